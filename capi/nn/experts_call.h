/* experts_call.h: a call of the experts: what was checked, where in the workspace things lie, and the
 * steps that both passes take. */
#ifndef HR_EXPERTS_CALL_H
#define HR_EXPERTS_CALL_H

#include "capi/check/check.h"
#include "capi/check/layout.h"
#include "kernels/nn/experts.h"

#define EXPERTS_ANY (2 * (uint32_t)HR_EXPERTS_DOWN_B - 1)
/* The gradients that need gate and up, which all do but that of the bias of down. */
#define EXPERTS_INNER (EXPERTS_ANY & ~(uint32_t)HR_EXPERTS_DOWN_BIAS)

/* Parts of the workspace, as capi/check/layout.h has them: of what one product takes. */
typedef struct experts_parts {
    size_t matrix;       /* of one expert, in dtype: rounded, or decoded */
    size_t sum;          /* of its gradient over tiles, f32 */
    size_t a, b;         /* of its adapter, in dtype: rounded */
    size_t a_sum, b_sum; /* of their gradients, f32 */
    size_t t, u;         /* [tile, rank]: inputs times A^T, gradients of outputs times B */
} experts_parts;

typedef struct experts_layout {
    /* of a tile: rows */
    size_t x, dy;         /* [tile, hidden]: gathered */
    size_t gate_up;       /* [tile, width] */
    size_t gate_up_grads; /* [tile, width]: gate_up itself where that is evaluated again */
    size_t inner;         /* [tile, features]: h, or in backward w * h */
    size_t q;             /* [tile, features], f32 */
    size_t out;           /* [tile, hidden], f32: what is added to the sums */
    experts_parts of_gate_up, of_down;
    size_t bias_sum; /* [width], f64 */
    /* of all tokens */
    size_t sums; /* [tokens, hidden], f32 */
    size_t product, product_bytes;
    size_t bytes; /* of all, and what it takes to align the first */
} experts_layout;

typedef struct experts_call {
    const char *function;
    hr_experts_sizes sizes;
    hr_experts_config config;
    hr_experts_params params;
    hr_experts_saved saved;
    int64_t rows, width, tile;
    size_t element; /* bytes of config.dtype */
    experts_layout layout;
    char *workspace;
    const int32_t *order, *offsets;
    const void *weight;
    hr_rows x; /* NULL data where not given */
    const hr_exec *exec;
} experts_call;

/* ---- experts_plan.c: checks, and what is allocated ------------------------------------------- */

/* What the query and both passes take. */
hr_status experts_begin(experts_call *call, const hr_experts_sizes *sizes,
                        const hr_experts_params *params, const hr_experts_config *config,
                        const hr_exec *exec);
/* What both passes take besides. */
hr_status experts_check_call(experts_call *call, const hr_rows *x, const void *weight,
                             const int32_t *order, const int32_t *offsets_host,
                             const hr_experts_saved *saved);
hr_status experts_check_wanted(const experts_call *call, uint32_t wanted);
hr_status experts_check_workspace(experts_call *call, void *workspace, size_t bytes);

/* Whether backward reads x, where gate and up are kept or not. */
int experts_reads_x(uint32_t wanted, int keeps_gate_up);
hr_status experts_plan_forward(experts_call *call, int keeps_gate_up, int keeps_activated);
hr_status experts_plan_backward(experts_call *call, uint32_t wanted, int keeps_gate_up);

/* ---- experts.c: steps ------------------------------------------------------------------------ */

/* A matrix of one expert with its adapter, and how the rows of its inputs are multiplied with it. */
typedef struct experts_matrix {
    hr_rows rows;
    int64_t outputs, inputs;
    hr_rows a, b;
    int64_t rank; /* 0: there is no adapter */
    double scale;
    size_t t, u; /* parts */
} experts_matrix;

void *experts_place(const experts_call *call, size_t place);

/* Where row `first` of a tile is: in what is kept, or else in the workspace. */
void *experts_rows(const experts_call *call, const void *kept, size_t place, int64_t first,
                   int64_t cols);
experts_tile experts_tile_at(const experts_call *call, int64_t first, int64_t count);
int64_t experts_tile_end(const experts_call *call, int64_t expert, int64_t first);

/* The matrices of an expert in the dtype of rows, rounded or decoded to the workspace where they have
 * another. */
hr_status experts_take(const experts_call *call, int64_t expert, experts_matrix *gate_up,
                       experts_matrix *down);
hr_gemm_config experts_gemm_config(const experts_call *call);

/* t = in A^T, or u = in B if `back`. */
hr_status experts_narrow(const experts_call *call, const void *in, const experts_matrix *matrix,
                         int64_t rows, int back);
/* out = in W^T + scale t B^T + bias, or in W + scale u A if `back`; in out_dtype. It leaves t, or u. */
hr_status experts_times(const experts_call *call, void *out, hr_dtype out_dtype, const void *in,
                        const experts_matrix *matrix, const void *bias, int64_t rows, int back);
hr_status experts_gather(const experts_call *call, const experts_tile *tile, size_t to,
                         const hr_rows *from);
/* The result of the first product of a tile. */
hr_status experts_gate_up(const experts_call *call, void *gate_up, const experts_tile *tile,
                          const experts_matrix *matrix, int64_t expert);
experts_activate_args experts_unit_args(const experts_call *call, const experts_tile *tile,
                                        const void *gate_up, void *h);

/* Sums of tokens: where rows are added to, which is `result` itself where it is binary32, set to 0;
 * and their rounding into it. */
hr_status experts_begin_sums(const experts_call *call, void *result);
hr_status experts_add(const experts_call *call, void *result, const experts_tile *tile,
                      const void *weight, const void *bias);
hr_status experts_end_sums(const experts_call *call, void *result);
hr_status experts_round(const experts_call *call, const hr_rows *to, hr_dtype dtype,
                        const hr_rows *from, int64_t rows, int64_t cols);

#endif
