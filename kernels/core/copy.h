/* copy.h: copies rows from one matrix of a device to another, and adds a vector to them. */
#ifndef HR_COPY_H
#define HR_COPY_H

#include "capi/headroom.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Copies `rows` rows of `bytes` bytes each; `to_pitch` and `from_pitch` bytes lead from a row to
 * the next. The matrices must not overlap. */
hr_status copy_rows_cpu(void *to, int64_t to_pitch, const void *from, int64_t from_pitch,
                        int64_t bytes, int64_t rows);
hr_status copy_rows_cuda(void *to, int64_t to_pitch, const void *from, int64_t from_pitch,
                         int64_t bytes, int64_t rows, const hr_exec *exec);

/* to = from + vector, rounded to their type; `to` may be `from`. Strides count elements. */
hr_status add_to_rows_host(const hr_rows *to, const hr_rows *from, const void *vector, int64_t rows,
                           int64_t cols, hr_dtype dtype);

#ifdef __cplusplus
}
#endif

#endif
