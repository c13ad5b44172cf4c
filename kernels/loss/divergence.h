/*
 * divergence.h: the formulas of a row of student's and teacher's logits: see hr_divergence_forward
 * in headroom.h.
 *
 * Everything is computed from the logarithm of the ratio of two probabilities, d = log p - log q,
 * which is exact where the logits are close. The larger of p and q is an exponential, the other is
 * that times e^-|d|, so that differences of close probabilities do not cancel; nor do logarithms of a
 * mixture in which one of them has almost no weight. Differences of logits are divided by the
 * temperature, not the logits, so that their quotients are not rounded before they are subtracted.
 * Elements are binary32; what there is one of in a row is binary64.
 */
#ifndef HR_DIVERGENCE_H
#define HR_DIVERGENCE_H

#include "kernels/loss/cross_entropy.h"

/* Numbers that the forward call leaves for each row: the temperature times the log-sum-exp of the
 * student and what rounding took off it, the same of the teacher, and of the mean of log(p / m)
 * under the student, without the temperature. */
enum { DV_STUDENT, DV_STUDENT_LOW, DV_TEACHER, DV_TEACHER_LOW, DV_MEAN, DV_MEAN_LOW };

/* Which of the formulas: beta is 0, 1, or between. */
enum { DV_FORWARD, DV_REVERSE, DV_MIXED };

typedef struct divergence_args {
    hr_rows student, teacher, grad;
    const uint8_t *ignored; /* NULL: none */
    float *loss;
    float *statistics; /* NULL where only the loss is wanted */
    const float *dloss;
    int64_t dloss_stride, rows, classes;
    hr_divergence_config config;
} divergence_args;

HR_INLINE int dv_kind(const divergence_args *a)
{
    return a->config.beta == 0.0 ? DV_FORWARD : a->config.beta == 1.0 ? DV_REVERSE : DV_MIXED;
}

HR_INLINE int dv_is_ignored(const divergence_args *a, int64_t row)
{
    return a->ignored && a->ignored[row];
}

/* 1 / temperature. `high` is below it, and `low`, the rest, above 0, so that an infinite number stays
 * what it is: at least 2^-100, whose products are no subnormal numbers, with which CPUs are slow. */
typedef struct dv_scale {
    float high, low;
} dv_scale;

HR_INLINE dv_scale dv_scale_of(const divergence_args *a)
{
    const double scale = 1.0 / a->config.temperature;
    dv_scale s = {(float)scale, 0.0f};
    if ((double)s.high > scale)
        s.high = hr_float(hr_bits(s.high) - 1u);
    s.low = hr_at_least((float)(scale - (double)s.high), 0x1p-100f);
    return s;
}

/* A difference of logits over the temperature, rounded as if 1 / temperature were exact. */
HR_INLINE float dv_scaled(float less, dv_scale scale)
{
    return fmaf(less, scale.high, less * scale.low);
}

/* The log-sum-exp of a row times the temperature, from its largest logit and the sum of what dv_exp
 * gives. */
HR_INLINE double dv_lse(const divergence_args *a, float top, double sum)
{
    return (double)top + a->config.temperature * ce_log(sum);
}

HR_INLINE float dv_exp(float less, dv_scale scale)
{
    return ce_exp(dv_scaled(less, scale));
}

/* ---- Once per row ---------------------------------------------------------------------------- */

typedef struct dv_row {
    float student, student_low, teacher, teacher_low; /* log-sum-exps times the temperature */
    float ratio, ratio_low;                           /* the student's less the teacher's */
    float mean, mean_low;
    float lesser, greater;  /* the smaller and the larger of beta and 1 - beta */
    int student_is_greater; /* whether the greater one is the weight of the student */
    dv_scale scale;
} dv_row;

HR_INLINE float dv_low(double x, float high)
{
    return isfinite(high) ? (float)(x - (double)high) : 0.0f;
}

