/*
 * A program for CUDA's libraries whose server carries calls out by functions of C: one call at least of most functions that cross. Its
 * argument says what is to be seen; it ends with the line of the first thing that is not as it should be, and else prints how often it has
 * called each function. Knows no server.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { unsigned x, y, z; } dim3;

extern int cudaGetDeviceCount(int *), cudaMalloc(void **, size_t), cudaFree(void *), cudaDeviceSynchronize(void), cudaGetLastError(void);
extern int cudaMemcpy(void *, const void *, size_t, int), cudaMemset(void *, int, size_t), cudaMemGetInfo(size_t *, size_t *);
extern int cudaMemcpyAsync(void *, const void *, size_t, int, void *), cudaMemsetAsync(void *, int, size_t, void *);
extern int cudaMemcpy2D(void *, size_t, const void *, size_t, size_t, size_t, int), cudaMemset2D(void *, size_t, int, size_t, size_t);
extern int cudaPointerGetAttributes(void *, const void *), cudaGetDeviceProperties(void *, int), cudaDeviceGetAttribute(int *, int, int);
extern int cudaStreamCreate(void **), cudaStreamCreateWithPriority(void **, unsigned, int), cudaStreamDestroy(void *);
extern int cudaStreamCreateWithFlags(void **, unsigned), cudaStreamSynchronize(void *), cudaStreamQuery(void *);
extern int cudaStreamWaitEvent(void *, void *, unsigned), cudaStreamGetPriority(void *, int *);
extern int cudaEventCreate(void **), cudaEventCreateWithFlags(void **, unsigned), cudaEventRecord(void *, void *), cudaEventQuery(void *);
extern int cudaEventSynchronize(void *), cudaEventElapsedTime(float *, void *, void *), cudaEventDestroy(void *);
extern int cudaEventRecordWithFlags(void *, void *, unsigned);
extern void **__cudaRegisterFatBinary(void *);
extern void __cudaRegisterFunction(void **, const char *, char *, const char *, int, void *, void *, void *, void *, void *);
extern int __cudaGetKernel(void **, const void *), __cudaLaunchKernel(void *, dim3, dim3, void **, size_t, void *);
extern int cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, void *), cudaFuncGetAttributes(void *, const void *);
extern int cudaFuncSetAttribute(const void *, int, int);
extern int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *, const void *, int, size_t, unsigned);
extern int cudaLibraryLoadData(void **, const void *, void *, void **, unsigned, void *, void **, unsigned);
extern int cudaLibraryGetKernel(void **, void *, const char *), cudaLibraryUnload(void *), cudaLibraryGetGlobal(void **, size_t *, void *, const char *);
extern int cuKernelGetParamInfo(void *, size_t, size_t *, size_t *);

extern int cublasCreate_v2(void **), cublasDestroy_v2(void *), cublasSetStream_v2(void *, void *), cublasSetMathMode(void *, int);
extern int cublasSetWorkspace_v2(void *, void *, size_t);
extern int cublasSgemm_v2(void *, int, int, int, int, int, const float *, const float *, int, const float *, int, const float *, float *, int);
extern int cublasDgemm_v2(void *, int, int, int, int, int, const double *, const void *, int, const void *, int, const double *, void *, int);
extern int cublasSgemv_v2(void *, int, int, int, const float *, const void *, int, const void *, int, const float *, void *, int);
extern int cublasGemmEx(void *, int, int, int, int, int, const void *, const void *, int, int, const void *, int, int, const void *, void *, int, int, int, int);
extern int cublasSgemmStridedBatched(void *, int, int, int, int, int, const float *, const void *, int, long long, const void *, int, long long, const float *, void *, int, long long, int);
extern int cublasSdot_v2(void *, int, const void *, int, const void *, int, float *), cublasSaxpy_v2(void *, int, const float *, const void *, int, void *, int);
extern int cublasIsamax_v2(void *, int, const void *, int, int *), cublasDnrm2_v2(void *, int, const void *, int, double *);
extern int cublasLtMatmulDescCreate(void **, int, int), cublasLtMatmulDescSetAttribute(void *, int, const void *, size_t);
extern int cublasLtMatmulDescDestroy(void *), cublasLtMatrixLayoutCreate(void **, int, uint64_t, uint64_t, int64_t);
extern int cublasLtMatrixLayoutDestroy(void *), cublasLtMatmulPreferenceCreate(void **);
extern int cublasLtMatmulPreferenceSetAttribute(void *, int, const void *, size_t), cublasLtMatmulPreferenceDestroy(void *);
extern int cublasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *, void *, int, void *, int *);
extern int cublasLtMatmul(void *, void *, const void *, const void *, void *, const void *, void *, const void *, const void *, void *, void *, void *, const void *, void *, size_t, void *);

extern int cudnnCreate(void **), cudnnDestroy(void *), cudnnSetStream(void *, void *), cudnnCreateTensorDescriptor(void **);
extern int cudnnCreateFilterDescriptor(void **), cudnnCreateConvolutionDescriptor(void **), cudnnCreatePoolingDescriptor(void **);
extern int cudnnCreateActivationDescriptor(void **), cudnnSetActivationDescriptor(void *, int, int, double);
extern int cudnnSetTensorNdDescriptor(void *, int, int, const int *, const int *), cudnnDestroyTensorDescriptor(void *);
extern int cudnnSetFilterNdDescriptor(void *, int, int, int, const int *);
extern int cudnnSetConvolutionNdDescriptor(void *, int, const int *, const int *, const int *, int, int);
extern int cudnnSetConvolutionMathType(void *, int), cudnnSetPooling2dDescriptor(void *, int, int, int, int, int, int, int, int);
extern int cudnnGetConvolutionForwardAlgorithm_v7(void *, void *, void *, void *, void *, int, int *, void *);
extern int cudnnGetConvolutionForwardWorkspaceSize(void *, void *, void *, void *, void *, int, size_t *);
extern int cudnnConvolutionForward(void *, const void *, void *, const void *, void *, const void *, void *, int, void *, size_t, const void *, void *, void *);
extern int cudnnConvolutionBackwardData(void *, const void *, void *, const void *, void *, const void *, void *, int, void *, size_t, const void *, void *, void *);
extern int cudnnConvolutionBackwardFilter(void *, const void *, void *, const void *, void *, const void *, void *, int, void *, size_t, const void *, void *, void *);
extern int cudnnPoolingForward(void *, void *, const void *, void *, const void *, const void *, void *, void *);
extern int cudnnActivationForward(void *, void *, const void *, void *, const void *, const void *, void *, void *);
extern int cudnnSoftmaxForward(void *, int, int, const void *, void *, const void *, const void *, void *, void *);
extern int cudnnAddTensor(void *, const void *, void *, const void *, const void *, void *, void *);

extern int curandCreateGenerator(void **, int), curandDestroyGenerator(void *), curandSetPseudoRandomGeneratorSeed(void *, unsigned long long);
extern int curandGenerateUniform(void *, void *, size_t), curandGenerateNormal(void *, void *, size_t, float, float), curandSetStream(void *, void *);

extern size_t basalt_cuda_counters(uint64_t *, uint64_t *, size_t);

#define IS(what, expected)                                                                                                         \
	do {                                                                                                                       \
		long long got = (long long)(what);                                                                                 \
		if (got != (long long)(expected)) {                                                                                \
			fprintf(stderr, "line %d: %s is %lld and not %lld\n", __LINE__, #what, got, (long long)(expected));        \
			exit(1);                                                                                                   \
		}                                                                                                                  \
	} while (0)

static void kernel(void) {}

/* A container without code, and a wrapper of it as a compiler makes them. */
static struct { uint32_t magic; uint16_t version, header; uint64_t size; char data[64]; } container = { 0xba55ed50, 1, 16, 64, "" };
static struct { int magic, version; void *data, *file; } wrapper = { 0x466243b1, 1, &container, NULL };

