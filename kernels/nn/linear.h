/*
 * linear.h: the product of few rows with a matrix of codes, which are decoded on the way, so that
 * nothing is written but the result: see hr_linear_forward in headroom.h.
 *
 * A row of the result is the sum over groups of LINEAR_GROUP columns. The columns of a group have
 * sums of their own, which are added as a tree in the end, so that the number of threads and the
 * instruction set change no bit.
 */
#ifndef HR_LINEAR_H
#define HR_LINEAR_H

#include "kernels/nn/gemm.h"

#define LINEAR_FEW   16 /* rows, at most */
#define LINEAR_GROUP 32 /* columns; a block of 4-bit codes has one or more whole groups */

typedef struct linear_few_args {
    hr_rows y, x;
    hr_matrix matrix;
    const void *bias; /* NULL where absent */
    int64_t m;        /* from 1 to LINEAR_FEW */
    float *workspace; /* CPU: linear_few_bytes() bytes at a multiple of 64 */
    hr_rows addend;   /* NULL data: nothing is added */
} linear_few_args;

/* Stores an element of y, from its sum. */
HR_INLINE void linear_store(const linear_few_args *args, int64_t i, int64_t row, float sum,
                            hr_dtype dtype)
{
    const hr_rows *const addend = &args->addend;
    const float added =
        addend->data ? hr_load(addend->data, i * addend->stride + row, dtype) : 0.0f;
    const float bias = args->bias ? hr_load(args->bias, row, dtype) : GEMM_NO_BIAS;
    hr_store(args->y.data, i * args->y.stride + row,
             gemm_value(sum, 1.0f, addend->data ? 1.0f : 0.0f, added, bias), dtype);
}

/* The bytes of a part of a matrix that is made in the workspace. With what the product takes on the
 * CPU, it is at most 4 MiB there. */
HR_INLINE size_t linear_part_bytes(const hr_exec *exec)
{
    return exec->device == HR_CPU ? (size_t)7 << 19 : (size_t)32 << 20;
}

/* How many columns the rows of x have as binary32 in the workspace, with zeros at their end. */
HR_INLINE int64_t linear_padded(int64_t cols)
{
    return (cols + LINEAR_GROUP - 1) / LINEAR_GROUP * LINEAR_GROUP;
}

HR_INLINE size_t linear_few_bytes(int64_t m, int64_t cols)
{
    return (size_t)(m * linear_padded(cols)) * sizeof(float);
}

/* Whether the kernel for CUDA takes the matrix: what a lane reads is in one block, at a multiple of 16
 * bytes. */
HR_INLINE int linear_few_is_aligned(const hr_matrix *matrix)
{
    return (uintptr_t)matrix->data % 16 == 0 && matrix->cols % LINEAR_GROUP == 0;
}

#ifdef __cplusplus
extern "C" {
#endif
hr_status linear_few_cpu(const linear_few_args *args);
hr_status linear_few_cuda(const linear_few_args *args, const hr_exec *exec);
#ifdef __cplusplus
}
#endif

#endif
