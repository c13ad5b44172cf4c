/*
 * quantize_matrix_cpu.c: the CPU loops of hr_quantize_matrix and hr_dequantize_matrix.
 *
 * A block of 4-bit codes has only sixteen different elements. So they are computed and rounded once,
 * and then moved to where the codes say. HR_MXFP4 has only 256 scales, whose elements are kept.
 */
#include <pthread.h>

#include "kernels/core/halves_cpu.h"
#include "kernels/quant/dynamic_map.h"
#include "kernels/quant/quantize_matrix.h"

#define STEP 16 /* bytes of 4-bit codes that are decoded at once */

/* What the instruction sets do in different ways: conversions of f16, and moving the elements of
 * `steps` times STEP bytes from a table of sixteen to their places. `mx`: the first of a byte is in its
 * lower half. */
typedef struct matrix_level {
    half_conversions halves;
    void (*spread)(void *out, const uint8_t *codes, int64_t steps, const void *table,
                   hr_dtype dtype, int mx);
} matrix_level;

/* The elements of a block, by code. */
typedef union block_table {
    float wide[16];
    uint16_t halves[16];
} block_table;

/* ---- Decoding -------------------------------------------------------------------------------- */

HR_INLINE void spread_baseline(void *restrict out, const uint8_t *restrict codes, int64_t steps,
                               const void *restrict table, hr_dtype dtype, int mx)
{
    for (int64_t i = 0; i < steps * STEP; i++) {
        const int first = codes[i] >> matrix_shift(0, mx) & 15;
        const int second = codes[i] >> matrix_shift(1, mx) & 15;
        if (dtype == HR_F32) {
            ((float *)out)[2 * i] = ((const float *)table)[first];
            ((float *)out)[2 * i + 1] = ((const float *)table)[second];
        } else {
            ((uint16_t *)out)[2 * i] = ((const uint16_t *)table)[first];
            ((uint16_t *)out)[2 * i + 1] = ((const uint16_t *)table)[second];
        }
    }
}

/* The values of 4-bit codes, of NF4 and FP4, the signed dynamic map, and the blocks of HR_MXFP4 by type
 * and scale; filled once. */
static float kept_values[2][16], kept_map[256];
static _Alignas(64) block_table kept_blocks[3][256];

static void fill_tables(void)
{
    for (int code = 0; code < 16; code++) {
        kept_values[0][code] = matrix_value(code, HR_NF4);
        kept_values[1][code] = matrix_value(code, HR_FP4);
    }
    for (int code = 0; code < 256; code++)
        kept_map[code] = dynamic_value(code, 1);
    for (int i = 0; i < 256 * 16; i++) {
        const float x = matrix_value(i % 16, HR_MXFP4) * matrix_power((uint32_t)i / 16);
        hr_store(&kept_blocks[HR_F32][i / 16], i % 16, x, HR_F32);
        hr_store(&kept_blocks[HR_BF16][i / 16], i % 16, x, HR_BF16);
        hr_store(&kept_blocks[HR_F16][i / 16], i % 16, x, HR_F16);
    }
}

/* Before loops over a table, which are to become vectors, and not sixteen times the body. */
#define ROLLED _Pragma("GCC unroll 1")

/* The sixteen elements of a block, by code. */
HR_INLINE void fill_table(void *restrict table, float absmax, const float *restrict values,
                          hr_dtype dtype, matrix_level level)
{
    float products[16];
    ROLLED
    for (int code = 0; code < 16; code++)
        hr_store(products, code, values[code] * absmax, HR_F32);
    if (dtype == HR_F16) {
        level.halves.narrow_f16((uint16_t *)table, products);
        return;
    }
    ROLLED
    for (int code = 0; code < 16; code++)
        hr_store(table, code, products[code], dtype);
}

/* Copies the element of code number i. */
HR_INLINE void decode_one(void *out, const uint8_t *codes, int64_t i, const void *table,
                          hr_dtype dtype, int mx)
{
    const int code = codes[i >> 1] >> matrix_shift(i, mx) & 15;
    if (dtype == HR_F32)
        *(float *)out = ((const float *)table)[code];
    else
        *(uint16_t *)out = ((const uint16_t *)table)[code];
}

