/* linear_cross_entropy.c: the checks of hr_linear_cross_entropy() and its companions. */
#include <inttypes.h>
#include <math.h>

#include "capi/check/matrix.h"
#include "capi/check/rows.h"
#include "capi/loss/cross_entropy_checks.h"
#include "capi/loss/linear_cross_entropy_call.h"

#define MOST_ELEMENTS (INT64_C(1) << 56) /* of a matrix */

typedef hr_linear_cross_entropy_config lce_config;

static hr_status check_flags(const char *function, const lce_config *own)
{
    const struct {
        const char *name;
        int32_t flag;
    } flags[] = {{"add_to_weight_grads", own->add_to_weight_grads},
                 {"allow_tf32", own->allow_tf32},
                 {"allow_reduced_precision_reduction", own->allow_reduced_precision_reduction},
                 {"deterministic", own->deterministic},
                 {"check_target", own->check_target}};
    for (int i = 0; i < 5; i++)
        HR_TRY(hr_check_flag(function, flags[i].name, flags[i].flag));
    return HR_OK;
}

/* The options of the loss, as the kernels take them. */
static hr_cross_entropy_config loss_config(const lce_config *own)
{
    hr_cross_entropy_config config = HR_CROSS_ENTROPY_CONFIG_INIT;
    config.target_bytes = own->target_bytes;
    config.reduction = own->reduction;
    config.ignore_index = own->ignore_index;
    config.label_smoothing = own->label_smoothing;
    config.softcap = own->softcap;
    config.z_loss = own->z_loss;
    return config;
}

static hr_status check_config(const char *function, lce_config *own, const lce_config *config,
                              int64_t rows)
{
    HR_REQUIRE(config, "%s: config is NULL", function);
    HR_TRY(hr_copy_config(function, "config->", own, sizeof *own, config,
                          offsetof(lce_config, workspace_limit) + sizeof own->workspace_limit,
                          "HR_LINEAR_CROSS_ENTROPY_CONFIG_INIT"));
    /* Of an older header, and not half an address. */
    if (config->size < offsetof(lce_config, matrix) + sizeof own->matrix)
        own->matrix = NULL;
    if (config->size < sizeof *own)
        own->dentropy = own->entropy = NULL;
    HR_TRY(hr_check_float(function, "config->dtype", own->dtype));
    HR_REQUIRE(own->grad_dtype == HR_F32 || (own->grad_dtype == HR_BF16 && own->dtype == HR_BF16),
               "%s: config->grad_dtype is %s, wanted f32, or bf16 if config->dtype is", function,
               hr_dtype_name(own->grad_dtype));
    const hr_cross_entropy_config loss = loss_config(own);
    HR_TRY(ce_check_options(function, &loss));
    HR_REQUIRE(own->mode >= HR_LINEAR_CROSS_ENTROPY_AUTO &&
                   own->mode <= HR_LINEAR_CROSS_ENTROPY_VOCABULARY,
               "%s: config->mode is %d, wanted 0, 1 or 2", function, (int)own->mode);
    HR_TRY(check_flags(function, own));
    HR_REQUIRE(isfinite((float)own->logit_scale) && (float)own->logit_scale != 0.0f,
               "%s: config->logit_scale is %g, wanted a finite binary32 that is not 0", function,
               own->logit_scale);
    HR_REQUIRE(own->capability >= 0,
               "%s: config->capability is %d, wanted 10 times that of a GPU, such as 90, or 0",
               function, own->capability);
    HR_REQUIRE(own->sequence >= 0 && (own->sequence == 0 || rows % own->sequence == 0),
               "%s: config->sequence is %" PRId64 ", wanted 0 or a divisor of rows (%" PRId64 ")",
               function, own->sequence, rows);
    return HR_OK;
}

/* The matrix in place of the weight. Afterwards config->matrix is `matrix`, a checked copy, or NULL
 * where it is dense and has become the weight. */
static hr_status check_matrix(const char *function, lce_config *own, hr_matrix *matrix,
                              hr_rows *weight, int64_t features, int64_t classes)
{
    if (!own->matrix)
        return HR_OK;
    HR_TRY(hr_check_matrix(function, matrix, own->matrix, 0));
    HR_REQUIRE(matrix->dtype == own->dtype && matrix->rows == classes && matrix->cols == features,
               "%s: config->matrix is %s [%" PRId64 ", %" PRId64 "], wanted %s [%" PRId64
               ", %" PRId64 "], [classes, features] in config->dtype",
               function, hr_dtype_name(matrix->dtype), matrix->rows, matrix->cols,
               hr_dtype_name(own->dtype), classes, features);
    const int is_dense = matrix->format == HR_DENSE;
    own->matrix = is_dense ? NULL : matrix;
    *weight = is_dense ? (hr_rows){matrix->data, matrix->stride} : (hr_rows){NULL, 0};
    return HR_OK;
}

