/* runtime.h: the state that the library keeps between calls: the last error of each thread, the
 * lent threads, and the instruction set in use. */
#ifndef HR_RUNTIME_H
#define HR_RUNTIME_H

#include "capi/headroom.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Records the message for hr_last_error() and returns `status`, for the caller to return. */
hr_status hr_fail(hr_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Calls `range` for parts of [begin, end) on the threads lent by hr_set_parallel_for(), or once on
 * the calling thread, where there are none and within such a part. */
void hr_parallel_for(int64_t begin, int64_t end, int64_t grain, hr_range_fn range, void *context);

/* The state behind hr_last_error(), hr_set_parallel_for() and hr_set_cpu_level(). */
const char *runtime_last_error(void);
void runtime_lend_threads(hr_parallel_for_fn parallel_for); /* NULL: none */
hr_cpu_level runtime_highest_cpu_level(void);               /* that this CPU has */
hr_cpu_level runtime_cpu_level(void);                       /* in use */
void runtime_set_cpu_level(hr_cpu_level level);             /* at most the highest */
const char *runtime_cpu_level_name(hr_cpu_level level);

/* hr_cuda_enter() makes `device` current for the calling thread and writes the device that was
 * current to *previous; hr_cuda_leave() makes that one current again. */
hr_status hr_cuda_enter(int32_t device, int32_t *previous);
void hr_cuda_leave(int32_t previous);

/* Writes the compute capability of a device, times 10: 90 for 9.0. */
hr_status hr_cuda_capability(int32_t device, int32_t *capability);

#ifdef __cplusplus
}
#endif

#endif