/* Decodes elements [i, end) of a matrix of 4-bit codes. */
HR_INLINE void decode_4_bits(void *out, const hr_matrix *m, int64_t i, int64_t end, hr_dtype dtype,
                             int mx, matrix_level level)
{
    const uint8_t *const codes = (const uint8_t *)m->data;
    const float *const values = kept_values[m->format == HR_FP4];
    const int size = hr_element_size(dtype), shift = __builtin_ctz((unsigned)m->block_size);
    char *to = (char *)out;
    while (i < end) {
        const int64_t b = i >> shift, after = (b + 1) << shift;
        const int64_t last = after < end ? after : end;
        block_table own;
        const block_table *const table = mx ? &kept_blocks[dtype][m->absmax_codes[b]] : &own;
        if (!mx) {
            fill_table(&own, matrix_absmax(m, b, kept_map), values, dtype, level);
        } else if (last - i == 2 * STEP) { /* as nearly all: without a count */
            level.spread(to, codes + (i >> 1), 1, table, dtype, mx);
            i = last;
            to += 2 * STEP * size;
            continue;
        }
        if (i & 1) {
            decode_one(to, codes, i++, table, dtype, mx);
            to += size;
        }
        const int64_t steps = (last - i) / (2 * STEP);
        level.spread(to, codes + (i >> 1), steps, table, dtype, mx);
        to += steps * 2 * STEP * size;
        for (i += steps * 2 * STEP; i < last; i++, to += size)
            decode_one(to, codes, i, table, dtype, mx);
    }
}

/* Decodes n elements of a row of 8-bit codes. */
HR_INLINE void decode_8_bits(void *restrict out, const int8_t *restrict codes, int64_t n,
                             float absmax, hr_dtype dtype, matrix_level level)
{
    float tile[256];
    for (int64_t j = 0; dtype == HR_F16 && j < n; j += 256) {
        const int count = n - j < 256 ? (int)(n - j) : 256;
        for (int k = 0; k < count; k++)
            hr_store(tile, k, (float)codes[j + k] * absmax * MATRIX_INT8_UNIT, HR_F32);
        f16_store((uint16_t *)out + j, tile, count, level.halves);
    }
    for (int64_t j = 0; dtype != HR_F16 && j < n; j++)
        hr_store(out, j, (float)codes[j] * absmax * MATRIX_INT8_UNIT, dtype);
}

/* Decodes elements [begin, end) of the rectangle, counted row by row. */
HR_INLINE void dequantize_range(void *context, int64_t begin, int64_t end, matrix_level level)
{
    const dequantize_matrix_args *const a = (const dequantize_matrix_args *)context;
    const hr_matrix *const m = &a->matrix;
    const int size = hr_element_size(m->dtype);
    int64_t r = begin / a->cols, c = begin % a->cols;
    for (int64_t n; begin < end; begin += n, r++, c = 0) {
        n = a->cols - c < end - begin ? a->cols - c : end - begin;
        char *const out = (char *)a->out.data + (r * a->out.stride + c) * size;
        const int64_t row = a->row + r, i = row * m->cols + a->col + c;
        if (m->format == HR_INT8_ROWS)
            FOR_DTYPE(m->dtype, D,
                      decode_8_bits(out, (const int8_t *)m->data + i, n, m->absmax[row], D, level))
        else
            FOR_FLAG(m->format == HR_MXFP4, mx,
                     FOR_DTYPE(m->dtype, D, decode_4_bits(out, m, i, i + n, D, mx, level)))
    }
}

/* ---- Quantizing ------------------------------------------------------------------------------ */

/* n elements of x from number i on, as binary32. */
HR_INLINE void load_tile(float *restrict tile, const quantize_matrix_args *a, int64_t i, int n,
                         matrix_level level)
{
    const int64_t cols = a->matrix.cols;
    int64_t row = i / cols, col = i % cols;
    for (int done = 0, count; done < n; done += count, row++, col = 0) {
        count = cols - col < n - done ? (int)(cols - col) : n - done;
        const char *const x =
            (const char *)a->x.data + (row * a->x.stride + col) * hr_element_size(a->dtype);
        if (a->dtype == HR_F32)
            memcpy(tile + done, x, (size_t)count * sizeof *tile);
        else if (a->dtype == HR_F16)
            f16_load(tile + done, (const uint16_t *)x, count, level.halves);
        else
            for (int k = 0; k < count; k++)
                tile[done + k] = hr_load(x, k, HR_BF16);
    }
}

