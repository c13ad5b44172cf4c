/*
 * momentum_cpu.c: the CPU step of SGD and Lion. One parallel region covers the elements of the whole
 * list.
 *
 * The loop takes binary32, in place where a tensor has it. Everything else is converted a tile at a
 * time, which stays in the first-level cache: so one loop for each formula serves every type and every
 * mode of weights. What people run most has loops of its own, because conversions take longer than the
 * step: bf16 throughout, two elements at a time; and moments in codes with params and grads of one
 * type.
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

/* Runs the body with the members of a kind as literals in `name`. */
#define MOMENTUM_AS(name, body, ...)              \
    do {                                          \
        const momentum_kind name = {__VA_ARGS__}; \
        body;                                     \
    } while (0)
#define MOMENTUM_FOR_KIND(kind, name, body)                                                   \
    FOR_FLAG(                                                                                 \
        (kind).skip_nonfinite, S, if ((kind).lion) MOMENTUM_AS(name, body, 1, 0, 0, 0, S);    \
        else FOR_FLAG((kind).l2, L, if ((kind).plain) MOMENTUM_AS(name, body, 0, 1, 0, L, S); \
                      else FOR_FLAG((kind).nesterov, N, MOMENTUM_AS(name, body, 0, 0, N, L, S))))

/* ---- Two bf16 at a time ---------------------------------------------------------------------- */

/* Where CPU_STEP elements wait for their rounding: those at even places, and those at odd places. */
typedef struct momentum_waiting {
    float param[2][CPU_STEP / 2], moment[2][CPU_STEP / 2];
} momentum_waiting;

/* Updates element `which` of pair j. Returns a NaN if it has one. */
HR_INLINE float momentum_half(momentum_constants c, momentum_waiting *w, int which, int j,
                              momentum_values x, momentum_kind kind)
{
    x = momentum_element(c, x, kind);
    w->param[which][j] = x.param;
    w->moment[which][j] = x.moment;
    return kind.plain ? x.param : x.param + x.moment;
}

/* Stores CPU_STEP elements that waited, NaNs among them. */
static __attribute__((noinline, cold)) void momentum_put_any(const momentum_waiting *w,
                                                             uint16_t *param, uint16_t *moment)
{
    for (int j = 0; j < CPU_STEP; j++) {
        param[j] = hr_to_bf16(w->param[j % 2][j / 2]);
        if (moment)
            moment[j] = hr_to_bf16(w->moment[j % 2][j / 2]);
    }
}

/* momentum_loop() of whole CPU_STEPs where all is bf16: two at a time, rounded as if all were
 * numbers; momentum_put_any() puts it right where one is none. */
HR_INLINE void momentum_pairs(momentum_constants c, uint16_t *restrict param,
                              const uint16_t *restrict grad, uint16_t *restrict moment, int count,
                              momentum_kind kind, half_conversions halves)
{
    for (int i = 0; i < count; i += CPU_STEP) {
        momentum_waiting w;
        uint32_t largest = 0;
        for (int j = 0; j < CPU_STEP / 2; j++) {
            const uint32_t high = 0xFFFF0000u, p = bf16_pair(param, i + 2 * j);
            const uint32_t g = bf16_pair(grad, i + 2 * j);
            const uint32_t m = kind.plain ? 0 : bf16_pair(moment, i + 2 * j);
            const momentum_values first = {hr_float(p << 16), hr_float(g << 16), hr_float(m << 16)};
            const momentum_values second = {hr_float(p & high), hr_float(g & high),
                                            hr_float(m & high)};
            const float sum =
                momentum_half(c, &w, 0, j, first, kind) + momentum_half(c, &w, 1, j, second, kind);
            const uint32_t magnitude = hr_bits(sum) & 0x7FFFFFFFu;
            largest = magnitude > largest ? magnitude : largest;
        }
        halves.narrow_bf16(param + i, w.param[0], w.param[1]);
        if (!kind.plain)
            halves.narrow_bf16(moment + i, w.moment[0], w.moment[1]);
        if (__builtin_expect(largest >= 0x7F800000u, 0))
            momentum_put_any(&w, param + i, kind.plain ? NULL : moment + i);
    }
}

/* Updates the elements [i, i + count), which are whole CPU_STEPs. */
HR_INLINE void momentum_tile_of_pairs(const momentum_part *p, int64_t i, int count, int64_t end,
                                      half_conversions halves)
{
    uint16_t *const param = (uint16_t *)p->param + i;
    const uint16_t *const grad = (const uint16_t *)p->grad + i;
    uint16_t *const moment = p->kind.plain ? NULL : (uint16_t *)p->moment + i;
    cpu_prefetch(p->param, i, count, end, HR_BF16);
    cpu_prefetch(p->grad, i, count, end, HR_BF16);
    if (moment)
        cpu_prefetch(p->moment, i, count, end, HR_BF16);
    MOMENTUM_FOR_KIND(p->kind, K,
                      momentum_pairs(p->constants, param, grad, moment, count, K, halves));
}

/* ---- Codes ----------------------------------------------------------------------------------- */

