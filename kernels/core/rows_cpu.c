/* rows_cpu.c: converts tiles of rows, once for all ops: see rows_cpu.h. */
#include "kernels/core/rows_cpu.h"

/* Elements [begin, end) of a row, and a tile for them. */
typedef struct conversion {
    void *row;
    float *tile;
} conversion;

/* Steps of CPU_STEP elements, after each of which what lies 2 KiB ahead in memory is asked for. */
#define LOAD(name, dtype)                                                                        \
    HR_INLINE void name(void *context, int64_t begin, int64_t end)                               \
    {                                                                                            \
        const conversion *const c = (const conversion *)context;                                 \
        const uint16_t *const row = (const uint16_t *)c->row;                                    \
        float *const restrict tile = c->tile;                                                    \
        CPU_IN_STEPS(                                                                            \
            begin, end, from, to,                                                                \
            (__builtin_prefetch(row + from + 1024), __builtin_prefetch(row + from + 1024 + 32)), \
            for (int64_t j = from; j < to; j++) tile[j - begin] = hr_load(row, j, dtype);)       \
    }                                                                                            \
    CPU_VARIANTS(name)

#define STORE(name, dtype)                                         \
    HR_INLINE void name(void *context, int64_t begin, int64_t end) \
    {                                                              \
        const conversion *const c = (const conversion *)context;   \
        void *const restrict row = c->row;                         \
        const float *const restrict tile = c->tile;                \
        for (int64_t j = begin; j < end; j++)                      \
            hr_store(row, j, tile[j - begin], dtype);              \
    }                                                              \
    CPU_VARIANTS(name)

LOAD(load_bf16, HR_BF16)
LOAD(load_f16, HR_F16)
STORE(store_f32, HR_F32)
STORE(store_bf16, HR_BF16)
STORE(store_f16, HR_F16)

void rows_load(float *tile, const void *row, int64_t begin, int64_t end, hr_dtype dtype)
{
    conversion c = {(void *)(uintptr_t)row, tile};
    (dtype == HR_BF16 ? CPU_BEST(load_bf16) : CPU_BEST(load_f16))(&c, begin, end);
}

void rows_store(void *row, const float *tile, int64_t begin, int64_t end, hr_dtype dtype)
{
    conversion c = {row, (float *)(uintptr_t)tile};
    (dtype == HR_F32    ? CPU_BEST(store_f32)
     : dtype == HR_BF16 ? CPU_BEST(store_bf16)
                        : CPU_BEST(store_f16))(&c, begin, end);
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

/* Streams from `from` on as many vectors of `width` elements as there are, and stores the rest. */
#define STREAM(name, target, width, load, stream)                    \
    target static void name(void *context, int64_t from, int64_t to) \
    {                                                                \
        const conversion *const c = (const conversion *)context;     \
        float *const row = (float *)c->row;                          \
        for (; to - from >= (width); from += (width))                \
            stream(row + from, load(c->tile + from));                \
        for (; from < to; from++)                                    \
            row[from] = c->tile[from];                               \
    }

STREAM(stream_baseline, , 4, _mm_loadu_ps, _mm_stream_ps)
STREAM(stream_avx2, CPU_AVX2, 8, _mm256_loadu_ps, _mm256_stream_ps)
STREAM(stream_avx512, CPU_AVX512, 16, _mm512_loadu_ps, _mm512_stream_ps)

void rows_stream(float *to, const float *tile, int64_t n)
{
    static const hr_range_fn variants[] = {stream_baseline, stream_avx2, stream_avx512,
                                           stream_avx512};
    conversion c = {to, (float *)(uintptr_t)tile};
    variants[runtime_cpu_level()](&c, 0, n);
}

void rows_streamed(void)
{
    _mm_sfence();
}
#else
void rows_stream(float *to, const float *tile, int64_t n)
{
    memcpy(to, tile, (size_t)n * sizeof *to);
}

void rows_streamed(void) {}
#endif
