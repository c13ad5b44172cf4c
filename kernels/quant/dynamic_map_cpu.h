/*
 * dynamic_map_cpu.h: encodes and decodes vectors of 8 or 16 numbers, with AVX2 and AVX-512.
 *
 * Gathering table entries, or a search, would cost more than the rest of an optimizer step. But
 * within a decade code and value are linear functions of each other, and the tables of decades fit
 * in vector registers. So with AVX-512 a value is slope * place + base, with an error of a few units
 * in the last place that a table of 4-bit differences corrects. (With AVX2 this takes longer than
 * loads from the table of values.) And a code is the value times a slope, rounded; where a value is
 * so close to a midpoint that this may be wrong, dynamic_encode() decides.
 *
 * The codes are those of quant_encode() in quantize_blocks.h, which names the tests that compare
 * them.
 */
#ifndef HR_DYNAMIC_MAP_CPU_H
#define HR_DYNAMIC_MAP_CPU_H

#include "kernels/core/cpu.h"
#include "kernels/quant/dynamic_map.h"

/* A code is the integer part of a number in [256, 512), whose last 15 bits are the fraction. */
#define DYNAMIC_FRACTION_BITS 15
/* A bound of the error of such a number, in units in the last place; a power of 2. */
#define DYNAMIC_SLACK_UNITS 4
/* Adds 1/2 to round, and the bound, so that one mask finds numbers too close to a midpoint. */
#define DYNAMIC_OFFSET (256.5f + 0x1p-15f * DYNAMIC_SLACK_UNITS)
/* A number that gets code 1 of the unsigned map, far from its borders: for a positive x whose
 * quotient is so small that it would get code 0, which means zero (quant_keep_positive()). */
#define DYNAMIC_LEAST_POSITIVE 3.25e-7f

/* The binade, as a biased exponent, from which decades are counted, and decades per binade in units
 * of 2^-16: dynamic_distances_avx2() must find a decade or the one before. dynamic_map_test.cpp has
 * numbers on either side of every border. */
#define DYNAMIC_FIRST_BINADE   106
#define DYNAMIC_BINADE_DECADES 21000

typedef struct dynamic_vectors {
    /* Decoding, indexed by the last 4 bits of the exponent of dynamic_place(). */
    float value_slopes[16], value_bases[16];
    uint32_t
        differences[32]; /* of 8 codes each, in units in the last place, from the top bits down */
    /* Encoding: as in dynamic_map, but indexed by pair of binades: [pair] after a decade has begun
     * in it, [16 + pair] before. In the unsigned map offsets and lasts include DYNAMIC_OFFSET. */
    float begins[16];
    float slopes[32], offsets[32], lasts[32];
} dynamic_vectors;

/* Encoding with 8 lanes: 8 entries for the 9 decades, because the first two need one only. Where a
 * decade has one part, or two, any line will do that passes its thresholds. */
typedef struct dynamic_decades {
    float ends[8]; /* where the next decade begins */
    float slopes[8], offsets[8], lasts[8];
} dynamic_decades;

static inline void dynamic_decades_fill(dynamic_decades *d, const dynamic_map *map, int is_signed)
{
    const int zero = dynamic_zero(is_signed), least = is_signed ? 1 : 2;
    for (int i = 0; i < 8; i++) {
        const int next = (least << (i + 1)) - (is_signed ? 0 : 1); /* its first code, from zero */
        d->ends[i] = i < 7 ? map->thresholds[zero + next - 1] : INFINITY;
        d->slopes[i] = map->slopes[i + 1];
        d->offsets[i] = map->offsets[i + 1];
        d->lasts[i] = map->lasts[i + 1];
    }
    const float first = map->thresholds[zero], second = map->thresholds[zero + 1];
    d->slopes[0] = is_signed ? 0.5f / first : 1.0f / (second - first);
    d->offsets[0] = is_signed ? 0.0f : 0.5f - first * d->slopes[0];
    for (int i = 0; i < 8; i++) {
        d->offsets[i] += DYNAMIC_OFFSET;
        d->lasts[i] += DYNAMIC_OFFSET;
    }
}

static inline float dynamic_place(int code, int is_signed)
{
    return (float)(is_signed ? 4 * (code - 127) : code + 1);
}