/* momentum_loop() of whole CPU_STEPs of a block, whose params and grads have one type. Its moments come
 * without their scale. Returns the largest quant_magnitude() of the new ones. */
HR_INLINE uint32_t momentum_block(momentum_constants c, void *restrict param,
                                  const void *restrict grad, float *restrict moment, float absmax,
                                  int count, momentum_kind kind, hr_dtype dtype,
                                  half_conversions halves)
{
    uint32_t largest = 0;
    for (int i = 0; i < count; i += CPU_STEP) {
        float params[CPU_STEP];
        for (int j = 0; j < CPU_STEP; j++) {
            momentum_values x = {hr_load(param, i + j, dtype), hr_load(grad, i + j, dtype),
                                 moment[i + j] * absmax};
            x = momentum_element(c, x, kind);
            if (dtype == HR_F32)
                hr_store(param, i + j, x.param, HR_F32);
            params[j] = x.param;
            moment[i + j] = x.moment;
            const uint32_t magnitude = quant_magnitude(x.moment, 0);
            largest = magnitude > largest ? magnitude : largest;
        }
        if (dtype == HR_BF16)
            bf16_store((uint16_t *)param + i, params, CPU_STEP, halves);
    }
    return largest;
}

/* Updates the elements [i, i + count), which are whole blocks. */
HR_INLINE void momentum_tile_of_blocks(const momentum_part *p, int64_t i, int count, int64_t end,
                                       half_conversions halves)
{
    _Alignas(64) float moments[MOMENTUM_TILE];
    uint8_t *const codes = (uint8_t *)p->moment + i;
    cpu_prefetch(p->param, i, count, end, p->param_dtype);
    cpu_prefetch(p->grad, i, count, end, p->param_dtype);
    cpu_prefetch(p->moment, i, count, end, HR_U8);
    quant_values_signed(codes, count, moments);
    for (int j = 0; j < count; j += p->block_size) {
        const int size = hr_element_size(p->param_dtype);
        void *const param = (char *)p->param + (i + j) * size;
        const void *const grad = (const char *)p->grad + (i + j) * size;
        float *const moment = moments + j, *const absmax = p->absmax + (i + j) / p->block_size;
        uint32_t largest = 0;
        FOR_F32_OR_BF16(p->param_dtype, D,
                        MOMENTUM_FOR_KIND(p->kind, K,
                                          if (!K.plain && !K.skip_nonfinite) largest =
                                              momentum_block(p->constants, param, grad, moment,
                                                             *absmax, p->block_size, K, D, halves)))
        *absmax = quant_codes_signed(moment, p->block_size, largest, codes + j);
    }
}

/* ---- Any mix of types ------------------------------------------------------------------------ */

/* How many of `count` elements are in the part of `size` that begins at element j. */
HR_INLINE int momentum_part_of(int count, int j, int size)
{
    return count - j < size ? count - j : size;
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
        param = halves_floats(p->param, i, count, end, p->param_dtype, param, halves);
    }
    const float *const grad =
        halves_floats(p->grad, i, count, end, p->grad_dtype, tiles[GRAD], halves);
    if (p->absmax) {
        moment = tiles[MOMENT];
        cpu_prefetch(p->moment, i, count, end, HR_U8);
        for (int j = 0; j < count; j += p->block_size)
            quant_decode_signed((const uint8_t *)p->moment + i + j,
                                momentum_part_of(count, j, p->block_size),
                                p->absmax[(i + j) / p->block_size], moment + j);
    } else if (!p->kind.plain) {
        moment = halves_floats(p->moment, i, count, end, p->moment_dtype, tiles[MOMENT], halves);
    }
    MOMENTUM_FOR_KIND(p->kind, K, momentum_loop(p->constants, param, grad, moment, count, K));
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

/* Returns of how many elements momentum_tile_of_pairs() or momentum_tile_of_blocks() takes multiples,
 * or 0 if neither takes this tensor. */
HR_INLINE int momentum_unit(const momentum_part *p)
{
    if (p->weights || p->param_dtype != p->grad_dtype || p->param_dtype == HR_F16)
        return 0;
    if (p->absmax)
        return p->kind.skip_nonfinite ? 0 : p->block_size;
    const int halves = p->param_dtype == HR_BF16 && (p->kind.plain || p->moment_dtype == HR_BF16);
    return BF16_FIRST_IS_LOW && halves ? CPU_STEP : 0;
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
        const int unit = momentum_unit(&part);
        for (int64_t i = from; i < to; i += MOMENTUM_TILE) {
            const int count = to - i < MOMENTUM_TILE ? (int)(to - i) : MOMENTUM_TILE;
            const int whole = unit > 0 ? count - count % unit : 0;
            if (whole > 0 && part.absmax)
                momentum_tile_of_blocks(&part, i, whole, to, halves);
            else if (whole > 0)
                momentum_tile_of_pairs(&part, i, whole, to, halves);
            if (whole < count)
                momentum_tile(&part, i + whole, count - whole, to, halves);
        }
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
