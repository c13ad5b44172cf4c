/* mlp_plan.c: the tokens of a tile of the MLP block, and what lies where in its workspace. */
#include "capi/nn/mlp_plan.h"

#include "kernels/nn/linear.h"

/* A tile is large enough for the products to be worth reading and writing the gradients of the
 * matrices once for each, and a multiple of what kernels of products take at a time. */
#define TILE_TOKENS  INT64_C(4096)
#define TILE_QUANTUM INT64_C(128)

static int64_t divided_up(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

static int is_narrow(const hr_mlp_config *config)
{
    return config->dtype != HR_F32;
}

/* The choice depends on neither what is kept nor what is wanted: the bits of products may depend on
 * the number of rows. */
static int64_t chosen_tile(const mlp_sizes *s, const hr_mlp_config *config)
{
    if (config->tile_tokens > 0)
        return config->tile_tokens < s->tokens ? config->tile_tokens : s->tokens;
    const double token = (double)(s->width + s->features + s->hidden) * (double)s->element;
    const double sums =
        is_narrow(config) ? 4.0 * (double)(s->width + s->features) * (double)s->hidden : 0;
    if ((double)s->tokens * token <= (double)TILE_TOKENS * token + sums)
        return s->tokens;
    const int64_t even = divided_up(s->tokens, divided_up(s->tokens, TILE_TOKENS));
    return divided_up(even, TILE_QUANTUM) * TILE_QUANTUM;
}

mlp_sizes mlp_sizes_of(int64_t tokens, int64_t hidden, int64_t features,
                       const hr_mlp_config *config)
{
    mlp_sizes s = {.tokens = tokens,
                   .hidden = hidden,
                   .features = features,
                   .width = config->gated ? 2 * features : features,
                   .element = hr_dtype_size(config->dtype)};
    const int64_t tile = chosen_tile(&s, config);
    s.tile = tile > 0 ? tile : 1;
    s.tiles = divided_up(tokens, s.tile);
    if (s.tiles == 0)
        s.tiles = 1; /* of no tokens: it writes gradients of zero */
    return s;
}

hr_norm_config mlp_norm_config(const hr_mlp_config *config)
{
    hr_norm_config norm = HR_NORM_CONFIG_INIT;
    norm.kind = config->norm;
    norm.casting = config->casting;
    norm.dtype = config->dtype;
    norm.weight_dtype = config->norm_dtype;
    norm.eps = config->eps;
    norm.offset = config->offset;
    return norm;
}

hr_gemm_config mlp_gemm_config(const hr_mlp_config *config)
{
    hr_gemm_config gemm = HR_GEMM_CONFIG_INIT;
    gemm.dtype = config->dtype;
    gemm.out_dtype = config->dtype;
    gemm.allow_tf32 = config->allow_tf32;
    gemm.allow_reduced_precision_reduction = config->allow_reduced_precision_reduction;
    gemm.deterministic = config->deterministic;
    return gemm;
}

hr_linear_config mlp_linear_config(const hr_mlp_config *config)
{
    hr_linear_config linear = HR_LINEAR_CONFIG_INIT;
    linear.allow_tf32 = config->allow_tf32;
    linear.allow_reduced_precision_reduction = config->allow_reduced_precision_reduction;
    linear.deterministic = config->deterministic;
    return linear;
}

uint32_t mlp_kept(hr_mlp_save save, uint32_t wanted)
{
    const uint32_t through = wanted & MLP_THROUGH, down = wanted & HR_MLP_DOWN;
    uint32_t kept = 0;
    if (through && save != HR_MLP_SAVE_INPUT)
        kept |= MLP_GATE_UP;
    /* Without a gradient through the activation, its result takes less than gate and up. */
    if (down && (save == HR_MLP_SAVE_ALL || (save == HR_MLP_SAVE_GATE_UP && !through)))
        kept |= MLP_ACTIVATED;
    if ((wanted & HR_MLP_GATE_UP) && save == HR_MLP_SAVE_ALL)
        kept |= MLP_NORMED;
    if (mlp_reads_x(wanted, kept))
        kept |= MLP_STATISTICS;
    return kept;
}

uint32_t mlp_evaluated(uint32_t wanted, uint32_t kept)
{
    uint32_t needed = 0;
    if (wanted & HR_MLP_DOWN)
        needed |= MLP_ACTIVATED;
    if ((wanted & MLP_THROUGH) || (needed & ~kept & MLP_ACTIVATED))
        needed |= MLP_GATE_UP;
    if ((wanted & HR_MLP_GATE_UP) || (needed & ~kept & MLP_GATE_UP))
        needed |= MLP_NORMED;
    return needed;
}

int mlp_reads_x(uint32_t wanted, uint32_t kept)
{
    return (wanted & (HR_MLP_X | HR_MLP_NORM_WEIGHT | HR_MLP_NORM_BIAS)) ||
           (mlp_evaluated(wanted, kept) & ~kept & MLP_NORMED);
}

/* ---- Where things lie ------------------------------------------------------------------------ */

static hr_status widen(size_t *most, int64_t m, int64_t n, int64_t k, const hr_gemm_config *config,
                       const hr_exec *exec)
{
    size_t bytes = 0;
    const hr_status status = hr_gemm_workspace(&bytes, m, n, k, config, exec);
    if (bytes > *most)
        *most = bytes;
    return status;
}

/* What products with a matrix of few bits take: those of a tile by parts, and on the CPU those of the
 * few tokens that the last tile may have. */
static hr_status widen_parts(size_t *most, const mlp_sizes *s, const hr_matrix *matrix,
                             const hr_mlp_config *config, const hr_exec *exec)
{
    const hr_linear_config linear = mlp_linear_config(config);
    const int64_t many = s->tile > LINEAR_FEW ? s->tile : LINEAR_FEW + 1;
    for (int backward = 0; backward < 2; backward++) {
        hr_linear_needs needs;
        const hr_status status = hr_linear_query(&needs, many, matrix, backward, &linear, exec);
        if (status != HR_OK)
            return status;
        if (needs.best > *most)
            *most = needs.best;
    }
    const int64_t few = s->tile < LINEAR_FEW ? s->tile : LINEAR_FEW;
    const size_t bytes = exec->device == HR_CPU ? linear_few_bytes(few, matrix->cols) : 0;
    if (bytes > *most)
        *most = bytes;
    return HR_OK;
}

/* All products get the same amount, because what it is may decide how they are computed. */
static hr_status product_bytes(size_t *most, const mlp_sizes *s, const hr_mlp_config *config,
                               const hr_exec *exec)
{
    hr_gemm_config gemm = mlp_gemm_config(config);
    const int64_t shapes[][3] = {
        {s->tile, s->width, s->hidden},    {s->tile, s->hidden, s->features},
        {s->tile, s->features, s->hidden}, {s->tile, s->hidden, s->width},
        {s->width, s->hidden, s->tile},    {s->hidden, s->features, s->tile}};
    *most = 0;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        const hr_status status = widen(most, shapes[i][0], shapes[i][1], shapes[i][2], &gemm, exec);
        if (status != HR_OK)
            return status;
    }
    const hr_matrix *const matrices[] = {config->gate_up, config->up, config->down};
    for (int i = 0; i < 3; i++) {
        const hr_status status =
            matrices[i] ? widen_parts(most, s, matrices[i], config, exec) : HR_OK;
        if (status != HR_OK)
            return status;
    }
    return HR_OK;
}