static void memory(void)
{
	struct { int type, device; void *on_device, *on_host; } about;
	size_t free_bytes, total, size = 5 << 20;
	void *a, *b, *stream;
	unsigned char *bytes = malloc(size);
	IS(cudaStreamCreate(&stream), 0);
	IS(cudaMalloc(&a, size), 0);
	IS(cudaMalloc(&b, 1000), 0);
	IS(cudaMemGetInfo(&free_bytes, &total), 0);
	IS(total, 64 << 20);
	IS(total - free_bytes, size + 1000);
	/* Addresses are the library's, and of this process alike: nothing of it is there. */
	IS(cudaPointerGetAttributes(&about, (char *)a + size - 1), 0);
	IS(about.type, 2);
	memset(bytes, 1, size);
	/* More than either arena has: in pieces. */
	IS(cudaMemcpy(a, bytes, size, 4), 0);
	IS(cudaMemcpyAsync(a, bytes, 1000, 1, stream), 0);
	IS(cudaMemcpyAsync(b, a, 1000, 3, stream), 0);
	IS(cudaMemcpy(bytes, a, size, 2), 0);
	/* The device has no bytes. */
	IS(bytes[0] + bytes[size - 1], 0);
	IS(cudaMemcpy2D(a, 512, bytes, 100, 100, 8, 1), 0);
	IS(cudaMemcpy2D(bytes, 100, a, 512, 100, 8, 2), 0);
	IS(cudaMemset(a, 7, size), 0);
	IS(cudaMemsetAsync(b, 7, 1000, stream), 0);
	IS(cudaMemset2D(a, 512, 7, 100, 8), 0);
	IS(cudaStreamSynchronize(stream), 0);
	IS(cudaFree(b), 0);
	IS(cudaFree(a), 0);
	IS(cudaMemGetInfo(&free_bytes, &total), 0);
	IS(total - free_bytes, 0);
	IS(cudaStreamDestroy(stream), 0);
	free(bytes);
}