static hr_status check_lce_sizes(const char *function, int64_t rows, int64_t features,
                                 int64_t classes)
{
    HR_REQUIRE(rows >= 0, "%s: rows is %" PRId64 ", wanted 0 or more", function, rows);
    HR_REQUIRE(features >= 1, "%s: features is %" PRId64 ", wanted 1 or more", function, features);
    HR_REQUIRE(classes >= 1, "%s: classes is %" PRId64 ", wanted 1 or more", function, classes);
    HR_REQUIRE(
        (rows == 0 || (features <= MOST_ELEMENTS / rows && classes <= MOST_ELEMENTS / rows)) &&
            classes <= MOST_ELEMENTS / features,
        "%s: rows is %" PRId64 ", features %" PRId64 " and classes %" PRId64
        ", wanted at most 2^56 elements of a matrix",
        function, rows, features, classes);
    return HR_OK;
}

/* Vectors of binary32 that may be absent. */
static hr_status check_inputs(lce_call *call)
{
    const lce_sizes *const s = &call->sizes;
    const hr_linear_cross_entropy_inputs *const in = &call->inputs;
    const char *const function = call->function;
    const hr_dtype dtype = call->config.dtype;
    HR_TRY(hr_check_rows(function, "inputs->hidden", &in->hidden, s->rows, s->features, dtype));
    if (!call->config.matrix)
        HR_TRY(
            hr_check_rows(function, "inputs->weight", &in->weight, s->classes, s->features, dtype));
    HR_TRY(hr_check_vector(function, "inputs->bias", in->bias, dtype));
    HR_TRY(hr_check_vector(function, "inputs->class_weight", in->class_weight, HR_F32));
    HR_TRY(hr_check_vector(function, "inputs->token_weight", in->token_weight, HR_F32));
    HR_TRY(hr_check_vector(function, "inputs->denominator", in->denominator, HR_F32));
    return ce_check_targets(function, "inputs->target", &call->listing.ce, call->exec);
}

static hr_status check_grads(lce_call *call)
{
    const lce_sizes *const s = &call->sizes;
    const hr_linear_cross_entropy_grads *const grads = &call->grads;
    const hr_dtype dtype = call->config.grad_dtype;
    if (grads->hidden.data) {
        call->wanted |= HR_LINEAR_CROSS_ENTROPY_HIDDEN;
        HR_TRY(hr_check_rows(call->function, "grads->hidden", &grads->hidden, s->rows, s->features,
                             dtype));
        HR_REQUIRE(grads->hidden.data != call->inputs.hidden.data,
                   "%s: grads->hidden is inputs->hidden, which is read after it is written",
                   call->function);
    }
    if (grads->weight.data) {
        call->wanted |= HR_LINEAR_CROSS_ENTROPY_WEIGHT;
        HR_TRY(hr_check_rows(call->function, "grads->weight", &grads->weight, s->classes,
                             s->features, dtype));
        HR_REQUIRE(grads->weight.data != call->inputs.weight.data,
                   "%s: grads->weight is inputs->weight, which is read after it is written",
                   call->function);
        HR_REQUIRE(!call->config.matrix,
                   "%s: grads->weight is given, wanted NULL with config->matrix, which has no "
                   "gradient",
                   call->function);
    }
    if (grads->bias)
        call->wanted |= HR_LINEAR_CROSS_ENTROPY_BIAS;
    return hr_check_vector(call->function, "grads->bias", grads->bias, dtype);
}

static hr_status check_workspace(lce_call *call, void *workspace, size_t bytes)
{
    HR_RUN(lce_layout_of(&call->layout, &call->sizes, call->wanted, &call->config, call->exec));
    HR_REQUIRE(bytes >= call->layout.bytes, "%s: workspace_bytes is %zu, wanted %zu",
               call->function, bytes, call->layout.bytes);
    HR_REQUIRE(workspace && (uintptr_t)workspace % 16 == 0,
               "%s: workspace is at %p, wanted a multiple of 16 bytes", call->function, workspace);
    const size_t past = (uintptr_t)workspace % HR_PART_ALIGNMENT;
    call->workspace = (char *)workspace + (past ? HR_PART_ALIGNMENT - past : 0);
    return HR_OK;
}

