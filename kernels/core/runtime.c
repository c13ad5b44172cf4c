/* runtime.c: the last error of each thread, the lent threads and the instruction set in use. */
#include "kernels/core/runtime.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif

static _Thread_local char last_error[512];

hr_status hr_fail(hr_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return status;
}

const char *runtime_last_error(void)
{
    return last_error;
}

static _Atomic(hr_parallel_for_fn) lent_threads;

void runtime_lend_threads(hr_parallel_for_fn parallel_for)
{
    atomic_store(&lent_threads, parallel_for);
}

typedef struct lent_range {
    hr_range_fn range;
    void *context;
} lent_range;

static _Thread_local int in_range; /* whether this thread runs a part that the host gave it */

static void run_lent(void *context, int64_t begin, int64_t end)
{
    const lent_range *const lent = (const lent_range *)context;
    in_range = 1;
    lent->range(lent->context, begin, end);
    in_range = 0;
}

void hr_parallel_for(int64_t begin, int64_t end, int64_t grain, hr_range_fn range, void *context)
{
    const hr_parallel_for_fn parallel_for = atomic_load(&lent_threads);
    lent_range lent = {range, context};
    if (begin >= end)
        return;
    if (parallel_for && !in_range && end - begin > grain)
        parallel_for(begin, end, grain, run_lent, &lent);
    else
        range(context, begin, end);
}

hr_cpu_level runtime_highest_cpu_level(void)
{
#if defined(__x86_64__) && defined(__GNUC__)
    unsigned a, b, c, d; /* of a leaf that names F16C, which not every compiler's builtin does */
    __builtin_cpu_init();
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                     __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                     __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    const int avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const int vbmi = __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
    return !avx2     ? HR_CPU_BASELINE
           : !avx512 ? HR_CPU_AVX2
           : !vbmi   ? HR_CPU_AVX512
                     : HR_CPU_AVX512_VBMI;
#else
    return HR_CPU_BASELINE;
#endif
}

const char *runtime_cpu_level_name(hr_cpu_level level)
{
    static const char *const names[] = {"baseline", "avx2", "avx512", "avx512vbmi"};
    return names[level];
}

static _Atomic int cpu_level = -1; /* not chosen before the first use */

hr_cpu_level runtime_cpu_level(void)
{
    const int known = atomic_load(&cpu_level);
    if (known >= 0)
        return (hr_cpu_level)known;
    int level = (int)runtime_highest_cpu_level();
    const char *wanted = getenv("HEADROOM_CPU_LEVEL");
    for (int i = 0; wanted && i < level; i++)
        if (strcmp(wanted, runtime_cpu_level_name((hr_cpu_level)i)) == 0)
            level = i;
    atomic_store(&cpu_level, level);
    return (hr_cpu_level)level;
}

void runtime_set_cpu_level(hr_cpu_level level)
{
    atomic_store(&cpu_level, (int)level);
}