static void streams(void)
{
	void *one, *two, *three, *begin, *end;
	float ms = -1;
	int priority = 7;
	IS(cudaStreamCreateWithFlags(&one, 1), 0);
	IS(cudaStreamCreateWithPriority(&two, 1, -1), 0);
	IS(cudaStreamCreate(&three), 0);
	IS(cudaStreamGetPriority(two, &priority), 0);
	IS(cudaEventCreate(&begin), 0);
	IS(cudaEventCreateWithFlags(&end, 0), 0);
	IS(cudaEventRecord(begin, one), 0);
	IS(cudaStreamWaitEvent(two, begin, 0), 0);
	IS(cudaEventRecordWithFlags(end, two, 0), 0);
	/* NULL, the legacy one, and the thread's own. */
	for (uintptr_t own = 0; own < 3; own++)
		IS(cudaStreamQuery((void *)own), 0);
	IS(cudaEventQuery(end), 0);
	IS(cudaEventSynchronize(end), 0);
	IS(cudaEventElapsedTime(&ms, begin, end), 0);
	IS(ms >= 0, 1);
	IS(cudaEventDestroy(begin), 0);
	IS(cudaEventDestroy(end), 0);
	IS(cudaStreamDestroy(one), 0);
	IS(cudaStreamDestroy(two), 0);
	IS(cudaStreamDestroy(three), 0);
}

