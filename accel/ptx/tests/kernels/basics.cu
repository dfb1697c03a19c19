// Kernels whose results a test computes anew on the CPU: elementwise, reductions, scan, histogram, softmax, tiled GEMM, and what
// warps do together. They call no function of the maker's libraries that has a body, so that the PTX is made of this text alone.

extern "C" __global__ void saxpy(int n, float a, const float *x, float *y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}

// Each warp by shuffles, then the warps' sums by the first one.
extern "C" __global__ void reduce_shuffle(int n, const float *x, float *sums) {
    __shared__ float parts[32];
    float sum = 0.0f;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += x[i];
    for (int by = 16; by > 0; by /= 2) sum += __shfl_down_sync(0xffffffffu, sum, by);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (lane == 0) parts[warp] = sum;
    __syncthreads();
    if (warp == 0) {
        sum = lane < (int)(blockDim.x >> 5) ? parts[lane] : 0.0f;
        for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
        if (lane == 0) sums[blockIdx.x] = sum;
    }
}

extern "C" __global__ void reduce_atomic(int n, const int *x, int *sum, int *least, int *most, unsigned long long *wide,
                                         float *real, double *twice) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    atomicAdd(sum, x[i]);
    atomicMin(least, x[i]);
    atomicMax(most, x[i]);
    atomicAdd(wide, (unsigned long long)(x[i] + 1000));
    atomicAdd(real, (float)x[i]);
    atomicAdd(twice, (double)x[i]);
}

// Bits, exchanges, and a lock that threads of one warp take in turn.
extern "C" __global__ void atomics(unsigned *words, unsigned *count) {
    unsigned i = threadIdx.x;
    atomicAnd(&words[0], ~(1u << (i & 31)));
    atomicOr(&words[1], 1u << (i & 31));
    atomicXor(&words[2], i);
    atomicInc(&words[3], 6);
    atomicDec(&words[4], 6);
    words[8 + i] = atomicExch(&words[5], i);
    bool done = false;
    while (!done) {
        if (atomicCAS(&words[6], 0u, 1u) == 0u) {
            *(volatile unsigned *)count += 1;
            __threadfence();
            atomicExch(&words[6], 0u);
            done = true;
        }
    }
}

#define TILE 16
extern "C" __global__ void gemm_tiled(int m, int n, int k, const float *a, const float *b, float *c) {
    __shared__ float as[TILE][TILE], bs[TILE][TILE];
    int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
    float sum = 0.0f;
    for (int at = 0; at < k; at += TILE) {
        int x = at + threadIdx.x, y = at + threadIdx.y;
        as[threadIdx.y][threadIdx.x] = row < m && x < k ? a[row * k + x] : 0.0f;
        bs[threadIdx.y][threadIdx.x] = y < k && column < n ? b[y * n + column] : 0.0f;
        __syncthreads();
        for (int i = 0; i < TILE; i++) sum += as[threadIdx.y][i] * bs[i][threadIdx.x];
        __syncthreads();
    }
    if (row < m && column < n) c[row * n + column] = sum;
}

// A row a block; __expf is one multiplication and one instruction.
extern "C" __global__ void softmax(int columns, const float *x, float *y) {
    extern __shared__ float room[];
    const float *in = x + blockIdx.x * columns;
    float *out = y + blockIdx.x * columns;
    float most = -1e30f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) most = fmaxf(most, in[i]);
    room[threadIdx.x] = most;
    __syncthreads();
    for (int by = blockDim.x / 2; by > 0; by /= 2) {
        if (threadIdx.x < by) room[threadIdx.x] = fmaxf(room[threadIdx.x], room[threadIdx.x + by]);
        __syncthreads();
    }
    most = room[0];
    __syncthreads();
    float sum = 0.0f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        float e = __expf(in[i] - most);
        out[i] = e;
        sum += e;
    }
    room[threadIdx.x] = sum;
    __syncthreads();
    for (int by = blockDim.x / 2; by > 0; by /= 2) {
        if (threadIdx.x < by) room[threadIdx.x] += room[threadIdx.x + by];
        __syncthreads();
    }
    for (int i = threadIdx.x; i < columns; i += blockDim.x) out[i] /= room[0];
}

// Inclusive, of one block.
extern "C" __global__ void scan(int n, const int *x, int *y) {
    extern __shared__ int sums[];
    int i = threadIdx.x;
    sums[i] = i < n ? x[i] : 0;
    __syncthreads();
    for (int by = 1; by < (int)blockDim.x; by *= 2) {
        int add = i >= by ? sums[i - by] : 0;
        __syncthreads();
        sums[i] += add;
        __syncthreads();
    }
    if (i < n) y[i] = sums[i];
}

extern "C" __global__ void histogram(int n, const unsigned char *x, unsigned *bins) {
    __shared__ unsigned own[256];
    for (int i = threadIdx.x; i < 256; i += blockDim.x) own[i] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&own[x[i]], 1u);
    __syncthreads();
    for (int i = threadIdx.x; i < 256; i += blockDim.x) atomicAdd(&bins[i], own[i]);
}

// Eight words a thread.
extern "C" __global__ void warp_wide(const int *x, unsigned *out) {
    unsigned lane = threadIdx.x & 31;
    int mine = x[threadIdx.x];
    unsigned *to = out + threadIdx.x * 8;
    to[0] = __ballot_sync(0xffffffffu, mine > 3);
    to[1] = __all_sync(0xffffffffu, mine < 8) + 2 * __any_sync(0xffffffffu, mine == 5);
    to[2] = __match_any_sync(0xffffffffu, mine);
    to[3] = __reduce_add_sync(0xffffffffu, mine);
    to[4] = __reduce_max_sync(0xffffffffu, mine);
    to[5] = __shfl_sync(0xffffffffu, mine, (lane + 5) & 7, 8);
    to[6] = __shfl_up_sync(0xffffffffu, mine, 3);
    // Threads that parted, each half with its own mask.
    if (lane & 1) {
        to[7] = __shfl_xor_sync(0xaaaaaaaau, mine, 2);
    } else {
        to[7] = __reduce_min_sync(0x55555555u, mine) + 1000;
    }
}

// Counts over the block, and a branch that differs within warps before the barrier.
extern "C" __global__ void block_votes(const int *x, int *out) {
    int mine = x[threadIdx.x];
    int odd = 0;
    if (mine & 1) odd = 2 * mine;
    out[threadIdx.x * 3] = __syncthreads_count(mine > 4);
    out[threadIdx.x * 3 + 1] = __syncthreads_and(mine >= 0) + 2 * __syncthreads_or(mine == 7);
    out[threadIdx.x * 3 + 2] = odd;
}
