/* weights_checks.c: checks hr_weights. */
#include "capi/check/weights_checks.h"

#include <inttypes.h>

#include "kernels/weights/weights.h"

static hr_status check_residuals(const char *function, const hr_weights *w,
                                 const hr_tensor_list *params)
{
    const hr_weights_mode_info *const info = hr_get_weights_mode_info(w->mode);
    HR_REQUIRE(info->has_residuals == (w->residuals != NULL),
               "%s: weights->residuals is %s, but %s %s", function, w->residuals ? "given" : "NULL",
               info->name, w->residuals ? "has none" : "needs them");
    if (!w->residuals)
        return HR_OK;
    const unsigned any =
        HR_BIT(HR_BF16) | HR_BIT(HR_F16) | HR_BIT(HR_F32) | HR_BIT(HR_I16) | HR_BIT(HR_I8);
    HR_TRY(hr_check_list(function, "residuals", w->residuals, params->count, params->numel, any));
    for (int64_t k = 0; k < params->count; k++) {
        const hr_dtype wanted = weights_residual_dtype(w->mode, params->dtype[k]);
        HR_REQUIRE(w->residuals->dtype[k] == wanted,
                   "%s: residuals[%" PRId64 "] has dtype %s, but %s needs %s", function, k,
                   hr_dtype_name(w->residuals->dtype[k]), info->name, hr_dtype_name(wanted));
    }
    return HR_OK;
}

static hr_status check_place(const char *function, hr_place place, int64_t numel, int64_t k)
{
    HR_REQUIRE(place.offset >= 0 && place.run >= 1 && place.stride >= 0,
               "%s: places[%" PRId64 "] is {%" PRId64 ", %" PRId64 ", %" PRId64
               "}, wanted an offset and a stride of 0 or more and a run of 1 or more",
               function, k, place.offset, place.run, place.stride);
    const int64_t runs = numel / place.run, bound = INT64_MAX / 4;
    HR_REQUIRE(place.offset < bound && place.run < bound &&
                   (runs == 0 || place.stride < bound / runs),
               "%s: places[%" PRId64 "] reaches past 2^61 elements", function, k);
    return HR_OK;
}

hr_status weights_copy(const char *function, hr_weights *own, const hr_weights **weights)
{
    if (!*weights)
        return HR_OK;
    HR_TRY(hr_copy_config(function, "weights->", own, sizeof *own, *weights,
                          offsetof(hr_weights, residuals), "HR_WEIGHTS_INIT"));
    *weights = own;
    return HR_OK;
}

hr_status weights_check(const char *function, const hr_weights *w, const hr_tensor_list *params)
{
    if (!w)
        return HR_OK;
    const hr_weights_mode_info *const info = hr_get_weights_mode_info(w->mode);
    HR_REQUIRE(info, "%s: weights->mode is %d, not an hr_weights_mode", function, (int)w->mode);
    for (int64_t k = 0; k < params->count; k++)
        HR_REQUIRE(info->params & HR_BIT(params->dtype[k]),
                   "%s: params[%" PRId64 "] has dtype %s, which %s does not take", function, k,
                   hr_dtype_name(params->dtype[k]), info->name);
    HR_TRY(check_residuals(function, w, params));
    HR_REQUIRE(info->is_random == (w->seeds != NULL), "%s: weights->seeds is %s, but %s %s",
               function, w->seeds ? "given" : "NULL", info->name,
               w->seeds ? "has no use for them" : "needs them");
    for (int64_t k = 0; w->places && k < params->count; k++)
        HR_TRY(check_place(function, w->places[k], params->numel[k], k));
    HR_REQUIRE((uintptr_t)w->stalled % sizeof *w->stalled == 0,
               "%s: weights->stalled is at %p, which is not a multiple of %zu bytes", function,
               (void *)w->stalled, sizeof *w->stalled);
    return HR_OK;
}
