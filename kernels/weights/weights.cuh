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

/* Eight weights as they lie in memory, params of 16 bits. */
typedef struct weights_pack {
    uint32_t params[4], residuals[8];
} weights_pack;

static __device__ __forceinline__ weights_pack weights_load8(const void *param,
                                                             const void *residual, int64_t i,
                                                             hr_dtype residual_dtype)
{
    const uint4 params = *(const uint4 *)((const uint16_t *)param + i);
    weights_pack pack = {{params.x, params.y, params.z, params.w}, {0}};
    if (residual_dtype == HR_I8) {
        const uint2 bytes = *(const uint2 *)((const uint8_t *)residual + i);
        pack.residuals[0] = bytes.x;
        pack.residuals[1] = bytes.y;
    } else if (residual_dtype != HR_F64) {
        const ::pack<8> words = pack_load<8>(residual, i, residual_dtype);
#pragma unroll
        for (int j = 0; j < 8; j++)
            pack.residuals[j] = pack_word(words, j);
    }
    return pack;
}

static __device__ __forceinline__ weights_bits weights_get8(const weights_pack &pack, int j,
                                                            hr_dtype residual)
{
    weights_bits bits;
    bits.param = (pack.params[j / 2] >> (16 * (j % 2))) & 0xFFFFu;
    bits.residual = residual == HR_F32  ? pack.residuals[j]
                    : residual == HR_I8 ? (pack.residuals[j / 4] >> (8 * (j % 4))) & 0xFFu
                                        : (pack.residuals[j / 2] >> (16 * (j % 2))) & 0xFFFFu;
    return bits;
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

/* Puts weight j of eight into what is to be stored: params of 16 bits. */
static __device__ __forceinline__ void weights_put8(weights_pack &pack, int j, weights_bits bits,
                                                    hr_dtype residual)
{
    pack.params[j / 2] |= bits.param << (16 * (j % 2));
    if (residual == HR_F32)
        pack.residuals[j] = bits.residual;
    else if (residual == HR_I8)
        pack.residuals[j / 4] |= bits.residual << (8 * (j % 4));
    else
        pack.residuals[j / 2] |= bits.residual << (16 * (j % 2));
}

static __device__ __forceinline__ void weights_store8(void *param, void *residual, int64_t i,
                                                      const weights_pack &pack,
                                                      hr_dtype residual_dtype)
{
    const uint32_t *const p = pack.params, *const r = pack.residuals;
    __stcs((uint4 *)((uint16_t *)param + i), make_uint4(p[0], p[1], p[2], p[3]));
    if (residual_dtype == HR_I8)
        __stcs((uint2 *)((uint8_t *)residual + i), make_uint2(r[0], r[1]));
    else if (residual_dtype != HR_F64)
        pack_store(residual, i, pack_from(pack.residuals), residual_dtype);
}

/* Residuals of four weights; bytes are in the first word. */
static __device__ __forceinline__ pack<4>
weights_load_residuals(const void *base, uint32_t i, hr_dtype residual, bool whole, int left)
{
    pack<4> residuals = {};
    if (residual == HR_I8)
        residuals.words[0] = pack_load_bytes((const uint8_t *)base, i, whole, left, 0);
    else if (residual != HR_F64)
        residuals = pack_load<4>(base, i, residual, whole, left);
    return residuals;
}

static __device__ __forceinline__ void weights_store_residuals(void *base, uint32_t i,
                                                               hr_dtype residual, bool whole,
                                                               int left, const pack<4> &residuals)
{
    if (residual == HR_I8)
        pack_store_bytes((uint8_t *)base, i, whole, left, residuals.words[0]);
    else if (residual != HR_F64)
        pack_store<4>(base, i, residual, whole, left, residuals);
}

/* Whether a weight that was to change is stored as it was. */
static __device__ __forceinline__ uint32_t weights_stall(weights_bits before, weights_bits after,
                                                         float was, float is)
{
    return is != was && before.param == after.param && before.residual == after.residual;
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
