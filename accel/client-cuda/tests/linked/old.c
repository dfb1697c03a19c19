/* A program that is linked with CUDA 11's runtime, as far as it is: it is told before its main. Knows no server. */
#include <stdio.h>

extern void **register_of_11(void *);
__asm__(".symver register_of_11, __cudaRegisterFatBinary@libcudart.so.11.0");

__attribute__((constructor)) static void registers(void)
{
	register_of_11(NULL);
}

int main(void)
{
	puts("it went on");
	return 0;
}
