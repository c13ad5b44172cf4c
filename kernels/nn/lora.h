/*
 * lora.h: what a linear layer with adapters does beside its products: rounds the adapters to the type
 * of the rows, and drops elements. See hr_lora_forward in headroom.h.
 */
#ifndef HR_LORA_H
#define HR_LORA_H

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

#ifdef __cplusplus
extern "C" {
#endif
hr_status lora_rows_cpu(const lora_rows_args *args);
hr_status lora_rows_cuda(const lora_rows_args *args, const hr_exec *exec);
#ifdef __cplusplus
}
#endif

#endif
