/*
 * cross_entropy.h: the formulas of a row of logits: see hr_cross_entropy_forward in headroom.h.
 *
 * The elements of a row are binary32. What there is one of in a row is binary64, because a loss is
 * the small difference of two logits, and the gradient at a target that is almost certain the small
 * difference of two probabilities.
 */
#ifndef HR_CROSS_ENTROPY_H
#define HR_CROSS_ENTROPY_H

#include <math.h>

#include "kernels/core/dtype.h"
#include "kernels/core/math.h"

/* Sums over rows. */
typedef struct ce_totals {
    double loss, z_loss, weight, count;
} ce_totals;

typedef struct cross_entropy_args {
    hr_rows logits, grad;
    const void *target;
    const float *weight;
    float *loss, *lse, *lse_low; /* NULL where absent, here and below */
    int64_t *argmax;
    const float *dloss, *factors;
    int64_t dloss_stride;
    float *result, *new_factors;     /* of a reduction */
    ce_totals *parts;                /* [CE_PARTS] of it on CUDA, or NULL: there is one part */
    double weight_sum;               /* of all classes; computed here for the CPU alone */
    const double *given_sum;         /* the same, or NULL: still to be computed */
    const float *entropy, *dentropy; /* of row index[i] of the caller's for row i of logits */
    const int64_t *index;
    int64_t dentropy_stride;
    int64_t rows, classes; /* of logits, whose first column is class `first` of `all` */
    int64_t first, all;
    hr_cross_entropy_config config;
} cross_entropy_args;

/* ---- Targets --------------------------------------------------------------------------------- */

HR_INLINE int64_t ce_target(const cross_entropy_args *a, int64_t row)
{
    return a->config.target_bytes == 8 ? ((const int64_t *)a->target)[row]
                                       : ((const int32_t *)a->target)[row];
}

HR_INLINE int ce_is_ignored(const cross_entropy_args *a, int64_t target)
{
    return target == a->config.ignore_index;
}

HR_INLINE int ce_is_class(const cross_entropy_args *a, int64_t target)
{
    return target >= 0 && target < a->all;
}

/* The first target that is neither a class nor ignored. */
typedef struct ce_stray {
    int64_t row, target; /* -1 and 0 if there is none */
} ce_stray;

HR_INLINE int ce_is_stray(const cross_entropy_args *a, int64_t target)
{
    return !ce_is_class(a, target) && !ce_is_ignored(a, target);
}

/* Whether logits have a column for a target that is a class. */
HR_INLINE int ce_has_column(const cross_entropy_args *a, int64_t target)
{
    return target >= a->first && target - a->first < a->classes;
}

/* The weights of the classes that logits have, or NULL. */
HR_INLINE const float *ce_weights(const cross_entropy_args *a)
{
    return a->weight ? a->weight + a->first : NULL;
}

/* The weight of a row. A target that is no class makes sums of weights NaN. */
HR_INLINE double ce_weight(const cross_entropy_args *a, int64_t target)
{
    if (ce_is_ignored(a, target))
        return 0.0;
    if (!ce_is_class(a, target))
        return NAN;
    return a->weight ? (double)a->weight[target] : 1.0;
}

/* ---- binary64: once per row ------------------------------------------------------------------ */

