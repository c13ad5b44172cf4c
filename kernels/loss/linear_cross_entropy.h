/*
 * linear_cross_entropy.h: what happens between the products of hr_linear_cross_entropy(): the rows
 * that count are listed, gathered and scattered; what is seen of their logits becomes a loss; and
 * sums of gradients are kept in 16 + 16 bits.
 */
#ifndef HR_LINEAR_CROSS_ENTROPY_KERNELS_H
#define HR_LINEAR_CROSS_ENTROPY_KERNELS_H

#include "kernels/loss/cross_entropy.h"

/* What there is one of in a call, in device memory. */
typedef struct lce_totals {
    int64_t count;     /* of the rows that are listed */
    double weight_sum; /* of all classes */
    float factors[2];  /* of the rows' losses and of their z-losses in the result */
    int32_t is_nan;    /* the result, whatever they are: a mean of nothing */
    float used[2];     /* the same, in the gradients of the logits */
} lce_totals;

/* The rows that count, one after another; the list is filled up with rows that are ignored. */
typedef struct lce_list {
    int64_t *index;              /* which row; -1: none */
    int64_t *target;             /* its class; ignore_index: none */
    float *scale;                /* token_weight */
    float *dloss;                /* the gradient of its loss, with token_weight */
    float *loss, *lse, *lse_low; /* loss: without the z-loss */
    int64_t capacity;            /* as many as there are rows */
    lce_totals *totals;
} lce_list;

/* Of the rows of a part that count, and of its share of the classes: see ce_parts(). */
typedef struct lce_counts {
    double weights, tokens, weight_sum;
    int64_t rows;
} lce_counts;

typedef struct lce_listing {
    cross_entropy_args ce; /* target, weight (of classes), rows and config, as they were given */
    const float *token_weight, *denominator;
    const float *dloss, *given_factors, *lse, *lse_low; /* of a backward call; else NULL */
    int64_t dloss_stride, sequence;
    int32_t keeps_range; /* the gradients are those of the sum, and `scale` is the factor */
    float *factors, *scale;
    hr_linear_cross_entropy_rows out;
    lce_list list;
    lce_counts *counts; /* [CE_PARTS] on CUDA */
} lce_listing;

typedef struct lce_seeing {
    cross_entropy_args ce; /* of some rows of the list: logits, target, weight, rows, classes */
    ce_seen *seen;         /* in all parts of the classes so far */
    int32_t is_first;
    ce_wants wants;
} lce_seeing;

/* Ends what was seen of rows [first, first + rows) of the list. */
typedef struct lce_ending {
    cross_entropy_args ce;
    const ce_seen *seen;
    int64_t classes; /* that were seen */
    lce_list list;
    int64_t first, rows;
    hr_linear_cross_entropy_rows out;
} lce_ending;

/* Rows of a matrix to places of another, or from them: see lce_gather and lce_scatter. */
typedef struct lce_move {
    hr_rows to, from;
    hr_dtype to_dtype, from_dtype;
    const int64_t *index; /* NULL: the rows are where they should be */
    int64_t rows, cols;
} lce_move;

/* sum += addend, where sum is binary32 in two halves, or the upper half alone; rounded if it is. */
typedef struct lce_addition {
    hr_rows high;   /* bf16, or any type where low is NULL */
    uint16_t *low;  /* [rows, cols], or NULL */
    hr_rows addend; /* f32 */
    int64_t rows, cols;
    hr_dtype dtype;     /* of high */
    int32_t is_first;   /* low is not read, and taken for 0 */
    int32_t overwrites; /* high is not read either */
    int32_t is_last;    /* high is rounded */
} lce_addition;

typedef struct lce_reduction {
    lce_list list;
    double z_loss;
    float *result;
    ce_totals *parts; /* [CE_PARTS] on CUDA */
} lce_reduction;

/* ---- One row or one element ------------------------------------------------------------------ */

/* The target of a row: with sequences, that of the next row, and none for the last of a sequence. */
HR_INLINE int64_t lce_target(const lce_listing *l, int64_t row)
{
    if (l->sequence == 0)
        return ce_target(&l->ce, row);
    return (row + 1) % l->sequence == 0 ? l->ce.config.ignore_index : ce_target(&l->ce, row + 1);
}

