/*
 * weights_cpu.c: tiles of weights, compiled once per instruction set for all loops that use them.
 */
#include "weights_cpu.h"

/* The random bits of elements [i, i + count). */
static inline void weights_fill_random(const weights_tensor *t, int64_t i, int count,
                                       uint16_t *random)
{
    const weights_start start = weights_start_of(t->place, i);
    int64_t known = -1;
    hr_random4 words = {{0, 0, 0, 0}};
    for (int lane = 0; lane < count; lane++) {
        const int64_t e = weights_element(t->place, start, (uint32_t)lane);
        if (e / 8 != known)
            words = hr_philox(weights_counter(t->step, (uint64_t)(e / 8)), t->seed);
        known = e / 8;
        random[lane] = (uint16_t)weights_random(&words, e);
    }
}

/* Runs the body with the constants `D` and `M` equal to the type and the mode of a tensor. */
#define WEIGHTS_FOR_MODE_(dtype_, mode_, body) \
    {                                          \
        const hr_dtype D = dtype_;             \
        const hr_weights_mode M = mode_;       \
        body;                                  \
        break;                                 \
    }
#define WEIGHTS_FOR_MODE(t, body)                                          \
    switch ((int)(t)->mode * 4 + (int)(t)->dtype) {                        \
    case HR_WEIGHTS_NEAREST * 4 + HR_F32:                                  \
        WEIGHTS_FOR_MODE_(HR_F32, HR_WEIGHTS_NEAREST, body)                \
    case HR_WEIGHTS_NEAREST * 4 + HR_F16:                                  \
        WEIGHTS_FOR_MODE_(HR_F16, HR_WEIGHTS_NEAREST, body)                \
    case HR_WEIGHTS_STOCHASTIC * 4 + HR_F16:                               \
        WEIGHTS_FOR_MODE_(HR_F16, HR_WEIGHTS_STOCHASTIC, body)             \
    case HR_WEIGHTS_KAHAN * 4 + HR_F16:                                    \
        WEIGHTS_FOR_MODE_(HR_F16, HR_WEIGHTS_KAHAN, body)                  \
    case HR_WEIGHTS_MASTER * 4 + HR_F16:                                   \
        WEIGHTS_FOR_MODE_(HR_F16, HR_WEIGHTS_MASTER, body)                 \
    case HR_WEIGHTS_STOCHASTIC * 4 + HR_BF16:                              \
        WEIGHTS_FOR_MODE_(HR_BF16, HR_WEIGHTS_STOCHASTIC, body)            \
    case HR_WEIGHTS_KAHAN * 4 + HR_BF16:                                   \
        WEIGHTS_FOR_MODE_(HR_BF16, HR_WEIGHTS_KAHAN, body)                 \
    case HR_WEIGHTS_MASTER * 4 + HR_BF16:                                  \
        WEIGHTS_FOR_MODE_(HR_BF16, HR_WEIGHTS_MASTER, body)                \
    case HR_WEIGHTS_REMAINDER16 * 4 + HR_BF16:                             \
        WEIGHTS_FOR_MODE_(HR_BF16, HR_WEIGHTS_REMAINDER16, body)           \
    case HR_WEIGHTS_REMAINDER8 * 4 + HR_BF16:                              \
        WEIGHTS_FOR_MODE_(HR_BF16, HR_WEIGHTS_REMAINDER8, body)            \
    case HR_WEIGHTS_REMAINDER8_STOCHASTIC * 4 + HR_BF16:                   \
        WEIGHTS_FOR_MODE_(HR_BF16, HR_WEIGHTS_REMAINDER8_STOCHASTIC, body) \
    default:                                                               \
        WEIGHTS_FOR_MODE_(HR_BF16, HR_WEIGHTS_NEAREST, body)               \
    }

HR_INLINE void weights_load_as(const void *restrict param, const void *restrict residual, int64_t i,
                               int count, float *restrict tile, hr_dtype dtype,
                               hr_weights_mode mode)
{
    for (int lane = 0; lane < count; lane++)
        tile[lane] =
            weights_join(weights_bits_at(param, residual, i + lane, dtype, mode), dtype, mode);
}

HR_INLINE void weights_store_as(void *restrict param, void *restrict residual, int64_t i, int count,
                                const float *restrict tile, const uint16_t *restrict random,
                                hr_dtype dtype, hr_weights_mode mode)
{
    for (int lane = 0; lane < count; lane++) {
        const uint32_t word = weights_are_random(mode) ? random[lane] : 0;
        const weights_bits bits = weights_split(tile[lane], dtype, mode, word);
        weights_put_bits(param, residual, i + lane, bits, dtype, mode);
    }
}

/* How many of the weights that were to change will be stored as they are. */
static inline int64_t weights_count_stalled(const weights_tensor *t, int64_t i, int count,
                                            const float *tile, const uint16_t *random,
                                            const float *before)
{
    int64_t stalled = 0;
    for (int lane = 0; lane < count; lane++) {
        const weights_bits old =
            weights_bits_at(t->param, t->residual, i + lane, t->dtype, t->mode);
        const uint32_t word = weights_are_random(t->mode) ? random[lane] : 0;
        const weights_bits bits = weights_split(tile[lane], t->dtype, t->mode, word);
        stalled +=
            tile[lane] != before[lane] && bits.param == old.param && bits.residual == old.residual;
    }
    return stalled;
}

/* What a variant is called with; it takes the elements [begin, end). */
typedef struct weights_move {
    const weights_tensor *tensor;
    float *tile;
    const uint16_t *random;
} weights_move;

HR_INLINE void weights_load_range(void *context, int64_t begin, int64_t end)
{
    const weights_move *const move = (const weights_move *)context;
    const weights_tensor *const t = move->tensor;
    WEIGHTS_FOR_MODE(
        t, weights_load_as(t->param, t->residual, begin, (int)(end - begin), move->tile, D, M))
}

HR_INLINE void weights_store_range(void *context, int64_t begin, int64_t end)
{
    const weights_move *const move = (const weights_move *)context;
    const weights_tensor *const t = move->tensor;
    WEIGHTS_FOR_MODE(t, weights_store_as(t->param, t->residual, begin, (int)(end - begin),
                                         move->tile, move->random, D, M))
}

CPU_VARIANTS(weights_load_range)
CPU_VARIANTS(weights_store_range)

void weights_load(const weights_tensor *t, int64_t i, int count, float *tile)
{
    weights_move move = {t, tile, NULL};
    CPU_BEST(weights_load_range)(&move, i, i + count);
}

void weights_store(const weights_tensor *t, int64_t i, int count, const float *tile,
                   const float *before)
{
    uint16_t random[WEIGHTS_TILE];
    weights_move move = {t, (float *)tile, random};
    if (weights_are_random(t->mode))
        weights_fill_random(t, i, count, random);
    if (before)
        __atomic_fetch_add(t->stalled, weights_count_stalled(t, i, count, tile, random, before),
                           __ATOMIC_RELAXED);
    CPU_BEST(weights_store_range)(&move, i, i + count);
}
