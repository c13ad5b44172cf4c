// The calls of the CUDA runtime, as if there were one device.
#include "tests/c/emulator/machine.h"

#include <algorithm>
#include <map>
#include <new>
#include <utility>

using namespace hr_emu;

namespace
{
cudaError_t last_error = cudaSuccess;
bool capturing = false;
thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

cudaError_t result(cudaError_t error)
{
    if (error != cudaSuccess)
        set_last_error(error);
    return error;
}

// A transfer may touch only whole allocations where the kind says device.
bool on_device(const void *pointer, size_t bytes, bool write)
{
    Allocation *const a = find_allocation(pointer, bytes);
    if (a && write) {
        const auto first =
            a->written.begin() + (static_cast<const char *>(pointer) - a->range.begin);
        std::fill(first, first + bytes, true);
    }
    return a != nullptr;
}
} // namespace

void hr_emu::set_last_error(cudaError_t error)
{
    last_error = error;
}

void hr_emu::submit(cudaStream_t, std::function<void()> work)
{
    work();
}

void hr_emu::pretend_capture(bool on)
{
    capturing = on;
}

bool hr_emu::refused_in_capture(const char *call)
{
    if (!capturing || mode == cudaStreamCaptureModeRelaxed)
        return false;
    report_host("not in a capture: " + std::string(call), cudaErrorStreamCaptureUnsupported);
    return true;
}

cudaError_t cudaMalloc(void **pointer, size_t bytes)
{
    *pointer = nullptr;
    if (refused_in_capture("cudaMalloc"))
        return cudaErrorStreamCaptureUnsupported;
    if (bytes == 0)
        return cudaSuccess;
    try {
        *pointer = allocate_device(bytes);
    } catch (const std::bad_alloc &) {
        return result(cudaErrorMemoryAllocation);
    }
    return cudaSuccess;
}

cudaError_t cudaFree(void *pointer)
{
    if (refused_in_capture("cudaFree"))
        return cudaErrorStreamCaptureUnsupported;
    return result(!pointer || free_device(pointer) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t)
{
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (bytes == 0)
        return cudaSuccess;
    const bool found = on_device(to, bytes, true) || !to_device;
    if (!found || (from_device && !on_device(from, bytes, false)))
        return result(cudaErrorInvalidValue);
    memmove(always_open(to), always_open(from), bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind)
{
    if (refused_in_capture("cudaMemcpy"))
        return cudaErrorStreamCaptureUnsupported;
    return cudaMemcpyAsync(to, from, bytes, kind);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t bytes, size_t rows, cudaMemcpyKind kind, cudaStream_t)
{
    if (to_pitch < bytes || from_pitch < bytes)
        return result(cudaErrorInvalidValue);
    for (size_t i = 0; i < rows; i++) {
        const cudaError_t error =
            cudaMemcpyAsync(static_cast<char *>(to) + i * to_pitch,
                            static_cast<const char *>(from) + i * from_pitch, bytes, kind);
        if (error != cudaSuccess)
            return error;
    }
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *pointer, int value, size_t bytes, cudaStream_t)
{
    if (bytes == 0)
        return cudaSuccess;
    if (!on_device(pointer, bytes, true))
        return result(cudaErrorInvalidValue);
    memset(always_open(pointer), value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *pointer, int value, size_t bytes)
{
    if (refused_in_capture("cudaMemset"))
        return cudaErrorStreamCaptureUnsupported;
    return cudaMemsetAsync(pointer, value, bytes);
}

// ---- Errors, the device, streams ----------------------------------------------------------------

cudaError_t cudaGetLastError()
{
    return std::exchange(last_error, cudaSuccess);
}

cudaError_t cudaPeekAtLastError()
{
    return last_error;
}

const char *cudaGetErrorName(cudaError_t error)
{
    switch (error) {
    case cudaSuccess:
        return "cudaSuccess";
    case cudaErrorInvalidValue:
        return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
        return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
        return "cudaErrorInvalidConfiguration";
    case cudaErrorNoDevice:
        return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice:
        return "cudaErrorInvalidDevice";
    case cudaErrorIllegalAddress:
        return "cudaErrorIllegalAddress";
    case cudaErrorLaunchFailure:
        return "cudaErrorLaunchFailure";
    case cudaErrorStreamCaptureUnsupported:
        return "cudaErrorStreamCaptureUnsupported";
    }
    return "an error the emulator does not know";
}

const char *cudaGetErrorString(cudaError_t error)
{
    return cudaGetErrorName(error);
}

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    return result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device)
{
    const std::map<cudaDeviceAttr, int> values = {
        {cudaDevAttrMaxThreadsPerBlock, 1024},
        {cudaDevAttrMaxSharedMemoryPerBlock, 48 << 10},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, 48 << 10},
        {cudaDevAttrWarpSize, warpSize},
        {cudaDevAttrMultiProcessorCount, 2},
        {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
        {cudaDevAttrComputeCapabilityMajor, machine.capability / 10},
        {cudaDevAttrComputeCapabilityMinor, machine.capability % 10},
    };
    if (device != 0 || values.count(attribute) == 0)
        return result(device != 0 ? cudaErrorInvalidDevice : cudaErrorInvalidValue);
    *value = values.at(attribute);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize()
{
    return refused_in_capture("cudaDeviceSynchronize") ? cudaErrorStreamCaptureUnsupported
                                                       : cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t)
{
    return refused_in_capture("cudaStreamSynchronize") ? cudaErrorStreamCaptureUnsupported
                                                       : cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *other)
{
    std::swap(mode, *other);
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status)
{
    *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
