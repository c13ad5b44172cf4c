/* weights.c: hr_join_weights, hr_split_weights and the table of modes: checks, then the kernel of
 * the device. */
#include "kernels/weights/weights.h"

#include "capi/check/check.h"
#include "capi/check/weights_checks.h"

const hr_weights_mode_info *hr_get_weights_mode_info(hr_weights_mode mode)
{
#define INFO(context, mode_, params_, residual_, is_random_, nearest_) \
    [HR_WEIGHTS_##mode_] = {"HR_WEIGHTS_" #mode_,                      \
                            params_,                                   \
                            (residual_) != WEIGHTS_NO_RESIDUAL,        \
                            (residual_) == WEIGHTS_LIKE_PARAM,         \
                            residual_,                                 \
                            is_random_,                                \
                            HR_WEIGHTS_##nearest_},
    static const hr_weights_mode_info infos[] = {WEIGHTS_MODES(INFO, )};
#undef INFO
    return (unsigned)mode < sizeof infos / sizeof infos[0] ? &infos[mode] : NULL;
}

/* Checks a call, and replaces its weights by a copy without seeds, whose mode rounds to nearest. */
static hr_status prepare(const char *function, weights_args *a, hr_weights *weights,
                         const hr_exec *exec)
{
    HR_REQUIRE(a->params, "%s: params is NULL", function);
    HR_REQUIRE(a->weights, "%s: weights is NULL", function);
    HR_TRY(weights_copy(function, weights, &a->weights));
    HR_TRY(hr_check_exec(function, exec));
    const int64_t count = a->params->count;
    HR_TRY(hr_check_list(function, "params", a->params, count, NULL, HR_FLOATS));
    HR_TRY(hr_check_list(function, "values", a->values, count, a->params->numel, HR_BIT(HR_F32)));
    const hr_weights_mode_info *const info = hr_get_weights_mode_info(weights->mode);
    weights->mode = info ? info->nearest : weights->mode;
    weights->seeds = NULL;
    weights->places = NULL;
    weights->stalled = NULL;
    HR_TRY(weights_check(function, weights, a->params));
    return HR_OK;
}

static hr_status convert(const char *function, weights_args *args, const hr_exec *exec)
{
    hr_weights weights = HR_WEIGHTS_INIT;
    HR_TRY(prepare(function, args, &weights, exec));
    if (exec->device == HR_CPU)
        return weights_cpu(args);
    HR_RETURN_CUDA(weights_cuda(args, exec), exec);
}

hr_status hr_join_weights(const hr_tensor_list *values, const hr_tensor_list *params,
                          const hr_weights *weights, const hr_exec *exec)
{
    weights_args args = {values, params, weights, 0};
    return convert("hr_join_weights", &args, exec);
}

hr_status hr_split_weights(const hr_tensor_list *params, const hr_tensor_list *values,
                           const hr_weights *weights, const hr_exec *exec)
{
    weights_args args = {values, params, weights, 1};
    return convert("hr_split_weights", &args, exec);
}
