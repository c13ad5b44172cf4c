/* runtime.c: the public functions that start no work: version, status, sizes, threads and
 * levels. */
#include <stdio.h>

#include "capi/check/check.h"

#if !defined(HR_BUILD_COMPILER)
#define HR_BUILD_COMPILER "unknown"
#define HR_BUILD_CUDA     "none"
#define HR_BUILD_ARCHS    ""
#define HR_BUILD_CUBLAS   "none"
#endif

int32_t hr_version(void)
{
    return HR_VERSION;
}

const char *hr_build_info(void)
{
    static _Thread_local char info[512];
    snprintf(info, sizeof info,
             "version=%d.%d.%d; compiler=%s; cuda=%s; archs=%s; cublas=%s; cpu=%s",
             HR_VERSION_MAJOR, HR_VERSION_MINOR, HR_VERSION_PATCH, HR_BUILD_COMPILER, HR_BUILD_CUDA,
             HR_BUILD_ARCHS, HR_BUILD_CUBLAS, runtime_cpu_level_name(runtime_cpu_level()));
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

int64_t hr_block_count(int64_t numel, int64_t block_size)
{
    return numel <= 0 || block_size <= 0 ? 0 : numel / block_size + (numel % block_size != 0);
}

const char *hr_last_error(void)
{
    return runtime_last_error();
}

hr_status hr_set_parallel_for(hr_parallel_for_fn parallel_for)
{
    runtime_lend_threads(parallel_for);
    return HR_OK;
}

hr_cpu_level hr_get_cpu_level(void)
{
    return runtime_cpu_level();
}

hr_status hr_set_cpu_level(hr_cpu_level level)
{
    const hr_cpu_level highest = runtime_highest_cpu_level();
    HR_REQUIRE((int)level >= HR_CPU_BASELINE && (int)level <= HR_CPU_AVX512_VBMI,
               "hr_set_cpu_level: level is %d, wanted 0 to 3", (int)level);
    if (level > highest)
        return hr_fail(HR_UNSUPPORTED, "hr_set_cpu_level: level %d, but this CPU goes up to %d",
                       (int)level, (int)highest);
    runtime_set_cpu_level(level);
    return HR_OK;
}
