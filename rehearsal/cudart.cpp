// The devices, their properties, and kernels, of which only the launches are counted.
#include "device.h"

#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <unordered_map>
#include <utility>

namespace rehearsal
{
namespace
{
thread_local int device = 0;
thread_local int held = -1; // what the current device was before it was held
uint64_t launches = 0;

std::unordered_map<const void *, std::string> &kernels() // names, by the address of their stubs
{
    static auto *const all = new std::unordered_map<const void *, std::string>;
    return *all;
}

cudaError_t launch(const void *kernel, cudaStream_t stream)
{
    Lock lock(mutex);
    launches++;
    Stream *const s = stream_of(stream);
    if (s->device != device)
        return fail(cudaErrorInvalidResourceHandle);
    tick(s);
    enqueue(s, [](Stream *) {});
    if (settings().logged) {
        const auto found = kernels().find(kernel);
        const char *const name = found == kernels().end() ? "?" : found->second.c_str();
        char *const plain = abi::__cxa_demangle(name, nullptr, nullptr, nullptr);
        note_missing(std::string("kernel ") + std::string(plain ? plain : name).substr(0, 300));
        free(plain);
    }
    return cudaSuccess;
}
} // namespace

int current_device()
{
    return device;
}
} // namespace rehearsal

using namespace rehearsal;

CALL(uint64_t rehearsal_launches(), return launches;)
EXPORT int rehearsal_computes() // whether kernels and products have results
{
    return settings().computed == SIZE_MAX;
}
EXPORT void rehearsal_launch(void *stream) // by the driver's calls
{
    launch(nullptr, static_cast<cudaStream_t>(stream));
}

// ---- Devices ------------------------------------------------------------------------------------

EXPORT cudaError_t cudaGetDeviceCount(int *count)
{
    *count = settings().devices;
    return cudaSuccess;
}
EXPORT cudaError_t cudaGetDevice(int *current)
{
    *current = device;
    return cudaSuccess;
}
EXPORT cudaError_t cudaSetDevice(int wanted)
{
    if (wanted < 0 || wanted >= settings().devices)
        return fail(cudaErrorInvalidDevice);
    if (held < 0)
        device = wanted;
    return cudaSuccess;
}
// From now on `index` is the current device of the thread, whatever it asks for, as if nobody guarded
// it; -1: it is what it was before.
EXPORT void rehearsal_hold_device(int index)
{
    if (held >= 0)
        device = std::exchange(held, -1);
    if (index >= 0)
        held = std::exchange(device, index);
}
CALL(cudaError_t cudaInitDevice(int, unsigned, unsigned), return cudaSuccess;)
EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int index)
{
    if (index < 0 || index >= settings().devices)
        return fail(cudaErrorInvalidDevice);
    const Gpu &gpu = settings().gpu;
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", gpu.name);
    memcpy(p->uuid.bytes, "software device", sizeof p->uuid.bytes);
    p->uuid.bytes[15] = char(index);
    p->totalGlobalMem = gpu.memory;
    p->sharedMemPerBlock = 48 << 10;
    p->sharedMemPerMultiprocessor = size_t(gpu.shared_kilobytes) << 10;
    p->reservedSharedMemPerBlock = 1 << 10;
    p->sharedMemPerBlockOptin = p->sharedMemPerMultiprocessor - p->reservedSharedMemPerBlock;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->memPitch = 0x7FFFFFFF;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 0x7FFFFFFF;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 65536;
    p->major = gpu.capability / 10;
    p->minor = gpu.capability % 10;
    p->textureAlignment = 512;
    p->texturePitchAlignment = 32;
    p->multiProcessorCount = gpu.multiprocessors;
    p->canMapHostMemory = p->unifiedAddressing = p->concurrentKernels = 1;
    p->managedMemory = p->concurrentManagedAccess = p->memoryPoolsSupported = 1;
    p->streamPrioritiesSupported = p->globalL1CacheSupported = p->localL1CacheSupported = 1;
    p->cooperativeLaunch = p->hostRegisterSupported = 1;
    p->pciBusID = index + 1;
    p->asyncEngineCount = 3;
    p->memoryBusWidth = gpu.bus_bits;
    p->l2CacheSize = gpu.l2_megabytes << 20;
    p->maxThreadsPerMultiProcessor = gpu.capability == 75                           ? 1024
                                     : gpu.capability % 10 || gpu.capability == 120 ? 1536
                                                                                    : 2048;
    p->maxBlocksPerMultiProcessor = gpu.capability == 75 || gpu.capability == 86 ? 16 : 32;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int index)
{
    cudaDeviceProp p;
    const cudaError_t error = cudaGetDeviceProperties(&p, index);
    if (error != cudaSuccess)
        return error;
    const std::unordered_map<int, int> values = {
        {cudaDevAttrMaxThreadsPerBlock, p.maxThreadsPerBlock},
        {cudaDevAttrMaxBlockDimX, 1024},
        {cudaDevAttrMaxBlockDimY, 1024},
        {cudaDevAttrMaxBlockDimZ, 64},
        {cudaDevAttrMaxGridDimX, p.maxGridSize[0]},
        {cudaDevAttrMaxGridDimY, 65535},
        {cudaDevAttrMaxGridDimZ, 65535},
        {cudaDevAttrMaxSharedMemoryPerBlock, int(p.sharedMemPerBlock)},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, int(p.sharedMemPerBlockOptin)},
        {cudaDevAttrMaxSharedMemoryPerMultiprocessor, int(p.sharedMemPerMultiprocessor)},
        {cudaDevAttrWarpSize, 32},
        {cudaDevAttrMultiProcessorCount, p.multiProcessorCount},
        {cudaDevAttrMaxThreadsPerMultiProcessor, p.maxThreadsPerMultiProcessor},
        {cudaDevAttrMaxBlocksPerMultiprocessor, p.maxBlocksPerMultiProcessor},
        {cudaDevAttrMaxRegistersPerBlock, 65536},
        {cudaDevAttrMaxRegistersPerMultiprocessor, 65536},
        {cudaDevAttrL2CacheSize, p.l2CacheSize},
        {cudaDevAttrComputeCapabilityMajor, p.major},
        {cudaDevAttrComputeCapabilityMinor, p.minor},
        {cudaDevAttrUnifiedAddressing, 1},
        {cudaDevAttrMemoryPoolsSupported, 1},
        {cudaDevAttrCooperativeLaunch, 1},
        {cudaDevAttrConcurrentKernels, 1},
        {cudaDevAttrStreamPrioritiesSupported, 1},
        {cudaDevAttrClockRate, settings().gpu.clock_mhz * 1000},
        {cudaDevAttrGlobalMemoryBusWidth, p.memoryBusWidth},
        {102 /* CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED */, 1},
    };
    const auto found = values.find(attribute);
    *value = found == values.end() ? 0 : found->second;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char *id, int bytes, int index)
{
    snprintf(id, size_t(bytes), "0000:%02x:00.0", index + 1);
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int from, int to)
{
    *can = from != to;
    return cudaSuccess;
}
CALL(cudaError_t cudaDeviceEnablePeerAccess(int, unsigned), return cudaSuccess;)
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDriverGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}
EXPORT cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}
CALL(cudaError_t cudaProfilerStart(), return cudaSuccess;)
CALL(cudaError_t cudaProfilerStop(), return cudaSuccess;)

