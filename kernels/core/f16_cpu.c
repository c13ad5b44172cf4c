/* f16_cpu.c: the loops of f16_cpu.h: the portable one, and the instructions of F16C and AVX-512. */
#include "kernels/core/f16_cpu.h"

typedef void f16_load_fn(float *restrict tile, const uint16_t *restrict halves, int count);
typedef void f16_store_fn(uint16_t *restrict halves, const float *restrict tile, int count);

static void f16_load_baseline(float *restrict tile, const uint16_t *restrict halves, int count)
{
    for (int j = 0; j < count; j++)
        tile[j] = hr_from_f16(halves[j]);
}

static void f16_store_baseline(uint16_t *restrict halves, const float *restrict tile, int count)
{
    for (int j = 0; j < count; j++)
        halves[j] = hr_to_f16(tile[j]);
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

CPU_AVX2 static void f16_load_avx2(float *restrict tile, const uint16_t *restrict halves, int count)
{
    int j = 0;
    for (; count - j >= 8; j += 8)
        _mm256_storeu_ps(tile + j, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves + j))));
    f16_load_baseline(tile + j, halves + j, count - j);
}

CPU_AVX2 static void f16_store_avx2(uint16_t *restrict halves, const float *restrict tile,
                                    int count)
{
    int j = 0;
    for (; count - j >= 8; j += 8)
        _mm_storeu_si128((__m128i *)(halves + j), _mm256_cvtps_ph(_mm256_loadu_ps(tile + j), 0));
    f16_store_baseline(halves + j, tile + j, count - j);
}

CPU_AVX512 static void f16_load_avx512(float *restrict tile, const uint16_t *restrict halves,
                                       int count)
{
    int j = 0;
    for (; count - j >= 16; j += 16)
        _mm512_storeu_ps(tile + j,
                         _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(halves + j))));
    f16_load_avx2(tile + j, halves + j, count - j);
}

CPU_AVX512 static void f16_store_avx512(uint16_t *restrict halves, const float *restrict tile,
                                        int count)
{
    int j = 0;
    for (; count - j >= 16; j += 16)
        _mm256_storeu_si256((__m256i *)(halves + j), _mm512_cvtps_ph(_mm512_loadu_ps(tile + j), 0));
    f16_store_avx2(halves + j, tile + j, count - j);
}

static f16_load_fn *const load_variants[] = {f16_load_baseline, f16_load_avx2, f16_load_avx512,
                                             f16_load_avx512};
static f16_store_fn *const store_variants[] = {f16_store_baseline, f16_store_avx2, f16_store_avx512,
                                               f16_store_avx512};
#else
static f16_load_fn *const load_variants[] = {f16_load_baseline};
static f16_store_fn *const store_variants[] = {f16_store_baseline};
#endif

void f16_load(float *tile, const void *base, int64_t i, int count)
{
    load_variants[runtime_cpu_level()](tile, (const uint16_t *)base + i, count);
}

void f16_store(void *base, int64_t i, const float *tile, int count)
{
    store_variants[runtime_cpu_level()]((uint16_t *)base + i, tile, count);
}
