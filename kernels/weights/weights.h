/*
 * weights.h: the formula of one 16-bit weight: joined from (param, residual) to binary32, and split
 * into them again. The modes are documented at hr_weights in headroom.h; weights_modes.h has their
 * facts. weights_cpu_vbmi.h repeats join and split on vectors; tests/python/functional/
 * test_cpu_levels.py compares the two for every param.
 */
#ifndef HR_WEIGHTS_H
#define HR_WEIGHTS_H

#include "kernels/core/dtype.h"
#include "kernels/core/random.h"
#include "kernels/weights/weights_modes.h"

/* A weight as it is stored. The bits of each part are the low bits of the word. */
typedef struct weights_bits {
    uint32_t param, residual;
} weights_bits;

HR_INLINE float weights_from_half(uint32_t half, hr_dtype dtype)
{
    return hr_from_half((uint16_t)half, dtype);
}

HR_INLINE uint32_t weights_to_half(float x, hr_dtype dtype)
{
    return hr_to_half(x, dtype);
}

/* Other code may write a param after weights_split() made its residual: a pruning mask, a
 * checkpoint, a clamp. The written param counts, so each mode drops a residual that weights_split()
 * never makes for this param. The rules below do not change weights that were split. */

/* Drops a residual that is larger than half a unit in the last place of the param. So the residual
 * of a zero is dropped unless it is 0, and no sum of finite numbers overflows. */
HR_INLINE float weights_join_kahan(float param, float residual, hr_dtype dtype)
{
    const float power = hr_float(hr_bits(param) & 0x7F800000u); /* of two, at most |param| */
    const float magnitude = hr_float(hr_bits(residual) & 0x7FFFFFFFu);
    const float halves = magnitude * (dtype == HR_BF16 ? 0x1p8f : 0x1p11f);
    return param + (halves <= power ? residual : 0.0f);
}

/* Drops a residual that would turn a number into a NaN: a negative residual of a zero, whose sum
 * wraps to the other sign, and a positive residual of an infinity. */
HR_INLINE float weights_join_remainder(uint32_t param, int32_t residual)
{
    const float sum = hr_float((param << 16) + (uint32_t)residual);
    return sum != sum ? hr_float(param << 16) : sum;
}

/* Drops a master weight that does not round to the param. */
HR_INLINE float weights_join_master(uint32_t param, float master, hr_dtype dtype)
{
    return weights_to_half(master, dtype) == param ? master : weights_from_half(param, dtype);
}

/* The weight in binary32. The payload of a NaN is unspecified. */
HR_INLINE float weights_join(weights_bits bits, hr_dtype dtype, hr_weights_mode mode)
{
    switch (mode) {
    case HR_WEIGHTS_KAHAN:
        return weights_join_kahan(weights_from_half(bits.param, dtype),
                                  weights_from_half(bits.residual, dtype), dtype);
    case HR_WEIGHTS_MASTER:
        return weights_join_master(bits.param, hr_float(bits.residual), dtype);
    case HR_WEIGHTS_REMAINDER16:
        return weights_join_remainder(bits.param, (int16_t)bits.residual);
    case HR_WEIGHTS_REMAINDER8:
    case HR_WEIGHTS_REMAINDER8_STOCHASTIC:
        return weights_join_remainder(bits.param, (int8_t)bits.residual * 256);
    default:
        return dtype == HR_F32 ? hr_float(bits.param) : weights_from_half(bits.param, dtype);
    }
}

