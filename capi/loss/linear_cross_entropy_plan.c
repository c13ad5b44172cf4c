/* linear_cross_entropy_plan.c: how many logits exist at a time, and what lies where. */
#include "capi/loss/linear_cross_entropy_call.h"
#include "kernels/nn/gemm.h"

#define MIB ((double)(1 << 20))

/* On the CPU a chunk of fewer rows reads and writes weights more often than its products are worth. */
#define LEAST_ROWS_CPU INT64_C(64)
#define QUANTUM        INT64_C(64) /* of rows, classes and pitches */

static int64_t divided_up(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

static int64_t rounded_up(int64_t a, int64_t quantum)
{
    return divided_up(a, quantum) * quantum;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t most(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* `whole` in parts of at most about `wanted`, as equal as multiples of the quantum are. */
static int64_t part_of(int64_t whole, int64_t wanted)
{
    if (wanted >= whole || whole <= 1)
        return most(whole, 1);
    if (wanted < QUANTUM)
        return divided_up(whole, divided_up(whole, most(wanted, 1)));
    return rounded_up(divided_up(whole, divided_up(whole, wanted / QUANTUM * QUANTUM)), QUANTUM);
}

/* Cuts the logits into parts for the mode. */
static void cut(lce_sizes *s, hr_linear_cross_entropy_mode mode,
                const hr_linear_cross_entropy_config *config)
{
    const double element = (double)hr_element_size(config->dtype);
    double limit = (double)config->workspace_limit;
    if (limit == 0.0) {
        limit = 0.5 * element * (double)s->classes * (double)s->features;
        const double floor = s->on_cpu ? 32 * MIB : 256 * MIB;
        limit = limit < floor ? floor : limit;
        if (mode == HR_LINEAR_CROSS_ENTROPY_VOCABULARY) {
            const double copies =
                ((double)hr_dtype_size(s->computed) + 4.0) * (double)s->rows * (double)s->features;
            limit -= copies < 0.5 * limit ? copies : 0.5 * limit;
        }
    }
    const double floats = limit / 4.0 < 1e18 ? limit / 4.0 : 1e18;
    s->mode = mode;
    s->chunk = most(s->rows, 1);
    s->tile = s->classes;
    if (mode == HR_LINEAR_CROSS_ENTROPY_TOKENS)
        s->chunk = part_of(s->rows, (int64_t)(floats / (double)s->classes));
    else
        s->tile = part_of(s->classes, most((int64_t)(floats / (double)s->chunk), QUANTUM));
    s->pitch = rounded_up(s->tile, QUANTUM);
    const double wide = config->matrix ? (double)hr_element_size(s->computed) : 4.0;
    const double panel = (s->on_cpu ? 4 * MIB : 32 * MIB) / (wide * (double)s->features);
    s->panel = least(s->tile, most((int64_t)panel / QUANTUM * QUANTUM, QUANTUM));
}

hr_status lce_sizes_of(lce_sizes *sizes, int64_t rows, int64_t features, int64_t classes,
                       uint32_t wanted, const hr_linear_cross_entropy_config *config,
                       const hr_exec *exec)
{
    const int on_cpu = exec->device == HR_CPU;
    int32_t capability = config->capability;
#if HR_WITH_CUDA
    if (!on_cpu && capability == 0)
        HR_RUN(hr_cuda_capability(exec->device, &capability));
#endif
    lce_sizes s = {.rows = rows, .features = features, .classes = classes, .on_cpu = on_cpu};
    s.computed = on_cpu ? HR_F32 : config->dtype;
    const int is_chosen = config->mode != HR_LINEAR_CROSS_ENTROPY_AUTO;
    cut(&s, is_chosen ? config->mode : HR_LINEAR_CROSS_ENTROPY_TOKENS, config);
    *sizes = s;
    if (is_chosen || s.chunk >= s.rows)
        return HR_OK;
    cut(&s, HR_LINEAR_CROSS_ENTROPY_VOCABULARY, config);
    const lce_rates rates = lce_rates_of(capability, config);
    const int is_better = on_cpu ? sizes->chunk < LEAST_ROWS_CPU
                                 : lce_seconds(&s, wanted, config, &rates) <
                                       lce_seconds(sizes, wanted, config, &rates);
    if (is_better)
        *sizes = s;
    return HR_OK;
}

int lce_sums_in_halves(const lce_sizes *s, const hr_linear_cross_entropy_config *config)
{
    return config->grad_dtype != HR_F32 && s->rows > s->chunk;
}

hr_gemm_config lce_gemm_config(const hr_linear_cross_entropy_config *config, hr_dtype dtype)
{
    hr_gemm_config gemm = HR_GEMM_CONFIG_INIT;
    gemm.dtype = dtype;
    gemm.allow_tf32 = config->allow_tf32;
    gemm.allow_reduced_precision_reduction = config->allow_reduced_precision_reduction;
    gemm.deterministic = config->deterministic;
    return gemm;
}

/* What the products of a part need, and for a GPU that may not be there what is given to all. */
static hr_status product_bytes(size_t *largest, const lce_sizes *s,
                               const hr_linear_cross_entropy_config *config, const hr_exec *exec)
{
    const hr_gemm_config gemm = lce_gemm_config(config, s->computed);
    const int64_t shapes[][3] = {{s->chunk, s->tile, s->features},
                                 {s->chunk, s->features, s->tile},
                                 {s->tile, s->features, s->chunk}};
    if (!s->on_cpu && config->capability > 0) {
        *largest = gemm_workspace_bytes(config->capability);
        return HR_OK;
    }
    for (int i = 0; i < 3; i++) {
        size_t bytes = 0;
        HR_RUN(hr_gemm_workspace(&bytes, shapes[i][0], shapes[i][1], shapes[i][2], &gemm, exec));
        if (bytes > *largest)
            *largest = bytes;
    }
    return HR_OK;
}

hr_status lce_layout_of(lce_layout *layout, const lce_sizes *s, uint32_t wanted,
                        const hr_linear_cross_entropy_config *config, const hr_exec *exec)
{
    const int weight = (wanted & HR_LINEAR_CROSS_ENTROPY_WEIGHT) != 0;
    const int narrow_in = config->dtype != s->computed;
    const int narrow_out = config->grad_dtype != HR_F32;
    const int halves = weight && lce_sums_in_halves(s, config);
    *layout = (lce_layout){0};
    layout->totals = hr_take_part(&layout->bytes, 1, 1, 1, sizeof(lce_totals));
    layout->index = hr_take_part(&layout->bytes, 1, s->rows, 1, sizeof(int64_t));
    layout->target = hr_take_part(&layout->bytes, 1, s->rows, 1, sizeof(int64_t));
    layout->scale = hr_take_part(&layout->bytes, 1, s->rows, 1, sizeof(float));
    layout->dloss = hr_take_part(&layout->bytes, 1, s->rows, 1, sizeof(float));
    layout->loss = hr_take_part(&layout->bytes, 1, s->rows, 1, sizeof(float));
    layout->lse = hr_take_part(&layout->bytes, 1, s->rows, 1, sizeof(float));
    layout->lse_low = hr_take_part(&layout->bytes, 1, s->rows, 1, sizeof(float));
    layout->seen = hr_take_part(&layout->bytes, 1, s->chunk, 1, sizeof(ce_seen));
    layout->parts =
        hr_take_part(&layout->bytes, !s->on_cpu, ce_parts(s->rows), 1, sizeof(ce_totals));
    layout->hidden =
        hr_take_part(&layout->bytes, 1, s->chunk, s->features, hr_dtype_size(s->computed));
    layout->hidden_grad = hr_take_part(&layout->bytes, wanted & HR_LINEAR_CROSS_ENTROPY_HIDDEN,
                                       s->chunk, s->features, 4);
    layout->logits = hr_take_part(&layout->bytes, 1, s->chunk, s->pitch, 4);
    layout->weight = hr_take_part(&layout->bytes, narrow_in || config->matrix, s->panel,
                                  s->features, hr_dtype_size(s->computed));
    layout->decoded = hr_take_part(&layout->bytes, narrow_in && config->matrix, s->panel,
                                   s->features, hr_dtype_size(config->dtype));
    layout->bias = hr_take_part(&layout->bytes, 1, s->classes, 1, sizeof(float));
    layout->weight_grad = hr_take_part(
        &layout->bytes, halves || (weight && narrow_out && narrow_in), s->panel, s->features, 4);
    layout->low = hr_take_part(&layout->bytes, halves, s->classes, s->features, 2);
    layout->bias_grad = hr_take_part(&layout->bytes, wanted & HR_LINEAR_CROSS_ENTROPY_BIAS,
                                     s->classes, 1, sizeof(double));
    HR_RUN(product_bytes(&layout->product_bytes, s, config, exec));
    layout->product = hr_take_part(&layout->bytes, layout->product_bytes > 0, 1,
                                   (int64_t)layout->product_bytes, 1);
    layout->bytes += HR_PART_ALIGNMENT;
    return HR_OK;
}