static inline void dynamic_vectors_fill(dynamic_vectors *v, const dynamic_map *map, int is_signed)
{
    const int zero = dynamic_zero(is_signed);
    memset(v, 0, sizeof *v);
    for (int n = is_signed ? 1 : 2, code = zero + 1; code < 256; code += n, n *= 2) {
        const float place = dynamic_place(code, is_signed);
        const int entry = (int)(hr_bits(place) >> 23) & 15;
        const float rise = n > 1 && code < 255
                               ? (map->values[code + n - 1] - map->values[code]) / (float)(n - 1)
                               : 0.0f;
        v->value_slopes[entry] = is_signed ? rise / 4.0f : rise;
        v->value_bases[entry] = map->values[code] - v->value_slopes[entry] * place;
    }
    for (int code = 0; code < 256; code++) {
        const float place = dynamic_place(code, is_signed);
        const int entry = (int)(hr_bits(place) >> 23) & 15;
        const float base = place < 0.0f ? -v->value_bases[entry] : v->value_bases[entry];
        const uint32_t bits = hr_bits(fmaf(v->value_slopes[entry], place, base));
        const uint32_t difference = hr_bits(map->values[code]) - bits;
        v->differences[code / 8] |= (difference & 15u) << (28 - code % 8 * 4);
    }
    const float offset = is_signed ? 0.0f : DYNAMIC_OFFSET;
    for (int entry = 0; entry < 32; entry++) {
        const int pair = entry % 16, decade = map->before[pair] + (entry < 16);
        v->begins[pair] = map->begins[pair];
        v->slopes[entry] = map->slopes[decade];
        v->offsets[entry] = map->offsets[decade] + offset;
        v->lasts[entry] = map->lasts[decade] + offset;
    }
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

/* Decodes 16 codes, without their scale. */
CPU_AVX512 HR_INLINE __m512 dynamic_values_avx512(const dynamic_vectors *v, __m128i codes,
                                                  int is_signed)
{
    const __m512i code = _mm512_cvtepu8_epi32(codes);
    /* Makes the code the mantissa of 2^25 + 4 * code or 2^23 + code, and subtracts. */
    const __m512i magic = _mm512_set1_epi32(is_signed ? 0x4C000000 : 0x4B000000);
    const __m512 from = _mm512_set1_ps(is_signed ? 0x1p25f + 508.0f : 0x1p23f - 1.0f);
    const __m512 place = _mm512_sub_ps(_mm512_castsi512_ps(_mm512_or_si512(code, magic)), from);
    const __m512i entry = _mm512_srli_epi32(_mm512_castps_si512(place), 23);
    const __m512 slope = _mm512_permutexvar_ps(entry, _mm512_loadu_ps(v->value_slopes));
    __m512 base = _mm512_permutexvar_ps(entry, _mm512_loadu_ps(v->value_bases));
    if (is_signed) /* gives base the sign of place */
        base = _mm512_castsi512_ps(
            _mm512_ternarylogic_epi32(_mm512_castps_si512(base), _mm512_castps_si512(place),
                                      _mm512_set1_epi32((int)0x80000000u), 0x78));
    const __m512 near = _mm512_fmadd_ps(slope, place, base);
    const __m512i differences =
        _mm512_permutex2var_epi32(_mm512_loadu_si512(v->differences), _mm512_srli_epi32(code, 3),
                                  _mm512_loadu_si512(v->differences + 16));
    /* Moves the 4 bits of the code to the top, and down again with their sign. */
    const __m512i difference =
        _mm512_srai_epi32(_mm512_rolv_epi32(differences, _mm512_slli_epi32(code, 2)), 28);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(near), difference));
}

/* The codes nearest to 16 numbers y, in the low bytes of words. Where a bit of `sure` is 0,
 * dynamic_encode() must decide. In the unsigned map the code is at least 1 where x > 0, and 0
 * elsewhere. */
