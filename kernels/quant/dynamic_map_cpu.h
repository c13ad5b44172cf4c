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
/* The same with AVX2, in units of 2^-16. */
#define DYNAMIC_SLACK_BITS 8
/* Adds 1/2 to round, and the bound, so that one mask finds numbers too close to a midpoint. */
#define DYNAMIC_OFFSET (256.5f + 0x1p-15f * DYNAMIC_SLACK_UNITS)
/* A number that gets code 1 of the unsigned map, far from its borders: for a positive x whose
 * quotient is so small that it would get code 0, which means zero (quant_keep_positive()). */
#define DYNAMIC_LEAST_POSITIVE 3.25e-7f

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

/* Encoding with 8 lanes: by 8 lines, one for each decade but 0, because the first two share one. The
 * decade with n parts gives a quotient y, when r = y * slope - n / 9,
 *
 *     n + min(r, (r - 0.2) * 1.25),
 *
 * whose integer part is the distance from the code of zero, plus 1 in the unsigned map. Parts end
 * where r is 1, 2, .. n. But the first begins at 0.2, midway between values of parts that differ in
 * size, and below that the line holds for the last part of the decade before, too. So the choice of a
 * line need not be exact: decades are counted in the bits of a quotient as if they were its logarithm,
 * rounded to an integer whose last 3 bits are the index. Quotients are multiplied by dynamic_factor(),
 * so that every change of line is where both lines hold. */
typedef struct dynamic_lines {
    float slopes[8], offsets[8];
    /* Decoding: the bits of the map's values, and the same in the upper half of a word. */
    uint32_t low[256];
    uint64_t high[256];
} dynamic_lines;

/* A sum with this is rounded to an integer, whose last bits are the sum's. */
#define DYNAMIC_MAGIC 0x1.8p23f

/* What an offset holds besides -n / 9. With n, -8 times it is added to the sum above, which then has its
 * integer part in bits 16 to 23 of a word. */
HR_CONSTEXPR float dynamic_base(int is_signed)
{
    return ((is_signed ? 128.0f : 255.0f) + 0x1p-16f * DYNAMIC_SLACK_BITS) / -8.0f;
}

HR_CONSTEXPR float dynamic_factor(int is_signed)
{
    return is_signed ? 0x1p10f : 0x1.2p25f;
}

HR_CONSTEXPR float dynamic_decades_per_bit(int is_signed)
{
    return is_signed ? 0x1p-23f / 3.38215f : 0x1p-23f / 3.3433f;
}

/* The least quotient for which there is a line. It gets the code of zero, or code 1 of the unsigned
 * map. */
HR_CONSTEXPR float dynamic_least(int is_signed)
{
    return is_signed ? 1.5e-7f : DYNAMIC_LEAST_POSITIVE;
}

static inline void dynamic_lines_fill(dynamic_lines *l, const dynamic_map *map, int is_signed)
{
    const int zero = dynamic_zero(is_signed), least = is_signed ? 1 : 2;
    const float factor = dynamic_factor(is_signed);
    memset(l, 0, sizeof *l);
    for (int code = 0; code < 256; code++) {
        l->low[code] = hr_bits(map->values[code]);
        l->high[code] = (uint64_t)l->low[code] << 32;
    }
    for (int i = 0; i < 8; i++) {
        const int n = least << i;
        const float begin = map->thresholds[zero + n - least];
        const float inside = factor * (i < 7 ? 0.5f * dynamic_power_of_10(i - 6) : 1.0f);
        const int entry = (int)hr_bits(fmaf((float)hr_bits(inside),
                                            dynamic_decades_per_bit(is_signed), DYNAMIC_MAGIC)) &
                          7;
        /* Of a decade with one part, and of 1, only the beginning matters. */
        const float slope =
            n == 1 || i == 7 ? ((float)n / 9.0f + 0.2f) / begin : map->slopes[i + 1];
        l->slopes[entry] = slope / factor;
        l->offsets[entry] = dynamic_base(is_signed) - (float)n / 9.0f;
    }
}

/* Decodes `count` codes, without their scale, in pairs: an instruction that puts a value into a vector
 * would take more of what computes on vectors, and a store of each more of what stores. */
HR_INLINE void dynamic_decode_pairs(const dynamic_lines *lines, const uint8_t *codes, int count,
                                    float *values)
{
#pragma GCC unroll 8
    for (int i = 0; i < count; i += 2) {
        const uint64_t pair = lines->low[codes[i]] | lines->high[codes[i + 1]];
        memcpy(values + i, &pair, sizeof pair);
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

CPU_AVX2 HR_INLINE __m256 dynamic_entries_avx2(const float *table, __m256i entry)
{
    return _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), entry);
}