/* For the gradient of the reverse divergence, `ratio` has the mean in it. */
HR_INLINE dv_row dv_row_of(const divergence_args *a, dv_scale scale, const float *statistics,
                           int for_gradient)
{
    dv_row r;
    r.student = statistics[DV_STUDENT];
    r.student_low = statistics[DV_STUDENT_LOW];
    r.teacher = statistics[DV_TEACHER];
    r.teacher_low = statistics[DV_TEACHER_LOW];
    r.mean = statistics[DV_MEAN];
    r.mean_low = statistics[DV_MEAN_LOW];
    double ratio =
        ((double)r.student - (double)r.teacher) + ((double)r.student_low - (double)r.teacher_low);
    if (for_gradient && dv_kind(a) == DV_REVERSE)
        ratio += a->config.temperature * ((double)r.mean + (double)r.mean_low);
    r.ratio = (float)ratio;
    r.ratio_low = dv_low(ratio, r.ratio);
    const double beta = a->config.beta;
    r.student_is_greater = beta <= 0.5;
    /* At least a normal number, of which there is a logarithm. */
    r.lesser = hr_at_least((float)(r.student_is_greater ? beta : 1.0 - beta), 0x1p-126f);
    r.greater = (float)(r.student_is_greater ? 1.0 - beta : beta);
    r.scale = scale;
    return r;
}

/* The same before there is a mean. */
HR_INLINE dv_row dv_row_of_lse(const divergence_args *a, dv_scale scale, double student,
                               double teacher)
{
    float statistics[HR_DIVERGENCE_STATISTICS] = {(float)student, 0.0f, (float)teacher,
                                                  0.0f,           0.0f, 0.0f};
    statistics[DV_STUDENT_LOW] = dv_low(student, statistics[DV_STUDENT]);
    statistics[DV_TEACHER_LOW] = dv_low(teacher, statistics[DV_TEACHER]);
    return dv_row_of(a, scale, statistics, 0);
}

/* Sums over the classes of a row of what dv_terms_of gives. */
typedef struct dv_sums {
    double under_student, under_teacher, p, q;
} dv_sums;

/* Writes the loss of a row. A mean is over the sum of the probabilities, so that what was rounded off
 * the log-sum-exps does not count twice, and the gradients of a row add up to 0. */
HR_INLINE void dv_finish(const divergence_args *a, int64_t row, const dv_row *r,
                         const dv_sums *sums)
{
    const double beta = a->config.beta;
    const double under_student = beta > 0.0 ? sums->under_student / sums->p : 0.0;
    const double under_teacher = beta < 1.0 ? sums->under_teacher / sums->q : 0.0;
    double loss = 0.0; /* a sum that does not count may be infinite */
    if (beta < 1.0)
        loss += beta > 0.0 ? (1.0 - beta) * under_student : under_teacher;
    if (beta > 0.0)
        loss += beta < 1.0 ? beta * under_teacher : under_student;
    hr_store(a->loss, row, (float)loss, HR_F32); /* every NaN as the same */
    if (!a->statistics)
        return;
    float *const statistics = a->statistics + row * HR_DIVERGENCE_STATISTICS;
    const float mean = (float)under_student;
    hr_store(statistics, DV_STUDENT, r->student, HR_F32);
    hr_store(statistics, DV_STUDENT_LOW, r->student_low, HR_F32);
    hr_store(statistics, DV_TEACHER, r->teacher, HR_F32);
    hr_store(statistics, DV_TEACHER_LOW, r->teacher_low, HR_F32);
    hr_store(statistics, DV_MEAN, mean, HR_F32);
    hr_store(statistics, DV_MEAN_LOW, dv_low(under_student, mean), HR_F32);
}

/* Of a row that is ignored. */
HR_INLINE void dv_finish_ignored(const divergence_args *a, int64_t row)
{
    a->loss[row] = 0.0f;
    for (int k = 0; a->statistics && k < HR_DIVERGENCE_STATISTICS; k++)
        a->statistics[row * HR_DIVERGENCE_STATISTICS + k] = 0.0f;
}