CPU_AVX512 HR_INLINE __m512i dynamic_codes_avx512(const dynamic_vectors *v, __m512 y, __m512 x,
                                                  int is_signed, __mmask16 *sure)
{
    __m512 magnitude;
    if (is_signed) {
        /* The greater of |y| and 2^-31; a NaN becomes 2^-31. */
        magnitude = _mm512_range_ps(y, _mm512_set1_ps(0x1p-31f), 0xB);
    } else {
        /* At least DYNAMIC_LEAST_POSITIVE where x is positive, even if y is 0; else 0. */
        const __mmask16 positive = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ);
        magnitude = _mm512_maskz_max_ps(positive, y, _mm512_set1_ps(DYNAMIC_LEAST_POSITIVE));
    }
    /* 16 + the pair in the last 5 bits, from 2^-31 on. */
    const __m512i pair = _mm512_srli_epi32(_mm512_castps_si512(magnitude), 24);
    const __m512 begin = _mm512_permutexvar_ps(pair, _mm512_loadu_ps(v->begins));
    const __mmask16 begun = _mm512_cmp_ps_mask(magnitude, begin, _CMP_GT_OQ);
    const __m512i entry = _mm512_mask_add_epi32(pair, begun, pair, _mm512_set1_epi32(16));
    const __m512 slope =
        _mm512_permutex2var_ps(_mm512_loadu_ps(v->slopes), entry, _mm512_loadu_ps(v->slopes + 16));
    const __m512 offset = _mm512_permutex2var_ps(_mm512_loadu_ps(v->offsets), entry,
                                                 _mm512_loadu_ps(v->offsets + 16));
    const __m512 last =
        _mm512_permutex2var_ps(_mm512_loadu_ps(v->lasts), entry, _mm512_loadu_ps(v->lasts + 16));
    __m512 place = _mm512_min_ps(_mm512_fmadd_ps(magnitude, slope, offset), last);
    __mmask16 inside = 0xFFFF;
    if (is_signed) {
        /* With the sign of y; then what an offset does elsewhere. -1 is not in the map. */
        place = _mm512_castsi512_ps(
            _mm512_ternarylogic_epi32(_mm512_castps_si512(place), _mm512_castps_si512(y),
                                      _mm512_set1_epi32((int)0x80000000u), 0xF8));
        place = _mm512_add_ps(place, _mm512_set1_ps(127.0f + DYNAMIC_OFFSET));
        place = _mm512_max_ps(place, _mm512_set1_ps(DYNAMIC_OFFSET));
        /* Where a decade begins, a negative midpoint has the greater magnitude. */
        inside = _mm512_cmp_ps_mask(magnitude, begin, _CMP_NEQ_UQ);
    }
    const __m512i bits = _mm512_castps_si512(place);
    const int fraction = (1 << DYNAMIC_FRACTION_BITS) - 2 * DYNAMIC_SLACK_UNITS;
    *sure = _mm512_mask_test_epi32_mask(inside, bits, _mm512_set1_epi32(fraction));
    return _mm512_srli_epi32(bits, DYNAMIC_FRACTION_BITS);
}

CPU_AVX2 HR_INLINE __m256i dynamic_entries_avx2(const float *table, __m256i entry)
{
    return _mm256_permutevar8x32_epi32(_mm256_loadu_si256((const __m256i *)table), entry);
}

/* 256 + the distances from the code of zero that 8 magnitudes of quotients get, and below them
 * DYNAMIC_FRACTION_BITS bits. A word of `sure` is 0 where dynamic_encode() must decide. No magnitude is
 * NaN. They are compared as integers, which a core does with twice as many units as binary32. */
CPU_AVX2 HR_INLINE __m256i dynamic_distances_avx2(const dynamic_decades *d, __m256i magnitude,
                                                  int is_signed, __m256i *sure)
{
    /* The decade or the one before, from the exponent: 0.32 decades for each binade from 2^-21. */
    const __m256i binade = _mm256_subs_epu16(_mm256_srli_epi32(magnitude, 23),
                                             _mm256_set1_epi32(DYNAMIC_FIRST_BINADE));
    const __m256i guess = _mm256_mulhi_epu16(binade, _mm256_set1_epi32(DYNAMIC_BINADE_DECADES));
    const __m256i end = dynamic_entries_avx2(d->ends, guess);
    const __m256i decade = _mm256_sub_epi32(guess, _mm256_cmpgt_epi32(magnitude, end));
    const __m256 slope = _mm256_castsi256_ps(dynamic_entries_avx2(d->slopes, decade));
    const __m256 offset = _mm256_castsi256_ps(dynamic_entries_avx2(d->offsets, decade));
    const __m256i last = dynamic_entries_avx2(d->lasts, decade);
    const __m256 place = _mm256_fmadd_ps(_mm256_castsi256_ps(magnitude), slope, offset);
    const __m256i distance = _mm256_min_epi32(_mm256_castps_si256(place), last);
    const int fraction = (1 << DYNAMIC_FRACTION_BITS) - 2 * DYNAMIC_SLACK_UNITS;
    *sure = _mm256_and_si256(distance, _mm256_set1_epi32(fraction));
    if (is_signed) /* where a decade begins, a negative midpoint has the greater magnitude */
        *sure = _mm256_andnot_si256(_mm256_cmpeq_epi32(magnitude, end), *sure);
    return distance;
}
#endif

#endif