static void launches(void)
{
	void *handle = __cudaRegisterFatBinary(&wrapper), *found, *arguments[1] = { &handle };
	char attributes[144];
	int blocks = -1;
	dim3 grid = { 7, 8, 9 }, block = { 32, 1, 1 };
	__cudaRegisterFunction(handle, (const char *)kernel, NULL, "kernel", -1, NULL, NULL, NULL, NULL, NULL);
	IS(__cudaGetKernel(&found, (const char *)kernel), 0);
	IS(__cudaLaunchKernel(found, grid, block, arguments, 0, NULL), 0);
	IS(cudaLaunchKernel((const char *)kernel, grid, block, arguments, 64, NULL), 0);
	IS(cudaLaunchKernel(&grid, grid, block, arguments, 0, NULL), 98);
	IS(cudaGetLastError(), 98);
	IS(cudaFuncGetAttributes(attributes, (const char *)kernel), 0);
	IS(cudaFuncSetAttribute((const char *)kernel, 8, 1024), 0);
	IS(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&blocks, (const char *)kernel, 128, 0, 0), 0);
	IS(blocks > 0, 1);
	IS(cudaDeviceSynchronize(), 0);
}

static void algebra(void)
{
	void *handle, *stream, *m, *desc, *layout, *preference;
	float one = 1, dot = -1;
	double big = 1, norm = -1;
	int index = -1, found = -1;
	size_t workspace = 4096;
	char results[2][96];
	IS(cudaStreamCreate(&stream), 0);
	IS(cublasCreate_v2(&handle), 0);
	IS(cudaMalloc(&m, 1 << 16), 0);
	IS(cublasSetStream_v2(handle, stream), 0);
	IS(cublasSetMathMode(handle, 0), 0);
	IS(cublasSetWorkspace_v2(handle, m, 4096), 0);
	IS(cublasSgemm_v2(handle, 0, 0, 8, 8, 8, &one, m, 8, m, 8, &one, m, 8), 0);
	IS(cublasDgemm_v2(handle, 0, 1, 8, 8, 8, &big, m, 8, m, 8, &big, m, 8), 0);
	IS(cublasSgemv_v2(handle, 0, 8, 8, &one, m, 8, m, 1, &one, m, 1), 0);
	IS(cublasGemmEx(handle, 0, 0, 8, 8, 8, &one, m, 2, 8, m, 2, 8, &one, m, 2, 8, 68, -1), 0);
	IS(cublasSgemmStridedBatched(handle, 0, 0, 8, 8, 8, &one, m, 8, 64, m, 8, 64, &one, m, 8, 64, 4), 0);
	IS(cublasSaxpy_v2(handle, 8, &one, m, 1, m, 1), 0);
	IS(cublasSdot_v2(handle, 8, m, 1, m, 1, &dot), 0);
	IS(cublasIsamax_v2(handle, 8, m, 1, &index), 0);
	IS(cublasDnrm2_v2(handle, 8, m, 1, &norm), 0);
	IS(dot + norm + index, 0);
	/* Descriptors: made again on the server from what was put into these. */
	IS(cublasLtMatmulDescCreate(&desc, 68, 0), 0);
	IS(cublasLtMatmulDescSetAttribute(desc, 3, &index, 4), 0);
	IS(cublasLtMatrixLayoutCreate(&layout, 0, 8, 8, 8), 0);
	IS(cublasLtMatmulPreferenceCreate(&preference), 0);
	IS(cublasLtMatmulPreferenceSetAttribute(preference, 1, &workspace, sizeof(workspace)), 0);
	IS(cublasLtMatmulAlgoGetHeuristic(handle, desc, layout, layout, layout, layout, preference, 2, results, &found), 0);
	IS(found, 1);
	IS(cublasLtMatmul(handle, desc, &one, m, layout, m, layout, &one, m, layout, m, layout, results[0], m, 4096, stream), 0);
	IS(cublasLtMatmul(handle, desc, &one, m, layout, m, layout, &one, m, layout, m, layout, NULL, m, 4096, stream), 0);
	IS(cublasLtMatmulDescDestroy(desc), 0);
	IS(cublasLtMatrixLayoutDestroy(layout), 0);
	IS(cublasLtMatmulPreferenceDestroy(preference), 0);
	IS(cudaStreamSynchronize(stream), 0);
	IS(cublasDestroy_v2(handle), 0);
	IS(cudaStreamDestroy(stream), 0);
	IS(cudaFree(m), 0);
}

