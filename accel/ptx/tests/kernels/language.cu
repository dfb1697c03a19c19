// What the language has beyond plain kernels: variables of the module, functions that are called, local arrays, structures as
// parameters, switches, integers of all widths, and what kernels do wrong.

struct Weights {
    float scale[3];
    short add;
    char sign;
};

__constant__ float table[4] = {1.5f, -2.0f, 0.25f, 8.0f};
__device__ int counter = 5;
__device__ const float *chosen = table;

extern "C" __global__ void variables(float *out) {
    out[threadIdx.x] = table[threadIdx.x & 3] + chosen[3];
    atomicAdd(&counter, 2);
}

extern "C" __global__ void structure(Weights weights, int which, float *out) {
    int i = threadIdx.x;
    out[i] = weights.scale[(i + which) % 3] * weights.sign + weights.add;
}

// A pointer to a parameter, which is a generic address.
__device__ __noinline__ float third(const Weights *weights, int at) { return weights->scale[at % 3] + weights->add; }

extern "C" __global__ void grid_constant(const __grid_constant__ Weights weights, int which, float *out) {
    out[threadIdx.x] = third(&weights, which + threadIdx.x);
}

__device__ __noinline__ int fibonacci(int n) { return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2); }

extern "C" __global__ void recursion(int *out) { out[threadIdx.x] = fibonacci(threadIdx.x % 9); }

__device__ __noinline__ int endless(int n, volatile int *sink) {
    int room[64];
    for (int i = 0; i < 64; i++) room[i] = sink[i & 3] + n;
    return endless(n + 1, sink) + room[n & 63];
}

extern "C" __global__ void overflow(int *out) { out[0] = endless(0, out); }

extern "C" __global__ void local_array(int n, const int *order, int *out) {
    int values[16];
    for (int i = 0; i < 16; i++) values[i] = i * i + threadIdx.x;
    int sum = 0;
    for (int i = 0; i < n; i++) {
        sum += values[order[i] & 15];
        values[order[i] & 15] = i;
    }
    out[threadIdx.x] = sum;
}

extern "C" __global__ void dispatch(const int *op, int *x) {
    int v = x[threadIdx.x];
    switch (op[threadIdx.x]) {
    case 0: v += 7; break;
    case 1: v -= 3; break;
    case 2: v *= 5; break;
    case 3: v /= 3; break;
    case 4: v %= 10; break;
    case 5: v = ~v; break;
    case 6: v <<= 3; break;
    case 7: v >>= 2; break;
    case 8: v = v * v; break;
    default: v = -1;
    }
    x[threadIdx.x] = v;
}

// Sixteen results of each pair.
extern "C" __global__ void integers(const long long *in, long long *out) {
    long long a = in[threadIdx.x * 2], b = in[threadIdx.x * 2 + 1];
    int x = (int)a, y = (int)b;
    unsigned u = (unsigned)a, v = (unsigned)b;
    long long *to = out + threadIdx.x * 16;
    to[0] = a * b;
    to[1] = b ? a / b : 0;
    to[2] = (long long)((unsigned long long)a % ((unsigned long long)b | 1));
    to[3] = __mulhi(x, y);
    to[4] = (long long)__umul64hi((unsigned long long)a, (unsigned long long)b);
    to[5] = __popc(u) + 100 * __clz(x) + 10000 * __popcll((unsigned long long)a) + 1000000 * __clzll(b);
    to[6] = __brev(u);
    to[7] = __byte_perm(u, v, 0x3715);
    to[8] = __funnelshift_l(u, v, v & 63) + (long long)__funnelshift_rc(u, v, 40);
    to[9] = min(x, y) + (long long)max(u, v) * 3;
    to[10] = (short)x * (short)y + (signed char)x - (unsigned char)y;
    to[11] = __ffs(x) * 100 + __sad(x, y, 1u);
    to[12] = (x & y) ^ (u | ~v);
    to[13] = (a >> (b & 63)) + (long long)((unsigned long long)b >> (a & 63)) + (a << (b & 31));
    to[14] = (long long)(((unsigned __int128)(unsigned long long)a * (unsigned long long)b + (unsigned long long)a) >> 64);
    to[15] = abs(x) + (x < y) + 2 * (u < v) + 4 * (a <= b);
}