HR_INLINE uint32_t largest_magnitude(const float *tile, int n)
{
    uint32_t largest = 0;
    for (int k = 0; k < n; k++) {
        const uint32_t magnitude = matrix_magnitude(tile[k]);
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

/* Returns the best multiple for a block, whose elements over the largest magnitude are y. */
HR_INLINE float best_multiple(const float *restrict y, int n, hr_format format)
{
    int32_t least = INT32_MAX;
    float best = 1.0f;
    for (int trial = -1; trial < MATRIX_TRIALS; trial++) {
        const float multiple = matrix_multiple(trial);
        int32_t sum = 0;
        for (int k = 0; k < n; k++)
            sum += matrix_error(y[k], multiple, format);
        best = sum < least ? multiple : best;
        least = sum < least ? sum : least;
    }
    return best;
}

HR_INLINE void quantize_4_bits(const quantize_matrix_args *a, int64_t b, hr_format format,
                               matrix_level level)
{
    const hr_matrix *const m = &a->matrix;
    const int64_t i = b * m->block_size, left = m->rows * m->cols - i;
    const int n = left < m->block_size ? (int)left : m->block_size;
    uint8_t *const bytes = (uint8_t *)m->data + i / 2;
    float tile[MATRIX_MAX_BLOCK], y[MATRIX_MAX_BLOCK];
    uint8_t codes[MATRIX_MAX_BLOCK];
    load_tile(tile, a, i, n, level);
    float absmax = matrix_absmax_of(largest_magnitude(tile, n));
    matrix_scale scale = matrix_scale_of(absmax, format);
    if (a->search && matrix_can_search(absmax)) {
        for (int k = 0; k < n; k++)
            y[k] = tile[k] * scale.first * scale.second;
        absmax *= best_multiple(y, n, format);
        scale = matrix_scale_of(absmax, format);
    }
    m->absmax[b] = absmax;
    for (int k = 0; k < n; k++)
        codes[k] = (uint8_t)matrix_encode(tile[k], scale, format);
    if (n % 2)
        codes[n] = (uint8_t)matrix_code(0.0f, format);
    for (int k = 0; k < (n + 1) / 2; k++)
        bytes[k] = (uint8_t)(codes[2 * k] << 4 | codes[2 * k + 1]);
}

/* Quantizes a row to 8 bits. */
HR_INLINE void quantize_8_bits(const quantize_matrix_args *a, int64_t row, matrix_level level)
{
    const hr_matrix *const m = &a->matrix;
    int8_t *const codes = (int8_t *)m->data + row * m->cols;
    float tile[MATRIX_MAX_BLOCK];
    matrix_scale scale = {0, 0};
    for (int pass = 0; pass < 2; pass++) {
        uint32_t largest = 0;
        for (int64_t c = 0; c < m->cols; c += MATRIX_MAX_BLOCK) {
            const int64_t left = m->cols - c;
            const int n = left < MATRIX_MAX_BLOCK ? (int)left : MATRIX_MAX_BLOCK;
            load_tile(tile, a, row * m->cols + c, n, level);
            const uint32_t magnitude = pass == 0 ? largest_magnitude(tile, n) : 0;
            largest = magnitude > largest ? magnitude : largest;
            for (int k = 0; pass == 1 && k < n; k++)
                codes[c + k] = (int8_t)matrix_encode(tile[k], scale, HR_INT8_ROWS);
        }
        if (pass == 0) {
            m->absmax[row] = matrix_absmax_of(largest);
            scale = matrix_scale_of(m->absmax[row], HR_INT8_ROWS);
        }
    }
}

/* Quantizes blocks [begin, end), or rows. */
HR_INLINE void quantize_range(void *context, int64_t begin, int64_t end, matrix_level level)
{
    const quantize_matrix_args *const a = (const quantize_matrix_args *)context;
    for (int64_t b = begin; b < end; b++)
        if (a->matrix.format == HR_INT8_ROWS)
            quantize_8_bits(a, b, level);
        else if (a->matrix.format == HR_NF4)
            quantize_4_bits(a, b, HR_NF4, level);
        else
            quantize_4_bits(a, b, HR_FP4, level);
}

/* Subtracts the mean, which is summed in the order that MATRIX_SUMS stands for. */
static void subtract_mean(float *absmax, float *mean, int64_t n)
{
    double sums[MATRIX_SUMS] = {0};
    for (int64_t i = 0; i < n; i++)
        sums[i % MATRIX_SUMS] += absmax[i];
    for (int width = MATRIX_SUMS / 2; width > 0; width /= 2)
        for (int k = 0; k < width; k++)
            sums[k] += sums[k + width];
    hr_store(mean, 0, (float)(sums[0] / (double)n), HR_F32); /* every NaN as the same */
    for (int64_t i = 0; i < n; i++)
        hr_store(absmax, i, absmax[i] - *mean, HR_F32);
}

/* ---- Instruction sets ------------------------------------------------------------------------ */

#define VARIANT(target, loop, level)                                             \
    target static void loop##_##level(void *context, int64_t begin, int64_t end) \
    {                                                                            \
        const matrix_level own = {HALVES_OF(level), spread_##level};             \
        loop(context, begin, end, own);                                          \
    }

#if defined(__x86_64__) && defined(__GNUC__)

/* Low and high bytes of the table of 16-bit elements, each in 16 bytes: a shuffle of bytes takes one
 * of each for every code. */
CPU_AVX2 HR_INLINE void spread_halves_avx2(uint16_t *out, const uint8_t *codes, int64_t steps,
                                           const void *table, int mx)
{
    /* Two loads, because the table may have been stored in two parts. */
    const __m128i byte = _mm_set1_epi16(255);
    const __m128i one = _mm_loadu_si128((const __m128i *)table);
    const __m128i other = _mm_loadu_si128((const __m128i *)table + 1);
    const __m256i low = _mm256_broadcastsi128_si256(
        _mm_packus_epi16(_mm_and_si128(one, byte), _mm_and_si128(other, byte)));
    const __m256i high = _mm256_broadcastsi128_si256(
        _mm_packus_epi16(_mm_srli_epi16(one, 8), _mm_srli_epi16(other, 8)));
    const __m256i mask = _mm256_set1_epi8(15);
    /* Words 0 and 2 of the codes go to the lower half, 1 and 3 to the upper: interleaving halves
     * then leaves elements in their order. */
    const __m256i order = _mm256_setr_epi32(0, 2, 0, 2, 1, 3, 1, 3);
    for (; steps > 0; steps--, codes += STEP, out += 2 * STEP) {
        const __m256i bytes = _mm256_permutevar8x32_epi32(
            _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)codes)), order);
        const __m256i lower = _mm256_and_si256(bytes, mask);
        const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask);
        const __m256i index =
            mx ? _mm256_unpacklo_epi8(lower, upper) : _mm256_unpacklo_epi8(upper, lower);
        const __m256i of_low = _mm256_shuffle_epi8(low, index);
        const __m256i of_high = _mm256_shuffle_epi8(high, index);
        _mm256_storeu_si256((__m256i *)out, _mm256_unpacklo_epi8(of_low, of_high));
        _mm256_storeu_si256((__m256i *)out + 1, _mm256_unpackhi_epi8(of_low, of_high));
    }
}

