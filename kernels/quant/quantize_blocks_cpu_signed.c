/*
 * quantize_blocks_cpu_signed.c: the loops over the codes of a block, with the best instruction set.
 *
 * Encoding finds the decade of a number and, by its line, a code, and sees whether the number lies so
 * close to a midpoint that this may be wrong; quant_encode() decides then. With AVX-512 it is that of
 * dynamic_map_cpu.h. With AVX2 the lines are permuted from registers; and a plain loop compares a
 * number with the beginning of every decade, because loads by index would cost it more.
 */
#include "kernels/quant/quantize_blocks_cpu_signed.h"

#include <pthread.h>

#include "kernels/core/cpu.h"
#include "kernels/quant/dynamic_map_cpu.h"

/* Filled once. The tables are static, so that no call can run out of memory. */
static struct {
    quant_maps maps;
    dynamic_vectors vectors;
    float begins[8], slopes[8]; /* of the decades; [7] begins is where 1 does */
    /* For AVX2, by decade less 1, of which the first two share a line, and 1 is the last: where it
     * ends, and its line with DYNAMIC_OFFSET. */
    struct {
        float ends[8], slopes[8], offsets[8], lasts[8];
    } lines;
} kept;

static void fill_tables(void)
{
    quant_maps_fill(&kept.maps, 0);
    const dynamic_map *const map = &kept.maps.map[1];
    dynamic_vectors_fill(&kept.vectors, map, 1);
    for (int d = 0; d < 8; d++) {
        kept.begins[d] = map->thresholds[dynamic_zero(1) + (1 << d) - 1];
        kept.slopes[d] = map->slopes[d + 1];
        kept.lines.slopes[d] = d > 0 ? map->slopes[d + 1] : 0.5f / kept.begins[0];
        kept.lines.offsets[d] = (d > 0 ? map->offsets[d + 1] : 0.0f) + DYNAMIC_OFFSET;
        kept.lines.lasts[d] = map->lasts[d + 1] + DYNAMIC_OFFSET;
    }
    for (int d = 0; d < 8; d++)
        kept.lines.ends[d] = d < 7 ? kept.begins[d + 1] : INFINITY;
}

static void need_tables(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, fill_tables);
}

/* Numbers and codes of a block; `scale` is the reciprocal of the absmax. */
typedef struct codes_run {
    float *x;
    uint8_t *codes;
    float absmax, scale;
} codes_run;

HR_INLINE void decode_range(void *context, int64_t begin, int64_t end)
{
    const codes_run *const r = (const codes_run *)context;
    for (int64_t i = begin; i < end; i++)
        r->x[i] = kept.maps.map[1].values[r->codes[i]] * r->absmax;
}

HR_INLINE void encode_each(const codes_run *r, int64_t begin, int64_t end)
{
    const dynamic_scale scale = {1.0f, r->scale};
    for (int64_t i = begin; i < end; i++)
        r->codes[i] = quant_encode(&kept.maps, r->x[i], scale, 1);
}

/* Encodes elements of a block whose absmax is a number that needs no first factor of
 * dynamic_scale. */
HR_INLINE void encode_range(void *context, int64_t begin, int64_t end)
{
    const codes_run *const r = (const codes_run *)context;
    const float scale = r->scale, *const begins = kept.begins, *const slopes = kept.slopes;
    for (int64_t i = begin; i < end; i += CPU_STEP) {
        const int count = end - i < CPU_STEP ? (int)(end - i) : CPU_STEP;
        const float *const x = r->x + i;
        uint8_t *restrict const codes = r->codes + i;
        uint32_t unsure = 0;
        for (int lane = 0; lane < count; lane++) {
            const uint32_t y = hr_bits(x[lane] * scale), negative = y >> 31;
            /* As in dynamic_encode(), a negative midpoint gets the greater magnitude. */
            const float magnitude = hr_float((y & 0x7FFFFFFFu) + negative);
            uint32_t decade = 126; /* n, the number of parts, is 2 to the power of decade - 127 */
            float slope = 0.0f;
            for (int d = 0; d < 7; d++) {
                decade += magnitude > begins[d];
                slope = magnitude > begins[d] ? slopes[d] : slope;
            }
            const float n = hr_float(decade << 23), last = 2.0f * n - 1.0f;
            const float place = magnitude * slope + (n * (8.0f / 9.0f) - 0.5f);
            const uint32_t bits = hr_bits((place < last ? place : last) + DYNAMIC_OFFSET);
            const uint32_t fraction = (1 << DYNAMIC_FRACTION_BITS) - 2 * DYNAMIC_SLACK_UNITS;
            unsure |= (bits & fraction) == 0;
            const uint32_t distance = ((bits >> DYNAMIC_FRACTION_BITS) & 255u);
            const uint32_t above = distance + (magnitude > begins[7]); /* -1 is not in the map */
            codes[lane] = (uint8_t)(negative ? 127u - distance : 127u + above);
        }
        if (__builtin_expect(unsure != 0, 0))
            encode_each(r, i, i + count);
    }
}

