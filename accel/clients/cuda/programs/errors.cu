// What programs do wrong: the code is CUDA's, the device goes on where a code is no sticky one, and a wrong address is told from then on.
#include "check.h"

__global__ void fill(int *x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        x[i] = i;
}

__global__ void never(int *x) { *x = 1; }

// nvcc's own registration, called as it calls it.
extern "C" void **__cudaRegisterFatBinary(void *wrapper);
extern "C" void __cudaRegisterFunction(void **module, const char *host, char *device, const char *name, int limit, uint3 *tid,
                                       uint3 *bid, dim3 *block, dim3 *grid, int *warp);

// A kernel of a fat binary whose header lies.
static cudaError_t launch_of(uint32_t magic, uint64_t announced)
{
    static uint64_t containers[4][4];
    static struct {
        uint32_t magic, version;
        const void *data;
        void *unused;
    } wrappers[4];
    static char functions[4];
    static int used = 0;
    int mine = used++;
    containers[mine][0] = 0x001000010000'0000ull | magic;
    containers[mine][1] = announced;
    wrappers[mine] = {0x466243b1, 1, containers[mine], nullptr};
    void **module = __cudaRegisterFatBinary(&wrappers[mine]);
    __cudaRegisterFunction(module, &functions[mine], (char *)"lying", "lying", -1, nullptr, nullptr, nullptr, nullptr, nullptr);
    return cudaLaunchKernel(&functions[mine], dim3(1), dim3(1), nullptr, 0, nullptr);
}

int main()
{
    const int n = 64;
    int *x = on_device(std::vector<int>(n));
    void *holes[] = {&x, nullptr};
    REFUSED(cudaLaunchKernel((const void *)fill, dim3(1), dim3(n), nullptr, 0, nullptr), cudaErrorInvalidValue);
    REFUSED(cudaLaunchKernel((const void *)fill, dim3(1), dim3(n), holes, 0, nullptr), cudaErrorInvalidValue);
    REFUSED(cudaLaunchKernel((const void *)main, dim3(1), dim3(n), holes, 0, nullptr), cudaErrorInvalidDeviceFunction);
    REFUSED(cudaLaunchCooperativeKernel((const void *)never, dim3(2), dim3(1), holes, 0, nullptr), cudaErrorNotSupported);
    REFUSED(cudaGetLastError(), cudaErrorNotSupported);
    REFUSED(cudaGetLastError(), cudaSuccess);
    REFUSED(launch_of(0xba55ed50, 0x3000'0000), cudaErrorInvalidKernelImage);
    REFUSED(launch_of(0xba55ed50, ~0ull), cudaErrorInvalidKernelImage);
    REFUSED(launch_of(0x12345678, 16), cudaErrorInvalidKernelImage);
    REFUSED(launch_of(0xba55ed50, 0), cudaErrorNoKernelImageForDevice);
    (void)cudaGetLastError();
    void *none = nullptr;
    REFUSED(cudaMalloc(&none, (size_t)1 << 46), cudaErrorMemoryAllocation);
    (void)cudaGetLastError();

    // All of that has changed nothing.
    fill<<<2, n / 2>>>(x, n);
    CUDA(cudaDeviceSynchronize());
    std::vector<int> got = from_device(x, n);
    for (int i = 0; i < n; i++)
        IS(got[i] == i);

    // Behind the allocation: told by what waits for it, and by all that follows.
    never<<<1, 1>>>(x + (1 << 20));
    REFUSED(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
    REFUSED(cudaMemcpy(got.data(), x, sizeof(int), cudaMemcpyDeviceToHost), cudaErrorIllegalAddress);
    REFUSED(cudaGetLastError(), cudaErrorIllegalAddress);
    printf("errors: right, %d of them\n", refused);
}
