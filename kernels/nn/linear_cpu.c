/*
 * linear_cpu.c: few rows of x. A task decodes rows of the matrix, a tile of columns at a time, to
 * binary32 in the fastest cache, and multiplies them with all rows of x.
 *
 * Two codes of 4 bits lie in a byte, so the tile has the even columns of a group first, and then its
 * odd ones; the rows of x are put in the same order.
 */
#include "kernels/core/halves_cpu.h"
#include "kernels/core/rows_cpu.h"
#include "kernels/nn/linear.h"
#include "kernels/quant/dynamic_map.h"
#include "kernels/quant/quantize_matrix.h"

enum { GROUP = LINEAR_GROUP, HALF = GROUP / 2 };

typedef struct few_call {
    const linear_few_args *args;
    int64_t padded;
    float values[F16_AT_ONCE]; /* of codes of 4 bits */
    float map[256];            /* of scales that are codes */
} few_call;

/* Where column p of a group lies in a tile. */
HR_INLINE int place_of(int p, hr_format format)
{
    return format == HR_INT8_ROWS ? p : p % 2 * HALF + p / 2;
}

/* What the instruction sets do in different ways. */
typedef struct few_level {
    half_conversions halves;
    void (*group)(float *restrict tile, const uint8_t *codes, const float *products);
    int most; /* rows of x whose sums fit into registers */
} few_level;

/* Rounds F16_AT_ONCE products with absmax to the type that products see. Those with a NaN stay: its
 * payload may be one that rounding to bf16 turns into a number. */
HR_INLINE void round_products(float *restrict products, float absmax, hr_dtype dtype,
                              few_level level)
{
    uint16_t halves[F16_AT_ONCE];
    if (dtype == HR_F16) {
        level.halves.narrow_f16(halves, products);
        level.halves.widen_f16(products, halves);
    } else if (dtype == HR_BF16 && absmax == absmax) {
        for (int k = 0; k < F16_AT_ONCE; k++)
            products[k] = hr_float(bf16_to_high(products[k]) & 0xFFFF0000u);
    }
}

/* The elements that a block of 4-bit codes can have. */
HR_INLINE void fill_products(float *restrict products, const few_call *call, int64_t block,
                             hr_dtype dtype, few_level level)
{
    const float absmax = matrix_absmax(&call->args->matrix, block, call->map);
    for (int code = 0; code < F16_AT_ONCE; code++)
        products[code] = call->values[code] * absmax;
    round_products(products, absmax, dtype, level);
}

/* ---- A group whose codes are whole bytes of one block ---------------------------------------- */

HR_INLINE void group_baseline(float *restrict tile, const uint8_t *codes, const float *products)
{
    for (int byte = 0; byte < HALF; byte++) {
        tile[byte] = products[codes[byte] >> 4];
        tile[HALF + byte] = products[codes[byte] & 15];
    }
}

#if defined(__x86_64__) && defined(__GNUC__)
/* The same by shuffles, which compilers do not find. */
CPU_AVX2 HR_INLINE __m256 pick_avx2(const float *products, __m256i codes)
{
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(products), codes);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(products + 8), codes);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
}

CPU_AVX2 HR_INLINE void group_avx2(float *restrict tile, const uint8_t *codes,
                                   const float *products)
{
    for (int byte = 0; byte < HALF; byte += 8) {
        const __m256i both = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(codes + byte)));
        _mm256_storeu_ps(tile + byte, pick_avx2(products, _mm256_srli_epi32(both, 4)));
        _mm256_storeu_ps(tile + HALF + byte, pick_avx2(products, both));
    }
}

CPU_AVX512 HR_INLINE void group_avx512(float *restrict tile, const uint8_t *codes,
                                       const float *products)
{
    const __m512 table = _mm512_loadu_ps(products); /* indexed by the last 4 bits */
    const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
    _mm512_storeu_ps(tile, _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), table));
    _mm512_storeu_ps(tile + HALF, _mm512_permutexvar_ps(both, table));
}
#endif

/* ---- Tiles ----------------------------------------------------------------------------------- */