static mlp_layout empty_layout(void)
{
    return (mlp_layout){.normed = HR_NO_PART,
                        .gate_up = HR_NO_PART,
                        .inner = HR_NO_PART,
                        .gate_up_grad = HR_NO_PART,
                        .gate_up_sum = HR_NO_PART,
                        .down_sum = HR_NO_PART,
                        .gate_up_bias_sum = HR_NO_PART,
                        .down_bias_sum = HR_NO_PART,
                        .norm = HR_NO_PART,
                        .product = HR_NO_PART};
}

static hr_status finish(mlp_layout *layout, const mlp_sizes *s, const hr_mlp_config *config,
                        const hr_exec *exec)
{
    const hr_status status = product_bytes(&layout->product_bytes, s, config, exec);
    layout->product = hr_take_part(&layout->bytes, layout->product_bytes > 0, 1,
                                   (int64_t)layout->product_bytes, 1);
    layout->bytes += HR_PART_ALIGNMENT;
    return status;
}

hr_status mlp_forward_layout(mlp_layout *layout, const mlp_sizes *s, uint32_t kept,
                             const hr_mlp_config *config, const hr_exec *exec)
{
    *layout = empty_layout();
    layout->normed =
        hr_take_part(&layout->bytes, !(kept & MLP_NORMED), s->tile, s->hidden, s->element);
    layout->gate_up =
        hr_take_part(&layout->bytes, !(kept & MLP_GATE_UP), s->tile, s->width, s->element);
    layout->inner =
        hr_take_part(&layout->bytes, !(kept & MLP_ACTIVATED), s->tile, s->features, s->element);
    return finish(layout, s, config, exec);
}

