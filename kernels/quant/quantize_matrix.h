/*
 * quantize_matrix.h: matrices of 4 and 8 bits: the tables of their codes, the formula of a code and of
 * an element, and the kernels that apply them. The rules are documented at hr_matrix and
 * hr_quantize_matrix in headroom.h.
 *
 * QLoRA: efficient finetuning of quantized LLMs, Dettmers et al., arXiv:2305.14314; LLM.int8(),
 * Dettmers et al., arXiv:2208.07339.
 */
#ifndef HR_QUANTIZE_MATRIX_H
#define HR_QUANTIZE_MATRIX_H

#include "kernels/core/dtype.h"

#define MATRIX_MIN_BLOCK 32
#define MATRIX_MAX_BLOCK 4096
#define MATRIX_MX_BLOCK  32  /* of HR_MXFP4 */
#define MATRIX_SCALES    256 /* scales that have a scale of their own */

/* What bitsandbytes has for 1 / 127. */
#define MATRIX_INT8_UNIT 7.874015718698502e-3f

/* Before a loop over the values of a table: so that a loop around it becomes one of vectors. */
#if defined(__CUDA_ARCH__)
#define MATRIX_UNROLL _Pragma("unroll")
#elif defined(__CUDACC__)
#define MATRIX_UNROLL /* of the host, which has no such loop */
#else
#define MATRIX_UNROLL _Pragma("GCC unroll 16")
#endif

/* ---- The tables of 4 bits -------------------------------------------------------------------- */

/* The value of a code. */
HR_CONSTEXPR float matrix_value(int code, hr_format format)
{
    const uint32_t nf4[16] = {0xBF800000u, 0xBF3239B1u, 0xBF066B30u, 0xBECA32A0u,
                              0xBE91A24Du, 0xBE3D353Fu, 0xBDBA7871u, 0x00000000u,
                              0x3DA2FAFFu, 0x3E24CAE3u, 0x3E7C04DDu, 0x3EAD033Au,
                              0x3EE1A4B8u, 0x3F1007ABu, 0x3F3913B3u, 0x3F800000u};
    const int fp4[16] = {0, 1, 128, 192, 64, 96, 32, 48, 0, -1, -128, -192, -64, -96, -32, -48};
    const int doubled[8] = {0, 1, 2, 3, 4, 6, 8, 12};
    if (format == HR_MXFP4)
        return (code & 8 ? -0.5f : 0.5f) * (float)doubled[code & 7];
    return format == HR_NF4 ? hr_float(nf4[code]) : (float)fp4[code] / 192.0f;
}

/* By how much a byte is shifted for element number i of HR_MXFP4, or of the other formats of 4 bits. */
HR_CONSTEXPR int matrix_shift(int64_t i, int mx)
{
    return (i & 1) == mx ? 4 : 0;
}

/* The code of the value number `place`, counted from the least. FP4 has two zeros. */
HR_CONSTEXPR int matrix_code_at(int place, hr_format format)
{
    const int fp4[16] = {11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3};
    return format == HR_NF4 ? place : fp4[place];
}

/* The largest number that gets the value number `place`, and not the next: the middle of both. */
HR_CONSTEXPR float matrix_border(int place, hr_format format)
{
    return (matrix_value(matrix_code_at(place, format), format) +
            matrix_value(matrix_code_at(place + 1, format), format)) /
           2.0f;
}

/* The code nearest to y; that of 1 for a NaN. */
HR_INLINE int matrix_code(float y, hr_format format)
{
    int code = matrix_code_at(0, format);
    MATRIX_UNROLL
    for (int place = 0; place < 15; place++)
        code = y <= matrix_border(place, format) ? code : matrix_code_at(place + 1, format);
    return code;
}

/* ---- Scales ---------------------------------------------------------------------------------- */

/* The magnitude of x as an integer, of which the largest gives the absmax: a NaN is above infinity,
 * which is above all numbers. */
HR_INLINE uint32_t matrix_magnitude(float x)
{
    return hr_bits(x) & 0x7FFFFFFFu;
}

HR_INLINE float matrix_absmax_of(uint32_t magnitude)
{
    return hr_float(magnitude > 0x7F800000u ? 0x7FFFFFFFu : magnitude);
}

/* The two factors of y = (x * first) * second, which is x * (most / absmax): `first` is 1 but where
 * the quotient would overflow. */
