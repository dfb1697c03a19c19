// Softmax of rows in single and double precision: templates, dynamic shared memory, cudaLaunchKernelEx.
#include "check.h"

template <typename T> __global__ void softmax(const T *x, T *y, int columns)
{
    extern __shared__ unsigned char bytes[];
    T *own = (T *)bytes;
    const T *row = x + (size_t)blockIdx.x * columns;
    T most = -INFINITY;
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
        most = max(most, row[i]);
    own[threadIdx.x] = most;
    __syncthreads();
    for (int step = blockDim.x / 2; step > 0; step /= 2) {
        if (threadIdx.x < step)
            own[threadIdx.x] = max(own[threadIdx.x], own[threadIdx.x + step]);
        __syncthreads();
    }
    most = own[0];
    __syncthreads();
    T sum = 0;
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
        sum += exp(row[i] - most);
    own[threadIdx.x] = sum;
    __syncthreads();
    for (int step = blockDim.x / 2; step > 0; step /= 2) {
        if (threadIdx.x < step)
            own[threadIdx.x] += own[threadIdx.x + step];
        __syncthreads();
    }
    sum = own[0];
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
        y[(size_t)blockIdx.x * columns + i] = exp(row[i] - most) / sum;
}

template <typename T> static void compare(const std::vector<T> &x, const std::vector<T> &y, int rows, int columns, double most)
{
    for (int row = 0; row < rows; row++) {
        double largest = -INFINITY, sum = 0;
        for (int i = 0; i < columns; i++)
            largest = std::max(largest, (double)x[row * columns + i]);
        for (int i = 0; i < columns; i++)
            sum += std::exp(x[row * columns + i] - largest);
        for (int i = 0; i < columns; i++)
            close_to("y", row * columns + i, y[row * columns + i], std::exp(x[row * columns + i] - largest) / sum, most);
    }
}

int main()
{
    const int rows = 37, columns = 203, threads = 64;
    Numbers numbers(4);
    std::vector<float> x = numbers.list(rows * columns, 20);
    std::vector<double> wide(x.begin(), x.end());
    float *dx = on_device(x), *dy = on_device(x);
    double *dwide = on_device(wide), *dwider = on_device(wide);

    softmax<float><<<rows, threads, threads * sizeof(float)>>>(dx, dy, columns);
    CUDA(cudaGetLastError());
    CUDA(cudaFuncSetAttribute(softmax<double>, cudaFuncAttributeMaxDynamicSharedMemorySize, threads * (int)sizeof(double)));
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(rows);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = threads * sizeof(double);
    CUDA(cudaLaunchKernelEx(&config, softmax<double>, (const double *)dwide, dwider, columns));
    CUDA(cudaDeviceSynchronize());

    compare(x, from_device(dy, x.size()), rows, columns, 1e-6);
    compare(wide, from_device(dwider, wide.size()), rows, columns, 1e-14);
    printf("softmax: right, %d rows of %d, float and double\n", rows, columns);
}
