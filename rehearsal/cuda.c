/* libcuda: contexts, modules and attributes, as torch, Triton and bitsandbytes ask for them. A launch
 * does nothing. Virtual memory is in memory.cpp, for this library too. */
#include "export.h"

#include <stddef.h>

int cudaGetDeviceCount(int *count);
int cudaGetDevice(int *device);
int cudaSetDevice(int device);
int cudaDeviceGetAttribute(int *value, int attribute, int device);
int cudaDriverGetVersion(int *version);
int rehearsal_on_device(const void *address, size_t bytes);
void rehearsal_launch(void *stream);

CALL(int cuInit(unsigned flags), return 0;)
CALL(int cuDriverGetVersion(int *version), return cudaDriverGetVersion(version);)
CALL(int cuDeviceGetCount(int *count), return cudaGetDeviceCount(count);)
EXPORT int cuDeviceGet(int *device, int index)
{
    *device = index;
    return 0;
}
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    return cudaDeviceGetAttribute(value, attribute, device);
}

/* A context is the number of its device, and 1. */
EXPORT int cuCtxGetCurrent(size_t *context)
{
    int device;
    cudaGetDevice(&device);
    *context = (size_t)device + 1;
    return 0;
}
CALL(int cuCtxGetDevice(int *device), return cudaGetDevice(device);)
CALL(int cuCtxSetCurrent(size_t context), return context ? cudaSetDevice((int)context - 1) : 0;)
EXPORT int cuDevicePrimaryCtxRetain(size_t *context, int device)
{
    *context = (size_t)device + 1;
    return 0;
}
CALL(int cuDevicePrimaryCtxRelease_v2(int device), return 0;)
EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active)
{
    *flags = 0;
    *is_active = device >= 0;
    return 0;
}

EXPORT int cuModuleLoadData(void **module, const void *image)
{
    *module = (void *)image;
    return 0;
}
EXPORT int cuModuleLoadDataEx(void **module, const void *image, unsigned count, void *options,
                              void *values)
{
    return cuModuleLoadData(module, image);
}
CALL(int cuModuleLoad(void **module, const char *file), return cuModuleLoadData(module, file);)
CALL(int cuModuleUnload(void *module), return 0;)
EXPORT int cuModuleGetFunction(void **function, void *module, const char *name)
{
    *function = (void *)name;
    return 0;
}
EXPORT int cuFuncGetAttribute(int *value, int attribute, void *function)
{
    *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0; /* threads of a block; registers */
    return 0;
}
CALL(int cuFuncSetAttribute(void *function, int attribute, int value), return 0;)
CALL(int cuFuncSetCacheConfig(void *function, int config), return 0;)
EXPORT int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                          unsigned by, unsigned bz, unsigned shared, void *stream,
                          void **parameters, void **extra)
{
    rehearsal_launch(stream);
    return 0;
}
typedef struct { /* CUlaunchConfig */
    unsigned sizes[7];
    void *stream;
} launch_config;
EXPORT int cuLaunchKernelEx(const launch_config *config, void *function, void **parameters,
                            void **extra)
{
    rehearsal_launch(config->stream);
    return 0;
}
EXPORT int cuOccupancyMaxActiveClusters(int *count, void *function, const void *config)
{
    *count = 1;
    return 0;
}
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, void *function, int size,
                                                       size_t shared)
{
    *count = 2;
    return 0;
}
EXPORT int cuPointerGetAttribute(void *data, int attribute, const void *address)
{
    if (attribute == 3) /* CU_POINTER_ATTRIBUTE_DEVICE_POINTER */
        *(const void **)data = address;
    else if (attribute == 2) /* CU_POINTER_ATTRIBUTE_MEMORY_TYPE */
        *(int *)data = rehearsal_on_device(address, 1) ? 2 : 1;
    else
        *(int *)data = 0;
    return 0;
}
CALL(int cuTensorMapEncodeTiled(void *map), return 0;)
EXPORT int cuGetErrorString(int error, const char **text)
{
    *text = error == 0   ? "no error"
            : error == 2 ? "out of memory"
                         : "not supported by the software device";
    return 0;
}
EXPORT int cuGetErrorName(int error, const char **text)
{
    *text = error == 0   ? "CUDA_SUCCESS"
            : error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY"
                         : "CUDA_ERROR_NOT_SUPPORTED";
    return 0;
}
