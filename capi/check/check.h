/* check.h: the macros that entry points are made of, and the checks that several of them share. */
#ifndef HR_CHECK_H
#define HR_CHECK_H

#include "capi/headroom.h"
#include "kernels/core/dtype.h"
#include "kernels/core/runtime.h"

/* Whether a check passes. A test defines it to switch checks off one by one, and sees that other
 * tests then fail. */
#if !defined(HR_CHECK_PASSES)
#define HR_CHECK_PASSES(condition) (condition)
#endif

/* Returns HR_INVALID_ARGUMENT with a message unless the condition holds. */
#define HR_REQUIRE(condition, ...)                            \
    do {                                                      \
        if (!HR_CHECK_PASSES(condition))                      \
            return hr_fail(HR_INVALID_ARGUMENT, __VA_ARGS__); \
    } while (0)

/* Returns the status of the call from the function, unless it is HR_OK. */
#define HR_TRY(call)                                  \
    do {                                              \
        const hr_status hr_try_status = (call);       \
        if (!HR_CHECK_PASSES(hr_try_status == HR_OK)) \
            return hr_try_status;                     \
    } while (0)

/* Returns the status of a call that the checks before it left nothing to refuse of; what is left is a
 * failure of the device. */
#define HR_RUN(call)                     \
    do {                                 \
        const hr_status hr_run = (call); \
        if (hr_run != HR_OK)             \
            return hr_run;               \
    } while (0)

/* Ends an entry point: evaluates `launch` while exec's device is current and returns its status. In
 * a build without CUDA it is never reached, because hr_check_exec() refuses the device. */
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

/* Evaluates name_cpu(...), or name_cuda(..., exec) while exec's device is current, and returns its
 * status from the function unless it is HR_OK. */
#if HR_WITH_CUDA
#define HR_ON_DEVICE(exec, name, ...)                                            \
    do {                                                                         \
        if ((exec)->device == HR_CPU) {                                          \
            HR_RUN(name##_cpu(__VA_ARGS__));                                     \
        } else {                                                                 \
            int32_t hr_previous = 0;                                             \
            HR_RUN(hr_cuda_enter((exec)->device, &hr_previous));                 \
            const hr_status hr_launch_status = name##_cuda(__VA_ARGS__, (exec)); \
            hr_cuda_leave(hr_previous);                                          \
            HR_RUN(hr_launch_status);                                            \
        }                                                                        \
    } while (0)
#else
#define HR_ON_DEVICE(exec, name, ...)    \
    do {                                 \
        (void)(exec);                    \
        HR_RUN(name##_cpu(__VA_ARGS__)); \
    } while (0)
#endif

/* The name of a type, such as "f32"; also for a value that is not an hr_dtype. */
const char *hr_dtype_name(hr_dtype dtype);

/* Copies a caller's config, whose header may be older, over `own`, which holds the defaults of the
 * macro `init`. Refuses a size below `least` or above own_size. `path` comes before the name of a
 * member in messages, such as "config->". A struct grows at its end and never into padding, so that
 * its size tells which members it has. */
hr_status hr_copy_config(const char *function, const char *path, void *own, size_t own_size,
                         const void *config, size_t least, const char *init);

/* Checks that the member `name` of a config is 0 or 1. */
hr_status hr_check_flag(const char *function, const char *name, int32_t flag);

/* Checks that a list describes `count` tensors of the allowed types, at aligned addresses, with
 * `numel` elements each (NULL: any number that is not negative). */
hr_status hr_check_list(const char *function, const char *name, const hr_tensor_list *list,
                        int64_t count, const int64_t *numel, unsigned allowed_dtypes);

/* Checks the type and the alignment of a scalar in device memory, which may be NULL. */
hr_status hr_check_scalar(const char *function, const char *name, const void *scalar,
                          hr_dtype dtype);

/* Checks that exec names the CPU, or a CUDA device in a build with CUDA. */
hr_status hr_check_exec(const char *function, const hr_exec *exec);

#endif
