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

/* An aligned address of a vector. NULL is allowed. */
hr_status hr_check_vector(const char *function, const char *name, const void *vector,
                          hr_dtype dtype);

#endif
