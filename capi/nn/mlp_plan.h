/*
 * mlp_plan.h: what a call of hr_mlp_forward or hr_mlp_backward evaluates, and where in the workspace
 * it puts it.
 */
#ifndef HR_MLP_PLAN_H
#define HR_MLP_PLAN_H

#include "capi/check/layout.h"
#include "capi/headroom.h"

/* The gradients that pass through the activation. */
#define MLP_THROUGH \
    (HR_MLP_X | HR_MLP_NORM_WEIGHT | HR_MLP_NORM_BIAS | HR_MLP_GATE_UP | HR_MLP_GATE_UP_BIAS)
#define MLP_ANY (MLP_THROUGH | HR_MLP_DOWN | HR_MLP_DOWN_BIAS)

/* The buffers that can be kept from forward to backward. */
enum { MLP_STATISTICS = 1, MLP_NORMED = 2, MLP_GATE_UP = 4, MLP_ACTIVATED = 8 };

typedef struct mlp_sizes {
    int64_t tokens, hidden, features, width; /* width: of gate and up together */
    int64_t tile, tiles;
    size_t element; /* bytes */
} mlp_sizes;

/* Parts of the workspace, as capi/check/layout.h has them. */
typedef struct mlp_layout {
    /* of a tile: rows */
    size_t normed;       /* [tile, hidden] */
    size_t gate_up;      /* [tile, width] */
    size_t inner;        /* [tile, features]: activated, or its gradient and then itself */
    size_t gate_up_grad; /* [tile, width]: gate_up itself where that is evaluated again; inner
                            where there is no gate and activated was kept */
    /* sums over tiles */
    size_t gate_up_sum;      /* [width, hidden], f32 */
    size_t down_sum;         /* [hidden, features], f32 */
    size_t gate_up_bias_sum; /* [width], f64 */
    size_t down_bias_sum;    /* [hidden], f64 */
    /* scratch memory of the functions called */
    size_t norm, product;
    size_t norm_bytes, product_bytes;
    size_t bytes; /* of all, and what it takes to align the first */
} mlp_layout;

mlp_sizes mlp_sizes_of(int64_t tokens, int64_t hidden, int64_t features,
                       const hr_mlp_config *config);
hr_norm_config mlp_norm_config(const hr_mlp_config *config);
hr_gemm_config mlp_gemm_config(const hr_mlp_config *config);
hr_linear_config mlp_linear_config(const hr_mlp_config *config);

/* The buffers to keep for gradients that are wanted: a sum of MLP_STATISTICS, ... */
uint32_t mlp_kept(hr_mlp_save save, uint32_t wanted);

/* What backward needs, in memory that was kept or evaluated again: the same sum. */
uint32_t mlp_evaluated(uint32_t wanted, uint32_t kept);

/* Whether backward reads x and the statistics of its rows. */
int mlp_reads_x(uint32_t wanted, uint32_t kept);

hr_status mlp_forward_layout(mlp_layout *layout, const mlp_sizes *sizes, uint32_t kept,
                             const hr_mlp_config *config, const hr_exec *exec);
hr_status mlp_backward_layout(mlp_layout *layout, const mlp_sizes *sizes, uint32_t wanted,
                              uint32_t kept, const hr_mlp_config *config, const hr_exec *exec);

#endif