/* A byte becomes two indices of 32 bits. Permutations read bits 0 to 2 of each, and bit 3 chooses between
 * the halves of the table; the bits above do not count. */
CPU_AVX2 HR_INLINE void spread_floats_avx2(float *out, const uint8_t *codes, int64_t steps,
                                           const float *table, int mx)
{
    const __m256 first = _mm256_loadu_ps(table), second = _mm256_loadu_ps(table + 8);
    for (int64_t i = 0; i < steps * STEP; i += 4, out += 8) {
        int32_t four;
        memcpy(&four, codes + i, sizeof four);
        const __m256i bytes = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
        const __m256i index = _mm256_or_si256(_mm256_srli_epi64(bytes, matrix_shift(0, mx)),
                                              _mm256_slli_epi64(bytes, 32 - matrix_shift(1, mx)));
        _mm256_storeu_ps(out, _mm256_blendv_ps(_mm256_permutevar8x32_ps(first, index),
                                               _mm256_permutevar8x32_ps(second, index),
                                               _mm256_castsi256_ps(_mm256_slli_epi32(index, 28))));
    }
}

CPU_AVX2 HR_INLINE void spread_avx2(void *out, const uint8_t *codes, int64_t steps,
                                    const void *table, hr_dtype dtype, int mx)
{
    if (dtype == HR_F32)
        spread_floats_avx2((float *)out, codes, steps, (const float *)table, mx);
    else
        spread_halves_avx2((uint16_t *)out, codes, steps, table, mx);
}

