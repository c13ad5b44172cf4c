/*
 * quantize_matrix.cuh: the tables of matrices of few bits on a GPU, which the compiler computes and
 * each thread block copies into shared memory.
 */
#ifndef HR_QUANTIZE_MATRIX_CUH
#define HR_QUANTIZE_MATRIX_CUH

#include "kernels/core/cuda.cuh"
#include "kernels/quant/dynamic_map.h"
#include "kernels/quant/quantize_matrix.h"

/* Of one format: the values of 4-bit codes, and of the codes of nested scales. */
struct matrix_tables {
    float values[16], map[256];
};

constexpr matrix_tables matrix_tables_of(hr_format format)
{
    matrix_tables tables = {};
    for (int code = 0; code < 16; code++)
        tables.values[code] = matrix_value(code, format);
    for (int code = 0; code < 256; code++)
        tables.map[code] = dynamic_value(code, 1);
    return tables;
}

/* Of NF4 and FP4, and the values of HR_MXFP4. */
static constexpr __device__ matrix_tables kept_tables[] = {
    matrix_tables_of(HR_NF4), matrix_tables_of(HR_FP4), matrix_tables_of(HR_MXFP4)};

/* Copies what a matrix of 4-bit codes needs, by a block of 256 threads. */
static __device__ __forceinline__ void copy_tables(matrix_tables *to, const hr_matrix &matrix)
{
    const int number = matrix.format == HR_MXFP4 ? 2 : matrix.format == HR_FP4;
    const matrix_tables &from = kept_tables[number];
    if (threadIdx.x < 16)
        to->values[threadIdx.x] = from.values[threadIdx.x];
    if (matrix.absmax_codes && matrix.format != HR_MXFP4)
        to->map[threadIdx.x] = from.map[threadIdx.x];
}

#endif
