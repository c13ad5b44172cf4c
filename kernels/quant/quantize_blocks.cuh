/*
 * quantize_blocks.cuh: the codes of the dynamic map on a GPU, with tables in shared memory, which the
 * compiler computes and each thread block copies.
 *
 * A number's exponent and leading bits of mantissa select a cell, no wider than the gap between two
 * thresholds. So a cell's byte names one threshold, and on which side of it the number lies decides
 * between two codes. The byte is the upper code u, and the code u - !(y > below[u]).
 */
#ifndef HR_QUANTIZE_BLOCKS_CUH
#define HR_QUANTIZE_BLOCKS_CUH

#include "kernels/core/cuda.cuh"
#include "kernels/quant/quantize_blocks.h"

/* Of the unsigned map (0) and the signed one (1): the bits of mantissa that make cells narrow enough,
 * and as bits of binary32 the power of two up to which all numbers are in the first cell. Cells
 * reach up to 1 and a little more, as far as rounding takes a quotient. */
template <int is_signed> struct quant_cells {
    static constexpr int mantissa = is_signed ? 6 : 7, shift = 23 - mantissa;
    static constexpr uint32_t least = (uint32_t)(127 - (is_signed ? 22 : 23)) << 23;
    static constexpr int count = ((is_signed ? 22 : 23) << mantissa) + 1;
    static constexpr int begin = is_signed ? (23 << 7) + 1 : 0; /* past those of the unsigned map */
};

/* A multiple of 16 bytes, which is how it is copied. */
typedef struct __align__(16) quant_tables
{
    float values[2][256];
    float below[2][256]; /* a code: the largest number that gets the one before it */
    uint8_t cells[(quant_cells<1>::begin + quant_cells<1>::count + 15) / 16 * 16];
}
quant_tables;

template <int is_signed> constexpr void quant_fill_tables(quant_tables &tables, int bnb)
{
    typedef quant_cells<is_signed> cells;
    float *const values = tables.values[is_signed], *const below = tables.below[is_signed];
    for (int code = 0; code < 256; code++)
        values[code] = dynamic_value(code, is_signed);
    below[0] = -INFINITY;
    for (int code = 1; code < 256; code++)
        below[code] = dynamic_threshold(code - 1, values[code - 1], values[code], bnb);
    /* Magnitudes of both signs share their cells, and the upper code of -y is 255 - u. */
    int upper = dynamic_zero(is_signed) + 1;
    for (int cell = 0; cell < cells::count; cell++) {
        while (upper < 255 &&
               hr_float(cells::least + ((uint32_t)cell << cells::shift)) > below[upper])
            upper++;
        tables.cells[cells::begin + cell] = (uint8_t)upper;
    }
    if (!is_signed && !bnb) /* a positive exp_avg_sq never gets the code of zero */
        below[1] = 0.0f;
}

constexpr quant_tables quant_tables_of(int bnb)
{
    quant_tables tables = {};
    quant_fill_tables<0>(tables, bnb);
    quant_fill_tables<1>(tables, bnb);
    return tables;
}

static constexpr __device__ quant_tables quant_nearest_tables = quant_tables_of(0);
static constexpr __device__ quant_tables quant_bnb_tables = quant_tables_of(1);

/* By the whole thread block, which meets at the end. */
template <int threads, int bnb>
static __device__ __forceinline__ void quant_copy_tables(quant_tables *tables)
{
    constexpr int count = sizeof(quant_tables) / sizeof(uint4);
    const uint4 *const from = (const uint4 *)(bnb ? &quant_bnb_tables : &quant_nearest_tables);
#pragma unroll
    for (int first = 0; first < count; first += threads) {
        const int i = first + (int)threadIdx.x;
        if (i < count)
            ((uint4 *)tables)[i] = from[i];
    }
    __syncthreads();
}