/* The targets on a CUDA device, for which it waits: the last check. */
static hr_status check_targets_there(const lce_call *call)
{
    ce_stray stray = {-1, 0};
    if (call->exec->device == HR_CPU || !call->config.check_target)
        return HR_OK; /* checked before, or not at all */
#if HR_WITH_CUDA
    const cross_entropy_args *const args = &call->listing.ce;
    ce_stray *const there = (ce_stray *)(void *)(call->workspace + call->layout.parts);
    int32_t previous = 0;
    HR_RUN(hr_cuda_enter(call->exec->device, &previous));
    const hr_status status =
        cross_entropy_stray_cuda(&stray, there, args, call->function, call->exec);
    hr_cuda_leave(previous);
    HR_RUN(status);
#endif
    return ce_check_stray(call->function, &call->listing.ce, &stray);
}

/* What both functions take; fills the call. */
static hr_status check_call(lce_call *call, const hr_linear_cross_entropy_grads *grads,
                            const hr_linear_cross_entropy_inputs *inputs, int64_t rows,
                            int64_t features, int64_t classes, const lce_config *config,
                            const hr_exec *exec)
{
    lce_config *const own = &call->config;
    *own = (lce_config)HR_LINEAR_CROSS_ENTROPY_CONFIG_INIT;
    HR_TRY(check_lce_sizes(call->function, rows, features, classes));
    HR_TRY(check_config(call->function, own, config, rows));
    HR_TRY(hr_check_exec(call->function, exec));
    HR_REQUIRE(inputs, "%s: inputs is NULL", call->function);
    call->inputs = *inputs;
    HR_TRY(
        check_matrix(call->function, own, &call->matrix, &call->inputs.weight, features, classes));
    if (grads)
        call->grads = *grads;
    call->exec = exec;
    call->sizes = (lce_sizes){.rows = rows, .features = features, .classes = classes};
    call->listing.ce = (cross_entropy_args){.target = inputs->target,
                                            .weight = inputs->class_weight,
                                            .rows = rows,
                                            .classes = classes,
                                            .all = classes};
    call->listing.ce.config = loss_config(own);
    call->listing.sequence = own->sequence;
    call->listing.token_weight = inputs->token_weight;
    HR_TRY(check_inputs(call));
    HR_TRY(check_grads(call));
    HR_RUN(lce_sizes_of(&call->sizes, rows, features, classes, call->wanted, own, exec));
    return HR_OK;
}

static hr_status check_rows_out(const lce_call *call)
{
    const hr_linear_cross_entropy_rows *const out = &call->out;
    const struct {
        const char *name;
        const void *vector;
        hr_dtype dtype;
    } vectors[] = {{"rows_out->loss", out->loss, HR_F32},
                   {"rows_out->lse", out->lse, HR_F32},
                   {"rows_out->lse_low", out->lse_low, HR_F32},
                   {"rows_out->target_logit", out->target_logit, HR_F32},
                   {"rows_out->largest", out->largest, HR_F32},
                   {"rows_out->entropy", out->entropy, HR_F32},
                   {"rows_out->argmax", out->argmax, HR_F64},
                   {"rows_out->rank", out->rank, HR_F64},
                   {"rows_out->mean_logit", out->mean_logit, HR_F32},
                   {"rows_out->log_sum_sq_probs", out->log_sum_sq_probs, HR_F32}};
    for (int i = 0; i < 10; i++)
        HR_TRY(
            hr_check_vector(call->function, vectors[i].name, vectors[i].vector, vectors[i].dtype));
    HR_REQUIRE(!out->rank || call->sizes.tile == call->sizes.classes,
               "%s: rows_out->rank is given, which needs all classes at once: wanted config->mode "
               "1, and a larger config->workspace_limit where it is 0",
               call->function);
    return HR_OK;
}

