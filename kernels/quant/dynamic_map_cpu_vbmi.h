/*
 * dynamic_map_cpu_vbmi.h: decodes and encodes 64 codes at a time, with AVX-512 VBMI's byte
 * permutes.
 *
 * Decoding looks a value up byte by byte. Encoding looks the first 16 bits of a number up in a
 * table: the numbers that share these bits, a cell, have one code or two neighboring codes. A
 * gather reads the table, because it needs few of the instructions that compete for the vector
 * units.
 *
 * The codes are those of quant_encode() in quantize_blocks.h, which names the tests that compare
 * them.
 */
#ifndef HR_DYNAMIC_MAP_CPU_VBMI_H
#define HR_DYNAMIC_MAP_CPU_VBMI_H

#include "kernels/core/cpu_vbmi.h"
#include "kernels/quant/dynamic_map.h"

/* The tables of one map. */
typedef struct dynamic_bytes {
    _Alignas(64) uint8_t planes[4][256]; /* byte k of the value of a code */
    /* Constants. Loading them costs less than an instruction that broadcasts a byte. */
    uint8_t
        unpacking[2][64]; /* by order: the elements in the order that unpacking their bytes needs */
    uint8_t packing[2][64];  /* by order: the place of byte 2 of each element's word */
    uint8_t repeated[5][64]; /* bytes 64, 126, 127, 128 and 192 */
} dynamic_bytes;

enum { DYNAMIC_64, DYNAMIC_126, DYNAMIC_127, DYNAMIC_128, DYNAMIC_192 };

/* The cells of both maps. Bits 16 to 23 of cell + bits(y) are the code: a carry passes into them
 * where the second code of the cell begins. A carry can only add 1, so for a negative y these bits
 * are 126 - code. |y| must be at least signed_least, because no carry leads to or from the code of
 * zero.
 *
 * The cells of the signed map are for numbers from 2^-22 to 1 and their negatives. Between these
 * lie the cells of the unsigned map, for numbers from 0 to 1; there a positive number never gets
 * code 0, which means zero (quant_keep_positive()). */
#define DYNAMIC_CELLS_UNSIGNED 0x4000
typedef struct dynamic_cells {
    uint32_t cells[0xC000];
    float signed_least; /* the largest number that gets code 127 and whose negative gets it too */
} dynamic_cells;

HR_INLINE uint32_t dynamic_cell(uint32_t first, uint32_t low, uint32_t high, uint32_t last)
{
    const uint32_t carry = low != high ? 0xFFFFu - (last & 0xFFFFu) : 0u;
    return ((low - first) << 16) + carry;
}

static inline void dynamic_cells_fill(dynamic_cells *c, const dynamic_map maps[2])
{
    const float *const thresholds = maps[1].thresholds;
    c->signed_least = hr_float(hr_bits(thresholds[127]) - 1u);
    for (uint32_t first = 0; first <= 0x3F80u; first++) {
        const float from = hr_float(first << 16), to = hr_float(first << 16 | 0xFFFFu);
        int low = dynamic_encode(&maps[0], from, 0), high = dynamic_encode(&maps[0], to, 0);
        /* A positive number gets at least code 1. */
        low = low == 0 && first != 0 ? 1 : low;
        high = high == 0 ? 1 : high;
        const uint32_t last = first == 0 ? 0u : hr_bits(maps[0].thresholds[low]);
        c->cells[DYNAMIC_CELLS_UNSIGNED + first] =
            dynamic_cell(first, (uint32_t)low, (uint32_t)high, last);
        if (first < 0x3480u)
            continue;
        low = dynamic_encode(&maps[1], from, 1), high = dynamic_encode(&maps[1], to, 1);
        c->cells[first] =
            dynamic_cell(first, (uint32_t)low, (uint32_t)high, hr_bits(thresholds[low]));
        /* Below zero, the magnitude of a threshold gets the next code already. */
        low = dynamic_encode(&maps[1], -from, 1), high = dynamic_encode(&maps[1], -to, 1);
        low = low == 127 ? 126 : low;
        high = high == 127 ? 126 : high;
        c->cells[0x8000u + first] =
            dynamic_cell(0x8000u + first, (uint32_t)(126 - low), (uint32_t)(126 - high),
                         hr_bits(low > 0 ? thresholds[low - 1] : 0.0f) - 1u);
    }
}

