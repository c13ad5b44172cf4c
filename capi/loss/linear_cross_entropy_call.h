/* linear_cross_entropy_call.h: a call of hr_linear_cross_entropy(): what was checked, and where in
 * the workspace it puts what. */
#ifndef HR_LINEAR_CROSS_ENTROPY_CALL_H
#define HR_LINEAR_CROSS_ENTROPY_CALL_H

#include "capi/check/check.h"
#include "capi/check/layout.h"
#include "kernels/loss/linear_cross_entropy.h"

#define LCE_ANY \
    (HR_LINEAR_CROSS_ENTROPY_HIDDEN | HR_LINEAR_CROSS_ENTROPY_WEIGHT | HR_LINEAR_CROSS_ENTROPY_BIAS)

typedef struct lce_sizes {
    int64_t rows, features, classes;
    int64_t chunk; /* rows whose logits exist at a time */
    int64_t tile;  /* classes of which they exist */
    int64_t pitch; /* elements from a row of logits to the next */
    int64_t panel; /* classes whose weights, or their gradients, exist in another type */
    int on_cpu;
    hr_dtype computed; /* type of the factors of products */
    hr_linear_cross_entropy_mode mode;
} lce_sizes;

/* Parts of the workspace, as capi/check/layout.h has them. */
typedef struct lce_layout {
    size_t totals, index, target, scale, dloss, loss, lse, lse_low, seen;
    size_t parts;       /* [CE_PARTS]: sums of parts of the rows, in turn those of each step */
    size_t hidden;      /* [chunk, features]: rows that count */
    size_t hidden_grad; /* [chunk, features], f32 */
    size_t logits;      /* [chunk, pitch], f32, and then their gradients */
    size_t weight;      /* [panel, features], in the type of products */
    size_t decoded;     /* [panel, features], in 16 bits, before they are widened to these */
    size_t bias;        /* [classes], f32: as the products add it */
    size_t weight_grad; /* [panel, features], f32 */
    size_t low;         /* [classes, features]: lower halves of sums of the gradient of weight */
    size_t bias_grad;   /* [classes], f64 */
    size_t product, product_bytes;
    size_t bytes; /* of all, and what it takes to align the first */
} lce_layout;

typedef struct lce_call {
    const char *function;
    hr_linear_cross_entropy_config config;
    hr_matrix matrix; /* that config.matrix points to, which is NULL where it is inputs.weight */
    struct lce_held { /* the classes whose weights lie in the panel */
        int64_t class, classes;
    } * held;
    hr_linear_cross_entropy_inputs inputs;
    hr_linear_cross_entropy_grads grads;
    hr_linear_cross_entropy_rows out;
    lce_sizes sizes;
    lce_layout layout;
    lce_listing listing;
    uint32_t wanted;
    int32_t is_backward; /* lse is given */
    float *result;
    char *workspace; /* at a multiple of HR_PART_ALIGNMENT */
    const hr_exec *exec;
} lce_call;

hr_status lce_sizes_of(lce_sizes *sizes, int64_t rows, int64_t features, int64_t classes,
                       uint32_t wanted, const hr_linear_cross_entropy_config *config,
                       const hr_exec *exec);

/* Whether the gradient of weight is summed over chunks in two halves, apart from the products. */
int lce_sums_in_halves(const lce_sizes *sizes, const hr_linear_cross_entropy_config *config);

/* What a GPU is expected to reach: operations/s of products, bytes/s. */
typedef struct lce_rates {
    double product, bandwidth;
} lce_rates;

lce_rates lce_rates_of(int32_t capability, const hr_linear_cross_entropy_config *config);

/* What the loss and the gradients that are wanted take with these sizes, in seconds. */
double lce_seconds(const lce_sizes *sizes, uint32_t wanted,
                   const hr_linear_cross_entropy_config *config, const lce_rates *rates);

hr_status lce_layout_of(lce_layout *layout, const lce_sizes *sizes, uint32_t wanted,
                        const hr_linear_cross_entropy_config *config, const hr_exec *exec);
hr_gemm_config lce_gemm_config(const hr_linear_cross_entropy_config *config, hr_dtype dtype);

/* Computes, after all checks. */
hr_status lce_run(lce_call *call);

#endif
