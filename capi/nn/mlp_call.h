/* mlp_call.h: a call of the MLP block: what was checked, and the steps that both directions take. */
#ifndef HR_MLP_CALL_H
#define HR_MLP_CALL_H

#include "capi/check/check.h"
#include "capi/nn/mlp_plan.h"

typedef struct mlp_call {
    const char *function;
    hr_mlp_config config;
    mlp_sizes sizes;
    mlp_layout layout;
    hr_mlp_params params;
    hr_matrix matrices[3]; /* that config points to, where they are of few bits */
    hr_mlp_saved saved;    /* NULL where not kept */
    hr_rows x;             /* NULL data where not given */
    char *workspace;       /* at a multiple of HR_PART_ALIGNMENT */
    const hr_exec *exec;
} mlp_call;

/* ---- Checks: mlp_checks.c -------------------------------------------------------------------- */

hr_status mlp_check_config(const char *function, hr_mlp_config *own, const hr_mlp_config *config);
hr_status mlp_check_sizes(const char *function, int64_t tokens, int64_t hidden, int64_t features);

/* The matrices of a config, which then points to checked copies in `own`, or to NULL where they are
 * dense; those have become matrices of `params`. */
hr_status mlp_check_matrices(const char *function, hr_mlp_config *config, hr_matrix own[3],
                             hr_mlp_params *params, int64_t hidden, int64_t features);

/* Weights, or, after the weights of the call are known, their gradients. */
hr_status mlp_check_params(const mlp_call *call, const hr_mlp_params *p, int are_grads);

/* What both directions take; fills the call, but for the layout and the workspace. */
hr_status mlp_check_call(mlp_call *call, const hr_rows *x, const hr_mlp_params *params,
                         const hr_mlp_saved *saved, int64_t tokens, int64_t hidden,
                         int64_t features, const hr_mlp_config *config, const hr_exec *exec);
hr_status mlp_check_workspace(mlp_call *call, void *workspace, size_t bytes);

/* ---- Steps: mlp_steps.c ---------------------------------------------------------------------- */

/* The second factor of a product. */
typedef struct mlp_factor {
    hr_rows rows;
    const hr_matrix *few_bits; /* or NULL: rows */
} mlp_factor;

/* Whether gate and up are two matrices. */
int mlp_is_apart(const mlp_call *call);

/* The matrices of gate and up: one, or two with half of the columns of their product each. */
typedef struct gate_up_part {
    mlp_factor matrix;
    hr_rows grad;
    const void *bias;
    void *bias_grad;
    int64_t first, width;
} gate_up_part;

/* Returns how many; grads: NULL if there are none. */
int mlp_parts(const mlp_call *call, const hr_mlp_params *grads, gate_up_part parts[2]);

/* The buffers that are kept: a sum of MLP_STATISTICS, ... */
uint32_t mlp_kept_in(const mlp_call *call);

/* A part of the workspace, or NULL for HR_NO_PART. */
void *mlp_at(const mlp_call *call, size_t place);

hr_rows mlp_rows_from(const mlp_call *call, const hr_rows *rows, int64_t first);
hr_rows mlp_columns_from(const mlp_call *call, const hr_rows *rows, int64_t first);

/* Rows of a tile that begins at token `first`: of the buffer that is kept for all tokens if there
 * is one, else in the workspace. */
hr_rows mlp_tile_rows(const mlp_call *call, void *kept, size_t place, int64_t cols, int64_t first);

/* Where the statistics of a tile are, or NULL. */
float *mlp_from_row(float *values, int64_t first);

/* With few bits, `config` has no other options than those of mlp_gemm_config, transpose_b, beta and
 * addend. */
hr_status mlp_product(const mlp_call *call, const hr_rows *c, const hr_rows *a, const mlp_factor *b,
                      const void *bias, int64_t m, int64_t n, int64_t k,
                      const hr_gemm_config *config);
hr_glu_config mlp_glu_config(const mlp_call *call);

/* gate_up = normed * matrix^T + bias, and activated = act(gate) * up, of `rows` tokens. */
hr_status mlp_gate_up(const mlp_call *call, const hr_rows *gate_up, const hr_rows *normed,
                      int64_t rows);
hr_status mlp_activate(const mlp_call *call, const hr_rows *activated, const hr_rows *gate_up,
                       int64_t rows);

#endif
