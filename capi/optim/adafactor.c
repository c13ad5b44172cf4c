/* adafactor.c: hr_adafactor and the size of its workspace: checks, then the kernel of the
 * device. */
#include "kernels/optim/adafactor_plan.h"

#include <inttypes.h>
#include <string.h>

#include "capi/check/step.h"
#include "capi/check/weights_checks.h"

/* Copies the config, with the defaults of the semantics that it names. */
static hr_status copy_config(hr_adafactor_config *own, const hr_adafactor_config *config)
{
    const hr_adafactor_config of_torch = HR_ADAFACTOR_TORCH_INIT;
    HR_TRY(hr_copy_config("hr_adafactor", "config->", own, sizeof *own, config,
                          offsetof(hr_adafactor_config, phases),
                          "HR_ADAFACTOR_HF_INIT or HR_ADAFACTOR_TORCH_INIT"));
    const size_t size = config->size;
    if (own->semantics == HR_ADAFACTOR_TORCH) {
        *own = of_torch;
        memcpy((char *)own + sizeof size, (const char *)config + sizeof size, size - sizeof size);
    }
    return HR_OK;
}

static hr_status check_config(const hr_adafactor_config *config, int has_steps)
{
    const int is_torch = config->semantics == HR_ADAFACTOR_TORCH;
    HR_REQUIRE(is_torch || config->semantics == HR_ADAFACTOR_HF,
               "hr_adafactor: semantics is %d, wanted HR_ADAFACTOR_HF or HR_ADAFACTOR_TORCH",
               (int)config->semantics);
    HR_TRY(step_check_config("hr_adafactor", "config->", &config->step, has_steps));
    HR_REQUIRE(!config->step.skip_nonfinite,
               "hr_adafactor: config->step.skip_nonfinite is %" PRId32
               ", wanted 0: a sum over a row has every element in it; measure the gradients first "
               "and pass found_inf",
               config->step.skip_nonfinite);
    HR_REQUIRE(isfinite(config->beta2_decay) && config->beta2_decay <= 0,
               "hr_adafactor: beta2_decay is %g, wanted a finite number <= 0", config->beta2_decay);
    HR_REQUIRE(isfinite(config->eps1) && (is_torch || config->eps1 >= 0),
               "hr_adafactor: eps1 is %g, wanted a finite number%s", config->eps1,
               is_torch ? "" : " >= 0");
    HR_REQUIRE(isfinite(config->eps2) && config->eps2 >= 0,
               "hr_adafactor: eps2 is %g, wanted a finite number >= 0", config->eps2);
    HR_REQUIRE(config->clip_threshold > 0, "hr_adafactor: clip_threshold is %g, wanted > 0",
               config->clip_threshold);
    HR_REQUIRE(isfinite(config->weight_decay) && config->weight_decay >= 0,
               "hr_adafactor: weight_decay is %g, wanted a finite number >= 0",
               config->weight_decay);
    HR_REQUIRE(config->beta1 >= 0 && config->beta1 < 1, "hr_adafactor: beta1 is %g, wanted [0, 1)",
               config->beta1);
    HR_REQUIRE(is_torch || config->relative_step || !config->warmup_init,
               "hr_adafactor: warmup_init needs relative_step");
    HR_REQUIRE(config->phases > 0 && config->phases <= HR_ADAFACTOR_ALL,
               "hr_adafactor: phases is %" PRId32 ", wanted a sum of hr_adafactor_phases",
               config->phases);
    return HR_OK;
}

/* Whether the product of three numbers >= 0 is at most 2^59; *product is then the product. */
static int multiply(int64_t a, int64_t b, int64_t c, int64_t *product)
{
    return !__builtin_mul_overflow(a, b, product) &&
           !__builtin_mul_overflow(*product, c, product) && *product <= INT64_MAX / 16;
}

