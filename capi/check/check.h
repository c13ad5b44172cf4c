/* check.h: the two lines that entry points are made of, and the checks that many share. */
#ifndef HR_CHECK_H
#define HR_CHECK_H

#include "capi/headroom.h"
#include "kernels/core/dtype.h"
#include "kernels/core/runtime.h"

/* Whether a check passes. The tests define it, to take the checks away one at a time and see that
 * this is noticed. */
#if !defined(HR_CHECK_PASSES)
#define HR_CHECK_PASSES(condition) (condition)
#endif

/* Returns HR_INVALID_ARGUMENT with a message unless the condition holds. */
#define HR_REQUIRE(condition, ...)                            \
    do {                                                      \
        if (!HR_CHECK_PASSES(condition))                      \
            return hr_fail(HR_INVALID_ARGUMENT, __VA_ARGS__); \
    } while (0)

/* Returns the status of a call unless it is HR_OK. */
#define HR_TRY(call)                                  \
    do {                                              \
        const hr_status hr_try_status = (call);       \
        if (!HR_CHECK_PASSES(hr_try_status == HR_OK)) \
            return hr_try_status;                     \
    } while (0)

/* Ends an entry point with the status of `launch`, made with exec's device current. Without a CUDA
 * part it is not reached, because hr_check_exec has refused. */
#if HR_WITH_CUDA
#define HR_RETURN_CUDA(launch, exec)                         \
    do {                                                     \
        int32_t hr_previous = 0;                             \
        HR_TRY(hr_cuda_enter((exec)->device, &hr_previous)); \
        const hr_status hr_launch_status = (launch);         \
        hr_cuda_leave(hr_previous);                          \
        return hr_launch_status;                             \
    } while (0)
#else
#define HR_RETURN_CUDA(launch, exec) return HR_INTERNAL
#endif

/* Bytes of an element; 0 for what is not an hr_dtype. */
size_t hr_dtype_bytes(hr_dtype dtype);

/* "f32" and the like, for any value. */
const char *hr_dtype_name(hr_dtype dtype);

/* Copies the config of a caller, whose header may be older, over `own`, which holds the defaults of
 * the macro `init`. `path` is what the caller writes before a member, such as "config->", and
 * `least` is the smallest size. A struct grows at its end, and never into padding, so that its size
 * tells which members there are. */
hr_status hr_copy_config(const char *function, const char *path, void *own, size_t own_size,
                         const void *config, size_t least, const char *init);

/* Each list has a readable description of `count` tensors, aligned, of the allowed dtypes, with
 * `numel` elements each (NULL: any number that is not negative). */
hr_status hr_check_list(const char *function, const char *name, const hr_tensor_list *list,
                        int64_t count, const int64_t *numel, unsigned allowed_dtypes);

/* A scalar in device memory: NULL is allowed, a misaligned address is not. */
hr_status hr_check_scalar(const char *function, const char *name, const void *scalar,
                          hr_dtype dtype);

hr_status hr_check_exec(const char *function, const hr_exec *exec);

#endif
