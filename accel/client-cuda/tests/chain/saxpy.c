/*
 * A program with kernels: the container of its fat binary is in the file that its argument names (accel/ptx/tests/kernels/program.cu). It
 * launches them as one that a compiler of CUDA makes, and as a library that it has in memory, and looks at what comes back.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned x, y, z; } dim3;

extern int cudaMalloc(void **, size_t), cudaFree(void *), cudaMemcpy(void *, const void *, size_t, int), cudaDeviceSynchronize(void);
extern int cudaGetLastError(void), cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, void *);
extern void **__cudaRegisterFatBinary(void *);
extern void __cudaRegisterFunction(void **, const char *, char *, const char *, int, void *, void *, void *, void *, void *);
extern int cudaLibraryLoadData(void **, const void *, void *, void **, unsigned, void *, void **, unsigned);
extern int cudaLibraryGetKernel(void **, void *, const char *), cudaLibraryUnload(void *);
extern int cudaLibraryGetGlobal(void **, size_t *, void *, const char *), cuKernelGetParamInfo(void *, size_t, size_t *, size_t *);

#define IS(what, expected)                                                                                                         \
	do {                                                                                                                       \
		long long got = (long long)(what);                                                                                 \
		if (got != (long long)(expected)) {                                                                                \
			fprintf(stderr, "line %d: %s is %lld and not %lld\n", __LINE__, #what, got, (long long)(expected));        \
			exit(1);                                                                                                   \
		}                                                                                                                  \
	} while (0)

enum { N = 4096 };

static void saxpy(void) {}
static void missing(void) {}

static char container[4096] __attribute__((aligned(8)));
static struct { int magic, version; void *data, *file; } wrapper = { 0x466243b1, 1, container, NULL };

int main(int argc, char **argv)
{
	static float x[N], y[N];
	float a = 3, half = 0.5;
	int n = N, right = 0;
	void *on_x, *on_y, *library, *scale, *handle;
	size_t offset, size;
	dim3 grid = { N / 128, 1, 1 }, block = { 128, 1, 1 };
	FILE *file = argc > 1 ? fopen(argv[1], "rb") : NULL;
	/* An empty one stands before it. */
	if (file == NULL || fseek(file, 16, SEEK_SET) != 0 || fread(container, 1, sizeof(container), file) == 0)
		return 2;
	handle = __cudaRegisterFatBinary(&wrapper);
	__cudaRegisterFunction(handle, (const char *)saxpy, NULL, "saxpy", -1, NULL, NULL, NULL, NULL, NULL);
	__cudaRegisterFunction(handle, (const char *)missing, NULL, "missing", -1, NULL, NULL, NULL, NULL, NULL);
	for (int i = 0; i < N; i++) {
		x[i] = i;
		y[i] = 1;
	}
	IS(cudaMalloc(&on_x, sizeof(x)), 0);
	IS(cudaMalloc(&on_y, sizeof(y)), 0);
	IS(cudaMemcpy(on_x, x, sizeof(x), 1), 0);
	IS(cudaMemcpy(on_y, y, sizeof(y), 1), 0);
	void *arguments[4] = { &n, &a, &on_x, &on_y };
	if (argc > 2) {
		/* It writes where nothing is. */
		on_y = (void *)0x1000;
		IS(cudaLaunchKernel((const void *)saxpy, grid, block, arguments, 0, NULL), 0);
		IS(cudaDeviceSynchronize(), 700);
		return 0;
	}
	IS(cudaLaunchKernel((const void *)saxpy, grid, block, arguments, 0, NULL), 0);
	IS(cudaLaunchKernel((const void *)missing, grid, block, arguments, 0, NULL), 98);
	IS(cudaGetLastError(), 98);
	/* The same container, and a kernel by its name. */
	IS(cudaLibraryLoadData(&library, container, NULL, NULL, 0, NULL, NULL, 0), 0);
	IS(cudaLibraryGetKernel(&scale, library, "scale"), 0);
	IS(cuKernelGetParamInfo(scale, 2, &offset, &size), 0);
	IS(offset, 8);
	IS(size, 8);
	IS(cuKernelGetParamInfo(scale, 3, &offset, &size), 1);
	void *others[3] = { &n, &half, &on_y };
	IS(cudaLaunchKernel(scale, grid, block, others, 0, NULL), 0);
	IS(cudaMemcpy(y, on_y, sizeof(y), 2), 0);
	for (int i = 0; i < N; i++)
		right += y[i] == (a * x[i] + 1) / 2;
	fprintf(stderr, "%d of %d are right\n", right, N);
	IS(cudaLibraryUnload(library), 0);
	IS(cudaDeviceSynchronize(), 0);
	IS(cudaFree(on_x), 0);
	IS(cudaFree(on_y), 0);
	IS(cudaDeviceSynchronize(), 0);
	/* Its library is gone; it is told by every later call that waits. */
	IS(cudaLaunchKernel(scale, grid, block, others, 0, NULL), 0);
	IS(cudaDeviceSynchronize(), 400);
	return 0;
}