HR_INLINE float lce_token_weight(const lce_listing *l, int64_t row)
{
    return l->token_weight ? l->token_weight[row + (l->sequence != 0)] : 1.0f;
}

/* The results of a row that is ignored. */
HR_INLINE void lce_clear(const lce_listing *l, int64_t row)
{
    const hr_linear_cross_entropy_rows *const out = &l->out;
    float *const floats[] = {out->loss,    out->lse,     out->lse_low,    out->target_logit,
                             out->largest, out->entropy, out->mean_logit, out->log_sum_sq_probs};
    for (int k = 0; k < 8; k++)
        if (floats[k])
            floats[k][row] = 0.0f;
    if (out->argmax)
        out->argmax[row] = -1;
    if (out->rank)
        out->rank[row] = -1;
}

/* Puts a row, or none, at a place of the list. */
HR_INLINE void lce_put(const lce_listing *l, int64_t place, int64_t row)
{
    const lce_list *const list = &l->list;
    const float scale = row < 0 ? 0.0f : lce_token_weight(l, row);
    list->index[place] = row;
    list->target[place] = row < 0 ? l->ce.config.ignore_index : lce_target(l, row);
    list->scale[place] = scale;
    list->dloss[place] = row < 0    ? 0.0f
                         : l->dloss ? scale * l->dloss[row * l->dloss_stride]
                                    : scale;
    list->loss[place] = 0.0f;
    list->lse[place] = l->lse && row >= 0 ? l->lse[row] : 0.0f;
    list->lse_low[place] = l->lse_low && row >= 0 ? l->lse_low[row] : 0.0f;
}

/* Writes a result of a row, if it is wanted; every NaN as the same. */
HR_INLINE void lce_write(float *results, int64_t row, double value)
{
    if (results)
        hr_store(results, row, (float)value, HR_F32);
}

/* Writes what there is one of, from the sums over the rows that count. */
HR_INLINE void lce_total(const lce_listing *l, int64_t count, double weights, double tokens,
                         double weight_sum)
{
    lce_totals *const t = l->list.totals;
    const hr_cross_entropy_config *const config = &l->ce.config;
    double factor = 1.0, z_factor = 1.0;
    t->is_nan = 0;
    if (l->given_factors) {
        factor = (double)l->given_factors[0];
        z_factor = (double)l->given_factors[1];
    } else if (l->denominator) {
        factor = z_factor = 1.0 / (double)*l->denominator;
    } else if (!l->lse && config->reduction != HR_REDUCE_SUM) {
        factor = ce_mean_factor(weights);
        z_factor = ce_mean_factor(tokens);
        t->is_nan = config->reduction == HR_REDUCE_MEAN && factor == 0.0;
    }
    t->count = count;
    t->weight_sum = weight_sum;
    t->factors[0] = t->used[0] = (float)factor;
    t->factors[1] = t->used[1] = (float)z_factor;
    const int keeps_range = l->keeps_range && factor != 0.0;
    if (keeps_range) {
        t->used[0] = 1.0f;
        t->used[1] = (float)(z_factor / factor);
    }
    lce_write(l->factors, 0, factor);
    lce_write(l->factors, 1, z_factor);
    if (l->scale)
        *l->scale = keeps_range ? (float)factor : 1.0f;
}