/* What elements of the gradient are multiplied by. */
HR_INLINE float dv_factor(const divergence_args *a, int64_t row, int kind)
{
    const double dloss = (double)a->dloss[row * a->dloss_stride] / a->config.temperature;
    return (float)(kind == DV_MIXED ? dloss * (1.0 - a->config.beta) : dloss);
}

/* ---- Each element ---------------------------------------------------------------------------- */

/* log(p / q). The difference of the logits may be large although their distributions are close, so
 * what is rounded off it counts (Knuth's two-sum). There is no such rest of an infinite one. */
HR_INLINE float dv_ratio(const dv_row *r, float s, float t)
{
    const float difference = s - t, of_t = s - difference, of_s = difference + of_t;
    const float rest = (s - of_s) + (of_t - t);
    const float left = (difference - r->ratio) + ((rest != rest ? 0.0f : rest) - r->ratio_low);
    return dv_scaled(left, r->scale);
}

HR_INLINE float dv_student(const dv_row *r, float s)
{
    return dv_exp((s - r->student) - r->student_low, r->scale);
}

HR_INLINE float dv_teacher(const dv_row *r, float t)
{
    return dv_exp((t - r->teacher) - r->teacher_low, r->scale);
}

/* Both probabilities, and their logarithms less that of the mixture m = beta q + (1 - beta) p. */
typedef struct dv_pair {
    float p, q;           /* of the student and of the teacher */
    float less;           /* p - q */
    float p_over, q_over; /* log(p / m) and log(q / m) */
} dv_pair;

/* The smaller of two probabilities over the larger: e = power * (1 + near_0), and e - 1. */
typedef struct dv_quotient {
    float e, less_1, near_0;
    uint32_t shifted; /* see hr_exp_split */
} dv_quotient;

HR_INLINE dv_quotient dv_quotient_of(float minus_d)
{
    const hr_exp_parts parts = hr_exp_split(hr_at_least(minus_d, -88.0f));
    const float power = hr_float(0x3F800000u + (parts.shifted << 23)); /* 0 from 2^-127 on */
    const float near_0 = hr_expm1_near_0(parts.r);
    return (dv_quotient){fmaf(power, near_0, power), fmaf(power, near_0, power - 1.0f), near_0,
                         parts.shifted};
}

/* Sets the logarithms of a pair, of which d is log(p / q).
 *
 * Of p and q, let x be the one with the greater weight, and y that with the lesser weight w. Then
 * m / x is 1 + w (y / x - 1), whose logarithm is small where w is, and not what is left of larger
 * numbers. Where x is less than w y, though, y / x may be infinite: the logarithm is then that of
 * m / y, which is w + (1 - w) x / y. */
HR_INLINE void dv_set_logarithms(dv_pair *pair, const dv_row *r, float d, dv_quotient quotient)
{
    const int y_is_larger = (d < 0.0f) == r->student_is_greater;
    const int over_y = y_is_larger && quotient.e < r->lesser;
    /* e^|d| is 2^(1 - n) over a number from sqrt(2) to 2 sqrt(2). */
    const float inverse = hr_inverse(fmaf(2.0f, quotient.near_0, 2.0f)) *
                          hr_float(0x40000000u - (quotient.shifted << 23));
    const float change = r->lesser * (y_is_larger ? -quotient.less_1 * inverse : quotient.less_1);
    const float near_1 = 1.0f + change, lost = change - (near_1 - 1.0f);
    /* A normal number above 0: the weights are not 0, and the quotient is at most 1. */
    const float m = over_y ? fmaf(r->greater, quotient.e, r->lesser) : near_1;
    const float log_m = hr_log_shifted(m, 0.0f) + (over_y ? 0.0f : lost);
    const int over_teacher = over_y == r->student_is_greater;
    pair->p_over = (over_teacher ? d : 0.0f) - log_m;
    pair->q_over = (over_teacher ? 0.0f : -d) - log_m;
}