/* The distances from the code of zero that 8 quotients get, in bits 16 to 23 of words. Below them is
 * their fraction: where it is less than 2 * DYNAMIC_SLACK_BITS, dynamic_encode() must decide. The
 * quotients are multiplied by dynamic_factor(). None is NaN. */
CPU_AVX2 HR_INLINE __m256i dynamic_distances_avx2(const dynamic_lines *l, __m256 quotient,
                                                  int is_signed)
{
    __m256i bits = _mm256_castps_si256(quotient);
    if (is_signed)
        bits = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
    const float least = dynamic_least(is_signed) * dynamic_factor(is_signed);
    bits = _mm256_max_epi32(bits, _mm256_castps_si256(_mm256_set1_ps(least)));
    const __m256i line = _mm256_castps_si256(_mm256_fmadd_ps(
        _mm256_cvtepi32_ps(bits), _mm256_set1_ps(dynamic_decades_per_bit(is_signed)),
        _mm256_set1_ps(DYNAMIC_MAGIC)));
    const __m256 offset = dynamic_entries_avx2(l->offsets, line);
    const __m256 place =
        _mm256_fmadd_ps(_mm256_castsi256_ps(bits), dynamic_entries_avx2(l->slopes, line), offset);
    const float base = dynamic_base(is_signed);
    const __m256 first =
        _mm256_fmadd_ps(place, _mm256_set1_ps(1.25f), _mm256_set1_ps(-0.25f * (1.0f + base)));
    const __m256i distance = _mm256_castps_si256(
        _mm256_fmadd_ps(offset, _mm256_set1_ps(-9.0f), _mm256_min_ps(place, first)));
    /* Signed distances count from 128, where a fraction has 16 bits; 128 more carries into bit 23,
     * which belongs to the exponent. Unsigned ones count from 256, where it has 15. */
    return is_signed ? distance : _mm256_add_epi32(distance, distance);
}

/* Bits 16 to 23 of 32 words as bytes: in each half of 16, four of every vector in turn. */
CPU_AVX2 HR_INLINE __m256i dynamic_bytes_avx2(const __m256i words[4])
{
    const __m256i first = _mm256_blend_epi16(_mm256_srli_epi32(words[0], 16), words[1], 0xAA);
    const __m256i last = _mm256_blend_epi16(_mm256_srli_epi32(words[2], 16), words[3], 0xAA);
    const __m256i bytes =
        _mm256_blendv_epi8(first, _mm256_slli_epi16(last, 8), _mm256_set1_epi16((short)0xFF00));
    return _mm256_shuffle_epi8(bytes, _mm256_setr_epi8(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7,
                                                       11, 15, 0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9,
                                                       13, 3, 7, 11, 15));
}

/* Encodes 32 numbers; `factor` is dynamic_factor() times the second factor of their scale. Lowers the
 * words of *least to those of dynamic_distances_avx2(). */
CPU_AVX2 HR_INLINE void dynamic_encode32_avx2(const dynamic_lines *lines, const float *x,
                                              __m256 factor, int is_signed, uint8_t *codes,
                                              __m256i *least)
{
    __m256i signs[4], distances[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        const __m256 number = _mm256_loadu_ps(x + 8 * k), quotient = number * factor;
        signs[k] = _mm256_castps_si256(quotient);
        distances[k] = dynamic_distances_avx2(lines, quotient, is_signed);
        *least = _mm256_min_epu16(*least, distances[k]);
        if (!is_signed) /* 0 gets code 0, and no other number */
            distances[k] = _mm256_sign_epi32(distances[k], _mm256_castps_si256(number));
    }
    __m256i in_turns = dynamic_bytes_avx2(distances);
    if (is_signed) { /* -1 is not in the map, so the difference stops at 0 */
        const __m256i zero = _mm256_set1_epi8(127);
        const __m256i sign = _mm256_packs_epi16(_mm256_packs_epi32(signs[0], signs[1]),
                                                _mm256_packs_epi32(signs[2], signs[3]));
        in_turns = _mm256_blendv_epi8(_mm256_add_epi8(zero, in_turns),
                                      _mm256_subs_epu8(zero, in_turns), sign);
    }
    const __m256i in_row =
        _mm256_permutevar8x32_epi32(in_turns, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)codes, in_row);
}

/* -1 in the words that say that a code is not sure. */
CPU_AVX2 HR_INLINE __m256i dynamic_unsure_avx2(__m256i least)
{
    const __m256i fraction = _mm256_and_si256(least, _mm256_set1_epi32(0xFFFF));
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(2 * DYNAMIC_SLACK_BITS), fraction);
}
#endif

#endif