/* The upper one of the two codes next to y. NaN is in the cell of zero. */
template <int is_signed>
static __device__ __forceinline__ uint32_t quant_upper(const quant_tables &tables, float y)
{
    typedef quant_cells<is_signed> cells;
    const float magnitude = fmaxf(is_signed ? fabsf(y) : y, hr_float(cells::least));
    const uint32_t cell = (hr_bits(magnitude) >> cells::shift) - (cells::least >> cells::shift);
    const uint32_t upper = tables.cells[cells::begin + cell];
    return is_signed && y < 0.0f ? upper ^ 255u : upper;
}

/* dynamic_encode(); but with tables that are not bitsandbytes', in the unsigned map, what is positive
 * never gets the code of zero. */
template <int is_signed>
static __device__ __forceinline__ int quant_code(const quant_tables &tables, float y)
{
    const uint32_t upper = quant_upper<is_signed>(tables, y);
    return (int)upper - !(y > tables.below[is_signed][upper]);
}

/* Subtracts 2^shift unless y > below: two instructions, for which the compiler takes three. */
static __device__ __forceinline__ uint32_t quant_step_down(uint32_t codes, float y, float below,
                                                           int shift)
{
#if defined(__CUDA_ARCH__)
    asm("{\n\t"
        ".reg .pred above;\n\t"
        "setp.gt.f32 above, %1, %2;\n\t"
        "@!above sub.u32 %0, %0, %3;\n\t"
        "}"
        : "+r"(codes)
        : "f"(y), "f"(below), "r"(1u << shift));
    return codes;
#else
    return y > below ? codes : codes - (1u << shift);
#endif
}

/* The codes of N numbers, four in a word: as upper codes first, from which a byte each may lose 1. */
template <int is_signed, int N>
static __device__ __forceinline__ void quant_codes(const quant_tables &tables, const float (&y)[N],
                                                   uint32_t (&codes)[N / 4])
{
    uint32_t upper[N];
#pragma unroll
    for (int e = 0; e < N; e++)
        upper[e] = quant_upper<is_signed>(tables, y[e]);
#pragma unroll
    for (int w = 0; w < N / 4; w++) {
        codes[w] = 0;
#pragma unroll
        for (int e = 0; e < 4; e++)
            codes[w] += upper[4 * w + e] << (8 * e);
#pragma unroll
        for (int e = 0; e < 4; e++)
            codes[w] = quant_step_down(codes[w], y[4 * w + e],
                                       tables.below[is_signed][upper[4 * w + e]], 8 * e);
    }
}

/* dynamic_encode_randomly(), from quant_code() and a y of quant_quotient(). */
template <int is_signed>
static __device__ __forceinline__ int quant_code_randomly(const quant_tables &tables, int nearest,
                                                          float y, uint32_t random)
{
    const float *const values = tables.values[is_signed];
    const int below = nearest - (values[nearest] > y);
    if (below < 0 || below == 255)
        return nearest;
    const float low = values[below], high = values[below + 1];
    const float uniform = (float)(random >> 8) * 0x1p-24f;
    const int code = below + (uniform * (high - low) < y - low);
    return !is_signed && y > 0.0f ? max(code, 1) : code;
}

/* Whether x / absmax is x times the reciprocal, and does not become zero for a positive x. */
template <int is_signed> static __device__ __forceinline__ bool quant_is_simple(float absmax)
{
    return absmax >= 0x1p-64f && absmax < (is_signed ? 0x1p64f : 2.0f);
}

/* x / absmax as quant_encode() computes it, for quant_code(): what is positive in the unsigned map
 * stays positive, and does not become zero where absmax is far larger. */
template <int is_signed>
static __device__ __forceinline__ float quant_quotient(float x, dynamic_scale scale)
{
    const float y = x * scale.first * scale.second;
    return !is_signed && x > 0.0f ? fmaxf(y, 0x1p-149f) : y;
}

/* The larger of `largest` and quant_magnitude(x). */
static __device__ __forceinline__ uint32_t quant_larger(uint32_t largest, float x, int bnb)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    if (!bnb) { /* one instruction, of which NaN comes out as 0x7FFFFFFF */
        float larger;
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(x)), "f"(hr_float(largest)));
        return hr_bits(larger);
    }
#endif
    return max(largest, quant_magnitude(x, bnb));
}

#endif
