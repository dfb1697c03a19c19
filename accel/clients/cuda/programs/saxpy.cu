// y = a x + y: a launch by <<<>>>, one by cudaLaunchKernel, and copies both ways.
#include "check.h"

__global__ void saxpy(int n, float a, const float *x, float *y)
{
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        y[i] = a * x[i] + y[i];
}

int main()
{
    const int n = 100003;
    Numbers numbers(1);
    std::vector<float> x = numbers.list(n), y = numbers.list(n);
    float *dx = on_device(x), *dy = on_device(y);

    saxpy<<<64, 128>>>(n, 2.5f, dx, dy);
    CUDA(cudaGetLastError());
    float a = -0.5f;
    int count = n;
    void *arguments[] = {&count, &a, &dx, &dy};
    CUDA(cudaLaunchKernel((const void *)saxpy, dim3(3), dim3(256), arguments, 0, nullptr));
    CUDA(cudaDeviceSynchronize());

    std::vector<float> got = from_device(dy, n);
    for (int i = 0; i < n; i++)
        close_to("y", i, got[i], std::fma(-0.5f, x[i], std::fma(2.5f, x[i], y[i])), 1e-6);
    CUDA(cudaFree(dx));
    CUDA(cudaFree(dy));
    printf("saxpy: right, %d numbers, two launches\n", n);
}
