// A tiled matrix product through shared memory, of matrices whose rows have a pitch.
#include "check.h"

template <int TILE> __global__ void gemm(int m, int n, int k, const float *a, size_t pitch, const float *b, float *c)
{
    __shared__ float left[TILE][TILE], right[TILE][TILE + 1];
    int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
    float value = 0;
    for (int from = 0; from < k; from += TILE) {
        int across = from + threadIdx.x, down = from + threadIdx.y;
        const float *line = (const float *)((const char *)a + row * pitch);
        left[threadIdx.y][threadIdx.x] = row < m && across < k ? line[across] : 0;
        right[threadIdx.y][threadIdx.x] = down < k && column < n ? b[down * n + column] : 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < TILE; i++)
            value += left[threadIdx.y][i] * right[i][threadIdx.x];
        __syncthreads();
    }
    if (row < m && column < n)
        c[row * n + column] = value;
}

int main()
{
    const int m = 75, n = 53, k = 91, tile = 16;
    Numbers numbers(3);
    std::vector<float> a = numbers.list(m * k), b = numbers.list(k * n);
    float *da = nullptr, *db = on_device(b), *dc = nullptr;
    size_t pitch = 0;
    CUDA(cudaMallocPitch((void **)&da, &pitch, k * sizeof(float), m));
    IS(pitch >= k * sizeof(float) && pitch % 32 == 0);
    CUDA(cudaMemcpy2D(da, pitch, a.data(), k * sizeof(float), k * sizeof(float), m, cudaMemcpyHostToDevice));
    CUDA(cudaMalloc((void **)&dc, m * n * sizeof(float)));
    CUDA(cudaMemset(dc, 0xff, m * n * sizeof(float)));

    gemm<tile><<<dim3((n + tile - 1) / tile, (m + tile - 1) / tile), dim3(tile, tile)>>>(m, n, k, da, pitch, db, dc);
    CUDA(cudaDeviceSynchronize());
    std::vector<float> c = from_device(dc, m * n);
    for (int row = 0; row < m; row++)
        for (int column = 0; column < n; column++) {
            double value = 0;
            for (int i = 0; i < k; i++)
                value += (double)a[row * k + i] * b[i * n + column];
            close_to("c", row * n + column, c[row * n + column], value, 1e-5);
        }

    // Rows of the device's to the program's and within the device.
    std::vector<float> back(m * k), part(m * 8, -1);
    CUDA(cudaMemcpy2D(back.data(), k * sizeof(float), da, pitch, k * sizeof(float), m, cudaMemcpyDeviceToHost));
    IS(back == a);
    CUDA(cudaMemset2D(da, pitch, 0, 3 * sizeof(float), m));
    CUDA(cudaMemcpy2D(dc, 8 * sizeof(float), da, pitch, 8 * sizeof(float), m, cudaMemcpyDeviceToDevice));
    CUDA(cudaMemcpy(part.data(), dc, part.size() * sizeof(float), cudaMemcpyDeviceToHost));
    for (int row = 0; row < m; row++)
        for (int i = 0; i < 8; i++)
            IS(part[row * 8 + i] == (i < 3 ? 0 : a[row * k + i]));
    REFUSED(cudaMemcpy2D(da, 4, a.data(), 8, 8, 1, cudaMemcpyHostToDevice), cudaErrorInvalidPitchValue);

    cudaFuncAttributes attributes;
    CUDA(cudaFuncGetAttributes(&attributes, gemm<tile>));
    IS(attributes.sharedSizeBytes == sizeof(float) * tile * (tile + tile + 1));
    IS(attributes.maxThreadsPerBlock >= tile * tile);
    int blocks = 0;
    CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, gemm<tile>, tile * tile, 0));
    IS(blocks > 0);
    printf("gemm: right, %d x %d x %d, pitch %zu\n", m, n, k, pitch);
}
