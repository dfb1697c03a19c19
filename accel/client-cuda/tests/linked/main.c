/*
 * A program for CUDA's libraries as one is that a compiler of CUDA makes: it names functions by their versions, registers a kernel, and
 * calls. Its first argument says what is to be seen; it ends with the line of the first thing that is not as it should be. Knows no server.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct { unsigned x, y, z; } dim3;

extern int cudaGetDeviceCount(int *), cudaMalloc(void **, size_t), cudaFree(void *), cudaDeviceSynchronize(void);
extern int cudaMemcpy(void *, const void *, size_t, int), cudaMemset(void *, int, size_t), cudaGraphLaunch(void *, void *);
extern int cudaGetLastError(void), cudaPeekAtLastError(void), cudaMemGetInfo(size_t *, size_t *);
extern int cudaPointerGetAttributes(void *, const void *), cudaHostAlloc(void **, size_t, unsigned), cudaFreeHost(void *);
extern int cudaStreamCreate(void **), cudaStreamDestroy(void *), cudaStreamSynchronize(void *);
extern void **__cudaRegisterFatBinary(void *);
extern void __cudaRegisterFunction(void **, const char *, char *, const char *, int, void *, void *, void *, void *, int *);
extern unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void *);
extern int __cudaPopCallConfiguration(dim3 *, dim3 *, size_t *, void *), __cudaGetKernel(void **, const void *);
extern int __cudaLaunchKernel(void *, dim3, dim3, void **, size_t, void *), cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, void *);
extern int cublasCreate_v2(void **), cublasSetStream_v2(void *, void *), cublasSetPointerMode_v2(void *, int);
extern int cublasSgemm_v2(void *, int, int, int, int, int, const float *, const float *, int, const float *, int, const float *, float *, int);
extern int cudnnCreate(void **), cudnnCreateTensorDescriptor(void **), cudnnCreateFilterDescriptor(void **);
extern int cudnnCreateConvolutionDescriptor(void **), cudnnSetTensorNdDescriptor(void *, int, int, const int *, const int *);
extern int cudnnGetTensorNdDescriptor(void *, int, int *, int *, int *, int *);
extern int cudnnSetFilterNdDescriptor(void *, int, int, int, const int *);
extern int cudnnSetConvolutionNdDescriptor(void *, int, const int *, const int *, const int *, int, int);
extern int cudnnGetConvolutionForwardWorkspaceSize(void *, void *, void *, void *, void *, int, size_t *);
extern void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int);
extern int cudaMemcpyToSymbol(const void *, const void *, size_t, size_t, int), cudaGetSymbolAddress(void **, const void *);
extern int cudaGetSymbolSize(size_t *, const void *), cudaMallocPitch(void **, size_t *, size_t, size_t), cudaDeviceReset(void);
extern int cudaMemcpy2D(void *, size_t, const void *, size_t, size_t, size_t, int), cudaMemset2D(void *, size_t, int, size_t, size_t);
extern int cublasGetStream_v2(void *, void **), cublasSetMatrix(int, int, int, const void *, int, void *, int);
extern int cublasSdot_v2(void *, int, const float *, int, const float *, int, float *);
extern int curandCreateGenerator(void **, int), curandGenerateUniform(void *, float *, size_t), curandDestroyGenerator(void *);
extern size_t basalt_cuda_counters(uint64_t *, uint64_t *, size_t);
extern int malloc_of_12(void **, size_t);
__asm__(".symver malloc_of_12, cudaMalloc@libcudart.so.12");

#define IS(what, expected)                                                                                                         \
	do {                                                                                                                       \
		long long got = (long long)(what);                                                                                 \
		if (got != (long long)(expected)) {                                                                                \
			fprintf(stderr, "line %d: %s is %lld and not %lld\n", __LINE__, #what, got, (long long)(expected));        \
			exit(1);                                                                                                   \
		}                                                                                                                  \
	} while (0)

enum { CALLS, SENT, ASKED, NOT_SERVED };

static uint64_t count(int which)
{
	uint64_t counts[4];
	basalt_cuda_counters(counts, NULL, 0);
	return counts[which];
}

static void kernel(void) {}

static void launches(void)
{
	void *handle = __cudaRegisterFatBinary(NULL), *found = NULL, *stream;
	dim3 grid = { 7, 8, 9 }, block = { 32, 1, 1 }, no = { 0, 0, 0 };
	size_t shared;
	uint64_t sent = count(SENT);
	for (int i = 0; i < 20000; i++)
		__cudaRegisterFunction(handle, (const char *)kernel + i, NULL, "kernel", -1, NULL, NULL, NULL, NULL, NULL);
	IS(count(SENT), sent);
	IS(__cudaPushCallConfiguration(grid, block, 12, (void *)2), 0);
	IS(__cudaPopCallConfiguration(&no, &block, &shared, &stream), 0);
	IS(no.z, 9);
	IS(shared, 12);
	IS((uintptr_t)stream, 2);
	IS(__cudaPopCallConfiguration(&no, &block, &shared, &stream), 1);
	IS(__cudaGetKernel(&found, (const char *)kernel + 5), 0);
	IS(__cudaLaunchKernel(found, grid, block, NULL, 0, NULL), 0);
	/* The module and the kernel were told of, and are not again, by whatever name it is launched. */
	IS(count(SENT), sent + 3);
	IS(cudaLaunchKernel((const char *)kernel + 5, grid, block, NULL, 0, NULL), 0);
	IS(count(SENT), sent + 4);
	IS(cudaLaunchKernel(&grid, grid, block, NULL, 0, NULL), 98);
	IS(cudaGetLastError(), 98);
	IS(cudaDeviceSynchronize(), 0);
}

