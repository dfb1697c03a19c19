// Sums, maxima and a histogram: shuffles within a warp, shared memory within a block, atomics between blocks.
#include "check.h"

__inline__ __device__ double warp_sum(double value)
{
    for (int step = warpSize / 2; step > 0; step /= 2)
        value += __shfl_down_sync(0xffffffffu, value, step);
    return value;
}

__global__ void sum(const float *x, int n, double *total)
{
    __shared__ double parts[32];
    double value = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        value += x[i];
    value = warp_sum(value);
    int lane = threadIdx.x % warpSize, warp = threadIdx.x / warpSize;
    if (lane == 0)
        parts[warp] = value;
    __syncthreads();
    if (warp == 0) {
        value = warp_sum(lane < blockDim.x / warpSize ? parts[lane] : 0);
        if (lane == 0)
            atomicAdd(total, value);
    }
}

__global__ void largest(const int *x, int n, int *most, unsigned long long *where)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int value = i < n ? x[i] : INT32_MIN;
    for (int step = 16; step > 0; step /= 2)
        value = max(value, __shfl_xor_sync(0xffffffffu, value, step));
    if (threadIdx.x % 32 == 0)
        atomicMax(most, value);
    bool mine = i < n && x[i] % 7 == 0;
    unsigned votes = __ballot_sync(0xffffffffu, mine);
    if (threadIdx.x % 32 == 0)
        atomicAdd(where, (unsigned long long)__popc(votes));
}

__global__ void histogram(const unsigned char *bytes, int n, unsigned *counts)
{
    __shared__ unsigned own[256];
    for (int i = threadIdx.x; i < 256; i += blockDim.x)
        own[i] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&own[bytes[i]], 1u);
    __syncthreads();
    for (int i = threadIdx.x; i < 256; i += blockDim.x)
        atomicAdd(&counts[i], own[i]);
}

int main()
{
    const int n = 50021;
    Numbers numbers(2);
    std::vector<float> x = numbers.list(n);
    std::vector<int> whole(n);
    std::vector<unsigned char> bytes(n);
    double total = 0;
    int most = INT32_MIN;
    unsigned long long sevenths = 0;
    std::vector<unsigned> counts(256);
    for (int i = 0; i < n; i++) {
        whole[i] = (int)(numbers.next() * 1e6f);
        bytes[i] = (unsigned char)(whole[i] & 255);
        total += x[i];
        most = std::max(most, whole[i]);
        sevenths += whole[i] % 7 == 0;
        counts[bytes[i]]++;
    }
    float *dx = on_device(x);
    int *dwhole = on_device(whole), *dmost = on_device(std::vector<int>{INT32_MIN});
    unsigned char *dbytes = on_device(bytes);
    double *dtotal = on_device(std::vector<double>{0});
    unsigned long long *dsevenths = on_device(std::vector<unsigned long long>{0});
    unsigned *dcounts = on_device(std::vector<unsigned>(256));

    sum<<<20, 256>>>(dx, n, dtotal);
    largest<<<(n + 127) / 128, 128>>>(dwhole, n, dmost, dsevenths);
    histogram<<<8, 192>>>(dbytes, n, dcounts);
    CUDA(cudaDeviceSynchronize());

    close_to("sum", 0, from_device(dtotal, 1)[0], total, 1e-9);
    IS(from_device(dmost, 1)[0] == most);
    IS(from_device(dsevenths, 1)[0] == sevenths);
    IS(from_device(dcounts, 256) == counts);
    printf("reduce: right, %d numbers, sum %.6f, most %d\n", n, total, most);
}