/* The results of row i of those that end, at its places. */
HR_INLINE void lce_end(const lce_ending *e, int64_t i)
{
    const int64_t place = e->first + i, row = e->list.index[place];
    if (row < 0)
        return;
    const ce_seen seen = e->seen[i];
    const double sum = seen.sums.sum, lse = ce_lse(seen.top, sum);
    const float low = ce_low(lse);
    const int64_t target = e->list.target[place];
    const double weight = ce_weight(&e->ce, target);
    const double scale = (double)e->list.scale[place];
    const double loss = scale * ce_loss(&e->ce.config, lse, (double)seen.z, weight,
                                        e->list.totals->weight_sum, seen.weighted, e->ce.all);
    e->list.lse[place] = (float)lse;
    e->list.lse_low[place] = low;
    e->list.loss[place] = (float)loss;
    const hr_linear_cross_entropy_rows *const out = &e->out;
    lce_write(out->loss, row, loss + scale * ce_z_loss(e->ce.config.z_loss, lse));
    lce_write(out->lse, row, lse);
    lce_write(out->lse_low, row, (double)low);
    lce_write(out->target_logit, row, (double)seen.z);
    lce_write(out->largest, row, (double)seen.top);
    const double mean = sum > 0.0 ? seen.sums.mean / sum : 0.0;
    lce_write(out->entropy, row, lse - ((double)seen.top + mean));
    lce_write(out->mean_logit, row, seen.total / (double)e->classes);
    if (out->log_sum_sq_probs)
        lce_write(out->log_sum_sq_probs, row, ce_log(seen.sums.squares) - 2.0 * ce_log(sum));
    if (out->argmax)
        out->argmax[row] = seen.argmax;
    if (out->rank)
        out->rank[row] = seen.rank;
}

/* Element j of the bias that the products add, which they do not scale. */
HR_INLINE float lce_scaled(const void *vector, double factor, int64_t j, hr_dtype dtype)
{
    return (float)(factor * (double)hr_load(vector, j, dtype));
}

/* The bits of binary32 in halves of 16, and back. */
HR_INLINE float lce_joined(uint16_t high, uint16_t low)
{
    return hr_float((uint32_t)high << 16 | low);
}

/* One element of an addition. */
HR_INLINE void lce_add(const lce_addition *a, void *high, uint16_t *low, float addend, int64_t j)
{
    float sum = addend;
    if (!low) {
        if (!a->overwrites)
            sum += hr_load(high, j, a->dtype);
        hr_store(high, j, sum, a->dtype);
        return;
    }
    uint16_t *const upper = (uint16_t *)high;
    if (!a->overwrites)
        sum += lce_joined(upper[j], a->is_first ? 0 : low[j]);
    const uint32_t bits = hr_bits(sum);
    upper[j] = a->is_last ? hr_to_bf16(sum) : (uint16_t)(bits >> 16);
    low[j] = (uint16_t)bits;
}

/* The result from the sums over the list of losses and z-losses. */
HR_INLINE void lce_finish(const lce_reduction *r, double loss, double z_loss)
{
    const lce_totals *const t = r->list.totals;
    const double result = loss * (double)t->factors[0] + z_loss * (double)t->factors[1];
    lce_write(r->result, 0, t->is_nan ? NAN : result);
}

#ifdef __cplusplus
extern "C" {
#endif
hr_status lce_list_rows_cpu(const lce_listing *listing);
hr_status lce_see_cpu(const lce_seeing *seeing);
hr_status lce_end_cpu(const lce_ending *ending);
hr_status lce_gather_cpu(const lce_move *move);  /* row i from row index[i]; zeros for -1 */
hr_status lce_scatter_cpu(const lce_move *move); /* row i to row index[i]; not for -1 */
hr_status lce_add_cpu(const lce_addition *addition);
hr_status lce_scale_cpu(float *to, const void *vector, double factor, int64_t count,
                        hr_dtype dtype); /* to = factor * vector */
hr_status lce_reduce_cpu(const lce_reduction *reduction);
hr_status lce_list_rows_cuda(const lce_listing *listing, const hr_exec *exec);
hr_status lce_see_cuda(const lce_seeing *seeing, const hr_exec *exec);
hr_status lce_end_cuda(const lce_ending *ending, const hr_exec *exec);
hr_status lce_gather_cuda(const lce_move *move, const hr_exec *exec);
hr_status lce_scatter_cuda(const lce_move *move, const hr_exec *exec);
hr_status lce_add_cuda(const lce_addition *addition, const hr_exec *exec);
hr_status lce_scale_cuda(float *to, const void *vector, double factor, int64_t count,
                         hr_dtype dtype, const hr_exec *exec);
hr_status lce_reduce_cuda(const lce_reduction *reduction, const hr_exec *exec);
hr_status lce_zero_cuda(const hr_rows *to, int64_t rows, int64_t bytes, int64_t pitch,
                        const hr_exec *exec);
#ifdef __cplusplus
}
#endif

#endif
