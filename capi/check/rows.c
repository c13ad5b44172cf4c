#include "capi/check/rows.h"

#include <inttypes.h>

hr_status hr_check_sizes(const char *function, int64_t rows, int64_t cols)
{
    HR_REQUIRE(rows >= 0, "%s: rows is %" PRId64 ", wanted 0 or more", function, rows);
    HR_REQUIRE(cols >= 1, "%s: cols is %" PRId64 ", wanted 1 or more", function, cols);
    HR_REQUIRE(rows == 0 || cols <= (INT64_C(1) << 59) / rows,
               "%s: rows is %" PRId64 " and cols %" PRId64 ", wanted at most 2^59 elements",
               function, rows, cols);
    return HR_OK;
}

hr_status hr_check_float(const char *function, const char *name, hr_dtype dtype)
{
    HR_REQUIRE((unsigned)dtype < 32 && (HR_FLOATS & HR_BIT(dtype)),
               "%s: %s is %s (%d), wanted f32, bf16 or f16", function, name, hr_dtype_name(dtype),
               (int)dtype);
    return HR_OK;
}

hr_status hr_check_rows(const char *function, const char *name, const hr_rows *matrix, int64_t rows,
                        int64_t cols, hr_dtype dtype)
{
    if (!matrix)
        return HR_OK;
    HR_REQUIRE(rows <= 1 || matrix->stride >= cols,
               "%s: %s->stride is %" PRId64 ", wanted cols (%" PRId64 ") or more", function, name,
               matrix->stride, cols);
    HR_REQUIRE(rows <= 1 || matrix->stride <= (INT64_C(1) << 59) / rows,
               "%s: %s->stride is %" PRId64 ", wanted at most 2^59 elements from the first row to "
               "the last",
               function, name, matrix->stride);
    HR_REQUIRE(rows == 0 || matrix->data, "%s: %s->data is NULL", function, name);
    const size_t bytes = hr_dtype_size(dtype);
    HR_REQUIRE((uintptr_t)matrix->data % bytes == 0,
               "%s: %s->data is at %p, which is not a multiple of %zu bytes", function, name,
               matrix->data, bytes);
    return HR_OK;
}

hr_status hr_check_vector(const char *function, const char *name, const void *vector,
                          hr_dtype dtype)
{
    const size_t bytes = hr_dtype_size(dtype);
    HR_REQUIRE((uintptr_t)vector % bytes == 0,
               "%s: %s is at %p, which is not a multiple of %zu bytes", function, name, vector,
               bytes);
    return HR_OK;
}
