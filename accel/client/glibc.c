/*
 * Functions that glibc has only since 2.33, or links into each library (libc_nonshared.a): what they were in glibc 2.17, on x86-64.
 * Linked into the client's library where that is built for old images (glibc.toml); hidden, so that nobody else finds them.
 */

struct stat64;

/* The layout of struct stat64 that these functions are told to fill: there is one on x86-64. */
#define STAT_VERSION 1

#define HIDDEN __attribute__((visibility("hidden")))

extern int __xstat64(int version, const char *path, struct stat64 *about);
extern int __fxstat64(int version, int file, struct stat64 *about);
extern int __register_atfork(void (*before)(void), void (*parent)(void), void (*child)(void), void *library);

/* Of the library, by the compiler's start files. */
extern void *__dso_handle HIDDEN;

HIDDEN int stat64(const char *path, struct stat64 *about)
{
	return __xstat64(STAT_VERSION, path, about);
}

HIDDEN int fstat64(int file, struct stat64 *about)
{
	return __fxstat64(STAT_VERSION, file, about);
}

HIDDEN int pthread_atfork(void (*before)(void), void (*parent)(void), void (*child)(void))
{
	return __register_atfork(before, parent, child, __dso_handle);
}