static void networks(void)
{
	void *cudnn, *stream, *x, *w, *convolution, *pooling, *activation, *m, *generator;
	float one = 1, zero = 0;
	int dims[4] = { 1, 2, 8, 8 }, strides[4] = { 128, 64, 8, 1 }, filter[4] = { 2, 2, 3, 3 }, ones[2] = { 1, 1 }, found = -1;
	char results[3][48];
	size_t workspace;
	IS(cudaStreamCreate(&stream), 0);
	IS(cudaMalloc(&m, 1 << 16), 0);
	IS(cudnnCreate(&cudnn), 0);
	IS(cudnnSetStream(cudnn, stream), 0);
	IS(cudnnCreateTensorDescriptor(&x), 0);
	IS(cudnnSetTensorNdDescriptor(x, 0, 4, dims, strides), 0);
	IS(cudnnCreateFilterDescriptor(&w), 0);
	IS(cudnnSetFilterNdDescriptor(w, 0, 0, 4, filter), 0);
	IS(cudnnCreateConvolutionDescriptor(&convolution), 0);
	IS(cudnnSetConvolutionNdDescriptor(convolution, 2, ones, ones, ones, 1, 0), 0);
	IS(cudnnSetConvolutionMathType(convolution, 1), 0);
	IS(cudnnCreatePoolingDescriptor(&pooling), 0);
	IS(cudnnSetPooling2dDescriptor(pooling, 0, 0, 2, 2, 0, 0, 2, 2), 0);
	IS(cudnnCreateActivationDescriptor(&activation), 0);
	IS(cudnnSetActivationDescriptor(activation, 1, 0, 1.5), 0);
	IS(cudnnGetConvolutionForwardAlgorithm_v7(cudnn, x, w, convolution, x, 3, &found, results), 0);
	IS(found, 1);
	IS(cudnnGetConvolutionForwardWorkspaceSize(cudnn, x, w, convolution, x, 0, &workspace), 0);
	IS(cudnnConvolutionForward(cudnn, &one, x, m, w, m, convolution, 0, NULL, 0, &zero, x, m), 0);
	IS(cudnnConvolutionBackwardData(cudnn, &one, w, m, x, m, convolution, 0, NULL, 0, &zero, x, m), 0);
	IS(cudnnConvolutionBackwardFilter(cudnn, &one, x, m, x, m, convolution, 0, NULL, 0, &zero, w, m), 0);
	IS(cudnnPoolingForward(cudnn, pooling, &one, x, m, &zero, x, m), 0);
	IS(cudnnActivationForward(cudnn, activation, &one, x, m, &zero, x, m), 0);
	IS(cudnnSoftmaxForward(cudnn, 0, 0, &one, x, m, &zero, x, m), 0);
	IS(cudnnAddTensor(cudnn, &one, x, m, &one, x, m), 0);
	IS(cudnnDestroyTensorDescriptor(x), 0);
	IS(curandCreateGenerator(&generator, 100), 0);
	IS(curandSetPseudoRandomGeneratorSeed(generator, 7), 0);
	IS(curandSetStream(generator, stream), 0);
	IS(curandGenerateUniform(generator, m, 1000), 0);
	IS(curandGenerateNormal(generator, m, 1000, 0, 1), 0);
	IS(cudaStreamSynchronize(stream), 0);
	IS(curandDestroyGenerator(generator), 0);
	IS(cudnnDestroy(cudnn), 0);
	IS(cudaStreamDestroy(stream), 0);
	IS(cudaFree(m), 0);
}

static void works(void)
{
	int devices = 0, attribute = 0;
	char properties[4096];
	IS(cudaGetDeviceCount(&devices), 0);
	IS(devices, 1);
	IS(cudaGetDeviceProperties(properties, 0), 0);
	IS(strcmp(properties, "Basalt null"), 0);
	IS(cudaDeviceGetAttribute(&attribute, 75, 0), 0);
	IS(attribute, 9);
	memory();
	streams();
	launches();
	algebra();
	networks();
	IS(cudaDeviceSynchronize(), 0);
}

