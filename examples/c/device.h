/* device.h: memory where an example runs: the CPU, or CUDA if EXAMPLE_CUDA is defined. */
#ifndef DEVICE_H
#define DEVICE_H

#include "problem.h"

#include <string.h>

enum { SKIPPED = 77 }; /* returned by a program that needs a CUDA device where there is none */

#ifdef EXAMPLE_CUDA
#include <cuda_runtime_api.h>

static inline void check_cuda(cudaError_t error)
{
    if (error == cudaSuccess)
        return;
    fprintf(stderr, "%s\n", cudaGetErrorString(error));
    exit(1);
}

static inline hr_exec device_exec(void)
{
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("skipped: no CUDA device\n");
        exit(SKIPPED);
    }
    const hr_exec gpu = {0, NULL};
    return gpu;
}

static inline void *device_zeros(size_t bytes)
{
    void *memory = NULL;
    check_cuda(cudaMalloc(&memory, bytes > 0 ? bytes : 1));
    check_cuda(cudaMemset(memory, 0, bytes));
    return memory;
}

static inline void to_device(void *to, const void *from, size_t bytes)
{
    check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
}

static inline void to_host(void *to, const void *from, size_t bytes)
{
    check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
}

static inline void device_free(void *memory)
{
    check_cuda(cudaFree(memory));
}

#else

static inline hr_exec device_exec(void)
{
    const hr_exec cpu = {HR_CPU, NULL};
    return cpu;
}

static inline void *device_zeros(size_t bytes)
{
    void *const memory = calloc(bytes > 0 ? bytes : 1, 1);
    if (memory)
        return memory;
    fprintf(stderr, "out of memory\n");
    exit(1);
}

static inline void to_device(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
}

static inline void to_host(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
}

static inline void device_free(void *memory)
{
    free(memory);
}

#endif

#endif
