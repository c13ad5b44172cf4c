/*
 * muon_update.h: the last pass of Muon: the formula of one element, its constants, the normalization
 * of rows, and the kernels. The rule is documented at hr_muon_update in headroom.h.
 */
#ifndef HR_MUON_UPDATE_H
#define HR_MUON_UPDATE_H

#include <math.h>

#include "kernels/core/step.h"
#include "kernels/optim/muon_matrix.h"

typedef struct muon_update_constants {
    float keep; /* 1 - lr * weight_decay */
    float rate; /* -lr * scale */
} muon_update_constants;

/* `factor`: of the row, 1 where rows are not normalized. */
HR_INLINE float muon_update_element(muon_update_constants c, float param, float update,
                                    float factor)
{
    return fmaf(c.rate, update * factor, c.keep * param);
}

/* Reads the scalars that `config` points to, so it must run where these live. */
HR_INLINE muon_update_constants muon_update_fold(const hr_muon_update_config *config, double scale)
{
    const double lr = step_lr(&config->step);
    muon_update_constants c;
    c.keep = (float)(1.0 - lr * config->weight_decay);
    c.rate = (float)-(lr * scale);
    return c;
}

/* ---- Rows ------------------------------------------------------------------------------------ */

/* The new variance of a row of `cols` elements, from the sum of their squares. */
HR_INLINE float muon_row_var(float row_var, double sum, int64_t cols, double beta2)
{
    const double mean = sum / (double)cols;
    return (float)((double)row_var + (1.0 - beta2) * (mean - (double)row_var));
}

/* What a row is divided by. */
HR_INLINE double muon_row_divisor(float row_var)
{
    return sqrt((double)row_var) + 1e-10;
}

/* What all rows are multiplied by, from the sums of squares before and after the division. */
HR_INLINE double muon_norm_ratio(double before, double after)
{
    return sqrt(before) / (sqrt(after) + 1e-10);
}

/* The checked arguments of a call. */
typedef struct muon_update_args {
    const hr_tensor_list *params;
    const hr_tensor_list *row_vars; /* NULL: rows are not normalized */
    const hr_tensor_list *steps;    /* NULL: config->step.t */
    const hr_tensor_list *updates;
    const hr_muon_matrix *matrices;
    const double *scales; /* host [count]; NULL: 1 */
    const hr_muon_update_config *config;
    double *rows; /* of every matrix: the sums of squares, then the factors */
} muon_update_args;

#ifdef __cplusplus
extern "C" {
#endif

hr_status muon_update_cpu(const muon_update_args *args);
hr_status muon_update_cuda(const muon_update_args *args, const hr_exec *exec);

#ifdef __cplusplus
}
#endif

#endif
