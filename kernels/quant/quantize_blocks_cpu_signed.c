/*
 * quantize_blocks_cpu_signed.c: the loops over the codes of a block, with the best instruction set.
 *
 * Encoding finds the decade of a number and, by its line, a code, and sees whether the number lies so
 * close to a midpoint that this may be wrong; quant_encode() decides then. With AVX-512 it is that of
 * dynamic_map_cpu.h, and with AVX2 that of the same file by 8 lines; a plain loop compares a number
 * with the beginning of every decade, because loads by index would cost it more.
 */
#include "kernels/quant/quantize_blocks_cpu_signed.h"

#include <pthread.h>

#include "kernels/core/cpu.h"
#include "kernels/quant/dynamic_map_cpu.h"

/* Filled once. The tables are static, so that no call can run out of memory. */
static struct {
    quant_maps maps;
    dynamic_vectors vectors;
    dynamic_lines lines;
    float begins[8], slopes[8]; /* of the decades; [7] begins is where 1 does */
} kept;

static void fill_tables(void)
{
    quant_maps_fill(&kept.maps, 0);
    const dynamic_map *const map = &kept.maps.map[1];
    dynamic_vectors_fill(&kept.vectors, map, 1);
    dynamic_lines_fill(&kept.lines, map, 1);
    for (int d = 0; d < 8; d++) {
        kept.begins[d] = map->thresholds[dynamic_zero(1) + (1 << d) - 1];
        kept.slopes[d] = map->slopes[d + 1];
    }
}

static void need_tables(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, fill_tables);
}

/* Numbers and codes of a block; `scale` is the absmax, or to encode its reciprocal. */
typedef struct codes_run {
    float *x;
    uint8_t *codes;
    float scale;
    uint32_t largest; /* magnitude */
} codes_run;

HR_INLINE void decode_range(void *context, int64_t begin, int64_t end)
{
    const codes_run *const r = (const codes_run *)context;
    for (int64_t i = begin; i < end; i++)
        r->x[i] = kept.maps.map[1].values[r->codes[i]];
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
    r->largest = largest;
}

HR_INLINE void scale_range(void *context, int64_t begin, int64_t end)
{
    const codes_run *const r = (const codes_run *)context;
    for (int64_t i = begin; i < end; i++)
        r->x[i] *= r->scale;
}

CPU_VARIANTS(largest_range)
CPU_VARIANTS(scale_range)

#define CODES_VARIANT(target, loop, level)                                       \
    target static void loop##_##level(void *context, int64_t begin, int64_t end) \
    {                                                                            \
        loop(context, begin, end);                                               \
    }
CODES_VARIANT(, decode_range, baseline)
CODES_VARIANT(, encode_range, baseline)

#if defined(__x86_64__) && defined(__GNUC__)
CPU_AVX2 static void decode_range_avx2(void *context, int64_t begin, int64_t end)
{
    const codes_run *const r = (const codes_run *)context;
    const int64_t rest = end - (end - begin) % CPU_STEP;
    for (int64_t i = begin; i < rest; i += CPU_STEP)
        dynamic_decode_pairs(&kept.lines, r->codes + i, CPU_STEP, r->x + i);
    decode_range(context, rest, end);
}

/* Encodes those of 32 numbers whose codes are not sure, which it finds again. */
static __attribute__((noinline)) CPU_AVX2 void encode_unsure(const codes_run *r, int64_t i,
                                                             __m256 factor)
{
    for (const int64_t end = i + 32; i < end; i += 8) {
        const __m256 quotient = _mm256_loadu_ps(r->x + i) * factor;
        const __m256i unsure =
            dynamic_unsure_avx2(dynamic_distances_avx2(&kept.lines, quotient, 1));
        unsigned lanes = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(unsure));
        for (; lanes; lanes &= lanes - 1)
            encode_each(r, i + __builtin_ctz(lanes), i + __builtin_ctz(lanes) + 1);
    }
}

CPU_AVX2 static void encode_range_avx2(void *context, int64_t begin, int64_t end)
{
    const codes_run *const r = (const codes_run *)context;
    const __m256 factor = _mm256_set1_ps(r->scale * dynamic_factor(1));
    int64_t i = begin;
    for (; end - i >= 32; i += 32) {
        __m256i least = _mm256_set1_epi32(-1);
        dynamic_encode32_avx2(&kept.lines, r->x + i, factor, 1, r->codes + i, &least);
        const __m256i unsure = dynamic_unsure_avx2(least);
        if (__builtin_expect(!_mm256_testz_si256(unsure, unsure), 0))
            encode_unsure(r, i, factor);
    }
    encode_range(context, i, end);
}

CPU_AVX512 static void decode_range_avx512(void *context, int64_t begin, int64_t end)
{
    const codes_run *const r = (const codes_run *)context;
    int64_t i = begin;
    for (; end - i >= 16; i += 16) {
        const __m128i codes = _mm_loadu_si128((const __m128i *)(r->codes + i));
        _mm512_storeu_ps(r->x + i, dynamic_values_avx512(&kept.vectors, codes, 1));
    }
    decode_range(context, i, end);
}

CPU_AVX512 static void encode_range_avx512(void *context, int64_t begin, int64_t end)
{
    const codes_run *const r = (const codes_run *)context;
    int64_t i = begin;
    for (; end - i >= CPU_STEP; i += CPU_STEP) {
        uint64_t unsure = 0;
        for (int k = 0; k < CPU_STEP; k += 16) {
            const __m512 x = _mm512_loadu_ps(r->x + i + k);
            const __m512 y = _mm512_mul_ps(x, _mm512_set1_ps(r->scale));
            __mmask16 sure;
            const __m512i words = dynamic_codes_avx512(&kept.vectors, y, x, 1, &sure);
            _mm_storeu_si128((__m128i *)(r->codes + i + k), _mm512_cvtepi32_epi8(words));
            unsure |= (uint64_t)(uint16_t)~sure << k;
        }
        for (; __builtin_expect(unsure != 0, 0); unsure &= unsure - 1)
            encode_each(r, i + __builtin_ctzll(unsure), i + __builtin_ctzll(unsure) + 1);
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

void quant_values_signed(const uint8_t *codes, int count, float *x)
{
    need_tables();
    codes_run run = {x, (uint8_t *)codes, 0.0f, 0};
    CPU_BEST(decode_range)(&run, 0, count);
}

void quant_decode_signed(const uint8_t *codes, int count, float absmax, float *x)
{
    codes_run run = {x, NULL, absmax, 0};
    quant_values_signed(codes, count, x);
    CPU_BEST(scale_range)(&run, 0, count);
}

float quant_encode_signed(const float *x, int count, uint8_t *codes)
{
    codes_run run = {(float *)x, codes, 0.0f, 0};
    CPU_BEST(largest_range)(&run, 0, count);
    return quant_codes_signed(x, count, run.largest, codes);
}

float quant_codes_signed(const float *x, int count, uint32_t largest, uint8_t *codes)
{
    need_tables();
    const float absmax = quant_absmax(largest, 0);
    const dynamic_scale scale = dynamic_scale_of(absmax);
    codes_run run = {(float *)x, codes, scale.second, largest};
    if (scale.first == 1.0f && absmax < INFINITY)
        CPU_BEST(encode_range)(&run, 0, count);
    else
        for (int i = 0; i < count; i++)
            codes[i] = quant_encode(&kept.maps, x[i], scale, 1);
    return absmax;
}
