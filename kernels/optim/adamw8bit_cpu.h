/*
 * adamw8bit_cpu.h: shared by the CPU loops of 8-bit Adam. Each instruction set has a loop, in a
 * file of its own; adamw8bit_cpu.c chooses among them.
 */
#ifndef HR_ADAMW8BIT_CPU_H
#define HR_ADAMW8BIT_CPU_H

#include "kernels/optim/adamw8bit.h"
#include "kernels/quant/dynamic_map_cpu.h"
#include "kernels/quant/dynamic_map_cpu_vbmi.h"
#include "kernels/weights/weights_cpu.h"

/* The rule of an element. ANY is hr_adamw's rule with all its options, and PLAIN is the same
 * without the rare ones: skip_nonfinite, and weight decay that is not decoupled. BNB is for
 * bnb_exact. */
typedef enum adamw8bit_rule { ADAMW8BIT_PLAIN, ADAMW8BIT_ANY, ADAMW8BIT_BNB } adamw8bit_rule;

/* The tables of both maps. All but `maps` are indexed by is_signed. */
typedef struct adamw8bit_tables {
    quant_maps maps;
    dynamic_vectors vectors[2];
    dynamic_lines lines[2];
    dynamic_bytes bytes[2];
} adamw8bit_tables;

typedef struct adamw8bit_tensor adamw8bit_tensor;

/* Updates the blocks of [from, to) of one tensor; `from` is the start of a block. */
typedef void (*adamw8bit_run_fn)(const adamw8bit_tensor *t, int64_t from, int64_t to,
                                 hr_dtype param_dtype, hr_dtype grad_dtype);
/* The same for weights of another mode than HR_WEIGHTS_NEAREST, without unpacking them first.
 * Returns 0 if it has no loop for these weights, else 1. */
typedef int (*adamw8bit_run_weights_fn)(const adamw8bit_tensor *t, const weights_tensor *weights,
                                        int64_t from, int64_t to, hr_dtype grad_dtype);

/* A call. */
typedef struct adamw8bit_call {
    const adamw8bit_args *args;
    adamw8bit_rule rule;
    const adamw8bit_tables *tables;
    adamw8bit_run_fn run;
    adamw8bit_run_weights_fn run_weights; /* or NULL */
} adamw8bit_call;

/* A tensor of the call. */
struct adamw8bit_tensor {
    const adamw8bit_call *call;
    void *param;
    const void *grad;
    uint8_t *exp_avg, *exp_avg_sq;
    float *exp_avg_absmax, *exp_avg_sq_absmax;
    adamw_constants constants;
    adamw8bit_bnb_constants bnb;
    uint64_t seed;
    double step;
    int64_t first; /* the element at which the pointers begin, for random numbers */
};

/* A block that has been updated and not encoded yet. */
typedef struct adamw8bit_pending {
    int64_t begin;
    int count;
    float *m, *v;
    float absmax_m, absmax_v;
    dynamic_scale scale_m, scale_v;
    int vectors;  /* 1: vector code may encode it */
    int overlaps; /* 1: it may be encoded while the next block is updated */
} adamw8bit_pending;

#define LANES CPU_STEP /* elements at a time; every block size is a multiple of it */

/* The moments of two blocks. A load waits for an earlier store to an address that is equal modulo
 * 4096, so `apart` keeps the two blocks from lying that far apart. */
typedef struct adamw8bit_moments {
    _Alignas(64) float m0[ADAMW8BIT_MAX_BLOCK];
    float v0[ADAMW8BIT_MAX_BLOCK];
    float apart[ADAMW8BIT_MAX_BLOCK / 2];
    float m1[ADAMW8BIT_MAX_BLOCK];
    float v1[ADAMW8BIT_MAX_BLOCK];
} adamw8bit_moments;

/* Fewer than LANES elements, padded with zeros. */
typedef struct adamw8bit_few {
    float param[LANES], grad[LANES];
    uint8_t exp_avg[LANES], exp_avg_sq[LANES];
} adamw8bit_few;

static inline void adamw8bit_pad(adamw8bit_few *few, const adamw8bit_tensor *t, int64_t i,
                                 int count, int param_size, int grad_size)
{
    memset(few, 0, sizeof *few);
    memset(few->exp_avg, dynamic_zero(1), sizeof few->exp_avg);
    memcpy(few->param, (const char *)t->param + i * param_size, (size_t)(count * param_size));
    memcpy(few->grad, (const char *)t->grad + i * grad_size, (size_t)(count * grad_size));
    memcpy(few->exp_avg, t->exp_avg + i, (size_t)count);
    memcpy(few->exp_avg_sq, t->exp_avg_sq + i, (size_t)count);
}

