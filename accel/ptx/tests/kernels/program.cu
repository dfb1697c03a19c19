// A program whose fat binary has PTX alone: how it is compressed is a matter of flags.

extern "C" __global__ void saxpy(int n, float a, const float *x, float *y) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) y[i] = a * x[i] + y[i]; }
extern "C" __global__ void scale(int n, float a, float *x) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) x[i] = a * x[i]; }
int main() { saxpy<<<1, 32>>>(0, 0.0f, 0, 0); scale<<<1, 32>>>(0, 0.0f, 0); return 0; }