/* Columns [k0, k0 + n) of row r, where groups are not whole bytes of one block. */
HR_INLINE void decode_each(float *restrict tile, const few_call *call, int64_t r, int64_t k0, int n,
                           hr_dtype dtype, few_level level)
{
    const hr_matrix *const matrix = &call->args->matrix;
    const uint8_t *const codes = (const uint8_t *)matrix->data;
    const int64_t first = r * matrix->cols + k0;
    const int shift = __builtin_ctz((unsigned)matrix->block_size);
    float products[F16_AT_ONCE];
    for (int p = 0; p < n; p++) {
        const int64_t i = first + p;
        if (p == 0 || (i & (matrix->block_size - 1)) == 0)
            fill_products(products, call, i >> shift, dtype, level);
        tile[p - p % GROUP + place_of(p % GROUP, HR_NF4)] =
            products[codes[i / 2] >> (i % 2 ? 0 : 4) & 15];
    }
}

HR_INLINE void decode_groups(float *restrict tile, const few_call *call, int64_t r, int64_t k0,
                             int n, hr_dtype dtype, few_level level)
{
    const hr_matrix *const matrix = &call->args->matrix;
    const int64_t first = r * matrix->cols + k0;
    const uint8_t *const codes = (const uint8_t *)matrix->data + first / 2;
    const int shift = __builtin_ctz((unsigned)matrix->block_size);
    _Alignas(64) float products[F16_AT_ONCE];
    for (int p = 0; p < n;) {
        const int64_t i = first + p, block = i >> shift;
        const int64_t left = ((block + 1) << shift) - i;
        const int end = left < n - p ? p + (int)left : n;
        fill_products(products, call, block, dtype, level);
        for (; p < end; p += GROUP)
            level.group(tile + p, codes + p / 2, products);
    }
}

HR_INLINE void decode_bytes(float *restrict tile, const few_call *call, int64_t r, int64_t k0,
                            int n, hr_dtype dtype, few_level level)
{
    const hr_matrix *const matrix = &call->args->matrix;
    const int8_t *const codes = (const int8_t *)matrix->data + r * matrix->cols + k0;
    const float absmax = matrix->absmax[r];
    for (int p = 0; p < n; p += F16_AT_ONCE) {
        const int count = n - p < F16_AT_ONCE ? n - p : F16_AT_ONCE;
        if (count == F16_AT_ONCE)
            for (int k = 0; k < F16_AT_ONCE; k++)
                tile[p + k] = (float)codes[p + k] * absmax * MATRIX_INT8_UNIT;
        else
            for (int k = 0; k < F16_AT_ONCE; k++)
                tile[p + k] = k < count ? (float)codes[p + k] * absmax * MATRIX_INT8_UNIT : 0.0f;
        round_products(tile + p, absmax, dtype, level);
    }
}

/* ---- Products -------------------------------------------------------------------------------- */

/* Adds to the sums of ROWS rows of x. Their number must be a constant of the source, or the compiler
 * leaves the sums in memory. */
#define DOT(ROWS)                                                                    \
    HR_INLINE void dot_##ROWS(float *restrict sums, const float *restrict w,         \
                              const float *restrict x, int64_t pitch, int n)         \
    {                                                                                \
        float block[ROWS][GROUP];                                                    \
        for (int i = 0; i < ROWS; i++)                                               \
            for (int j = 0; j < GROUP; j++)                                          \
                block[i][j] = sums[i * GROUP + j];                                   \
        for (int p = 0; p < n; p += GROUP)                                           \
            for (int i = 0; i < ROWS; i++)                                           \
                for (int j = 0; j < GROUP; j++)                                      \
                    block[i][j] = fmaf(w[p + j], x[i * pitch + p + j], block[i][j]); \
        for (int i = 0; i < ROWS; i++)                                               \
            for (int j = 0; j < GROUP; j++)                                          \
                sums[i * GROUP + j] = block[i][j];                                   \
    }
DOT(1)
DOT(2)
DOT(4)