hr_status hr_linear_cross_entropy(float *result, float *factors, float *scale,
                                  const hr_linear_cross_entropy_rows *rows_out,
                                  const hr_linear_cross_entropy_grads *grads,
                                  const hr_linear_cross_entropy_inputs *inputs, int64_t rows,
                                  int64_t features, int64_t classes, const lce_config *config,
                                  void *workspace, size_t workspace_bytes, const hr_exec *exec)
{
    lce_call call = {.function = "hr_linear_cross_entropy", .result = result};
    HR_TRY(check_call(&call, grads, inputs, rows, features, classes, config, exec));
    HR_TRY(hr_check_vector(call.function, "result", result, HR_F32));
    HR_TRY(hr_check_vector(call.function, "factors", factors, HR_F32));
    HR_TRY(hr_check_vector(call.function, "scale", scale, HR_F32));
    if (rows_out)
        call.out = *rows_out;
    HR_TRY(check_rows_out(&call));
    HR_TRY(check_workspace(&call, workspace, workspace_bytes));
    HR_TRY(check_targets_there(&call));
    call.listing.factors = factors;
    call.listing.scale = scale;
    call.listing.keeps_range = call.config.dtype == HR_F16 && scale;
    call.listing.denominator = inputs->denominator;
    return lce_run(&call);
}

/* The gradient of the entropies of rows, and these. */
static hr_status check_entropy(const char *function, const lce_config *own, int64_t rows)
{
    if (!own->dentropy)
        return HR_OK;
    HR_TRY(hr_check_vector(function, "config->dentropy", own->dentropy, HR_F32));
    HR_TRY(hr_check_given(function, "config->entropy", own->entropy, rows));
    HR_REQUIRE(own->dentropy_stride >= 0 &&
                   (rows == 0 || own->dentropy_stride <= MOST_ELEMENTS / rows),
               "%s: config->dentropy_stride is %" PRId64
               ", wanted 0 or more, and at most 2^56 elements from the first row to the last",
               function, own->dentropy_stride);
    return HR_OK;
}

hr_status hr_linear_cross_entropy_backward(
    const hr_linear_cross_entropy_grads *grads, const float *dloss, int64_t dloss_stride,
    const float *factors, const float *lse, const float *lse_low,
    const hr_linear_cross_entropy_inputs *inputs, int64_t rows, int64_t features, int64_t classes,
    const lce_config *config, void *workspace, size_t workspace_bytes, const hr_exec *exec)
{
    lce_call call = {.function = "hr_linear_cross_entropy_backward", .is_backward = 1};
    HR_REQUIRE(grads, "%s: grads is NULL", call.function);
    HR_TRY(check_call(&call, grads, inputs, rows, features, classes, config, exec));
    HR_TRY(hr_check_dloss(call.function, dloss, dloss_stride, rows));
    HR_TRY(hr_check_vector(call.function, "factors", factors, HR_F32));
    HR_TRY(hr_check_given(call.function, "lse", lse, rows));
    HR_TRY(hr_check_vector(call.function, "lse_low", lse_low, HR_F32));
    HR_TRY(check_entropy(call.function, &call.config, rows));
    HR_TRY(check_workspace(&call, workspace, workspace_bytes));
    call.listing.dloss = dloss;
    call.listing.dloss_stride = dloss_stride;
    call.listing.given_factors = factors;
    call.listing.lse = lse;
    call.listing.lse_low = lse_low;
    return lce_run(&call);
}

hr_status hr_linear_cross_entropy_query(hr_linear_cross_entropy_needs *needs, int64_t rows,
                                        int64_t features, int64_t classes, uint32_t wanted,
                                        const lce_config *config, const hr_exec *exec)
{
    static const char function[] = "hr_linear_cross_entropy_query";
    lce_config own = HR_LINEAR_CROSS_ENTROPY_CONFIG_INIT;
    hr_matrix matrix;
    hr_rows weight;
    HR_REQUIRE(needs, "%s: needs is NULL", function);
    HR_TRY(hr_check_vector(function, "needs", needs, HR_F64));
    HR_TRY(check_lce_sizes(function, rows, features, classes));
    HR_TRY(check_config(function, &own, config, rows));
    HR_TRY(check_matrix(function, &own, &matrix, &weight, features, classes));
    if (!exec || own.capability == 0) /* else it may name a GPU that is not there */
        HR_TRY(hr_check_exec(function, exec));
    HR_REQUIRE(!(wanted & ~(uint32_t)LCE_ANY), "%s: wanted is %" PRIu32 ", wanted at most %d",
               function, wanted, (int)LCE_ANY);
    lce_sizes s;
    HR_RUN(lce_sizes_of(&s, rows, features, classes, wanted, &own, exec));
    lce_layout layout;
    HR_RUN(lce_layout_of(&layout, &s, wanted, &own, exec));
    *needs = (hr_linear_cross_entropy_needs){layout.bytes, s.chunk, s.tile, s.mode};
    return HR_OK;
}