// The driver's functions: those of libcuda beside this library, which exports stubs for what is not there.
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult *result)
{
    static void *const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    *function = driver ? dlsym(driver, symbol) : nullptr;
    if (!*function)
        note_missing(symbol);
    if (result)
        *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
EXPORT cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function,
                                           unsigned long long flags,
                                           cudaDriverEntryPointQueryResult *result)
{
    return cudaGetDriverEntryPointByVersion(symbol, function, 0, flags, result);
}

// ---- Kernels ------------------------------------------------------------------------------------

EXPORT void **__cudaRegisterFatBinary(void *)
{
    static void *handle;
    return &handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void **) {}
EXPORT void __cudaUnregisterFatBinary(void **) {}
CALL(char __cudaInitModule(void **), return 1;)
EXPORT void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
EXPORT void __cudaRegisterFunction(void **, const char *stub, char *, const char *name, int,
                                   uint3 *, uint3 *, dim3 *, dim3 *, int *)
{
    kernels()[stub] = name;
}

namespace
{
struct Configuration {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;
} // namespace

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                            cudaStream_t stream)
{
    configurations.push_back({grid, block, shared, stream});
    return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
    const Configuration last = configurations.back();
    configurations.pop_back();
    *grid = last.grid, *block = last.block, *shared = last.shared;
    *static_cast<cudaStream_t *>(stream) = last.stream;
    return cudaSuccess;
}
EXPORT cudaError_t __cudaGetKernel(void **kernel, const void *stub)
{
    *kernel = const_cast<void *>(stub);
    return cudaSuccess;
}
EXPORT cudaError_t __cudaLaunchKernel(void *kernel, dim3, dim3, void **, size_t,
                                      cudaStream_t stream)
{
    return launch(kernel, stream);
}
EXPORT cudaError_t cudaLaunchKernel(const void *kernel, dim3, dim3, void **, size_t,
                                    cudaStream_t stream)
{
    return launch(kernel, stream);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel,
                                       void **)
{
    return launch(kernel, config->stream);
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3, dim3, void **, size_t,
                                               cudaStream_t stream)
{
    return launch(kernel, stream);
}
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *)
{
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    // Code for 8.9 is that for 8.6, in torch's wheels: what chooses by it must find that.
    const int capability = settings().gpu.capability;
    attributes->ptxVersion = attributes->binaryVersion = capability == 89 ? 86 : capability;
    attributes->maxDynamicSharedSizeBytes = 48 << 10;
    return cudaSuccess;
}
CALL(cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int), return cudaSuccess;)
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *, int,
                                                                 size_t)
{
    *blocks = 2;
    return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *,
                                                                          int, size_t, unsigned)
{
    *blocks = 2;
    return cudaSuccess;
}
