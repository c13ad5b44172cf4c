/*
 * quantize_blocks.h: the formula that turns a block of numbers into codes of the dynamic map and a
 * scale, which the step of 8-bit Adam shares, and the kernels that apply it to lists. The rule is
 * documented at hr_quantize_blocks in headroom.h.
 *
 * Vector code repeats quant_encode(): dynamic_distances_avx2() and dynamic_codes_avx512() in
 * dynamic_map_cpu.h, dynamic_encode_vbmi() in dynamic_map_cpu_vbmi.h and quant_encode_cuda() in
 * quantize_blocks.cuh. Tests compare them on either side of every border between two codes, and for
 * positive numbers of every size: tests/c/quant/dynamic_map_test.cpp and
 * tests/python/functional/test_cpu_levels.py.
 *
 * 8-bit optimizers via block-wise quantization, Dettmers et al., arXiv:2110.02861.
 */
#ifndef HR_QUANTIZE_BLOCKS_H
#define HR_QUANTIZE_BLOCKS_H

#include "kernels/quant/dynamic_map.h"

#define QUANT_MIN_BLOCK 64
#define QUANT_MAX_BLOCK 4096

/* ---- The absmax of a block ------------------------------------------------------------------- */

/* The magnitude of x as an integer. The largest of a block gives its absmax, in whatever order they
 * are compared: a NaN is above infinity, which is above all numbers. With `bnb` NaNs are passed
 * over, as bitsandbytes' fmaxf() does. */
HR_INLINE uint32_t quant_magnitude(float x, int bnb)
{
    const uint32_t bits = hr_bits(x) & 0x7FFFFFFFu;
    return bnb && bits > 0x7F800000u ? 0u : bits;
}

/* The absmax, from the largest magnitude. An absmax that is not finite becomes NaN: infinity would
 * decode the code of zero to NaN and all others to infinity, and an element whose second moment is
 * infinite would silently stop. */
HR_INLINE float quant_absmax(uint32_t magnitude, int bnb)
{
    return hr_float(!bnb && magnitude >= 0x7F800000u ? 0x7FFFFFFFu : magnitude);
}

/* ---- The codes of an element ----------------------------------------------------------------- */

/* Both maps, indexed by is_signed: [0] is for second moments, [1] for first. */
typedef struct quant_maps {
    dynamic_map map[2];
} quant_maps;

HR_INLINE void quant_maps_fill(quant_maps *maps, int bnb)
{
    for (int phase = 0; phase < 3; phase++)
        for (int is_signed = 0; is_signed < 2; is_signed++)
            dynamic_map_fill(&maps->map[is_signed], is_signed, bnb, phase, 0, 1);
}

HR_INLINE float quant_decode(const quant_maps *maps, uint8_t code, float absmax, int is_signed)
{
    return maps->map[is_signed].values[code] * absmax;
}

/* The code of x, from the code that its quotient gets: in the unsigned map a positive x gets at
 * least code 1, because code 0 means zero. */
HR_INLINE uint8_t quant_keep_positive(int code, float x, int is_signed)
{
    return (uint8_t)(!is_signed && x > 0.0f && code == 0 ? 1 : code);
}

/* The code of x, rounded to nearest. */
HR_INLINE uint8_t quant_encode(const quant_maps *maps, float x, dynamic_scale scale, int is_signed)
{
    const float y = x * scale.first * scale.second;
    const int code = dynamic_encode(&maps->map[is_signed], y, is_signed);
    return quant_keep_positive(code, x, is_signed);
}

/* The code of x, rounded at random. */
HR_INLINE uint8_t quant_encode_randomly(const quant_maps *maps, float x, dynamic_scale scale,
                                        int is_signed, uint32_t random)
{
    const float y = x * scale.first * scale.second;
    const int code = dynamic_encode_randomly(&maps->map[is_signed], y, is_signed, random);
    return quant_keep_positive(code, x, is_signed);
}

/* ---- The kernels ----------------------------------------------------------------------------- */

/* The checked arguments of a call. */
typedef struct quantize_args {
    const hr_tensor_list *codes, *absmaxs, *values;
    const hr_quantize_config *config;
    int decode; /* 1: codes to values. 0: values to codes */
} quantize_args;

#ifdef __cplusplus
extern "C" {
#endif

hr_status quantize_blocks_cpu(const quantize_args *args);
hr_status quantize_blocks_cuda(const quantize_args *args, const hr_exec *exec);

#ifdef __cplusplus
}
#endif

#endif