typedef struct matrix_scale {
    float first, second;
} matrix_scale;

HR_INLINE matrix_scale matrix_scale_of(float absmax, hr_format format)
{
    matrix_scale scale;
    scale.first = absmax < 0x1p-64f ? 0x1p64f : 1.0f;
    scale.second =
        absmax == 0.0f ? 0.0f : (format == HR_INT8_ROWS ? 127.0f : 1.0f) / (absmax * scale.first);
    return scale;
}

/* The code of x, in the lowest bits. */
HR_INLINE int matrix_encode(float x, matrix_scale scale, hr_format format)
{
    const float y = x * scale.first * scale.second;
    if (format != HR_INT8_ROWS)
        return matrix_code(y, format);
    /* Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits. */
    return y == y ? (int)(hr_bits(y + 0x1.8p+23f) & 0xFFu) : 0;
}

/* A scale that is quantized, too, from the value of its code in the signed dynamic map. */
HR_INLINE float matrix_nested(float value, float scale, float offset)
{
    return value * scale + offset;
}

/* The scale 2^(code - 127) of HR_MXFP4, of which the least is a denormal. */
HR_INLINE float matrix_power(uint32_t code)
{
    return hr_float(code == 255 ? 0x7FFFFFFFu : code == 0 ? 0x00400000u : code << 23);
}

/* The scale of block `b` of NF4 or FP4, where `map` is the signed dynamic map. */
HR_INLINE float matrix_absmax(const hr_matrix *matrix, int64_t b, const float *map)
{
    if (!matrix->absmax_codes)
        return matrix->absmax[b];
    return matrix_nested(map[matrix->absmax_codes[b]],
                         matrix->absmax_scales[(uint64_t)b / MATRIX_SCALES], matrix->offset[0]);
}

/* The mean of all absmax is summed in MATRIX_SUMS sums, number i % MATRIX_SUMS in turn, which are
 * added as a tree: on every device in this order. */
#define MATRIX_SUMS 1024

/* ---- The search for a scale ------------------------------------------------------------------ */

/* The multiples of the largest magnitude that are tried: 1, then these. */
#define MATRIX_TRIALS 7

HR_INLINE float matrix_multiple(int trial)
{
    return (float)(trial < 0 ? 32 : trial == 0 ? 34 : 32 - trial) / 32.0f;
}

/* Whether a search makes sense: a multiple is finite, and not 0. */
HR_INLINE int matrix_can_search(float absmax)
{
    return absmax > 0.0f && absmax < 0x1p127f;
}

/* The squared error of y, in [-1, 1], with the table times `multiple`, as a multiple of 2^-22: sums
 * of such integers are the same in every order, and those of a block stay below 2^31. */
HR_INLINE int32_t matrix_error(float y, float multiple, hr_format format)
{
    float value = matrix_value(matrix_code_at(0, format), format) * multiple;
    MATRIX_UNROLL
    for (int place = 0; place < 15; place++)
        value = y <= matrix_border(place, format) * multiple
                    ? value
                    : matrix_value(matrix_code_at(place + 1, format), format) * multiple;
    const float error = y - value;
    return (int32_t)(error * error * 0x1p22f);
}

/* ---- The kernels ----------------------------------------------------------------------------- */

/* The checked arguments of the calls. */
typedef struct quantize_matrix_args {
    hr_matrix matrix;
    hr_rows x;
    hr_dtype dtype; /* of x */
    int search;
} quantize_matrix_args;

typedef struct dequantize_matrix_args {
    hr_rows out;
    hr_matrix matrix;
    int64_t row, rows, col, cols;
} dequantize_matrix_args;

static inline int64_t matrix_blocks(const hr_matrix *matrix)
{
    return hr_block_count(matrix->rows * matrix->cols, matrix->block_size);
}

#ifdef __cplusplus
extern "C" {
#endif

/* With absmax_codes they leave absmax - offset in absmax, and absmax_codes and absmax_scales as they
 * are. */
hr_status quantize_matrix_cpu(const quantize_matrix_args *args);
hr_status quantize_matrix_cuda(const quantize_matrix_args *args, const hr_exec *exec);
hr_status dequantize_matrix_cpu(const dequantize_matrix_args *args);
hr_status dequantize_matrix_cuda(const dequantize_matrix_args *args, const hr_exec *exec);

#ifdef __cplusplus
}
#endif

#endif