/* The table twice, so that bit 4 of an index does not count. A byte in the lower half of a word of 32
 * bits becomes two indices of 16 bits, of which the second takes its lower bits. */
CPU_AVX512 HR_INLINE void spread_halves_avx512(uint16_t *out, const uint8_t *codes, int64_t steps,
                                               const void *table, int mx)
{
    const __m512i values = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)table));
    for (; steps > 0; steps--, codes += STEP, out += 2 * STEP) {
        const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
        const __m512i index = _mm512_or_si512(_mm512_srli_epi32(bytes, matrix_shift(0, mx)),
                                              _mm512_slli_epi32(bytes, 16 - matrix_shift(1, mx)));
        _mm512_storeu_si512(out, _mm512_permutexvar_epi16(index, values));
    }
}

CPU_AVX512 HR_INLINE void spread_avx512(void *out, const uint8_t *codes, int64_t steps,
                                        const void *table, hr_dtype dtype, int mx)
{
    if (dtype != HR_F32) {
        spread_halves_avx512((uint16_t *)out, codes, steps, table, mx);
        return;
    }
    const __m512 values = _mm512_loadu_ps(table);
    float *to = (float *)out;
    for (int64_t i = 0; i < steps * STEP; i += 8, to += 16) {
        const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)(codes + i)));
        const __m512i index = _mm512_or_si512(_mm512_srli_epi64(bytes, matrix_shift(0, mx)),
                                              _mm512_slli_epi64(bytes, 32 - matrix_shift(1, mx)));
        _mm512_storeu_ps(to, _mm512_permutexvar_ps(index, values));
    }
}

#define VARIANTS(loop)                                                                         \
    VARIANT(, loop, baseline)                                                                  \
    VARIANT(CPU_AVX2, loop, avx2)                                                              \
    VARIANT(CPU_AVX512, loop, avx512)                                                          \
    static const hr_range_fn loop##_variants[] = {loop##_baseline, loop##_avx2, loop##_avx512, \
                                                  loop##_avx512};
#else
#define VARIANTS(loop)        \
    VARIANT(, loop, baseline) \
    static const hr_range_fn loop##_variants[] = {loop##_baseline};
#endif

VARIANTS(dequantize_range)
VARIANTS(quantize_range)

/* ---- Calls ----------------------------------------------------------------------------------- */

hr_status quantize_matrix_cpu(const quantize_matrix_args *args)
{
    const hr_matrix *const m = &args->matrix;
    const int rows = m->format == HR_INT8_ROWS;
    const int64_t blocks = rows ? m->rows : matrix_blocks(m);
    const int64_t grain = CPU_GRAIN / (rows ? m->cols : m->block_size) + 1;
    hr_parallel_for(0, blocks, grain, CPU_BEST(quantize_range), (void *)args);
    if (m->absmax_codes)
        subtract_mean(m->absmax, m->offset, blocks);
    return HR_OK;
}

hr_status dequantize_matrix_cpu(const dequantize_matrix_args *args)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, fill_tables);
    hr_parallel_for(0, args->rows * args->cols, CPU_GRAIN, CPU_BEST(dequantize_range),
                    (void *)args);
    return HR_OK;
}
