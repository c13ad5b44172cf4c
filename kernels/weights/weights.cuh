/*
 * weights.cuh: weights of any mode in registers, eight of a thread at a time or one by one.
 */
#ifndef HR_WEIGHTS_CUH
#define HR_WEIGHTS_CUH

#include "kernels/core/list.cuh"
#include "kernels/core/pack.cuh"
#include "kernels/weights/weights.h"

/* What a tensor's record adds where weights are not plain. */
typedef struct weights_record {
    void *residual;
    uint64_t seed;
    hr_place place;
} weights_record;

static inline weights_record weights_record_of(const hr_weights *w, const hr_tensor_list *params,
                                               int64_t k)
{
    const int64_t numel = params->numel[k];
    weights_record record;
    record.residual = w->residuals ? w->residuals->data[k] : nullptr;
    record.seed = w->seeds ? w->seeds[k] : 0;
    record.place = w->places ? w->places[k] : hr_place{0, numel > 0 ? numel : 1, 0};
    return record;
}

/* The record of a tensor whose weights have a mode. `Record` is that of one whose weights are plain:
 * they are rounded to nearest, and have no residuals, seeds or places. */
template <typename Record> struct weights_mode_record : Record {
    static constexpr bool plain = false;
    weights_record weights;
};

static inline hr_weights_mode weights_mode_of(const hr_weights *w)
{
    return w ? w->mode : HR_WEIGHTS_NEAREST;
}

static inline int64_t *weights_stalled_of(const hr_weights *w)
{
    return w ? w->stalled : nullptr;
}

/* What a thread needs for weights that are not plain. */
typedef struct weights_thread {
    const weights_record *record;
    weights_start start;
    uint32_t stalled; /* weights so far */
} weights_thread;

/* ---- Weights in registers -------------------------------------------------------------------- */

/* N weights as they lie in memory, 4 or 8. Residuals of a byte fill the first words. */
template <int N> struct weights_pack {
    pack<N> params, residuals;
};

/* `whole`: there are all N, at addresses for one access; else there are `left`. */
template <int N>
static __device__ __forceinline__ weights_pack<N>
weights_load(const void *param, const void *residual, int i, hr_dtype dtype, hr_weights_mode mode,
             bool whole, int left)
{
    const hr_dtype residual_dtype = weights_residual_dtype(mode, dtype);
    weights_pack<N> w;
    w.params = pack_load<N>(param, i, dtype, whole, left);
    if (residual_dtype == HR_I8 || residual_dtype == HR_F64) {
        uint32_t words[N] = {0}, bytes[N / 4];
        if (residual_dtype == HR_I8) {
            pack_load_bytes<N>((const uint8_t *)residual, i, whole, left, 0, bytes);
#pragma unroll
            for (int word = 0; word < N / 4; word++)
                words[word] = bytes[word];
        }
        w.residuals = pack_from(words);
    } else {
        w.residuals = pack_load<N>(residual, i, residual_dtype, whole, left);
    }
    return w;
}

template <int N>
static __device__ __forceinline__ void weights_store(void *param, void *residual, int i,
                                                     hr_dtype dtype, hr_weights_mode mode,
                                                     bool whole, int left, const weights_pack<N> &w)
{
    const hr_dtype residual_dtype = weights_residual_dtype(mode, dtype);
    pack_store<N>(param, i, dtype, whole, left, w.params);
    if (residual_dtype == HR_I8) {
        uint32_t bytes[N / 4];
#pragma unroll
        for (int word = 0; word < N / 4; word++)
            bytes[word] = pack_word(w.residuals, word);
        pack_store_bytes<N>((uint8_t *)residual, i, whole, left, bytes);
    } else if (residual_dtype != HR_F64) {
        pack_store<N>(residual, i, residual_dtype, whole, left, w.residuals);
    }
}

template <int N>
static __device__ __forceinline__ weights_bits weights_get(const weights_pack<N> &w, int e,
                                                           hr_dtype dtype, hr_weights_mode mode)
{
    const hr_dtype residual_dtype = weights_residual_dtype(mode, dtype);
    weights_bits bits;
    bits.param = pack_bits(w.params, e, dtype);
    bits.residual = residual_dtype == HR_F64 ? 0 : pack_bits(w.residuals, e, residual_dtype);
    return bits;
}

/* Calls f(dtype, mode) with literals, so that both are looked at once and not per weight. */
template <typename F>
static __device__ __forceinline__ void weights_with_literals(hr_dtype dtype, hr_weights_mode mode,
                                                             F f)
{
    if (dtype == HR_F32)
        return f(HR_F32, HR_WEIGHTS_NEAREST);
    if (dtype == HR_F16)
        return mode == HR_WEIGHTS_KAHAN        ? f(HR_F16, HR_WEIGHTS_KAHAN)
               : mode == HR_WEIGHTS_MASTER     ? f(HR_F16, HR_WEIGHTS_MASTER)
               : mode == HR_WEIGHTS_STOCHASTIC ? f(HR_F16, HR_WEIGHTS_STOCHASTIC)
                                               : f(HR_F16, HR_WEIGHTS_NEAREST);
    switch (mode) {
    case HR_WEIGHTS_KAHAN:
        return f(HR_BF16, HR_WEIGHTS_KAHAN);
    case HR_WEIGHTS_MASTER:
        return f(HR_BF16, HR_WEIGHTS_MASTER);
    case HR_WEIGHTS_STOCHASTIC:
        return f(HR_BF16, HR_WEIGHTS_STOCHASTIC);
    case HR_WEIGHTS_REMAINDER16:
        return f(HR_BF16, HR_WEIGHTS_REMAINDER16);
    case HR_WEIGHTS_REMAINDER8:
        return f(HR_BF16, HR_WEIGHTS_REMAINDER8);
    case HR_WEIGHTS_REMAINDER8_STOCHASTIC:
        return f(HR_BF16, HR_WEIGHTS_REMAINDER8_STOCHASTIC);
    default:
        return f(HR_BF16, HR_WEIGHTS_NEAREST);
    }
}