static void quota(void)
{
	void *a, *b;
	IS(cudaMalloc(&a, 60 << 20), 0);
	IS(cudaMalloc(&b, 5 << 20), 2);
	IS(cudaGetLastError(), 2);
	IS(cudaMalloc(&b, 4 << 20), 0);
	IS(cudaFree(a), 0);
	IS(cudaFree(a), 1);
	IS(cudaFree(b), 0);
	IS(cudaDeviceSynchronize(), 0);
}

/* Errors are told by every later call that waits, in each library's words; so each is seen in a child of its own. */
static void in_child(const char *program, const char *what)
{
	char command[4096];
	snprintf(command, sizeof(command), "%s %s >&2", program, what);
	IS(system(command), 0);
}

static void errors(const char *program)
{
	in_child(program, "outside");
	in_child(program, "no-stream");
	in_child(program, "no-handle");
	in_child(program, "no-module");
	in_child(program, "no-algorithm");
	in_child(program, "nothing-set");
	in_child(program, "not-returned");
	in_child(program, "short-workspace");
	in_child(program, "many-handles");
}

static void outside(void)
{
	void *a, *handle;
	float dot;
	IS(cudaMalloc(&a, 512), 0);
	IS(cublasCreate_v2(&handle), 0);
	IS(cublasSdot_v2(handle, 8, a, 1, (char *)a + 512, 1, &dot), 13);
	IS(cudaDeviceSynchronize(), 0);
	IS(cudaMemset(a, 0, 513), 0);
	IS(cudaDeviceSynchronize(), 700);
	IS(cudaStreamSynchronize(NULL), 700);
	IS(cublasSdot_v2(handle, 8, a, 1, a, 1, &dot), 13);
}

static void no_algorithm(void)
{
	void *m, *desc, *layout;
	float one = 1;
	char algorithm[64] = "mine";
	IS(cudaMalloc(&m, 4096), 0);
	IS(cublasLtMatmulDescCreate(&desc, 68, 0), 0);
	IS(cublasLtMatrixLayoutCreate(&layout, 0, 8, 8, 8), 0);
	/* One that no heuristic has told: a library would take its bytes for its own. */
	IS(cublasLtMatmul(NULL, desc, &one, m, layout, m, layout, &one, m, layout, m, layout, algorithm, NULL, 0, NULL), 0);
	IS(cudaDeviceSynchronize(), 999);
}

/* Wherever that is; the libraries are not asked. */
static void nothing_set(void)
{
	IS(cudaMemset(NULL, 7, 0), 0);
	IS(cudaDeviceSynchronize(), 0);
	IS(cudaMemsetAsync(NULL, 7, 0, NULL), 0);
	IS(cudaDeviceSynchronize(), 0);
	IS(cudaMemset2D(NULL, 512, 7, 0, 8), 0);
	IS(cudaDeviceSynchronize(), 0);
}

/* Two results are asked for and one is returned; there are zeroes for the other. */
static void not_returned(void)
{
	void *handle, *m, *desc, *layout, *preference;
	float one = 1;
	char results[2][96], zeroes[64] = { 0 };
	int found = -1;
	IS(cublasCreate_v2(&handle), 0);
	IS(cudaMalloc(&m, 4096), 0);
	IS(cublasLtMatmulDescCreate(&desc, 68, 0), 0);
	IS(cublasLtMatrixLayoutCreate(&layout, 0, 8, 8, 8), 0);
	IS(cublasLtMatmulPreferenceCreate(&preference), 0);
	IS(cublasLtMatmulAlgoGetHeuristic(handle, desc, layout, layout, layout, layout, preference, 2, results, &found), 0);
	IS(found, 1);
	IS(memcmp(results[0], zeroes, 64) != 0, 1);
	IS(cublasLtMatmul(handle, desc, &one, m, layout, m, layout, &one, m, layout, m, layout, zeroes, NULL, 0, NULL), 0);
	IS(cudaDeviceSynchronize(), 999);
}

