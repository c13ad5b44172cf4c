/*
 * weights_convert.h: between weights of any mode and binary32, for a list of them.
 */
#ifndef HR_WEIGHTS_CONVERT_H
#define HR_WEIGHTS_CONVERT_H

#include "weights.h"

/* The arguments of a call, checked. */
typedef struct weights_args {
    const hr_tensor_list *values; /* f32 */
    const hr_tensor_list *params;
    const hr_weights *weights;
    int split; /* values to params, else params to values */
} weights_args;

#ifdef __cplusplus
extern "C" {
#endif

hr_status weights_convert_cpu(const weights_args *args);
hr_status weights_convert_cuda(const weights_args *args, const hr_exec *exec);

#ifdef __cplusplus
}
#endif

#endif