HR_INLINE adamw_values adamw8bit_apply(const adamw8bit_tensor *t, adamw_values x,
                                       hr_dtype param_dtype, adamw8bit_rule rule)
{
    if (rule == ADAMW8BIT_BNB)
        return adamw8bit_bnb_element(t->bnb, x, param_dtype);
    if (rule == ADAMW8BIT_ANY)
        return adamw_update(t->constants, x, 0, t->call->args->config->adamw.step.skip_nonfinite);
    adamw_constants c = t->constants;
    c.l2 = 0.0f;
    return adamw_element_of(c, x, 0, adamw_has_l2(c), adamw_is_slow(c));
}

HR_INLINE uint32_t adamw8bit_largest(const uint32_t *magnitudes)
{
    uint32_t largest = 0;
    for (int lane = 0; lane < LANES; lane++)
        largest = magnitudes[lane] > largest ? magnitudes[lane] : largest;
    return largest;
}

/* Multiplies a block by the scale's first factor if that is large, which loses nothing, and makes
 * the factor 1: vector code applies only the second factor. */
HR_INLINE dynamic_scale adamw8bit_rescale(float *x, int count, dynamic_scale scale)
{
    if (__builtin_expect(scale.first > 1.0f, 0)) {
        for (int i = 0; i < cpu_round_up(count, LANES); i++)
            x[i] *= scale.first;
        scale.first = 1.0f;
    }
    return scale;
}

/* Ends the update of a block: stores its absmaxes and returns the block for encoding. */
HR_INLINE adamw8bit_pending adamw8bit_close(const adamw8bit_tensor *t, int64_t begin, int count,
                                            int64_t block, float *m, float *v, uint32_t magnitude_m,
                                            uint32_t magnitude_v)
{
    const int bnb = t->call->rule == ADAMW8BIT_BNB;
    adamw8bit_pending pending;
    pending.begin = begin;
    pending.count = count;
    pending.m = m;
    pending.v = v;
    pending.absmax_m = quant_absmax(magnitude_m, bnb);
    pending.absmax_v = quant_absmax(magnitude_v, bnb);
    pending.scale_m = dynamic_scale_of(pending.absmax_m);
    pending.scale_v = dynamic_scale_of(pending.absmax_v);
    pending.vectors = 0;
    pending.overlaps = 0;
    /* exp_avg_sq is negative only if its absmax was. */
    if (!bnb && !t->call->args->config->seeds && t->exp_avg_sq_absmax[block] >= 0.0f) {
        pending.scale_m = adamw8bit_rescale(m, count, pending.scale_m);
        pending.scale_v = adamw8bit_rescale(v, count, pending.scale_v);
        pending.vectors = pending.scale_m.first == 1.0f && pending.scale_v.first == 1.0f &&
                          pending.absmax_m + pending.absmax_v < INFINITY; /* neither is NaN */
    }
    t->exp_avg_absmax[block] = pending.absmax_m;
    t->exp_avg_sq_absmax[block] = pending.absmax_v;
    return pending;
}

/* Encodes the elements [i, i + count) of a block one by one. */
void adamw8bit_encode_each(const adamw8bit_tensor *t, const adamw8bit_pending *p, int i, int count);

void adamw8bit_run_baseline(const adamw8bit_tensor *t, int64_t from, int64_t to,
                            hr_dtype param_dtype, hr_dtype grad_dtype);
void adamw8bit_run_avx2(const adamw8bit_tensor *t, int64_t from, int64_t to, hr_dtype param_dtype,
                        hr_dtype grad_dtype);
void adamw8bit_run_plain_avx2(const adamw8bit_tensor *t, int64_t from, int64_t to,
                              hr_dtype param_dtype, hr_dtype grad_dtype);
void adamw8bit_run_avx512(const adamw8bit_tensor *t, int64_t from, int64_t to, hr_dtype param_dtype,
                          hr_dtype grad_dtype);
void adamw8bit_run_vbmi(const adamw8bit_tensor *t, int64_t from, int64_t to, hr_dtype param_dtype,
                        hr_dtype grad_dtype);

int adamw8bit_run_weights_vbmi(const adamw8bit_tensor *t, const weights_tensor *weights,
                               int64_t from, int64_t to, hr_dtype grad_dtype);

#endif