static inline void dynamic_bytes_fill(dynamic_bytes *b, const dynamic_map *map)
{
    static const uint8_t bytes[5] = {64, 126, 127, 128, 192};
    for (int i = 0; i < 5; i++)
        memset(b->repeated[i], bytes[i], sizeof b->repeated[i]);
    for (int order = 0; order < 2; order++)
        for (int k = 0; k < 4; k++)
            for (int lane = 0; lane < 16; lane++) {
                const int element = cpu_element((cpu_order)order, k, lane);
                b->unpacking[order][lane / 4 * 16 + k * 4 + lane % 4] = (uint8_t)element;
                b->packing[order][element] = (uint8_t)(4 * lane + 2);
            }
    for (int code = 0; code < 256; code++)
        for (int k = 0; k < 4; k++)
            b->planes[k][code] = (uint8_t)(hr_bits(map->values[code]) >> (8 * k));
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

CPU_AVX512_VBMI_BF16 HR_INLINE __m512i dynamic_repeated(const dynamic_bytes *b, int which)
{
    return _mm512_load_si512(b->repeated[which]);
}

/* 64 values that are being decoded, one byte of each at a time, so that other work fits in
 * between. */
typedef struct dynamic_decoding {
    __m512i code, planes[4];
    __mmask64 negative, other; /* signed: codes below 127, codes other than 127 */
    __mmask64 upper;           /* signed: in the upper half of a table; unsigned: from 64 */
    __mmask64 from_128, from_192;
} dynamic_decoding;

CPU_AVX512_VBMI_BF16 HR_INLINE void dynamic_decode_vbmi(dynamic_decoding *d, const dynamic_bytes *b,
                                                        const uint8_t *codes, int is_signed,
                                                        cpu_order order)
{
    const __m512i elements = _mm512_load_si512(b->unpacking[order]);
    const __m512i code = _mm512_permutexvar_epi8(elements, _mm512_loadu_si512(codes));
    if (is_signed) {
        /* A negative value is the value of code 254 - code with the sign bit; code 127 is 0. */
        d->negative = _mm512_cmplt_epu8_mask(code, dynamic_repeated(b, DYNAMIC_127));
        d->other = _mm512_cmpneq_epu8_mask(code, dynamic_repeated(b, DYNAMIC_127));
        d->code = _mm512_mask_sub_epi8(code, d->negative, dynamic_repeated(b, DYNAMIC_126), code);
        d->upper = _mm512_mask_test_epi8_mask(d->other, d->code, dynamic_repeated(b, DYNAMIC_64));
    } else {
        d->code = code;
        d->upper = _mm512_cmpge_epu8_mask(code, dynamic_repeated(b, DYNAMIC_64));
        d->from_128 = _mm512_movepi8_mask(code);
        d->from_192 = _mm512_cmpge_epu8_mask(code, dynamic_repeated(b, DYNAMIC_192));
    }
}

/* Byte k. */
CPU_AVX512_VBMI_BF16 HR_INLINE void
dynamic_decode_byte_vbmi(dynamic_decoding *d, const dynamic_bytes *b, int k, int is_signed)
{
    const __m512i t0 = _mm512_load_si512(b->planes[k]);
    const __m512i t64 = _mm512_load_si512(b->planes[k] + 64);
    const __m512i t128 = _mm512_load_si512(b->planes[k] + 128);
    const __m512i t192 = _mm512_load_si512(b->planes[k] + 192);
    __m512i plane;
    if (is_signed) {
        plane = _mm512_maskz_permutexvar_epi8(d->other, d->code, t128);
        plane = _mm512_mask_permutexvar_epi8(plane, d->upper, d->code, t192);
        if (k == 3)
            plane =
                _mm512_mask_add_epi8(plane, d->negative, plane, dynamic_repeated(b, DYNAMIC_128));
    } else {
        plane = _mm512_permutexvar_epi8(d->code, t0);
        plane = _mm512_mask_permutexvar_epi8(plane, d->upper, d->code, t64);
        plane = _mm512_mask_permutexvar_epi8(plane, d->from_128, d->code, t128);
        plane = _mm512_mask_permutexvar_epi8(plane, d->from_192, d->code, t192);
    }
    d->planes[k] = plane;
}

CPU_AVX512_VBMI_BF16 HR_INLINE void dynamic_decoded_vbmi(const dynamic_decoding *d,
                                                         __m512 values[4])
{
    const __m512i low0 = _mm512_unpacklo_epi8(d->planes[0], d->planes[1]);
    const __m512i low1 = _mm512_unpackhi_epi8(d->planes[0], d->planes[1]);
    const __m512i high0 = _mm512_unpacklo_epi8(d->planes[2], d->planes[3]);
    const __m512i high1 = _mm512_unpackhi_epi8(d->planes[2], d->planes[3]);
    values[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(low0, high0));
    values[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(low0, high0));
    values[2] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(low1, high1));
    values[3] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(low1, high1));
}