/* The logarithm of the larger of p and q, times the temperature; d is log(p / q). */
HR_INLINE float dv_larger(const dv_row *r, float s, float t, float d)
{
    return d < 0.0f ? (t - r->teacher) - r->teacher_low : (s - r->student) - r->student_low;
}

/* From d and the larger probability. `mixed`: whether the logarithms are wanted. Of a class that is
 * masked in both, all is 0. */
HR_INLINE dv_pair dv_pair_from(const dv_row *r, float d, float top, int mixed)
{
    const int below = d < 0.0f;
    const dv_quotient quotient = dv_quotient_of(below ? d : -d);
    const float other = top == 0.0f ? 0.0f : top * quotient.e;
    dv_pair pair;
    pair.p = below ? other : top;
    pair.q = below ? top : other;
    pair.less = top == 0.0f ? 0.0f : top * (below ? quotient.less_1 : -quotient.less_1);
    if (mixed)
        dv_set_logarithms(&pair, r, d, quotient);
    return pair;
}

HR_INLINE dv_pair dv_pair_of(const dv_row *r, float s, float t, int mixed)
{
    const float d = dv_ratio(r, s, t);
    return dv_pair_from(r, d, dv_exp(dv_larger(r, s, t, d), r->scale), mixed);
}

/* What an element adds to the sums under the student and under the teacher. A probability of 0 adds
 * nothing, whatever its logarithm. */
typedef struct dv_terms {
    float under_student, under_teacher, p, q; /* 0 where they do not count */
} dv_terms;

/* The logarithm, times the temperature, of the probability that the terms begin with. */
HR_INLINE float dv_exponent(const dv_row *r, float s, float t, float d, int kind)
{
    return kind == DV_MIXED     ? dv_larger(r, s, t, d)
           : kind == DV_REVERSE ? (s - r->student) - r->student_low
                                : (t - r->teacher) - r->teacher_low;
}

HR_INLINE dv_terms dv_terms_from(const dv_row *r, float d, float top, int kind)
{
    dv_terms terms = {0.0f, 0.0f, 0.0f, 0.0f};
    if (kind == DV_MIXED) {
        const dv_pair pair = dv_pair_from(r, d, top, 1);
        terms.under_student = pair.p == 0.0f ? 0.0f : pair.p * pair.p_over;
        terms.under_teacher = pair.q == 0.0f ? 0.0f : pair.q * pair.q_over;
        terms.p = pair.p;
        terms.q = pair.q;
    } else if (kind == DV_REVERSE) {
        terms.under_student = top == 0.0f ? 0.0f : top * d;
        terms.p = top;
    } else {
        terms.under_teacher = top == 0.0f ? 0.0f : -top * d;
        terms.q = top;
    }
    return terms;
}

HR_INLINE dv_terms dv_terms_of(const dv_row *r, float s, float t, int kind)
{
    const float d = dv_ratio(r, s, t);
    return dv_terms_from(r, d, dv_exp(dv_exponent(r, s, t, d, kind), r->scale), kind);
}

/* The gradient of the student's logit. */
HR_INLINE float dv_gradient(const dv_row *r, float s, float t, float factor, int kind)
{
    if (kind == DV_FORWARD)
        return factor * dv_pair_of(r, s, t, 0).less;
    if (kind == DV_REVERSE) {
        const float p = dv_student(r, s);
        return p == 0.0f ? 0.0f : factor * (p * dv_ratio(r, s, t));
    }
    const dv_pair pair = dv_pair_of(r, s, t, 1);
    return pair.p == 0.0f ? 0.0f : factor * (pair.p * ((pair.p_over - r->mean) - r->mean_low));
}

#ifdef __cplusplus
extern "C" {
#endif
hr_status divergence_forward_cpu(const divergence_args *args);
hr_status divergence_backward_cpu(const divergence_args *args);
hr_status divergence_forward_cuda(const divergence_args *args, const hr_exec *exec);
hr_status divergence_backward_cuda(const divergence_args *args, const hr_exec *exec);
#ifdef __cplusplus
}
#endif

#endif