/* N weights as binary32. */
template <int N>
static __device__ __forceinline__ void weights_join_all(const weights_pack<N> &w, hr_dtype dtype,
                                                        hr_weights_mode mode, float (&x)[N])
{
    weights_with_literals(dtype, mode, [&](hr_dtype literal, hr_weights_mode literal_mode) {
#pragma unroll
        for (int e = 0; e < N; e++)
            x[e] = weights_join(weights_get(w, e, literal, literal_mode), literal, literal_mode);
    });
}

/* And back; `random` has 16 bits per weight, if the mode needs any. */
template <int N>
static __device__ __forceinline__ weights_pack<N>
weights_split_all(const float (&x)[N], hr_dtype dtype, hr_weights_mode mode,
                  const hr_random4 &random)
{
    uint32_t params[N] = {0}, residuals[N] = {0};
    weights_with_literals(dtype, mode, [&](hr_dtype literal, hr_weights_mode literal_mode) {
        const hr_dtype residual = weights_residual_dtype(literal_mode, literal);
#pragma unroll
        for (int e = 0; e < N; e++) {
            const weights_bits bits =
                weights_split(x[e], literal, literal_mode, weights_random(&random, e));
            pack_put_bits(params, e, literal, bits.param);
            if (residual != HR_F64)
                pack_put_bits(residuals, e, residual, bits.residual);
        }
    });
    weights_pack<N> w;
    w.params = pack_from(params);
    w.residuals = pack_from(residuals);
    return w;
}

/* The random bits of an element, so many past the start. */
static __device__ __forceinline__ uint32_t weights_random_at(const weights_record &record,
                                                             weights_start start, double step,
                                                             uint32_t ahead)
{
    const int64_t e = weights_element(record.place, start, ahead);
    const hr_random4 words = hr_philox(weights_counter(step, (uint64_t)(e / 8)), record.seed);
    return weights_random(&words, e);
}

/* Those of N elements, 4 or 8, two in a word. */
template <uint32_t N>
static __device__ __forceinline__ hr_random4 weights_random_of(const weights_record &record,
                                                               weights_start start, double step,
                                                               uint32_t ahead)
{
    const int64_t e = weights_element(record.place, start, ahead);
    hr_random4 random = {{0, 0, 0, 0}};
    if (e % N == 0 && weights_element(record.place, start, ahead + N - 1) == e + N - 1) {
        random = hr_philox(weights_counter(step, (uint64_t)(e / 8)), record.seed);
        random.word[0] = e % 8 == 0 ? random.word[0] : random.word[2];
        random.word[1] = e % 8 == 0 ? random.word[1] : random.word[3];
        return random;
    }
#pragma unroll 1
    for (uint32_t j = 0; j < N; j++) {
        const uint32_t bits = weights_random_at(record, start, step, ahead + j) << (16 * (j % 2));
#pragma unroll
        for (uint32_t word = 0; word < 4; word++)
            random.word[word] |= j / 2 == word ? bits : 0;
    }
    return random;
}

/* Whether a weight that was to change is stored as it was. */
static __device__ __forceinline__ uint32_t weights_stall(weights_bits before, weights_bits after,
                                                         float was, float is)
{
    return is != was && before.param == after.param && before.residual == after.residual;
}

/* How many of the first `count` weights that were to change, to `is`, are stored as they were. */
template <int N>
static __device__ __forceinline__ uint32_t weights_stalled(const weights_pack<N> &before,
                                                           const weights_pack<N> &after,
                                                           const float (&is)[N], hr_dtype dtype,
                                                           hr_weights_mode mode, int count)
{
    float was[N];
    weights_join_all(before, dtype, mode, was);
    uint32_t stalled = 0;
#pragma unroll
    for (int e = 0; e < N; e++)
        stalled += e < count && weights_stall(weights_get(before, e, dtype, mode),
                                              weights_get(after, e, dtype, mode), was[e], is[e]);
    return stalled;
}

/* Adds the threads' counts, a warp at a time; all threads of a warp come here. */
static __device__ __forceinline__ void weights_add_stalled(int64_t *total, uint32_t stalled)
{
    for (int lanes = 16; lanes > 0; lanes /= 2)
        stalled += __shfl_down_sync(0xFFFFFFFFu, stalled, lanes);
    if (threadIdx.x % 32 == 0 && stalled > 0)
        atomicAdd((unsigned long long *)total, (unsigned long long)stalled);
}

#endif
