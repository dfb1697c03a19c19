// cuRAND and cuBLAS: distributions, sequences that begin where they are told, products of random matrices.
#include "check.h"
#include "libraries.h"

static void distribution(const char *what, const std::vector<double> &numbers, double mean, double variance)
{
    double sum = 0, squares = 0;
    for (double number : numbers)
        sum += number;
    double is = sum / numbers.size();
    for (double number : numbers)
        squares += (number - is) * (number - is);
    double spread = std::sqrt(variance / numbers.size());
    if (std::fabs(is - mean) > 6 * spread)
        wrong("%s: the mean is %g and not %g", what, is, mean);
    double got = squares / (numbers.size() - 1);
    if (std::fabs(got / variance - 1) > 0.1)
        wrong("%s: the variance is %g and not %g", what, got, variance);
}

template <typename T> static std::vector<double> wide(const std::vector<T> &numbers)
{
    return std::vector<double>(numbers.begin(), numbers.end());
}

static void random_numbers(int type)
{
    const size_t n = 20000;
    curandGenerator_t generator;
    LIBRARY(curandCreateGenerator(&generator, type));
    LIBRARY(curandSetPseudoRandomGeneratorSeed(generator, 1234));
    unsigned *whole = on_device(std::vector<unsigned>(n));
    float *single = on_device(std::vector<float>(n));
    double *twice = on_device(std::vector<double>(n));

    LIBRARY(curandGenerate(generator, whole, n));
    std::vector<unsigned> first = from_device(whole, n);
    distribution("words", wide(first), 2147483647.5, 4294967296.0 * 4294967296.0 / 12);
    LIBRARY(curandGenerate(generator, whole, n));
    IS(from_device(whole, n) != first);
    LIBRARY(curandSetPseudoRandomGeneratorSeed(generator, 1234));
    LIBRARY(curandSetGeneratorOffset(generator, 0));
    LIBRARY(curandGenerate(generator, whole, n));
    IS(from_device(whole, n) == first);
    LIBRARY(curandSetPseudoRandomGeneratorSeed(generator, 4321));
    LIBRARY(curandSetGeneratorOffset(generator, 0));
    LIBRARY(curandGenerate(generator, whole, n));
    IS(from_device(whole, n) != first);

    LIBRARY(curandGenerateUniform(generator, single, n));
    std::vector<float> uniform = from_device(single, n);
    for (float number : uniform)
        IS(number > 0 && number <= 1);
    distribution("uniform", wide(uniform), 0.5, 1.0 / 12);
    LIBRARY(curandGenerateUniformDouble(generator, twice, n));
    distribution("uniform double", from_device(twice, n), 0.5, 1.0 / 12);
    LIBRARY(curandGenerateNormal(generator, single, n, 3, 2));
    distribution("normal", wide(from_device(single, n)), 3, 4);
    LIBRARY(curandGenerateLogNormal(generator, single, n, 0, 0.25f));
    double e = std::exp(0.0625);
    distribution("log-normal", wide(from_device(single, n)), std::exp(0.03125), (e - 1) * e);
    LIBRARY(curandGeneratePoisson(generator, whole, n, 6.5));
    distribution("poisson", wide(from_device(whole, n)), 6.5, 6.5);
    LIBRARY(curandDestroyGenerator(generator));
    for (void *place : {(void *)whole, (void *)single, (void *)twice})
        CUDA(cudaFree(place));
}

int main()
{
    random_numbers(CURAND_RNG_PSEUDO_XORWOW);
    random_numbers(CURAND_RNG_PSEUDO_PHILOX4_32_10);
    curandGenerator_t none;
    REFUSED(curandCreateGenerator(&none, 77), CURAND_STATUS_TYPE_ERROR);

    // C = alpha A' B + beta C, in columns as cuBLAS has them, of matrices within larger ones.
    const int m = 33, n = 29, k = 47, lda = 50, ldb = 48, ldc = 40;
    Numbers numbers(7);
    std::vector<float> a = numbers.list(lda * m), b = numbers.list(ldb * n), c = numbers.list(ldc * n), got(ldc * n);
    float *da = on_device(a), *db = on_device(b), *dc = nullptr;
    CUDA(cudaMalloc((void **)&dc, c.size() * sizeof(float)));
    LIBRARY(cublasSetMatrix(m, n, sizeof(float), c.data(), ldc, dc, ldc));
    cublasHandle_t handle;
    cudaStream_t stream, is = nullptr;
    LIBRARY(cublasCreate_v2(&handle));
    CUDA(cudaStreamCreate(&stream));
    LIBRARY(cublasSetStream_v2(handle, stream));
    LIBRARY(cublasGetStream_v2(handle, &is));
    IS(is == stream);
    float alpha = 0.75f, beta = -2;
    LIBRARY(cublasSgemm_v2(handle, CUBLAS_OP_T, CUBLAS_OP_N, m, n, k, &alpha, da, lda, db, ldb, &beta, dc, ldc));
    CUDA(cudaStreamSynchronize(stream));
    LIBRARY(cublasGetMatrix(m, n, sizeof(float), dc, ldc, got.data(), ldc));
    for (int column = 0; column < n; column++)
        for (int row = 0; row < m; row++) {
            double value = 0;
            for (int i = 0; i < k; i++)
                value += (double)a[row * lda + i] * b[column * ldb + i];
            double expected = alpha * value + beta * c[column * ldc + row];
            close_to("c", column * ldc + row, got[column * ldc + row], expected, 1e-5);
        }

    // y = alpha A x + y over every other number, and a scalar product that the program waits for.
    std::vector<float> x = numbers.list(2 * k), y = numbers.list(lda);
    float *dx = on_device(x), *dy = on_device(y), dot = 0;
    LIBRARY(cublasSaxpy_v2(handle, k, &alpha, dx, 2, dy, 1));
    LIBRARY(cublasSdot_v2(handle, k, dx, 2, dy, 1, &dot));
    double expected = 0;
    for (int i = 0; i < k; i++)
        expected += (double)x[2 * i] * (alpha * x[2 * i] + y[i]);
    close_to("dot", 0, dot, expected, 1e-5);
    LIBRARY(cublasDestroy_v2(handle));
    printf("libraries: right, two generators, a product of %d x %d x %d, dot %.6f\n", m, n, k, dot);
}