static void memory(void)
{
	struct { int type, device; void *on_device, *on_host; } about;
	size_t free_bytes, total, size = 5 << 20;
	uint64_t asked;
	void *a, *b, *host;
	unsigned char *bytes = malloc(size);
	IS(cudaMalloc(&a, size), 0);
	IS(malloc_of_12(&b, 100), 0);
	IS(cudaMalloc(&host, (size_t)1 << 50), 2);
	IS(cudaGetLastError(), 2);
	IS(cudaMemGetInfo(&free_bytes, &total), 0);
	IS(total - free_bytes, size + 100);
	IS(cudaPointerGetAttributes(&about, (char *)a + size - 1), 0);
	IS(about.type, 2);
	IS(cudaPointerGetAttributes(&about, bytes), 0);
	IS(about.type, 0);
	IS(cudaHostAlloc(&host, 100, 0), 0);
	IS(cudaPointerGetAttributes(&about, host), 0);
	IS(about.type, 1);
	IS(cudaFreeHost(host), 0);
	memset(bytes, 1, size);
	/* More than the arena has: in pieces. The kind is found by the addresses. */
	IS(cudaMemcpy(a, bytes, size, 4), 0);
	IS(cudaMemcpy(bytes, a, size, 2), 0);
	IS(bytes[0] + bytes[size - 1], 0);
	/* What was copied from a stream is done there, until something else is put; other streams are asked about. */
	asked = count(ASKED);
	IS(cudaStreamSynchronize(NULL), 0);
	IS(cudaStreamSynchronize(NULL), 0);
	IS(count(ASKED), asked);
	IS(cudaStreamSynchronize((void *)2), 0);
	IS(cudaStreamSynchronize(NULL), 0);
	IS(count(ASKED), asked + 2);
	IS(cudaMemcpy(bytes, a, 1, 2), 0);
	IS(cudaMemset(a, 0, 1), 0);
	IS(cudaStreamSynchronize(NULL), 0);
	IS(count(ASKED), asked + 4);
	IS(cudaMemcpy(bytes, a, 1, 5), 21);
	IS(cudaFree(b), 0);
	IS(cudaFree(b), 1);
	IS(cudaFree(a), 0);
	IS(cudaMemGetInfo(&free_bytes, &total), 0);
	IS(total - free_bytes, 0);
	/* Twice more than there is at a time. */
	for (int i = 0; i < 4; i++) {
		IS(cudaMalloc(&a, total / 2), 0);
		IS(cudaFree(a), 0);
	}
	IS(cudaDeviceSynchronize(), 0);
	free(bytes);
}