/* Encodes vector k of numbers y = x * scale and puts the codes in their places among 64. Begin with
 * k = 0. In the unsigned map with `clamps` the code is at least 1 where x > 0, and 0 elsewhere;
 * without, x must be at least 0, and y may be 0 only where x is 0. */
CPU_AVX512_VBMI_BF16 HR_INLINE __m512i dynamic_encode_vbmi(__m512i codes, const dynamic_bytes *b,
                                                           const dynamic_cells *c, int k, __m512 x,
                                                           __m512 scale, int is_signed,
                                                           cpu_order order, int clamps)
{
    __m512 y = _mm512_mul_ps(x, scale);
    if (is_signed) {
        /* The number of greater magnitude; for y = -signed_least and for a NaN, signed_least. */
        y = _mm512_range_ps(y, _mm512_set1_ps(c->signed_least), 0x7);
    } else if (clamps) {
        const __mmask16 positive = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ);
        y = _mm512_maskz_max_ps(positive, y, _mm512_set1_ps(0x1p-30f));
    }
    const __m512i bits = _mm512_castps_si512(y);
    const __m512i cells = _mm512_i32gather_epi32(
        _mm512_srli_epi32(bits, 16), c->cells + (is_signed ? 0 : DYNAMIC_CELLS_UNSIGNED), 4);
    const __m512i sums = _mm512_add_epi32(cells, bits);
    const __m512i places = _mm512_load_si512(b->packing[order]);
    if (k == 0)
        return _mm512_permutexvar_epi8(places, sums);
    const __mmask64 elements =
        order == CPU_IN_ROW ? 0xFFFFull << (16 * k) : 0x55555555ull << (k / 2 * 32 + k % 2);
    return _mm512_mask_permutexvar_epi8(codes, elements, places, sums);
}

/* Stores 64 codes. */
CPU_AVX512_VBMI_BF16 HR_INLINE void dynamic_encoded_vbmi(__m512i codes, const dynamic_bytes *b,
                                                         int is_signed, uint8_t *to)
{
    if (is_signed) {
        const __mmask64 negative = _mm512_cmplt_epu8_mask(codes, dynamic_repeated(b, DYNAMIC_127));
        codes = _mm512_mask_sub_epi8(codes, negative, dynamic_repeated(b, DYNAMIC_126), codes);
    }
    _mm512_storeu_si512(to, codes);
}
#endif

#endif
