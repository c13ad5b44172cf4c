/* libnvidia-ml: as many devices as the runtime has, and nothing that they do. */
#include "export.h"

#include <stddef.h>

enum { NOT_SUPPORTED = 3 };

int cudaGetDeviceCount(int *count);
int cudaDriverGetVersion(int *version);

CALL(int nvmlInit_v2(void), return 0;)
CALL(int nvmlShutdown(void), return 0;)
CALL(int nvmlSystemGetCudaDriverVersion_v2(int *version), return cudaDriverGetVersion(version);)
CALL(int nvmlDeviceGetCount_v2(unsigned *count), return cudaGetDeviceCount((int *)count);)
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    *device = (void *)((size_t)index + 1);
    return 0;
}
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device)
{
    *device = (void *)1;
    return 0;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes)
{
    *count = 0;
    return 0;
}
EXPORT int nvmlDeviceGetGpuFabricInfoV(void *device, void *info)
{
    return NOT_SUPPORTED;
}
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, void *type)
{
    return NOT_SUPPORTED;
}
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info)
{
    return NOT_SUPPORTED;
}
EXPORT const char *nvmlErrorString(int error)
{
    return error ? "not supported by the software device" : "no error";
}