hr_status mlp_backward_layout(mlp_layout *layout, const mlp_sizes *s, uint32_t wanted,
                              uint32_t kept, const hr_mlp_config *config, const hr_exec *exec)
{
    *layout = empty_layout();
    const uint32_t again = mlp_evaluated(wanted, kept) & ~kept;
    const int through = (wanted & MLP_THROUGH) != 0, several = s->tiles > 1;
    const int sums = several && is_narrow(config);
    layout->normed =
        hr_take_part(&layout->bytes, again & MLP_NORMED, s->tile, s->hidden, s->element);
    layout->gate_up =
        hr_take_part(&layout->bytes, again & MLP_GATE_UP, s->tile, s->width, s->element);
    layout->inner = hr_take_part(&layout->bytes, through || (again & MLP_ACTIVATED), s->tile,
                                 s->features, s->element);
    /* In the place of what it is the gradient of, or of what it is made of. */
    layout->gate_up_grad = layout->gate_up;
    if (through && layout->gate_up == HR_NO_PART && !config->gated && !(again & MLP_ACTIVATED))
        layout->gate_up_grad = layout->inner;
    else if (through && layout->gate_up == HR_NO_PART)
        layout->gate_up_grad = hr_take_part(&layout->bytes, 1, s->tile, s->width, s->element);
    layout->gate_up_sum =
        hr_take_part(&layout->bytes, sums && (wanted & HR_MLP_GATE_UP), s->width, s->hidden, 4);
    layout->down_sum =
        hr_take_part(&layout->bytes, sums && (wanted & HR_MLP_DOWN), s->hidden, s->features, 4);
    const uint32_t gate_up_bias = wanted & HR_MLP_GATE_UP_BIAS;
    const uint32_t down_bias = wanted & HR_MLP_DOWN_BIAS;
    layout->gate_up_bias_sum =
        hr_take_part(&layout->bytes, several && gate_up_bias, 1, s->width, 8);
    layout->down_bias_sum = hr_take_part(&layout->bytes, several && down_bias, 1, s->hidden, 8);
    /* The norm is the last, so its scratch memory may lie where the tiles did. */
    if (wanted & (HR_MLP_NORM_WEIGHT | HR_MLP_NORM_BIAS)) {
        const hr_norm_config norm = mlp_norm_config(config);
        const hr_status status =
            hr_norm_workspace(&layout->norm_bytes, s->tokens, s->hidden, &norm);
        if (status != HR_OK)
            return status;
        layout->norm = 0;
        if (layout->bytes < layout->norm_bytes)
            layout->bytes = (layout->norm_bytes + HR_PART_ALIGNMENT - 1) / HR_PART_ALIGNMENT *
                            HR_PART_ALIGNMENT;
    }
    return finish(layout, s, config, exec);
}