/* Rounds x to f16 at random; `random` has 16 bits. */
HR_INLINE uint32_t weights_to_f16_randomly(float x, uint32_t random)
{
    const uint32_t bits = hr_bits(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    const uint32_t normal = (magnitude - (112u << 23) + (random & 0x1FFFu)) >> 13;
    /* Below 2^-14 the gap is 2^-24. */
    const float gaps = (magnitude < (113u << 23) ? hr_float(magnitude) : 0.0f) * 0x1p24f;
    const uint32_t below = (uint32_t)gaps;
    const uint32_t up = (gaps - (float)below) * 0x1p16f > (float)random;
    const uint32_t finite = magnitude < (113u << 23) ? below + up : normal;
    const uint32_t bounded = magnitude >= (143u << 23) ? 0x7C00u : finite;
    return magnitude > 0x7F800000u ? 0x7FFFu : sign | bounded;
}

/* Splits a weight. `random`: 16 random bits, if the mode rounds at random. */
HR_INLINE weights_bits weights_split(float x, hr_dtype dtype, hr_weights_mode mode, uint32_t random)
{
    const uint32_t bits = hr_bits(x);
    const int is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    weights_bits split = {0, 0};
    switch (mode) {
    case HR_WEIGHTS_KAHAN: {
        split.param = weights_to_half(x, dtype);
        const float rounded = weights_from_half(split.param, dtype);
        const int is_finite = (hr_bits(rounded) & 0x7FFFFFFFu) < 0x7F800000u;
        split.residual = weights_to_half(is_finite ? x - rounded : 0.0f, dtype);
        break;
    }
    case HR_WEIGHTS_MASTER:
        split.param = weights_to_half(x, dtype);
        split.residual = is_nan ? 0x7FFFFFFFu : bits;
        break;
    case HR_WEIGHTS_REMAINDER16:
        split.param = is_nan ? 0x7FFFu : (bits + 0x8000u) >> 16;
        split.residual = is_nan ? 0u : bits & 0xFFFFu;
        break;
    case HR_WEIGHTS_REMAINDER8:
    case HR_WEIGHTS_REMAINDER8_STOCHASTIC: {
        const uint32_t half =
            mode == HR_WEIGHTS_REMAINDER8 ? 0x7Fu + ((bits >> 8) & 1u) : random & 0xFFu;
        const uint32_t rounded = bits + half;
        split.param = is_nan ? 0x7FFFu : (rounded + 0x8000u) >> 16;
        split.residual = is_nan ? 0u : (rounded >> 8) & 0xFFu;
        break;
    }
    case HR_WEIGHTS_STOCHASTIC:
        split.param = dtype == HR_F16 ? weights_to_f16_randomly(x, random)
                      : is_nan        ? 0x7FFFu
                                      : (bits + random) >> 16;
        break;
    default:
        split.param = dtype != HR_F32 ? weights_to_half(x, dtype) : is_nan ? 0x7FFFFFFFu : bits;
        break;
    }
    return split;
}

/* ---- Memory ---------------------------------------------------------------------------------- */

HR_INLINE uint32_t weights_load_bits(const void *base, int64_t i, hr_dtype dtype)
{
    switch (dtype) {
    case HR_F32:
        return ((const uint32_t *)base)[i];
    case HR_I8:
        return ((const uint8_t *)base)[i];
    case HR_F64:
        return 0;
    default:
        return ((const uint16_t *)base)[i];
    }
}

HR_INLINE void weights_store_bits(void *base, int64_t i, uint32_t bits, hr_dtype dtype)
{
    switch (dtype) {
    case HR_F32:
        ((uint32_t *)base)[i] = bits;
        break;
    case HR_I8:
        ((uint8_t *)base)[i] = (uint8_t)bits;
        break;
    case HR_F64:
        break;
    default:
        ((uint16_t *)base)[i] = (uint16_t)bits;
        break;
    }
}

HR_INLINE weights_bits weights_bits_at(const void *param, const void *residual, int64_t i,
                                       hr_dtype dtype, hr_weights_mode mode)
{
    weights_bits bits;
    bits.param = weights_load_bits(param, i, dtype);
    bits.residual = weights_load_bits(residual, i, weights_residual_dtype(mode, dtype));
    return bits;
}

HR_INLINE void weights_put_bits(void *param, void *residual, int64_t i, weights_bits bits,
                                hr_dtype dtype, hr_weights_mode mode)
{
    weights_store_bits(param, i, bits.param, dtype);
    weights_store_bits(residual, i, bits.residual, weights_residual_dtype(mode, dtype));
}

/* ---- Randomness ------------------------------------------------------------------------------ */

/* Where a range of a part's elements begins in the whole. With it, the elements of the range need
 * no 64-bit division. */
typedef struct weights_start {
    int64_t run, column; /* the first element of the run, and the offset in the run */
} weights_start;

HR_INLINE weights_start weights_start_of(hr_place place, int64_t begin)
{
    weights_start start;
    start.run = place.offset + begin / place.run * place.stride;
    start.column = begin % place.run;
    return start;
}

/* The element of the whole that is `ahead` elements of the part after the start; ahead < 2^31. */
HR_INLINE int64_t weights_element(hr_place place, weights_start start, uint32_t ahead)
{
    const int64_t x = start.column + ahead;
    const int64_t runs = place.run >= INT64_C(1) << 31
                             ? x >= place.run
                             : (int64_t)((uint32_t)x / (uint32_t)place.run);
    return start.run + runs * place.stride + (x - runs * place.run);
}

/* The Philox counter for elements 8 * j to 8 * j + 7 in step t. Its highest bit is set, which keeps
 * it apart from the counters that other uses of the same seed take. */
HR_INLINE hr_random4 weights_counter(double t, uint64_t j)
{
    const uint64_t step = (uint64_t)t;
    hr_random4 counter;
    counter.word[0] = (uint32_t)j;
    counter.word[1] = (uint32_t)(j >> 32);
    counter.word[2] = (uint32_t)step;
    counter.word[3] = (uint32_t)(step >> 32) | 0x80000000u;
    return counter;
}

/* The 16 random bits of element e, from the words of its counter. Selects instead of indexing, so
 * that the words stay in registers. */
HR_INLINE uint32_t weights_random(const hr_random4 *words, int64_t e)
{
    const uint32_t low = e & 2 ? words->word[1] : words->word[0];
    const uint32_t high = e & 2 ? words->word[3] : words->word[2];
    return ((e & 4 ? high : low) >> (16 * (e & 1))) & 0xFFFFu;
}

/* ---- The kernels ----------------------------------------------------------------------------- */

/* The checked arguments of a call. */
typedef struct weights_args {
    const hr_tensor_list *values; /* f32 */
    const hr_tensor_list *params;
    const hr_weights *weights;
    int split; /* 1: values to params. 0: params to values */
} weights_args;

#ifdef __cplusplus
extern "C" {
#endif

hr_status weights_cpu(const weights_args *args);
hr_status weights_cuda(const weights_args *args, const hr_exec *exec);

#ifdef __cplusplus
}
#endif

#endif