static hr_status check_shapes(const char *function, const hr_adafactor_shape *shapes, int64_t count)
{
    HR_REQUIRE(shapes || count == 0, "%s: shapes is NULL", function);
    int64_t total = 0;
    for (int64_t k = 0; k < count; k++) {
        const hr_adafactor_shape s = shapes[k];
        int64_t numel = 0, lines = 0;
        HR_REQUIRE(s.batch >= 0 && s.rows >= 0 && s.cols >= 0 && s.rows <= INT64_MAX - s.cols &&
                       multiply(s.batch, s.rows, s.cols, &numel) &&
                       multiply(s.batch, s.rows + s.cols, 1, &lines),
                   "%s: shapes[%" PRId64 "] is [%" PRId64 ", %" PRId64 ", %" PRId64
                   "], wanted numbers >= 0 and at most 2^59 elements",
                   function, k, s.batch, s.rows, s.cols);
        HR_REQUIRE(s.factored == 1 || (s.factored == 0 && s.batch == 1 && s.rows == 1),
                   "%s: shapes[%" PRId64 "] has factored %" PRId64
                   ", wanted 1, or 0 for [1, 1, numel]",
                   function, k, s.factored);
        HR_REQUIRE((s.whole_rows == 0 || s.whole_rows >= s.rows) &&
                       (s.whole_cols == 0 || s.whole_cols >= s.cols) &&
                       (s.whole_numel == 0 || s.whole_numel >= numel),
                   "%s: shapes[%" PRId64 "] is larger than its whole", function, k);
        HR_REQUIRE(numel <= INT64_MAX / 16 - total && lines <= INT64_MAX / 16 - total - numel,
                   "%s: shapes has more than 2^59 elements", function);
        total += numel + lines;
    }
    return HR_OK;
}

static size_t workspace_bytes_of(const hr_adafactor_shape *shapes, int64_t count)
{
    const adafactor_extent cpu = adafactor_extent_of(shapes, count, adafactor_cut_cpu);
    const adafactor_extent cuda = adafactor_extent_of(shapes, count, adafactor_cut_cuda);
    const size_t a = adafactor_bytes(&cpu, count), b = adafactor_bytes(&cuda, count);
    return a > b ? a : b;
}

hr_status hr_adafactor_workspace(size_t *bytes, const hr_adafactor_shape *shapes, int64_t count)
{
    HR_REQUIRE(bytes, "hr_adafactor_workspace: bytes is NULL");
    HR_TRY(hr_check_scalar("hr_adafactor_workspace", "bytes", bytes, HR_F64));
    HR_REQUIRE(count >= 0, "hr_adafactor_workspace: count is %" PRId64 ", wanted 0 or more", count);
    HR_TRY(check_shapes("hr_adafactor_workspace", shapes, count));
    *bytes = workspace_bytes_of(shapes, count);
    return HR_OK;
}

typedef enum wanted { FACTORED_ROWS, FACTORED_COLS, NOT_FACTORED } wanted;

static int64_t wanted_numel(const hr_adafactor_shape *s, wanted part)
{
    return part == NOT_FACTORED    ? (s->factored ? 0 : s->cols)
           : !s->factored          ? 0
           : part == FACTORED_ROWS ? s->batch * s->rows
                                   : s->batch * s->cols;
}

/* Checks a list of variances, which may be NULL if no parameter needs them. */
static hr_status check_variances(const char *name, const hr_tensor_list *list,
                                 const adafactor_args *a, wanted part)
{
    const int64_t count = a->params->count;
    if (list)
        HR_TRY(hr_check_list("hr_adafactor", name, list, count, NULL, HR_BIT(HR_F32)));
    for (int64_t k = 0; k < count; k++) {
        const int64_t numel = wanted_numel(&a->shapes[k], part);
        HR_REQUIRE(list || numel == 0,
                   "hr_adafactor: %s is NULL, but params[%" PRId64 "] is %sfactored", name, k,
                   part == NOT_FACTORED ? "not " : "");
        HR_REQUIRE(!list || list->numel[k] == numel,
                   "hr_adafactor: %s[%" PRId64 "] has numel %" PRId64 ", wanted %" PRId64, name, k,
                   list->numel[k], numel);
    }
    return HR_OK;
}