HR_INLINE void largest_range(void *context, int64_t begin, int64_t end)
{
    codes_run *const r = (codes_run *)context;
    uint32_t largest = 0;
    for (int64_t i = begin; i < end; i++) {
        const uint32_t magnitude = quant_magnitude(r->x[i], 0);
        largest = magnitude > largest ? magnitude : largest;
    }
    r->absmax = quant_absmax(largest, 0);
}

CPU_VARIANTS(largest_range)

#define CODES_VARIANT(target, loop, level)                                       \
    target static void loop##_##level(void *context, int64_t begin, int64_t end) \
    {                                                                            \
        loop(context, begin, end);                                               \
    }
CODES_VARIANT(, decode_range, baseline)
CODES_VARIANT(, encode_range, baseline)

#if defined(__x86_64__) && defined(__GNUC__)
/* Loads of values take two instructions each, of which those that insert compute nothing. */
CPU_AVX2 static void decode_range_avx2(void *context, int64_t begin, int64_t end)
{
    const codes_run *const r = (const codes_run *)context;
    const int32_t *const bits = (const int32_t *)(const void *)kept.maps.map[1].values;
    int64_t i = begin;
    for (; end - i >= 8; i += 8) {
        const uint8_t *const codes = r->codes + i;
        __m128i half[2];
        for (int k = 0; k < 2; k++) {
            half[k] = _mm_cvtsi32_si128(bits[codes[4 * k]]);
            half[k] = _mm_insert_epi32(half[k], bits[codes[4 * k + 1]], 1);
            half[k] = _mm_insert_epi32(half[k], bits[codes[4 * k + 2]], 2);
            half[k] = _mm_insert_epi32(half[k], bits[codes[4 * k + 3]], 3);
        }
        const __m256 values = _mm256_castsi256_ps(_mm256_set_m128i(half[1], half[0]));
        _mm256_storeu_ps(r->x + i, _mm256_mul_ps(values, _mm256_set1_ps(r->absmax)));
    }
    decode_range(context, i, end);
}

CPU_AVX2 HR_INLINE __m256i entries_avx2(const float *table, __m256i entry)
{
    return _mm256_permutevar8x32_epi32(_mm256_loadu_si256((const __m256i *)table), entry);
}

/* The codes of 8 numbers in words. A word of *least is 0 if one is not sure. */
CPU_AVX2 HR_INLINE __m256i encode8_avx2(const float *x, float scale, __m256i *least)
{
    const __m256i y = _mm256_castps_si256(_mm256_mul_ps(_mm256_loadu_ps(x), _mm256_set1_ps(scale)));
    const __m256i sign = _mm256_srai_epi32(y, 31);
    const __m256i magnitude =
        _mm256_sub_epi32(_mm256_and_si256(y, _mm256_set1_epi32(0x7FFFFFFF)), sign);
    /* The line or the one before, from the exponent: 0.32 decades for each binade from 2^-21. */
    const __m256i binade =
        _mm256_subs_epu16(_mm256_srli_epi32(magnitude, 23), _mm256_set1_epi32(106));
    const __m256i guess = _mm256_mulhi_epu16(binade, _mm256_set1_epi32(21000));
    const __m256i end = entries_avx2(kept.lines.ends, guess);
    const __m256i line = _mm256_sub_epi32(guess, _mm256_cmpgt_epi32(magnitude, end));
    const __m256 slope = _mm256_castsi256_ps(entries_avx2(kept.lines.slopes, line));
    const __m256 offset = _mm256_castsi256_ps(entries_avx2(kept.lines.offsets, line));
    const __m256i place =
        _mm256_castps_si256(_mm256_fmadd_ps(_mm256_castsi256_ps(magnitude), slope, offset));
    const __m256i bits = _mm256_min_epi32(place, entries_avx2(kept.lines.lasts, line));
    const int fraction = (1 << DYNAMIC_FRACTION_BITS) - 2 * DYNAMIC_SLACK_UNITS;
    *least = _mm256_min_epu32(*least, _mm256_and_si256(bits, _mm256_set1_epi32(fraction)));
    const __m256i distance =
        _mm256_and_si256(_mm256_srli_epi32(bits, DYNAMIC_FRACTION_BITS), _mm256_set1_epi32(255));
    const __m256i with_sign = _mm256_sub_epi32(_mm256_xor_si256(distance, sign), sign);
    return _mm256_add_epi32(with_sign, _mm256_set1_epi32(127));
}

