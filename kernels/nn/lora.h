/*
 * lora.h: what a linear layer with adapters does beside its products: rounds the adapters to the type
 * of the rows, and drops elements. See hr_lora_forward in headroom.h.
 */
#ifndef HR_LORA_H
#define HR_LORA_H

#include <math.h>

#include "kernels/core/random.h"

#define LORA_GROUP 8      /* elements that share 128 random bits */
#define LORA_PARTS 0x1p16 /* what p is counted in */

/* out = x, with zeros where elements are dropped, or rounded from f32 where none are. */
typedef struct lora_rows_args {
    hr_rows out, x; /* out may be x where elements are dropped */
    hr_dtype out_dtype;
    int64_t rows, cols;
    int64_t row, col;    /* where x begins in the matrix; col is a multiple of LORA_GROUP */
    uint32_t threshold;  /* 2^16 p: below 2^16; 0: nothing is dropped */
    const int64_t *seed; /* NULL where nothing is dropped */
} lora_rows_args;

/* The type of x. */
HR_INLINE hr_dtype lora_dtype(const lora_rows_args *args)
{
    return args->threshold ? args->out_dtype : HR_F32;
}

/* Of a group of a row of the matrix. */
HR_INLINE hr_random4 lora_counter(int64_t row, int64_t group)
{
    hr_random4 counter;
    counter.word[0] = (uint32_t)group;
    counter.word[1] = (uint32_t)((uint64_t)group >> 32);
    counter.word[2] = (uint32_t)row;
    counter.word[3] = (uint32_t)((uint64_t)row >> 32);
    return counter;
}

/* Whether element e of a group is kept; `word` is its word e / 2. */
HR_INLINE int lora_keeps(uint32_t word, int e, uint32_t threshold)
{
    return (word >> e % 2 * 16 & 0xFFFFu) >= threshold;
}

/* Norms of rows of W + scale B A, for some rows of W. */
typedef struct lora_norms_args {
    float *norms;
    hr_rows w, b; /* [rows, cols] and [rows, rank] */
    hr_dtype dtype;
    const float *products; /* W A^T [rows, rank] */
    const float *gram;     /* A A^T [rank, rank] */
    int64_t rows, cols, rank;
    double scale;
} lora_norms_args;

/* What component k of row i of B adds to the square of the norm. */
HR_INLINE double lora_norm_term(const lora_norms_args *a, int64_t i, int64_t k, hr_dtype dtype)
{
    const int64_t at = i * a->b.stride;
    float inner = 0.0f;
    for (int64_t l = 0; l < a->rank; l++)
        inner = fmaf(a->gram[k * a->rank + l], hr_load(a->b.data, at + l, dtype), inner);
    return (double)hr_load(a->b.data, at + k, dtype) * a->scale *
           (2.0 * (double)a->products[i * a->rank + k] + a->scale * (double)inner);
}

HR_INLINE float lora_norm(double square)
{
    return square < 0.0 ? 0.0f : (float)sqrt(square); /* a NaN stays one */
}

#ifdef __cplusplus
extern "C" {
#endif
hr_status lora_norms_cpu(const lora_norms_args *args);
hr_status lora_norms_cuda(const lora_norms_args *args, const hr_exec *exec);
hr_status lora_rows_cpu(const lora_rows_args *args);
hr_status lora_rows_cuda(const lora_rows_args *args, const hr_exec *exec);
#ifdef __cplusplus
}
#endif

#endif