// Eight results of each pair.
extern "C" __global__ void floats(const float *in, float *out, double *wide, int *whole) {
    float a = in[threadIdx.x * 2], b = in[threadIdx.x * 2 + 1];
    float *to = out + threadIdx.x * 12;
    to[0] = __fadd_rz(a, b);
    to[1] = __fmul_ru(a, b);
    to[2] = __fdiv_rd(a, b);
    to[3] = fminf(a, b);
    to[4] = fmaxf(a, b);
    to[5] = __frsqrt_rn(fabsf(b));
    to[6] = __fsqrt_rn(fabsf(a));
    to[7] = __saturatef(a);
    to[8] = rintf(a) + floorf(b) * 2.0f;
    to[9] = __fmaf_rn(a, b, a);
    to[10] = __fmaf_rd(a, b, b);
    to[11] = copysignf(a, b);
    wide[threadIdx.x * 3] = (double)a * b + 1.0 / 3.0;
    wide[threadIdx.x * 3 + 1] = __dsqrt_rn(fabs((double)a)) / b;
    wide[threadIdx.x * 3 + 2] = (double)(long long)(a * 1e6f);
    whole[threadIdx.x * 6] = __float2int_rn(a);
    whole[threadIdx.x * 6 + 1] = __float2int_rd(b);
    whole[threadIdx.x * 6 + 2] = (int)(a * 1e10f);
    whole[threadIdx.x * 6 + 3] = (int)__float2uint_ru(b);
    whole[threadIdx.x * 6 + 4] = __float_as_int(a) + (a == b);
    whole[threadIdx.x * 6 + 5] = __float_as_int(__int2float_ru(whole[threadIdx.x * 6 + 4]));
}

// What kernels do wrong.
extern "C" __global__ void out_of_bounds(int *x, int at) { x[at + (int)threadIdx.x] = 1; }
extern "C" __global__ void shared_out_of_bounds(int *x, int at) {
    __shared__ int room[32];
    room[threadIdx.x] = x[0];
    x[0] = ((volatile int *)room)[at];
}
extern "C" __global__ void misaligned(char *x) { *(int *)(x + 1 + 4 * threadIdx.x) = 1; }
extern "C" __global__ void endless_loop(volatile int *x) { while (x[0] == 0) {} }
extern "C" __global__ void traps(int *x) {
    if (x[threadIdx.x] == 3) __trap();
    x[threadIdx.x] = 9;
}
extern "C" __global__ void half_a_barrier(int *x) {
    if (threadIdx.x < 32) asm volatile("barrier.sync 1, 64;");
    x[threadIdx.x] = 1;
}
// A producer and a consumer, each a warp: barriers for counts of threads, and arriving without waiting.
extern "C" __global__ void named_barriers(int *x) {
    __shared__ int handed[32];
    int lane = threadIdx.x & 31;
    if (threadIdx.x < 32) {
        handed[lane] = lane * 3;
        asm volatile("barrier.arrive 1, 64;" ::: "memory");
    } else if (threadIdx.x < 64) {
        asm volatile("barrier.sync 1, 64;" ::: "memory");
        x[lane] = handed[31 - lane];
    }
}
// Threads of one warp wait for each other by memory: whoever waits must not keep the others from going on.
extern "C" __global__ void turns(volatile int *x) {
    while (x[0] != (int)threadIdx.x) {}
    x[1] = x[1] * 3 + (int)threadIdx.x;
    __threadfence();
    x[0] = (int)threadIdx.x + 1;
}