HR_INLINE void few_rows(const few_call *call, int64_t begin, int64_t end, hr_dtype dtype,
                        few_level level)
{
    const linear_few_args *const a = call->args;
    const hr_matrix *const matrix = &a->matrix;
    const int64_t pitch = call->padded;
    const int m = (int)a->m;
    _Alignas(64) float tile[TILE];
    _Alignas(64) float sums[LINEAR_FEW * GROUP];
    for (int64_t r = begin; r < end; r++) {
        memset(sums, 0, sizeof(float) * (size_t)(m * GROUP));
        for (int64_t k0 = 0; k0 < pitch; k0 += TILE) {
            const int n = (int)(pitch - k0 < TILE ? pitch - k0 : TILE);
            const int there = (int)(matrix->cols - k0 < n ? matrix->cols - k0 : n);
            if (there < n)
                memset(tile + n - GROUP, 0, sizeof(float) * GROUP);
            if (matrix->format == HR_INT8_ROWS)
                decode_bytes(tile, call, r, k0, there, dtype, level);
            else if (matrix->cols % GROUP == 0)
                decode_groups(tile, call, r, k0, n, dtype, level);
            else
                decode_each(tile, call, r, k0, there, dtype, level);
            const float *x = a->workspace + k0;
            int i = 0;
            for (; level.most >= 4 && m - i >= 4; i += 4, x += 4 * pitch)
                dot_4(sums + i * GROUP, tile, x, pitch, n);
            for (; level.most >= 2 && m - i >= 2; i += 2, x += 2 * pitch)
                dot_2(sums + i * GROUP, tile, x, pitch, n);
            for (; i < m; i++, x += pitch)
                dot_1(sums + i * GROUP, tile, x, pitch, n);
        }
        for (int i = 0; i < m; i++)
            linear_store(a, i, r, (float)lanes_total(sums + i * GROUP), dtype);
    }
}

#define VARIANT(target, level, most)                                                       \
    target static void few_##level(void *context, int64_t begin, int64_t end)              \
    {                                                                                      \
        const few_level own = {HALVES_OF(level), group_##level, most};                     \
        const few_call *const call = (const few_call *)context;                            \
        FOR_DTYPE(call->args->matrix.dtype, dtype, few_rows(call, begin, end, dtype, own)) \
    }

VARIANT(, baseline, 1)
#if defined(__x86_64__) && defined(__GNUC__)
VARIANT(CPU_AVX2, avx2, 2)
VARIANT(CPU_AVX512, avx512, 4)
static const hr_range_fn few_variants[] = {few_baseline, few_avx2, few_avx512, few_avx512};
#else
static const hr_range_fn few_variants[] = {few_baseline};
#endif

/* Writes the rows of x in the order of the tiles. */
static void prepare(const few_call *call)
{
    const linear_few_args *const a = call->args;
    const int64_t cols = a->matrix.cols;
    float buffer[GROUP];
    for (int64_t i = 0; i < a->m; i++) {
        float *const to = a->workspace + i * call->padded;
        const void *const row = row_at(&a->x, i, a->matrix.dtype);
        for (int64_t k = 0; k < cols; k += GROUP) {
            const int n = (int)(cols - k < GROUP ? cols - k : GROUP);
            const float *const from = tile_in(buffer, row, k, n, a->matrix.dtype);
            for (int p = 0; p < GROUP; p++)
                to[k + place_of(p, a->matrix.format)] = p < n ? from[p] : 0.0f;
        }
    }
}

hr_status linear_few_cpu(const linear_few_args *args)
{
    const hr_matrix *const matrix = &args->matrix;
    few_call call = {.args = args, .padded = linear_padded(matrix->cols)};
    for (int code = 0; code < 16 && matrix->format != HR_INT8_ROWS; code++)
        call.values[code] = matrix_value(code, matrix->format);
    for (int code = 0; code < 256 && matrix->absmax_codes; code++)
        call.map[code] = dynamic_value(code, 1);
    prepare(&call);
    hr_parallel_for(0, matrix->rows, rows_per_task(call.padded, 1), CPU_BEST(few), &call);
    return HR_OK;
}
