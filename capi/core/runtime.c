#include <stdio.h>

#include "capi/headroom.h"

#if !defined(HR_BUILD_COMPILER)
#define HR_BUILD_COMPILER "unknown"
#define HR_BUILD_CUDA     "none"
#define HR_BUILD_ARCHS    ""
#endif

int32_t hr_version(void)
{
    return HR_VERSION;
}

const char *hr_build_info(void)
{
    static const char *const levels[] = {"baseline", "avx2", "avx512", "avx512vbmi"};
    static _Thread_local char info[512];
    snprintf(info, sizeof info, "version=%d.%d.%d; compiler=%s; cuda=%s; archs=%s; cpu=%s",
             HR_VERSION_MAJOR, HR_VERSION_MINOR, HR_VERSION_PATCH, HR_BUILD_COMPILER, HR_BUILD_CUDA,
             HR_BUILD_ARCHS, levels[hr_get_cpu_level()]);
    return info;
}

const char *hr_status_string(hr_status status)
{
    switch (status) {
    case HR_OK:
        return "ok";
    case HR_INVALID_ARGUMENT:
        return "invalid argument";
    case HR_UNSUPPORTED:
        return "unsupported";
    case HR_CUDA_ERROR:
        return "CUDA error";
    case HR_NO_DEVICE:
        return "no such device";
    case HR_INTERNAL:
        return "internal error";
    }
    return "unknown status";
}