/* 2^k for k in [-1022, 1023]. */
HR_INLINE double ce_power(int64_t k)
{
    const uint64_t bits = (uint64_t)(k + 1023) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

/* exp(x) - 1 to a few units in the last place, for x up to 700. */
HR_INLINE double ce_expm1(double x)
{
    if (x != x || x < -700.0)
        return x != x ? x : -1.0;
    const double k = floor(x * 1.4426950408889634 + 0.5);
    const double r = (x - k * 0.693147180369123816490) - k * 1.90821492927058770002e-10;
    double series = 1.0; /* (exp(r) - 1) / r */
    for (int n = 15; n > 1; n--)
        series = 1.0 + series * r * (1.0 / n); /* a constant, once the loop is unrolled */
    const double power = ce_power((int64_t)k);
    return power * (r * series) + (power - 1.0);
}

/* The logarithm of x >= 0 that is a normal number or 0. */
HR_INLINE double ce_log(double x)
{
    if (!(x > 0.0))
        return x == 0.0 ? -INFINITY : x;
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int64_t k = (int64_t)(bits >> 52) - 1023;
    bits = (bits & 0xFFFFFFFFFFFFFu) | 0x3FF0000000000000u;
    double fraction;
    memcpy(&fraction, &bits, sizeof fraction);
    if (fraction > 1.4142135623730951) {
        fraction *= 0.5;
        k++;
    }
    const double t = (fraction - 1.0) / (fraction + 1.0), square = t * t;
    double series = 0.0; /* atanh(t) / t */
    for (int n = 23; n >= 1; n -= 2)
        series = series * square + 1.0 / n;
    return (double)k * 0.6931471805599453 + 2.0 * t * series;
}

/* The log-sum-exp of a row from its largest logit and the sum of exp(z - top). */
HR_INLINE double ce_lse(float top, double sum)
{
    return (double)top + ce_log(sum);
}

/* The loss of a row, but for its z-loss. `weighted`: the sum of weight * z; `weights`: of weights. */
HR_INLINE double ce_loss(const hr_cross_entropy_config *config, double lse, double z, double weight,
                         double weights, double weighted, int64_t classes)
{
    const double smoothing = config->label_smoothing;
    double loss = (1.0 - smoothing) * weight * (lse - z);
    if (smoothing > 0.0)
        loss += smoothing / (double)classes * (weights * lse - weighted);
    return loss;
}

/* The z-loss of a row. */
HR_INLINE double ce_z_loss(double z_loss, double lse)
{
    return z_loss == 0.0 ? 0.0 : z_loss * lse * lse;
}

/* What rounding takes off an lse that is not infinite or NaN. */
HR_INLINE float ce_low(double lse)
{
    return isfinite((float)lse) ? (float)(lse - (double)(float)lse) : 0.0f;
}

/* Writes the loss and the lse of a row, every NaN as the same; z: the target's logit. */
HR_INLINE void ce_finish_row(const cross_entropy_args *a, int64_t row, double lse, float z,
                             double weights, double weighted)
{
    const double loss = ce_loss(&a->config, lse, (double)z, ce_weight(a, ce_target(a, row)),
                                weights, weighted, a->all);
    hr_store(a->loss, row, (float)(loss + ce_z_loss(a->config.z_loss, lse)), HR_F32);
    hr_store(a->lse, row, (float)lse, HR_F32);
    if (a->lse_low)
        a->lse_low[row] = ce_low(lse);
}

HR_INLINE void ce_clear_row(const cross_entropy_args *a, int64_t row)
{
    a->loss[row] = a->lse[row] = 0.0f;
    if (a->lse_low)
        a->lse_low[row] = 0.0f;
    if (a->argmax)
        a->argmax[row] = -1;
}

/* What rows that weigh this much in all are multiplied by for their mean; 0 for nothing, so that the
 * gradients of its mean, which may be NaN, are 0. */
HR_INLINE double ce_mean_factor(double weight)
{
    return weight == 0.0 ? 0.0 : 1.0 / weight;
}

/* ---- What is seen of a row ------------------------------------------------------------------- */

/* Sums over classes, relative to the largest logit: of exp(z - top), of that times (z - top), and of
 * its square. */
typedef struct ce_sums {
    double sum, mean, squares;
} ce_sums;

typedef struct ce_seen {
    ce_sums sums;
    double weighted, total; /* of weight * z; of z */
    float top, z;           /* z: the target's */
    int64_t argmax, rank;
} ce_seen;

/* What is wanted of it besides the sum of exponentials: `moments` are the other two of ce_sums. */
typedef struct ce_wants {
    int32_t argmax, rank, moments, total;
} ce_wants;

HR_INLINE ce_seen ce_nothing_seen(int64_t first_class)
{
    const ce_seen seen = {{0.0, 0.0, 0.0}, 0.0, 0.0, -INFINITY, 0.0f, first_class, 0};
    return seen;
}

/* Makes sums relative to `top` relative to a larger one, or leaves them as they are. */
HR_INLINE void ce_rescale(ce_sums *sums, float top, float larger)
{
    if (!(larger > top))
        return;
    const double less = (double)top - (double)larger, scale = 1.0 + ce_expm1(less);
    sums->mean = sums->sum > 0.0 ? (sums->mean + less * sums->sum) * scale : 0.0;
    sums->sum *= scale;
    sums->squares *= scale * scale;
}

/* ---- Gradients of a row ---------------------------------------------------------------------- */

/* The row of a gradient: grad = p * exp(z - lse) - w * weight, but at the target. */
typedef struct ce_row {
    float high, low; /* lse */
    float p, w;
    double target, others, each; /* p is target + others, and w is each */
} ce_row;

HR_INLINE ce_row ce_row_of(const cross_entropy_args *a, int64_t row, double weight, double weights)
{
    const double smoothing = a->config.label_smoothing;
    const double dloss = (double)a->dloss[row * a->dloss_stride];
    const double part = dloss * (a->factors ? (double)a->factors[0] : 1.0);
    const double z_part = dloss * (a->factors ? (double)a->factors[1] : 1.0);
    ce_row r;
    r.high = a->lse[row];
    r.low = a->lse_low ? a->lse_low[row] : 0.0f;
    r.target = part * (1.0 - smoothing) * weight;
    r.others = 0.0;
    r.each = smoothing > 0.0 ? part * smoothing / (double)a->all : 0.0;
    if (smoothing > 0.0)
        r.others = r.each * weights;
    if (a->config.z_loss != 0.0)
        r.others += z_part * 2.0 * a->config.z_loss * ((double)r.high + (double)r.low);
    r.p = (float)(r.target + r.others);
    r.w = (float)r.each;
    return r;
}

/* The entropy of a row and the gradient of it, which is 0 where there is none. */
typedef struct ce_entropy {
    float gradient, value;
} ce_entropy;

HR_INLINE ce_entropy ce_entropy_of(const cross_entropy_args *a, int64_t row)
{
    ce_entropy e = {0.0f, 0.0f};
    if (a->dentropy) {
        const int64_t place = a->index ? a->index[row] : row;
        e.gradient = a->dentropy[place * a->dentropy_stride];
        e.value = a->entropy[place];
    }
    return e;
}

/* The gradient at the target, whose logit is z before and `capped` after the softcap. */
HR_INLINE float ce_target_gradient(const ce_row *r, ce_entropy e, float capped, double weight,
                                   double slope)
{
    const double log_p = ((double)capped - (double)r->high) - (double)r->low;
    const double less = ce_expm1(log_p), p = 1.0 + less;
    double gradient = r->target * less + r->others * p - r->each * weight;
    if (e.gradient != 0.0f && p > 0.0)
        gradient -= (double)e.gradient * p * (log_p + (double)e.value);
    return (float)(gradient * slope);
}

/* ---- binary32: each element ------------------------------------------------------------------ */

/* e^x for x up to 88, in half the instructions of hr_exp: with x = n ln 2 + r it is 2^n (1 + (e^r -
 * 1)), where what rounding took off ln 2 is left out, which is |x| 2^-29 of the result. What is less
 * than the least normal number is 0, also for minus infinity; a NaN stays one. */
HR_INLINE float ce_exp(float x)
{
    /* Adding `shift` rounds to an integer, and leaves n + 127, the exponent of 2^n, in the low bits. */
    const float shift = 0x1.8p+23f + 127.0f, bounded = hr_at_least(x, -88.0f);
    const float shifted = fmaf(bounded, 0x1.715476p+0f, shift);
    const float less = hr_expm1_near_0(fmaf(shifted - shift, -0x1.62e430p-1f, bounded));
    const float power = hr_float(hr_bits(shifted) << 23);
    return fmaf(less, power, power);
}

HR_INLINE float ce_probability(float z, float high, float low)
{
    return ce_exp((z - high) - low);
}

/* The gradient of p times the loss less the target's logit, and of the entropy:
 * exp(log_p) * (p - e.gradient * (log_p + e.value)) with log_p = z - lse. Where exp(log_p) is 0, log_p
 * is bounded, so that a class that is masked by minus infinity has none. */
HR_INLINE float ce_gradient_with_entropy(float z, float high, float low, float p, ce_entropy e)
{
    const float log_p = hr_at_least((z - high) - low, -88.0f);
    return ce_exp(log_p) * (p - e.gradient * (log_p + e.value));
}

/* The derivative of the softcap, from tanh(z / cap). */
HR_INLINE float ce_slope(float tanh)
{
    return (1.0f - tanh) * (1.0f + tanh);
}

/* What exponents are taken relative to: finite even while all logits were minus infinity. */
HR_INLINE float ce_base(float top)
{
    return top == -INFINITY ? 0.0f : top;
}

/* ---- The reduction --------------------------------------------------------------------------- */

/* On CUDA many rows are added up in parts, a thread block each, and then the parts in their order. */
#define CE_PART  2048 /* rows of a part, while there are not too many parts */
#define CE_PARTS 512  /* at most */

HR_INLINE int64_t ce_parts(int64_t rows)
{
    const int64_t parts = (rows + CE_PART - 1) / CE_PART;
    return parts < 1 ? 1 : parts < CE_PARTS ? parts : CE_PARTS;
}

HR_INLINE void ce_count(const cross_entropy_args *a, int64_t target, float loss, float lse,
                        ce_totals *totals)
{
    if (ce_is_ignored(a, target))
        return;
    totals->weight += ce_weight(a, target);
    totals->count += 1.0;
    totals->loss += (double)loss;
    totals->z_loss += ce_z_loss(a->config.z_loss, (double)lse);
}

/* The loss of a row, where it is wanted, and its lse, where there is a z-loss. */
HR_INLINE float ce_given_loss(const cross_entropy_args *a, int64_t row)
{
    return a->loss ? a->loss[row] : 0.0f;
}

HR_INLINE float ce_given_lse(const cross_entropy_args *a, int64_t row)
{
    return a->loss && a->config.z_loss != 0.0 ? a->lse[row] : 0.0f;
}

/* Writes what is wanted of a reduction. */
HR_INLINE void ce_finish(const cross_entropy_args *a, const ce_totals *totals)
{
    double factor = 1.0, z_factor = 1.0;
    if (a->config.reduction != HR_REDUCE_SUM) {
        factor = ce_mean_factor(totals->weight);
        z_factor = ce_mean_factor(totals->count);
    }
    if (a->new_factors) {
        hr_store(a->new_factors, 0, (float)factor, HR_F32);
        hr_store(a->new_factors, 1, (float)z_factor, HR_F32);
    }
    if (!a->result)
        return;
    const double result = totals->loss * factor + totals->z_loss * z_factor;
    const int is_empty = a->config.reduction == HR_REDUCE_MEAN && factor == 0.0;
    hr_store(a->result, 0, is_empty ? NAN : (float)result, HR_F32);
}

#ifdef __cplusplus
extern "C" {
#endif
ce_stray cross_entropy_stray_cpu(const cross_entropy_args *args);
hr_status cross_entropy_forward_cpu(cross_entropy_args *args);
hr_status cross_entropy_backward_cpu(cross_entropy_args *args);
hr_status cross_entropy_reduce_cpu(const cross_entropy_args *args);
hr_status cross_entropy_forward_cuda(const cross_entropy_args *args, const hr_exec *exec);
hr_status cross_entropy_backward_cuda(const cross_entropy_args *args, const hr_exec *exec);
hr_status cross_entropy_reduce_cuda(const cross_entropy_args *args, const hr_exec *exec);
/* Waits for the device, in whose memory `there` is, [CE_PARTS]. Refuses a stream that is being
 * captured. */
hr_status cross_entropy_stray_cuda(ce_stray *stray, ce_stray *there, const cross_entropy_args *args,
                                   const char *function, const hr_exec *exec);
#ifdef __cplusplus
}
#endif

#endif
