/* check.c: checks of lists, scalars, configs and execs, and the table of types, hr_dtype_size(). */
#include "capi/check/check.h"

#include <inttypes.h>
#include <string.h>

static const struct {
    const char *name;
    size_t bytes;
} dtypes[] = {{"f32", 4}, {"bf16", 2}, {"f16", 2}, {"u8", 1}, {"i8", 1}, {"i16", 2}, {"f64", 8}};

#define DTYPES (sizeof dtypes / sizeof dtypes[0])

const char *hr_dtype_name(hr_dtype dtype)
{
    return (unsigned)dtype < DTYPES ? dtypes[dtype].name : "not an hr_dtype";
}

size_t hr_dtype_size(hr_dtype dtype)
{
    return (unsigned)dtype < DTYPES ? dtypes[dtype].bytes : 0;
}

static const char *set_name(unsigned allowed_dtypes)
{
    return allowed_dtypes == HR_FLOATS        ? "f32, bf16 or f16"
           : allowed_dtypes == HR_BIT(HR_F32) ? "f32"
           : allowed_dtypes == HR_BIT(HR_U8)  ? "u8"
           : allowed_dtypes == HR_SCALARS     ? "f32 or f64"
                                              : "another type";
}

hr_status hr_copy_config(const char *function, const char *path, void *own, size_t own_size,
                         const void *config, size_t least, const char *init)
{
    size_t size = 0;
    memcpy(&size, config, sizeof size);
    HR_REQUIRE(size >= least && size <= own_size && size % 4 == 0,
               "%s: %ssize is %zu, wanted %zu, or %zu or more of an older header; start from %s",
               function, path, size, own_size, least, init);
    memcpy(own, config, size);
    memcpy(own, &own_size, sizeof own_size);
    return HR_OK;
}

hr_status hr_check_flag(const char *function, const char *name, int32_t flag)
{
    HR_REQUIRE(flag == 0 || flag == 1, "%s: config->%s is %d, wanted 0 or 1", function, name, flag);
    return HR_OK;
}

hr_status hr_check_list(const char *function, const char *name, const hr_tensor_list *list,
                        int64_t count, const int64_t *numel, unsigned allowed_dtypes)
{
    HR_REQUIRE(list, "%s: %s is NULL", function, name);
    HR_REQUIRE(list->count >= 0, "%s: %s->count is %" PRId64 ", wanted 0 or more", function, name,
               list->count);
    HR_REQUIRE(list->count == count, "%s: %s->count is %" PRId64 ", wanted %" PRId64, function,
               name, list->count, count);
    if (count == 0)
        return HR_OK;
    HR_REQUIRE(list->data && list->numel && list->dtype, "%s: %s->%s is NULL", function, name,
               !list->data    ? "data"
               : !list->numel ? "numel"
                              : "dtype");
    int64_t total = 0;
    for (int64_t k = 0; k < count; k++) {
        const hr_dtype dtype = list->dtype[k];
        const int64_t n = list->numel[k];
        HR_REQUIRE((unsigned)dtype < DTYPES && (allowed_dtypes & HR_BIT(dtype)),
                   "%s: %s[%" PRId64 "] has dtype %s (%d), wanted %s", function, name, k,
                   hr_dtype_name(dtype), (int)dtype, set_name(allowed_dtypes));
        HR_REQUIRE(n >= 0, "%s: %s[%" PRId64 "] has numel %" PRId64 ", wanted 0 or more", function,
                   name, k, n);
        HR_REQUIRE(!numel || n == numel[k],
                   "%s: %s[%" PRId64 "] has numel %" PRId64 ", wanted %" PRId64, function, name, k,
                   n, numel ? numel[k] : n);
        HR_REQUIRE(n == 0 || list->data[k], "%s: %s[%" PRId64 "] is NULL", function, name, k);
        HR_REQUIRE((uintptr_t)list->data[k] % dtypes[dtype].bytes == 0,
                   "%s: %s[%" PRId64 "] is at %p, which is not a multiple of %zu bytes", function,
                   name, k, list->data[k], dtypes[dtype].bytes);
        HR_REQUIRE(n <= INT64_MAX / 16 - total, "%s: %s has more than 2^59 elements", function,
                   name);
        total += n;
    }
    return HR_OK;
}

hr_status hr_check_scalar(const char *function, const char *name, const void *scalar,
                          hr_dtype dtype)
{
    HR_REQUIRE(dtype == HR_F32 || dtype == HR_F64, "%s: %s has dtype %s (%d), wanted f32 or f64",
               function, name, hr_dtype_name(dtype), (int)dtype);
    HR_REQUIRE((uintptr_t)scalar % dtypes[dtype].bytes == 0,
               "%s: %s is at %p, which is not a multiple of %zu bytes", function, name, scalar,
               dtypes[dtype].bytes);
    return HR_OK;
}

hr_status hr_check_exec(const char *function, const hr_exec *exec)
{
    HR_REQUIRE(exec, "%s: exec is NULL", function);
    HR_REQUIRE(exec->device >= HR_CPU, "%s: exec->device is %d, wanted HR_CPU (%d) or an ordinal",
               function, exec->device, HR_CPU);
#if !HR_WITH_CUDA
    if (!HR_CHECK_PASSES(exec->device == HR_CPU))
        return hr_fail(HR_UNSUPPORTED,
                       "%s: exec->device is %d, but this build has no CUDA part: build it with "
                       "HEADROOM_CUDA=1, which says what that lacks",
                       function, exec->device);
#endif
    return HR_OK;
}
