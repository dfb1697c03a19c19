// Variables of the program on the device: constant memory, counters, first values, addresses of each other; and structures as arguments.
#include "check.h"

__constant__ float weights[5];
__constant__ int table[4] = {10, 20, 30, 40};
__device__ unsigned counter = 7;
__device__ double results[3];
__device__ unsigned *pointer = &counter;

// With holes, and longer than a register.
struct Shape {
    char kind;
    double scale;
    short rows[3];
    const float *input;
};

__global__ void convolve(Shape shape, float *output, int n, unsigned char last)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    float value = 0;
    for (int j = 0; j < 5; j++) {
        int at = i + j - 2;
        if (at >= 0 && at < n)
            value += weights[j] * shape.input[at];
    }
    output[i] = (float)(value * shape.scale) + table[(shape.kind + shape.rows[2] + last) % 4];
    atomicAdd(pointer, 1u);
    if (i == 0) {
        results[0] = shape.scale;
        results[1] = shape.rows[0] + shape.rows[1];
    }
}

int main()
{
    const int n = 1000;
    Numbers numbers(5);
    std::vector<float> x = numbers.list(n), w = numbers.list(5);
    float *dx = on_device(x), *dy = nullptr;
    CUDA(cudaMalloc((void **)&dy, n * sizeof(float)));

    // Before any kernel of the module.
    CUDA(cudaMemcpyToSymbol(weights, w.data(), 5 * sizeof(float)));
    unsigned count = 0;
    CUDA(cudaMemcpyFromSymbol(&count, counter, sizeof count));
    IS(count == 7);
    double third = 3.25;
    CUDA(cudaMemcpyToSymbol(results, &third, sizeof third, 2 * sizeof(double)));

    Shape shape = {'b', 1.5, {100, 200, 1}, dx};
    convolve<<<(n + 127) / 128, 128>>>(shape, dy, n, 255);
    CUDA(cudaGetLastError());
    const int index = ('b' + 1 + 255) % 4, tables[4] = {10, 20, 30, 40};
    std::vector<float> y = from_device(dy, n);
    for (int i = 0; i < n; i++) {
        float value = 0;
        for (int j = 0; j < 5; j++)
            if (i + j - 2 >= 0 && i + j - 2 < n)
                value = std::fma(w[j], x[i + j - 2], value);
        close_to("y", i, y[i], (float)(value * 1.5) + tables[index], 1e-6);
    }
    CUDA(cudaMemcpyFromSymbol(&count, counter, sizeof count));
    IS(count == 7 + n);
    double told[3] = {};
    CUDA(cudaMemcpyFromSymbol(told, results, sizeof told));
    IS(told[0] == 1.5 && told[1] == 300 && told[2] == 3.25);

    void *place = nullptr;
    size_t size = 0;
    CUDA(cudaGetSymbolAddress(&place, counter));
    CUDA(cudaGetSymbolSize(&size, weights));
    IS(place != nullptr && size == 5 * sizeof(float));
    unsigned zero = 0;
    CUDA(cudaMemcpy(place, &zero, sizeof zero, cudaMemcpyHostToDevice));
    unsigned *kept = nullptr;
    CUDA(cudaMemcpyFromSymbol(&kept, pointer, sizeof kept));
    IS(kept == place);
    CUDA(cudaMemcpyFromSymbol(&count, counter, sizeof count));
    IS(count == 0);
    REFUSED(cudaMemcpyToSymbol(weights, w.data(), 1, 5 * sizeof(float)), cudaErrorInvalidValue);
    REFUSED(cudaFree(place), cudaErrorInvalidValue);
    float none = 0;
    REFUSED(cudaMemcpyToSymbol(none, w.data(), 1), cudaErrorInvalidSymbol);
    printf("constant: right, %d numbers, five variables\n", n);
}
