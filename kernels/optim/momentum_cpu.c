/*
 * momentum_cpu.c: the CPU step of SGD and Lion. One parallel region covers the elements of the whole
 * list.
 *
 * The loop takes binary32, in place where a tensor has it. Everything else, codes of moments among
 * it, is converted a tile at a time, which stays in the first-level cache: so one loop for each
 * formula serves every type and every mode of weights. A step computes little, and memory bounds it.
 */
#include "kernels/core/halves_cpu.h"
#include "kernels/optim/momentum.h"
#include "kernels/quant/quantize_blocks_cpu_signed.h"
#include "kernels/weights/weights_cpu.h"

#define MOMENTUM_TILE 512 /* elements: whole blocks of codes */

/* The tensors of one parameter, and the constants of its step. */
typedef struct momentum_part {
    momentum_constants constants;
    momentum_kind kind;
    void *param, *moment;
    const void *grad;
    float *absmax;  /* NULL: moments are numbers */
    int block_size; /* of codes, else 1 */
    hr_dtype param_dtype, moment_dtype, grad_dtype;
    const weights_tensor *weights; /* NULL: params are plain */
} momentum_part;

HR_INLINE void momentum_loop(momentum_constants c, float *restrict param,
                             const float *restrict grad, float *restrict moment, int count,
                             momentum_kind kind)
{
    for (int i = 0; i < count; i++) {
        momentum_values x = {param[i], grad[i], kind.plain ? 0.0f : moment[i]};
        x = momentum_element(c, x, kind);
        hr_store(param, i, x.param, HR_F32);
        if (!kind.plain)
            hr_store(moment, i, x.moment, HR_F32);
    }
}

/* momentum_loop() with the kind as literals. */
HR_INLINE void momentum_update(const momentum_part *p, float *param, const float *grad,
                               float *moment, int count)
{
#define MOMENTUM_LOOP(...)                                             \
    do {                                                               \
        const momentum_kind kind = {__VA_ARGS__};                      \
        momentum_loop(p->constants, param, grad, moment, count, kind); \
    } while (0)
    FOR_FLAG(p->kind.skip_nonfinite, S, if (p->kind.lion) MOMENTUM_LOOP(1, 0, 0, 0, S);
             else FOR_FLAG(p->kind.l2, L, if (p->kind.plain) MOMENTUM_LOOP(0, 1, 0, L, S);
                           else FOR_FLAG(p->kind.nesterov, N, MOMENTUM_LOOP(0, 0, N, L, S))))
#undef MOMENTUM_LOOP
}

/* How many of `count` elements are in the part of `size` that begins at element j. */
HR_INLINE int momentum_part_of(int count, int j, int size)
{
    return count - j < size ? count - j : size;
}

/* Binary32 at element i: the tensor itself, or a tile that gets its elements. */
HR_INLINE float *momentum_floats(const void *base, int64_t i, int count, int64_t end,
                                 hr_dtype dtype, float *tile, half_conversions halves)
{
    if (dtype == HR_F32)
        return (float *)base + i;
    cpu_prefetch(base, i, count, end, dtype);
    halves_to_tile(base, i, count, dtype, tile, halves);
    return tile;
}

/* Updates the elements [i, i + count) of a tensor whose elements to update end at `end`. */
HR_INLINE void momentum_tile(const momentum_part *p, int64_t i, int count, int64_t end,
                             half_conversions halves)
{
    enum { PARAM, GRAD, MOMENT, BEFORE, TILES };
    _Alignas(64) float tiles[TILES][MOMENTUM_TILE];
    const weights_tensor *const weights = p->weights;
    float *param = tiles[PARAM], *moment = NULL;
    const int counts = weights && weights->stalled;
    if (weights) {
        weights_prefetch(weights->param, weights->residual, i, count, end, weights->dtype,
                         weights->mode);
        for (int j = 0; j < count; j += WEIGHTS_TILE)
            weights_load(weights, i + j, momentum_part_of(count, j, WEIGHTS_TILE), param + j);
        if (counts)
            memcpy(tiles[BEFORE], param, (size_t)count * sizeof param[0]);
    } else {
        param = momentum_floats(p->param, i, count, end, p->param_dtype, param, halves);
    }
    const float *const grad =
        momentum_floats(p->grad, i, count, end, p->grad_dtype, tiles[GRAD], halves);
    if (p->absmax) {
        moment = tiles[MOMENT];
        cpu_prefetch(p->moment, i, count, end, HR_U8);
        for (int j = 0; j < count; j += p->block_size)
            quant_decode_signed((const uint8_t *)p->moment + i + j,
                                momentum_part_of(count, j, p->block_size),
                                p->absmax[(i + j) / p->block_size], moment + j);
    } else if (!p->kind.plain) {
        moment = momentum_floats(p->moment, i, count, end, p->moment_dtype, tiles[MOMENT], halves);
    }
    momentum_update(p, param, grad, moment, count);
    for (int j = 0; weights && j < count; j += WEIGHTS_TILE)
        weights_store(weights, i + j, momentum_part_of(count, j, WEIGHTS_TILE), param + j,
                      counts ? tiles[BEFORE] + j : NULL);
    if (!weights && p->param_dtype != HR_F32)
        halves_from_tile(p->param, i, count, p->param_dtype, param, halves);
    for (int j = 0; p->absmax && j < count; j += p->block_size)
        p->absmax[(i + j) / p->block_size] = quant_encode_signed(
            moment + j, momentum_part_of(count, j, p->block_size), (uint8_t *)p->moment + i + j);
    if (!p->absmax && !p->kind.plain && p->moment_dtype != HR_F32)
        halves_from_tile(p->moment, i, count, p->moment_dtype, moment, halves);
}

/* Updates the elements [begin, end) of the tensors of the list laid end to end. */
HR_INLINE void momentum_range(void *context, int64_t begin, int64_t end, half_conversions halves)
{
    const momentum_args *const a = (const momentum_args *)context;
    momentum_part part = {0};
    part.kind = momentum_kind_of(a->config);
    part.block_size = a->absmaxs ? a->config->block_size : 1;
    CPU_FOR_EACH_TENSOR_IN_BLOCKS(a->params, begin, end, part.block_size, k, from, to)
    {
        const double t = step_number_of(&a->config->step, a->steps, k);
        weights_tensor weights;
        part.constants = momentum_fold(a->config, t);
        part.param = a->params->data[k];
        part.param_dtype = a->params->dtype[k];
        part.grad = a->grads->data[k];
        part.grad_dtype = a->grads->dtype[k];
        if (a->moments) {
            part.moment = a->moments->data[k];
            part.moment_dtype = a->moments->dtype[k];
        }
        if (a->absmaxs)
            part.absmax = (float *)a->absmaxs->data[k];
        if (a->config->step.weights) {
            weights = weights_of(a->config->step.weights, a->params, k, t);
            part.weights = &weights;
        }
        for (int64_t i = from; i < to; i += MOMENTUM_TILE)
            momentum_tile(&part, i, to - i < MOMENTUM_TILE ? (int)(to - i) : MOMENTUM_TILE, to,
                          halves);
    }
}

CPU_HALVES_VARIANTS(momentum_range)

hr_status momentum_cpu(const momentum_args *args)
{
    if (step_is_skipped(&args->config->step))
        return HR_OK;
    hr_parallel_for(0, cpu_total(args->params), CPU_GRAIN, CPU_BEST(momentum_range), (void *)args);
    step_count_all(args->steps);
    return HR_OK;
}
