// The part of CUDA's runtime interface that the kernels and their tests use, for a host without
// CUDA. It shadows NVIDIA's header of the same name, so the emulated build is the same everywhere.
#pragma once

#include <cstddef>

// ---- Vector types: the sizes and alignments of CUDA ---------------------------------------------

#define HR_EMU_VECTOR(type, name)                                    \
    struct alignas(2 * sizeof(type)) name##2                         \
    {                                                                \
        type x, y;                                                   \
    };                                                               \
    struct name##3                                                   \
    {                                                                \
        type x, y, z;                                                \
    };                                                               \
    struct alignas(sizeof(type) < 4 ? 4 * sizeof(type) : 16) name##4 \
    {                                                                \
        type x, y, z, w;                                             \
    };                                                               \
    inline name##2 make_##name##2(type x, type y)                    \
    {                                                                \
        return {x, y};                                               \
    }                                                                \
    inline name##3 make_##name##3(type x, type y, type z)            \
    {                                                                \
        return {x, y, z};                                            \
    }                                                                \
    inline name##4 make_##name##4(type x, type y, type z, type w)    \
    {                                                                \
        return {x, y, z, w};                                         \
    }

HR_EMU_VECTOR(signed char, char)
HR_EMU_VECTOR(unsigned char, uchar)
HR_EMU_VECTOR(short, short)
HR_EMU_VECTOR(unsigned short, ushort)
HR_EMU_VECTOR(int, int)
HR_EMU_VECTOR(unsigned int, uint)
HR_EMU_VECTOR(long long, longlong)
HR_EMU_VECTOR(unsigned long long, ulonglong)
HR_EMU_VECTOR(float, float)
HR_EMU_VECTOR(double, double)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// ---- Errors: the numbers of CUDA ----------------------------------------------------------------

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorIllegalAddress = 700,
    cudaErrorLaunchFailure = 719,
    cudaErrorStreamCaptureUnsupported = 900,
};
using cudaError = cudaError_t;

extern "C" {
cudaError_t cudaGetLastError();    // and forgets it
cudaError_t cudaPeekAtLastError(); // and keeps it
const char *cudaGetErrorName(cudaError_t error);
const char *cudaGetErrorString(cudaError_t error);
}

// ---- The one device -----------------------------------------------------------------------------

enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrWarpSize = 10,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};

extern "C" {
cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceSynchronize();
}

// ---- Streams: every operation is done when its call returns -------------------------------------

typedef struct CUstream_st *cudaStream_t;

enum cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone = 0,
    cudaStreamCaptureStatusActive = 1,
    cudaStreamCaptureStatusInvalidated = 2,
};

enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal = 0,
    cudaStreamCaptureModeThreadLocal = 1,
    cudaStreamCaptureModeRelaxed = 2,
};

extern "C" {
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status);
}

// ---- Memory -------------------------------------------------------------------------------------

enum cudaMemcpyKind {
    cudaMemcpyHostToHost = 0,
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3,
    cudaMemcpyDefault = 4,
};

extern "C" {
cudaError_t cudaMalloc(void **pointer, size_t bytes);
cudaError_t cudaFree(void *pointer);
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t bytes, size_t rows, cudaMemcpyKind kind,
                              cudaStream_t stream = nullptr);
cudaError_t cudaMemset(void *pointer, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void *pointer, int value, size_t bytes, cudaStream_t stream = nullptr);
}

template <class T> cudaError_t cudaMalloc(T **pointer, size_t bytes)
{
    return cudaMalloc(reinterpret_cast<void **>(pointer), bytes);
}
