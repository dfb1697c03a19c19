// What all of these programs have: a call that fails ends the program with its name and place, and so does a result that is wrong. The last
// line of a program that is content is its name, "right", and what it looked at. Knows no server.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <cuda_runtime.h>

#define CUDA(call)                                                                                                                  \
    do {                                                                                                                            \
        cudaError_t code_ = (call);                                                                                                 \
        if (code_ != cudaSuccess)                                                                                                   \
            wrong("%s:%d: %s: %s (%s)", __FILE__, __LINE__, #call, cudaGetErrorName(code_), cudaGetErrorString(code_));             \
    } while (0)

// A call of another library, whose codes are 0 for success.
#define LIBRARY(call)                                                                                                               \
    do {                                                                                                                            \
        int code_ = (int)(call);                                                                                                    \
        if (code_ != 0)                                                                                                             \
            wrong("%s:%d: %s: %d", __FILE__, __LINE__, #call, code_);                                                               \
    } while (0)

static int refused = 0;

// A call that has to fail with this code.
#define REFUSED(call, expected)                                                                                                     \
    do {                                                                                                                            \
        int code_ = (int)(call);                                                                                                    \
        refused++;                                                                                                                  \
        if (code_ != (int)(expected))                                                                                               \
            wrong("%s:%d: %s is %d and not %d", __FILE__, __LINE__, #call, code_, (int)(expected));                                 \
    } while (0)

#define IS(condition)                                                                                                               \
    do {                                                                                                                            \
        if (!(condition))                                                                                                           \
            wrong("%s:%d: %s is not so", __FILE__, __LINE__, #condition);                                                           \
    } while (0)

[[noreturn]] static inline void wrong(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    fputs("wrong: ", stdout);
    vprintf(format, list);
    va_end(list);
    putchar('\n');
    exit(1);
}

static inline void close_to(const char *what, size_t index, double got, double expected, double most)
{
    if (!(std::fabs(got - expected) <= most * (1 + std::fabs(expected))))
        wrong("%s[%zu] is %.9g and not %.9g", what, index, got, expected);
}

// Numbers that are the same in each run, between -1 and 1.
struct Numbers {
    uint64_t state;
    explicit Numbers(uint64_t seed) : state(seed * 2 + 1) {}
    float next()
    {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        return (float)((int32_t)(state >> 33) - (1 << 30)) / (float)(1 << 30);
    }
    std::vector<float> list(size_t count, float scale = 1)
    {
        std::vector<float> numbers(count);
        for (float &number : numbers)
            number = next() * scale;
        return numbers;
    }
};

template <typename T> static T *on_device(const std::vector<T> &numbers)
{
    T *place = nullptr;
    CUDA(cudaMalloc((void **)&place, numbers.size() * sizeof(T)));
    CUDA(cudaMemcpy(place, numbers.data(), numbers.size() * sizeof(T), cudaMemcpyHostToDevice));
    return place;
}

template <typename T> static std::vector<T> from_device(const T *place, size_t count)
{
    std::vector<T> numbers(count);
    CUDA(cudaMemcpy(numbers.data(), place, count * sizeof(T), cudaMemcpyDeviceToHost));
    return numbers;
}
