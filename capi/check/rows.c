/* rows.c: checks matrices of rows, their vectors, and logits with their gradients. */
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

hr_status hr_check_given(const char *function, const char *name, const void *vector, int64_t rows)
{
    HR_REQUIRE(vector || rows == 0, "%s: %s is NULL", function, name);
    return hr_check_vector(function, name, vector, HR_F32);
}

hr_status hr_check_dloss(const char *function, const float *dloss, int64_t stride, int64_t rows)
{
    HR_TRY(hr_check_given(function, "dloss", dloss, rows));
    HR_REQUIRE(stride >= 0 && (rows == 0 || stride <= (INT64_C(1) << 59) / rows),
               "%s: dloss_stride is %" PRId64 ", wanted 0 or more, and at most 2^59 elements from "
               "the first row to the last",
               function, stride);
    return HR_OK;
}

hr_status hr_check_logit_dtypes(const char *function, hr_dtype dtype, hr_dtype grad_dtype)
{
    HR_TRY(hr_check_float(function, "config->dtype", dtype));
    HR_TRY(hr_check_float(function, "config->grad_dtype", grad_dtype));
    HR_REQUIRE(grad_dtype == dtype || dtype == HR_F32,
               "%s: config->grad_dtype is %s, wanted %s, the type of logits", function,
               hr_dtype_name(grad_dtype), hr_dtype_name(dtype));
    return HR_OK;
}

hr_status hr_check_logits(const char *function, const char *name, const hr_rows *logits,
                          int64_t rows, int64_t classes, hr_dtype dtype)
{
    HR_REQUIRE(logits, "%s: %s is NULL", function, name);
    return hr_check_rows(function, name, logits, rows, classes, dtype);
}

hr_status hr_check_logit_grad(const char *function, const hr_rows *grad, hr_dtype grad_dtype,
                              const char *of_name, const hr_rows *of, hr_dtype dtype, int64_t rows,
                              int64_t classes)
{
    HR_TRY(hr_check_logits(function, "grad", grad, rows, classes, grad_dtype));
    const int64_t ratio = grad_dtype == dtype ? 1 : 2; /* of the sizes of elements */
    HR_REQUIRE(grad->data != of->data || rows <= 1 || grad->stride == of->stride * ratio,
               "%s: grad is written over %s, but grad->stride is %" PRId64 ", wanted %" PRId64,
               function, of_name, grad->stride, of->stride * ratio);
    return HR_OK;
}
