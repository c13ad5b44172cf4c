/* momentum.c: hr_momentum: checks, then the kernel of the device. */
#include "kernels/optim/momentum.h"

#include <inttypes.h>

#include "capi/check/quant.h"
#include "capi/check/step.h"
#include "capi/check/weights_checks.h"

static hr_status check_config(const hr_momentum_config *c, const momentum_args *a)
{
    HR_REQUIRE(c->rule == HR_SGD || c->rule == HR_LION,
               "hr_momentum: rule is %d, wanted HR_SGD or HR_LION", (int)c->rule);
    HR_TRY(step_check_config("hr_momentum", "config->", &c->step, a->steps != NULL));
    HR_REQUIRE(isfinite(c->weight_decay) && c->weight_decay >= 0,
               "hr_momentum: weight_decay is %g, wanted a finite number >= 0", c->weight_decay);
    if (c->rule == HR_SGD) {
        HR_REQUIRE(isfinite(c->momentum) && c->momentum >= 0,
                   "hr_momentum: momentum is %g, wanted a finite number >= 0", c->momentum);
        HR_REQUIRE(isfinite(c->dampening), "hr_momentum: dampening is %g, wanted a finite number",
                   c->dampening);
        HR_REQUIRE(!c->nesterov || (c->momentum > 0 && c->dampening == 0),
                   "hr_momentum: nesterov is 1, momentum %g and dampening %g, wanted momentum > 0 "
                   "and dampening 0",
                   c->momentum, c->dampening);
    } else {
        HR_REQUIRE(c->beta1 >= 0 && c->beta1 < 1, "hr_momentum: beta1 is %g, wanted [0, 1)",
                   c->beta1);
        HR_REQUIRE(c->beta2 >= 0 && c->beta2 < 1, "hr_momentum: beta2 is %g, wanted [0, 1)",
                   c->beta2);
    }
    const int32_t size = c->block_size;
    HR_REQUIRE(!a->absmaxs || size == 64 || size == 128 || size == 256 || size == 512,
               "hr_momentum: block_size is %" PRId32 ", wanted 64, 128, 256 or 512", size);
    return HR_OK;
}

static hr_status check_lists(const momentum_args *a)
{
    HR_REQUIRE(a->params, "hr_momentum: params is NULL");
    const int64_t count = a->params->count;
    HR_TRY(hr_check_list("hr_momentum", "params", a->params, count, NULL, HR_FLOATS));
    const int64_t *const numel = a->params->numel;
    if (a->config->rule == HR_SGD && a->config->momentum == 0) {
        HR_REQUIRE(!a->moments && !a->absmaxs,
                   "hr_momentum: %s is given, but SGD without momentum has none",
                   a->moments ? "moments" : "absmaxs");
    } else {
        const unsigned types = a->absmaxs ? HR_BIT(HR_U8) : HR_FLOATS;
        HR_TRY(hr_check_list("hr_momentum", "moments", a->moments, count, numel, types));
    }
    if (a->absmaxs)
        HR_TRY(quant_check_absmaxs("hr_momentum", "absmaxs", a->absmaxs, a->params,
                                   a->config->block_size));
    HR_TRY(step_check_steps("hr_momentum", a->steps, count));
    HR_TRY(weights_check("hr_momentum", a->config->step.weights, a->params));
    HR_TRY(hr_check_list("hr_momentum", "grads", a->grads, count, numel, HR_FLOATS));
    return HR_OK;
}

hr_status hr_momentum(const hr_tensor_list *params, const hr_tensor_list *moments,
                      const hr_tensor_list *absmaxs, const hr_tensor_list *steps,
                      const hr_tensor_list *grads, const hr_momentum_config *config,
                      const hr_exec *exec)
{
    hr_momentum_config own = HR_SGD_CONFIG_INIT;
    hr_weights own_weights = HR_WEIGHTS_INIT;
    const momentum_args args = {params, moments, absmaxs, steps, grads, &own};
    HR_REQUIRE(config, "hr_momentum: config is NULL");
    HR_TRY(hr_copy_config("hr_momentum", "config->", &own, sizeof own, config,
                          offsetof(hr_momentum_config, nesterov), "an INIT macro"));
    HR_TRY(check_config(&own, &args));
    HR_TRY(weights_copy("hr_momentum", &own_weights, &own.step.weights));
    HR_TRY(hr_check_exec("hr_momentum", exec));
    HR_TRY(check_lists(&args));
    if (exec->device == HR_CPU) {
        HR_TRY(step_check_values("hr_momentum", &own.step, steps));
        return momentum_cpu(&args);
    }
    HR_RETURN_CUDA(momentum_cuda(&args, exec), exec);
}
