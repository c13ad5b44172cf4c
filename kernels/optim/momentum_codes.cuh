/*
 * momentum_codes.cuh: blocks of 8-bit codes of moments that a warp holds in registers, 256 elements at
 * a time: their scales, and the codes.
 */
#ifndef HR_MOMENTUM_CODES_CUH
#define HR_MOMENTUM_CODES_CUH

#include "kernels/quant/quantize_blocks.cuh"

#define CODES_TILE 256 /* elements of a warp */

/* From the largest of each group to the largest of its block, in every lane. A block of 512 is two
 * tiles, of neighboring warps. */
template <int warps, int GROUP, int GROUPS>
static __device__ __forceinline__ void codes_largest_of_blocks(uint32_t (&largest)[GROUPS],
                                                               int block_shift)
{
    const bool one_block = 1 << block_shift >= CODES_TILE;
#pragma unroll
    for (int j = 1; j < GROUPS; j++)
        largest[0] = one_block ? max(largest[0], largest[j]) : largest[0];
#pragma unroll
    for (int j = 0; j < GROUPS; j++)
#pragma unroll
        for (int width = 1; width < 32; width *= 2)
            if ((j == 0 || !one_block) && width * GROUP < 1 << block_shift)
                largest[j] = max(largest[j], __shfl_xor_sync(0xFFFFFFFFu, largest[j], width));
    if (1 << block_shift > CODES_TILE) {
        __shared__ uint32_t tiles[warps];
        const int warp = (int)threadIdx.x / 32;
        if (threadIdx.x % 32 == 0)
            tiles[warp] = largest[0];
        __syncthreads();
        largest[0] = max(largest[0], tiles[warp ^ 1]);
        __syncthreads(); /* before the next tile's */
    }
#pragma unroll
    for (int j = 1; j < GROUPS; j++)
        largest[j] = one_block ? largest[0] : largest[j];
}

/* Encodes N moments of a block whose largest magnitude is known, and returns its absmax. */
template <int N>
static __device__ __forceinline__ float codes_encode(const quant_tables &tables,
                                                     const float (&moments)[N], uint32_t largest,
                                                     uint32_t (&codes)[N / 4])
{
    const float absmax = quant_absmax(largest, 0);
    const dynamic_scale scale = dynamic_scale_of(absmax);
    float y[N];
#pragma unroll
    for (int e = 0; e < N; e++)
        y[e] = quant_quotient<1>(moments[e], scale);
    quant_codes<1>(tables, y, codes);
    return absmax;
}

#endif