CPU_AVX2 static void encode_range_avx2(void *context, int64_t begin, int64_t end)
{
    const codes_run *const r = (const codes_run *)context;
    int64_t i = begin;
    for (; end - i >= 32; i += 32) {
        __m256i least = _mm256_set1_epi32(-1), words[4];
        for (int k = 0; k < 4; k++)
            words[k] = encode8_avx2(r->x + i + 8 * k, r->scale, &least);
        /* The packs take 4 words of each in turn, and make -1, which is not in the map, 0. */
        const __m256i first = _mm256_packs_epi32(words[0], words[1]);
        const __m256i last = _mm256_packs_epi32(words[2], words[3]);
        const __m256i codes = _mm256_permutevar8x32_epi32(
            _mm256_packus_epi16(first, last), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256((__m256i *)(r->codes + i), codes);
        const __m256i unsure = _mm256_cmpeq_epi32(least, _mm256_setzero_si256());
        if (__builtin_expect(!_mm256_testz_si256(unsure, unsure), 0))
            encode_each(r, i, i + 32);
    }
    encode_range(context, i, end);
}

CPU_AVX512 static void decode_range_avx512(void *context, int64_t begin, int64_t end)
{
    const codes_run *const r = (const codes_run *)context;
    int64_t i = begin;
    for (; end - i >= 16; i += 16) {
        const __m128i codes = _mm_loadu_si128((const __m128i *)(r->codes + i));
        const __m512 values = dynamic_values_avx512(&kept.vectors, codes, 1);
        _mm512_storeu_ps(r->x + i, _mm512_mul_ps(values, _mm512_set1_ps(r->absmax)));
    }
    decode_range(context, i, end);
}

CPU_AVX512 static void encode_range_avx512(void *context, int64_t begin, int64_t end)
{
    const codes_run *const r = (const codes_run *)context;
    int64_t i = begin;
    for (; end - i >= CPU_STEP; i += CPU_STEP) {
        uint32_t all_sure = 0xFFFFu;
        for (int k = 0; k < CPU_STEP; k += 16) {
            const __m512 x = _mm512_loadu_ps(r->x + i + k);
            const __m512 y = _mm512_mul_ps(x, _mm512_set1_ps(r->scale));
            __mmask16 sure;
            const __m512i words = dynamic_codes_avx512(&kept.vectors, y, x, 1, &sure);
            _mm_storeu_si128((__m128i *)(r->codes + i + k), _mm512_cvtepi32_epi8(words));
            all_sure &= sure;
        }
        if (__builtin_expect(all_sure != 0xFFFFu, 0))
            encode_each(r, i, i + CPU_STEP);
    }
    encode_range(context, i, end);
}

static const hr_range_fn decode_range_variants[] = {decode_range_baseline, decode_range_avx2,
                                                    decode_range_avx512, decode_range_avx512};
static const hr_range_fn encode_range_variants[] = {encode_range_baseline, encode_range_avx2,
                                                    encode_range_avx512, encode_range_avx512};
#else
static const hr_range_fn decode_range_variants[] = {decode_range_baseline};
static const hr_range_fn encode_range_variants[] = {encode_range_baseline};
#endif

void quant_decode_signed(const uint8_t *codes, int count, float absmax, float *x)
{
    need_tables();
    codes_run run = {x, (uint8_t *)codes, absmax, 0.0f};
    CPU_BEST(decode_range)(&run, 0, count);
}

float quant_encode_signed(const float *x, int count, uint8_t *codes)
{
    need_tables();
    codes_run run = {(float *)x, codes, 0.0f, 0.0f};
    CPU_BEST(largest_range)(&run, 0, count);
    const dynamic_scale scale = dynamic_scale_of(run.absmax);
    run.scale = scale.second;
    if (scale.first == 1.0f && run.absmax < INFINITY)
        CPU_BEST(encode_range)(&run, 0, count);
    else
        for (int i = 0; i < count; i++)
            codes[i] = quant_encode(&kept.maps, x[i], scale, 1);
    return run.absmax;
}