static hr_status check_lists(const adafactor_args *a)
{
    const char *const function = "hr_adafactor";
    HR_REQUIRE(a->params, "hr_adafactor: params is NULL");
    const int64_t count = a->params->count;
    HR_TRY(hr_check_list(function, "params", a->params, count, NULL, HR_FLOATS));
    HR_TRY(weights_check(function, a->config->step.weights, a->params));
    HR_TRY(hr_check_list(function, "grads", a->grads, count, a->params->numel, HR_FLOATS));
    HR_TRY(check_shapes(function, a->shapes, count));
    for (int64_t k = 0; k < count; k++) {
        const hr_adafactor_shape s = a->shapes[k];
        HR_REQUIRE(s.batch * s.rows * s.cols == a->params->numel[k],
                   "hr_adafactor: shapes[%" PRId64 "] is [%" PRId64 ", %" PRId64 ", %" PRId64
                   "], but params has numel %" PRId64,
                   k, s.batch, s.rows, s.cols, a->params->numel[k]);
    }
    HR_TRY(check_variances("row_vars", a->row_vars, a, FACTORED_ROWS));
    HR_TRY(check_variances("col_vars", a->col_vars, a, FACTORED_COLS));
    HR_TRY(check_variances("variances", a->variances, a, NOT_FACTORED));
    if (a->exp_avgs)
        HR_TRY(hr_check_list(function, "exp_avgs", a->exp_avgs, count, a->params->numel,
                             HR_BIT(HR_F32)));
    if (a->rms_values)
        HR_TRY(hr_check_list(function, "rms_values", a->rms_values, count, NULL, HR_BIT(HR_F32)));
    for (int64_t k = 0; a->rms_values && k < count; k++)
        HR_REQUIRE(a->rms_values->numel[k] == 1,
                   "hr_adafactor: rms_values[%" PRId64 "] has numel %" PRId64 ", wanted 1", k,
                   a->rms_values->numel[k]);
    HR_TRY(step_check_steps(function, a->steps, count));
    return HR_OK;
}

hr_status hr_adafactor(const hr_tensor_list *params, const hr_tensor_list *row_vars,
                       const hr_tensor_list *col_vars, const hr_tensor_list *variances,
                       const hr_tensor_list *exp_avgs, const hr_tensor_list *rms_values,
                       const hr_tensor_list *steps, const hr_tensor_list *grads,
                       const hr_adafactor_shape *shapes, const hr_adafactor_config *config,
                       void *workspace, size_t workspace_bytes, const hr_exec *exec)
{
    hr_adafactor_config own = HR_ADAFACTOR_HF_INIT;
    hr_weights own_weights = HR_WEIGHTS_INIT;
    const adafactor_args args = {params, row_vars, col_vars, variances, exp_avgs, rms_values,
                                 steps,  grads,    shapes,   &own,      workspace};
    HR_REQUIRE(config, "hr_adafactor: config is NULL");
    HR_TRY(copy_config(&own, config));
    HR_TRY(check_config(&own, steps != NULL));
    HR_TRY(weights_copy("hr_adafactor", &own_weights, &own.step.weights));
    HR_TRY(hr_check_exec("hr_adafactor", exec));
    HR_TRY(check_lists(&args));
    const size_t wanted_bytes = workspace_bytes_of(shapes, params->count);
    HR_REQUIRE(workspace_bytes >= wanted_bytes, "hr_adafactor: workspace_bytes is %zu, wanted %zu",
               workspace_bytes, wanted_bytes);
    HR_REQUIRE(wanted_bytes == 0 || (workspace && (uintptr_t)workspace % 8 == 0),
               "hr_adafactor: workspace is at %p, wanted a multiple of 8 bytes", workspace);
    /* Weights with a mode take the steps of binary32. */
    if (own.eps1 < 0 && own.step.weights && own.step.weights->mode != HR_WEIGHTS_NEAREST)
        own.eps1 = 0x1p-23;
    if (exec->device == HR_CPU) {
        HR_TRY(step_check_values("hr_adafactor", &own.step, steps));
        return adafactor_cpu(&args);
    }
    HR_RETURN_CUDA(adafactor_cuda(&args, exec), exec);
}