static void short_workspace(void)
{
	void *handle, *m;
	IS(cublasCreate_v2(&handle), 0);
	IS(cudaMalloc(&m, 4096), 0);
	IS(cublasSetWorkspace_v2(handle, m, 4096), 0);
	IS(cublasSetWorkspace_v2(handle, NULL, 1 << 20), 0);
	IS(cudaDeviceSynchronize(), 0);
	IS(cublasSetWorkspace_v2(handle, m, 4097), 0);
	IS(cudaDeviceSynchronize(), 999);
}

static void many_handles(void)
{
	void *handle;
	for (int made = 0; made < 64; made++)
		IS(cublasCreate_v2(&handle), 0);
	IS(cudaDeviceSynchronize(), 0);
	IS(cublasDestroy_v2(handle), 0);
	IS(cublasCreate_v2(&handle), 0);
	IS(cudaDeviceSynchronize(), 0);
	IS(cublasCreate_v2(&handle), 0);
	IS(cudaDeviceSynchronize(), 999);
}

static void left(void)
{
	void *a, *handle, *cudnn, *stream, *event, *generator;
	IS(cudaMalloc(&a, 8 << 20), 0);
	IS(cudaStreamCreate(&stream), 0);
	IS(cudaEventCreate(&event), 0);
	IS(cublasCreate_v2(&handle), 0);
	IS(cudnnCreate(&cudnn), 0);
	IS(curandCreateGenerator(&generator, 100), 0);
	launches();
	_exit(0);
}

int main(int argc, char **argv)
{
	void *a;
	const char *what = argc > 1 ? argv[1] : "";
	if (strcmp(what, "works") == 0) {
		works();
	} else if (strcmp(what, "quota") == 0) {
		quota();
	} else if (strcmp(what, "errors") == 0) {
		errors(argv[0]);
	} else if (strcmp(what, "outside") == 0) {
		outside();
	} else if (strcmp(what, "no-stream") == 0) {
		IS(cudaStreamQuery((void *)77), 400);
		IS(cudaStreamDestroy((void *)77), 0);
		IS(cudaDeviceSynchronize(), 400);
	} else if (strcmp(what, "no-handle") == 0) {
		IS(cublasSdot_v2((void *)77, 8, NULL, 1, NULL, 1, NULL), 1);
		IS(cudaDeviceSynchronize(), 0);
	} else if (strcmp(what, "no-module") == 0) {
		container.magic = 7;
		IS(cudaLibraryLoadData(&a, &container, NULL, NULL, 0, NULL, NULL, 0), 200);
		container.magic = 0xba55ed50;
		IS(cudaLibraryLoadData(&a, &container, NULL, NULL, 0, NULL, NULL, 0), 0);
		IS(cudaLibraryGetKernel(&a, (void *)77, "kernel"), 1);
	} else if (strcmp(what, "no-algorithm") == 0) {
		no_algorithm();
	} else if (strcmp(what, "nothing-set") == 0) {
		nothing_set();
	} else if (strcmp(what, "not-returned") == 0) {
		not_returned();
	} else if (strcmp(what, "short-workspace") == 0) {
		short_workspace();
	} else if (strcmp(what, "many-handles") == 0) {
		many_handles();
	} else if (strcmp(what, "left") == 0) {
		left();
	} else {
		return 2;
	}
	uint64_t each[4096] = { 0 };
	size_t count = basalt_cuda_counters(NULL, each, 4096);
	for (size_t index = 0; index < count && index < 4096; index++)
		if (each[index] > 0)
			printf("calls %zu %llu\n", index, (unsigned long long)each[index]);
	return 0;
}
