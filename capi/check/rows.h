/* rows.h: checks of matrices of rows, and of the dtypes that a config names. */
#ifndef HR_CHECK_ROWS_H
#define HR_CHECK_ROWS_H

#include "capi/check/check.h"

hr_status hr_check_sizes(const char *function, int64_t rows, int64_t cols);

/* `dtype` is f32, bf16 or f16. */
hr_status hr_check_float(const char *function, const char *name, hr_dtype dtype);

/* Every element of [rows, cols] has an address. NULL is allowed. */
hr_status hr_check_rows(const char *function, const char *name, const hr_rows *matrix, int64_t rows,
                        int64_t cols, hr_dtype dtype);

/* A matrix that may be absent, by value. */
static inline hr_rows hr_rows_or_none(const hr_rows *rows)
{
    return rows ? *rows : (hr_rows){NULL, 0};
}

/* An aligned address of a vector. NULL is allowed. */
hr_status hr_check_vector(const char *function, const char *name, const void *vector,
                          hr_dtype dtype);

/* An aligned address of an f32 vector, which is NULL only if there are no rows. */
hr_status hr_check_given(const char *function, const char *name, const void *vector, int64_t rows);

/* The gradients of the losses of rows: that of row i is dloss[i * stride]. */
hr_status hr_check_dloss(const char *function, const float *dloss, int64_t stride, int64_t rows);

/* The types of logits and of their gradients: the same, or a narrower one for those of f32. */
hr_status hr_check_logit_dtypes(const char *function, hr_dtype dtype, hr_dtype grad_dtype);

/* Logits [rows, classes], which are given. */
hr_status hr_check_logits(const char *function, const char *name, const hr_rows *logits,
                          int64_t rows, int64_t classes, hr_dtype dtype);

/* The gradient of the logits `of`, checked before. It may lie over them: the rows of both then begin
 * at the same addresses. */
hr_status hr_check_logit_grad(const char *function, const hr_rows *grad, hr_dtype grad_dtype,
                              const char *of_name, const hr_rows *of, hr_dtype dtype, int64_t rows,
                              int64_t classes);

#endif
