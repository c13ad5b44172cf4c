/*
 * quantize_blocks.h: numbers as codes of the dynamic map, with one scale per block. The formula of
 * a block and of an element, which the step of 8-bit Adam shares, and the kernels. The rule is
 * documented at hr_quantize_blocks in headroom.h.
 *
 * 8-bit optimizers via block-wise quantization, Dettmers et al., arXiv:2110.02861.
 */
#ifndef HR_QUANTIZE_BLOCKS_H
#define HR_QUANTIZE_BLOCKS_H

#include "kernels/quant/dynamic_map.h"

#define QUANT_MIN_BLOCK 64
#define QUANT_MAX_BLOCK 4096

/* ---- The absmax of a block ------------------------------------------------------------------- */

/* A block's absmax is the largest of these as integers, in any order: NaN is above infinity, which
 * is above all numbers. bitsandbytes' fmaxf() passes over NaN. */
HR_INLINE uint32_t quant_magnitude(float x, int bnb)
{
    const uint32_t bits = hr_bits(x) & 0x7FFFFFFFu;
    return bnb && bits > 0x7F800000u ? 0u : bits;
}

/* The absmax, from that integer. NaN if it is not finite: infinity times the code of zero would be
 * NaN and times another infinity, which stops an element silently. */
HR_INLINE float quant_absmax(uint32_t magnitude, int bnb)
{
    return hr_float(!bnb && magnitude >= 0x7F800000u ? 0x7FFFFFFFu : magnitude);
}

/* ---- The codes of an element ----------------------------------------------------------------- */

/* Both maps, [0] for exp_avg_sq and [1] for exp_avg: indexed by is_signed. */
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

/* The code of the moment x: the nearest, but a positive exp_avg_sq never that of zero. */
HR_INLINE uint8_t quant_encode(const quant_maps *maps, float x, dynamic_scale scale, int is_signed)
{
    const float y = x * scale.first * scale.second;
    const int code = dynamic_encode(&maps->map[is_signed], y, is_signed);
    return (uint8_t)(!is_signed && x > 0.0f && code == 0 ? 1 : code);
}

/* The same with stochastic rounding. */
HR_INLINE uint8_t quant_encode_randomly(const quant_maps *maps, float x, dynamic_scale scale,
                                        int is_signed, uint32_t random)
{
    const float y = x * scale.first * scale.second;
    const int code = dynamic_encode_randomly(&maps->map[is_signed], y, is_signed, random);
    return (uint8_t)(!is_signed && x > 0.0f && code == 0 ? 1 : code);
}

/* ---- The kernels ----------------------------------------------------------------------------- */

/* The arguments of a call, checked. */
typedef struct quantize_args {
    const hr_tensor_list *codes, *absmaxs, *values;
    const hr_quantize_config *config;
    int decode; /* codes to values, else values to codes */
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