static void libraries(void)
{
	void *handle, *cudnn, *stream, *x, *y, *w, *convolution, *m;
	float one = 1;
	int dims[4] = { 1, 2, 8, 8 }, strides[4] = { 128, 64, 8, 1 }, filter[4] = { 2, 2, 3, 3 }, ones[2] = { 1, 1 }, read[4], type, n;
	size_t workspace;
	uint64_t sent, asked;
	IS(cudaStreamCreate(&stream), 0);
	IS(cublasCreate_v2(&handle), 0);
	sent = count(SENT);
	for (int i = 0; i < 3; i++)
		IS(cublasSetStream_v2(handle, stream), 0);
	IS(count(SENT), sent + 1);
	IS(cudaMalloc(&m, 4096), 0);
	IS(cublasSgemm_v2(handle, 0, 0, 8, 8, 8, &one, m, 8, m, 8, &one, m, 8), 0);
	IS(cublasSetPointerMode_v2(handle, 1), 15);
	IS(cudnnCreate(&cudnn), 0);
	IS(cudnnCreateTensorDescriptor(&x), 0);
	IS(cudnnCreateTensorDescriptor(&y), 0);
	IS(cudnnCreateFilterDescriptor(&w), 0);
	IS(cudnnCreateConvolutionDescriptor(&convolution), 0);
	IS(cudnnSetTensorNdDescriptor(x, 0, 4, dims, strides), 0);
	IS(cudnnSetTensorNdDescriptor(y, 0, 4, dims, strides), 0);
	IS(cudnnSetFilterNdDescriptor(w, 0, 0, 4, filter), 0);
	IS(cudnnSetConvolutionNdDescriptor(convolution, 2, ones, ones, ones, 1, 0), 0);
	IS(cudnnGetTensorNdDescriptor(x, 4, &type, &n, read, dims), 0);
	IS(n + read[1], 6);
	IS(dims[0], 128);
	asked = count(ASKED);
	for (int i = 0; i < 3; i++)
		IS(cudnnGetConvolutionForwardWorkspaceSize(cudnn, x, w, convolution, y, 0, &workspace), 0);
	IS(count(ASKED), asked + 1);
	dims[0] = 3;
	IS(cudnnSetTensorNdDescriptor(x, 0, 4, dims, strides), 0);
	IS(cudnnGetConvolutionForwardWorkspaceSize(cudnn, x, w, convolution, y, 0, &workspace), 0);
	IS(count(ASKED), asked + 2);
	IS(cudaStreamSynchronize(stream), 0);
	IS(cudaStreamDestroy(stream), 0);
	IS(cudaGraphLaunch(NULL, NULL), 801);
	IS(count(NOT_SERVED), 1);
	IS(cudaPeekAtLastError(), 801);
	IS(cudaGetLastError(), 801);
	IS(cudaGetLastError(), 0);
	IS(cudaFree(m), 0);
}

