// Streams and events: copies and kernels in several streams, waits between them, times, pinned memory.
#include "check.h"

__global__ void scale(float *x, int n, float by)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        x[i] *= by;
}

__global__ void add(float *x, const float *y, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        x[i] += y[i];
}

int main()
{
    const int n = 4096, lanes = 4, part = n / lanes;
    float *host = nullptr, *out = nullptr, *dx = nullptr;
    CUDA(cudaMallocHost((void **)&host, n * sizeof(float)));
    CUDA(cudaHostAlloc((void **)&out, n * sizeof(float), cudaHostAllocDefault));
    CUDA(cudaMalloc((void **)&dx, n * sizeof(float)));
    Numbers numbers(6);
    for (int i = 0; i < n; i++)
        host[i] = numbers.next();

    cudaStream_t streams[lanes];
    cudaEvent_t begin, end, done[lanes];
    CUDA(cudaEventCreate(&begin));
    CUDA(cudaEventCreate(&end));
    CUDA(cudaEventRecord(begin));
    for (int lane = 0; lane < lanes; lane++) {
        CUDA(cudaStreamCreateWithFlags(&streams[lane], cudaStreamNonBlocking));
        CUDA(cudaEventCreateWithFlags(&done[lane], cudaEventDisableTiming));
        float *at = dx + lane * part;
        CUDA(cudaMemcpyAsync(at, host + lane * part, part * sizeof(float), cudaMemcpyHostToDevice, streams[lane]));
        scale<<<(part + 255) / 256, 256, 0, streams[lane]>>>(at, part, (float)(lane + 1));
        CUDA(cudaEventRecord(done[lane], streams[lane]));
    }
    // The last lane waits for the one before, adds it to itself, and is copied back.
    CUDA(cudaStreamWaitEvent(streams[lanes - 1], done[lanes - 2], 0));
    add<<<(part + 255) / 256, 256, 0, streams[lanes - 1]>>>(dx + (lanes - 1) * part, dx + (lanes - 2) * part, part);
    for (int lane = 0; lane < lanes; lane++)
        CUDA(cudaMemcpyAsync(out + lane * part, dx + lane * part, part * sizeof(float), cudaMemcpyDeviceToHost, streams[lane]));
    for (int lane = 0; lane < lanes; lane++)
        CUDA(cudaStreamSynchronize(streams[lane]));
    CUDA(cudaEventRecord(end));
    CUDA(cudaEventSynchronize(end));
    CUDA(cudaEventQuery(end));
    float time = -1;
    CUDA(cudaEventElapsedTime(&time, begin, end));
    IS(time >= 0 && time < 600e3);

    for (int i = 0; i < n; i++) {
        int lane = i / part;
        float value = host[i] * (lane + 1);
        if (lane == lanes - 1)
            value += host[i - part] * lane;
        close_to("x", i, out[i], value, 1e-6);
    }
    for (int lane = 0; lane < lanes; lane++) {
        CUDA(cudaStreamDestroy(streams[lane]));
        CUDA(cudaEventDestroy(done[lane]));
    }
    CUDA(cudaFreeHost(host));
    CUDA(cudaFreeHost(out));
    CUDA(cudaDeviceReset());
    printf("streams: right, %d streams, %d numbers\n", lanes, n);
}
