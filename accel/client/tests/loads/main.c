/*
 * Loads the client's library as a loader does, and calls its server from four threads, each with a queue and a buffer of its own. For C
 * libraries that the tests of Rust are not compiled for: `cargo xtask` compiles it with each, and runs it with what it has built and the
 * server `null`, which moves no data. So what is seen is that the library loads, that calls are answered, and that threads come to an end.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Of cl_khr_icd: an object begins with the address of the table, in this order. */
enum {
	GET_DEVICE_IDS = 2,
	CREATE_CONTEXT = 4,
	RELEASE_CONTEXT = 7,
	CREATE_COMMAND_QUEUE = 9,
	RELEASE_COMMAND_QUEUE = 11,
	CREATE_BUFFER = 14,
	RELEASE_MEM_OBJECT = 18,
	ENQUEUE_READ_BUFFER = 48,
	ENQUEUE_WRITE_BUFFER = 49,
};

#define SIZE (1 << 20)

typedef void *object;

static object *platform_of(const char *path)
{
	int (*platforms)(unsigned, object *, unsigned *);
	void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	unsigned count = 0;
	object platform;
	int code;

	if (!library) {
		fprintf(stderr, "dlopen: %s\n", dlerror());
		exit(1);
	}
	platforms = (int (*)(unsigned, object *, unsigned *))dlsym(library, "clIcdGetPlatformIDsKHR");
	if (!platforms) {
		fprintf(stderr, "dlsym: %s\n", dlerror());
		exit(1);
	}
	code = platforms(1, &platform, &count);
	if (code || !count) {
		fprintf(stderr, "clIcdGetPlatformIDsKHR: %d, %u platforms\n", code, count);
		exit(1);
	}
	return platform;
}

static void must(const char *what, int code)
{
	if (code) {
		fprintf(stderr, "%s: %d\n", what, code);
		exit(1);
	}
}

/* What a thread does. */
static void *writes_and_reads(void *argument)
{
	object **arguments = argument, device = arguments[1], context = arguments[2], queue, buffer;
	void **table = *(void ***)device;
	unsigned char *out = malloc(SIZE), *in = calloc(1, SIZE);
	int code;

	queue = ((object (*)(object, object, unsigned long, int *))table[CREATE_COMMAND_QUEUE])(context, device, 0, &code);
	must("clCreateCommandQueue", code);
	buffer = ((object (*)(object, unsigned long, size_t, void *, int *))table[CREATE_BUFFER])(context, 1, SIZE, NULL, &code);
	must("clCreateBuffer", code);
	memset(out, 0x5a, SIZE);
	must("clEnqueueWriteBuffer", ((int (*)(object, object, unsigned, size_t, size_t, const void *, unsigned, const object *, object *))
		table[ENQUEUE_WRITE_BUFFER])(queue, buffer, 0, 0, SIZE, out, 0, NULL, NULL));
	must("clEnqueueReadBuffer", ((int (*)(object, object, unsigned, size_t, size_t, void *, unsigned, const object *, object *))
		table[ENQUEUE_READ_BUFFER])(queue, buffer, 1, 0, SIZE, in, 0, NULL, NULL));
	must("clReleaseMemObject", ((int (*)(object))table[RELEASE_MEM_OBJECT])(buffer));
	must("clReleaseCommandQueue", ((int (*)(object))table[RELEASE_COMMAND_QUEUE])(queue));
	free(out);
	free(in);
	return NULL;
}

int main(int count, char **arguments)
{
	object platform, device, context;
	pthread_t threads[4];
	void **table;
	int code;

	if (count != 2)
		return 2;
	platform = platform_of(arguments[1]);
	table = *(void ***)platform;
	must("clGetDeviceIDs", ((int (*)(object, unsigned long, unsigned, object *, unsigned *))table[GET_DEVICE_IDS])(platform,
		0xffffffff, 1, &device, NULL));
	context = ((object (*)(const void *, unsigned, const object *, void *, void *, int *))table[CREATE_CONTEXT])(NULL, 1, &device, NULL,
		NULL, &code);
	must("clCreateContext", code);
	for (int i = 0; i < 4; i++)
		must("pthread_create", pthread_create(&threads[i], NULL, writes_and_reads, (object[]){ platform, device, context }));
	for (int i = 0; i < 4; i++)
		must("pthread_join", pthread_join(threads[i], NULL));
	must("clReleaseContext", ((int (*)(object))table[RELEASE_CONTEXT])(context));
	puts("loaded and answered");
	return 0;
}