static void variables_and_rows(void)
{
	static char variable, other, bytes[64 * 1024];
	void *handle = __cudaRegisterFatBinary(NULL), *address, *rows, *blas, *stream, *is = NULL, *generator;
	size_t size = 0, pitch, all;
	float dot = 7;
	uint64_t sent;
	__cudaRegisterVar(handle, &variable, NULL, "variable", 0, 24, 0, 0);
	sent = count(SENT);
	IS(cudaMemcpyToSymbol(&variable, bytes, 16, 8, 1), 0);
	IS(cudaMemcpyToSymbol(&variable, bytes, 16, 0, 1), 0);
	/* An allocation, and two copies. */
	IS(count(SENT), sent + 3);
	IS(cudaMemcpyToSymbol(&variable, bytes, 17, 8, 1), 1);
	IS(cudaMemcpyToSymbol(&variable, bytes, 16, 8, 2), 21);
	IS(cudaMemcpyToSymbol(&other, bytes, 1, 0, 1), 13);
	IS(cudaGetSymbolSize(&size, &variable), 0);
	IS(size, 24);
	IS(cudaGetSymbolAddress(&address, &variable), 0);
	IS(cudaFree(address), 1);
	IS(cudaMallocPitch(&rows, &pitch, 100, 40), 0);
	IS(pitch, 512);
	sent = count(SENT);
	IS(cudaMemcpy2D(rows, pitch, bytes, 200, 100, 40, 4), 0);
	IS(cudaMemset2D(rows, pitch, 1, 512, 40), 0);
	IS(count(SENT), sent + 2);
	memset(bytes, 1, sizeof bytes);
	IS(cudaMemcpy2D(bytes, 200, rows, pitch, 100, 40, 2), 0);
	IS(bytes[99] + bytes[100] + bytes[39 * 200], 1);
	IS(cudaMemcpy2D(rows, 99, bytes, 200, 100, 40, 1), 12);
	IS(cudaMemcpy2D(rows, (size_t)1 << 60, bytes, 200, 100, 40, 1), 1);
	IS(cudaStreamCreate(&stream), 0);
	IS(cublasCreate_v2(&blas), 0);
	IS(cublasSetStream_v2(blas, stream), 0);
	IS(cublasGetStream_v2(blas, &is), 0);
	IS(is == stream, 1);
	IS(cublasSetMatrix(10, 10, 4, bytes, 20, rows, 10), 0);
	IS(cublasSetMatrix(10, 10, 4, bytes, 9, rows, 10), 7);
	IS(cublasSdot_v2(blas, 10, rows, 1, rows, 1, &dot), 0);
	IS(dot, 0);
	IS(curandCreateGenerator(&generator, 101), 0);
	IS(curandGenerateUniform(generator, rows, 100), 0);
	IS(curandDestroyGenerator(generator), 0);
	IS(cudaDeviceReset(), 0);
	IS(cudaMemGetInfo(&size, &all), 0);
	IS(all - size, 24);
	IS(cudaGetLastError(), 1);
}

static void works(void)
{
	int devices = 0, status;
	void *a;
	IS(cudaGetDeviceCount(&devices), 0);
	IS(devices, 1);
	IS(malloc_of_12 == cudaMalloc, 1);
	IS(dlopen("libcudnn.so.9", RTLD_NOW) == dlopen("libcudart.so.12", RTLD_NOW), 1);
	launches();
	memory();
	libraries();
	variables_and_rows();
	/* A child has no device, and its parent goes on. */
	if (fork() == 0) {
		IS(cudaDeviceSynchronize(), 3);
		_exit(0);
	}
	wait(&status);
	IS(status, 0);
	/* What nobody waited for and failed is told from then on. */
	IS(cudaMalloc(&a, 512), 0);
	IS(cudaMemset(a, 0, 513), 0);
	IS(cudaDeviceSynchronize(), 700);
	IS(cudaStreamSynchronize(NULL), 700);
}

int main(int argc, char **argv)
{
	int devices = 7;
	void *a;
	if (argc > 1 && strcmp(argv[1], "works") == 0) {
		works();
	} else if (argc > 1 && strcmp(argv[1], "no-server") == 0) {
		IS(cudaGetDeviceCount(&devices), 100);
		IS(devices, 0);
		IS(cublasCreate_v2(&a), 1);
	} else if (argc > 1 && strcmp(argv[1], "local") == 0) {
		IS(cudaGetDeviceCount(&devices), 0);
		IS(cudaMalloc(&a, 512), 0);
		for (int i = 0; i < 10; i++)
			IS(cudaGetLastError(), 0);
		IS(cudaFree(a), 0);
		IS(cudaDeviceSynchronize(), 0);
	} else if (argc > 1 && strcmp(argv[1], "gone") == 0) {
		IS(cudaMalloc(&a, 512), 0);
		IS(cudaDeviceSynchronize(), 0);
		IS(cudaDeviceSynchronize(), 46);
		IS(cudaMalloc(&a, 512), 46);
		IS(cudaGetLastError(), 46);
	} else {
		return 2;
	}
	puts("as it should be");
	return 0;
}
