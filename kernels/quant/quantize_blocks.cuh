/* quantize_blocks.cuh: the codes of the dynamic map on a GPU, with a map in shared memory. */
#ifndef HR_QUANTIZE_BLOCKS_CUH
#define HR_QUANTIZE_BLOCKS_CUH

#include "kernels/core/cuda.cuh"
#include "kernels/quant/quantize_blocks.h"

/* Fills the maps from the unsigned (0) or the signed one (1) to `last`, by the whole thread block,
 * which meets at its end. */
template <int threads>
static __device__ __attribute__((noinline)) void quant_fill_maps(quant_maps *maps, int first,
                                                                 int last, int bnb)
{
    for (int phase = 0; phase < 3; phase++) {
        for (int s = first; s <= last; s++)
            dynamic_map_fill(&maps->map[s], s, bnb, phase, (int)threadIdx.x, threads);
        __syncthreads();
    }
}

/* dynamic_encode(), but its last table, the one whose lanes wait for each other, is only asked
 * about what may be a midpoint: a place close to the middle between two codes, or, where y is
 * negative, a magnitude next to the one that a decade begins with. */
static __device__ __forceinline__ int dynamic_encode_cuda(const dynamic_map &map, float y,
                                                          int is_signed)
{
    const int negative = is_signed && y < 0.0f;
    const float magnitude = negative ? hr_float((hr_bits(y) & 0x7FFFFFFFu) + 1u) : y;
    const float clamped = fmaxf(magnitude, 0x1p-31f); /* NaN becomes it */
    const int pair = dynamic_pair(clamped);
    const float begin = map.begins[pair];
    const int decade = map.before[pair] + (clamped > begin);
    const float place = fmaf(clamped, map.slopes[decade], map.offsets[decade]);
    const float distance = fminf(place, map.lasts[decade]);
    const float signed_distance = negative ? fmaxf(-distance, -127.0f) : distance;
    /* An addition that rounds to an integer, and leaves it in the low bits. */
    const float integer = signed_distance + 0x1.8p23f;
    const float rest = signed_distance - (integer - 0x1.8p23f);
    int code = dynamic_zero(is_signed) + (int)(hr_bits(integer) - hr_bits(0x1.8p23f));
    const bool at_begin = is_signed && hr_bits(clamped) - hr_bits(begin) == 1;
    if (fabsf(rest) > 0.5f - DYNAMIC_SLACK || at_begin) {
        code -= rest < 0.0f;
        code += y > map.thresholds[code];
    }
    return code;
}

/* quant_encode(). */
static __device__ __forceinline__ uint8_t quant_encode_cuda(const dynamic_map &map, float x,
                                                            dynamic_scale scale, int is_signed)
{
    const int code = dynamic_encode_cuda(map, x * scale.first * scale.second, is_signed);
    return (uint8_t)(!is_signed && x > 0.0f ? max(code, 1) : code);
}

#endif
