/*
 * experts.h: what experts need between their products: see hr_route, hr_experts_forward and
 * hr_experts_backward in headroom.h.
 *
 * A tile is `count` rows of one expert that follow each other in `order`. The number of a row divided
 * by `slots` is its token.
 */
#ifndef HR_EXPERTS_H
#define HR_EXPERTS_H

#include "kernels/core/math.h"
#include "kernels/nn/glu.h"

typedef struct experts_tile {
    const int32_t *order;
    int64_t count, slots;
} experts_tile;

HR_INLINE int64_t experts_token(const experts_tile *tile, int64_t row)
{
    return tile->order[row] / (int32_t)tile->slots; /* 64 bits are divided by a subroutine */
}

typedef struct experts_route_args {
    int32_t *offsets, *order;
    const void *index;
    int32_t index_bytes;
    int64_t rows, experts;
} experts_route_args;

/* The expert of a row: `experts` if it has none. */
HR_INLINE int64_t experts_of(const experts_route_args *a, int64_t row)
{
    const int64_t e = a->index_bytes == 8   ? ((const int64_t *)a->index)[row]
                      : a->index_bytes == 4 ? ((const int32_t *)a->index)[row]
                                            : ((const int16_t *)a->index)[row];
    return e >= 0 && e < a->experts ? e : a->experts;
}

/* to[row] = from[token]: rows of `bytes` bytes; `from_pitch` bytes lead from a token to the next. */
typedef struct experts_gather_args {
    experts_tile tile;
    void *to;
    const void *from;
    int64_t from_pitch, bytes;
} experts_gather_args;

/* to[token] += w * (from[row] + bias), where there are a weight and a bias. A token with several rows
 * in the tile has them next to each other, and they are added one after another. */
typedef struct experts_add_args {
    experts_tile tile;
    float *to;
    const float *from;
    const void *weight, *bias; /* of all rows; [cols]. NULL where absent */
    hr_dtype weight_dtype, bias_dtype;
    int64_t cols;
} experts_add_args;

HR_INLINE float experts_added(float sum, float weight, float x, float bias)
{
    return fmaf(weight, x + bias, sum);
}

typedef struct experts_unit {
    hr_activation activation;
    int32_t gated, interleaved;
    float alpha, inverse; /* of HR_SWIGLU_ALPHA, and its reciprocal */
    float limit;          /* NaN, with which no comparison is true: none */
} experts_unit;

/* With `gate_up` alone it writes h. With q as well it writes the gradients, and w * h and the
 * gradient of w where those are wanted; h is what was kept, or NULL. */
typedef struct experts_activate_args {
    experts_tile tile;
    experts_unit unit;
    const void *gate_up;          /* [count, width] */
    void *h;                      /* [count, features] */
    const float *q;               /* [count, features]; NULL in forward */
    const void *weight;           /* of all rows */
    void *grads, *weighted;       /* [count, width], which may be gate_up; [count, features] */
    void *dweight;                /* of all rows */
    const void *dy, *down_bias;   /* with a bias: [count, hidden], [hidden] */
    hr_dtype dtype, weight_dtype; /* weight_dtype: of weight and dweight */
    int64_t features, hidden;
} experts_activate_args;

/* h, and its derivatives by gate and by up. */
typedef struct experts_point {
    float value, dgate, dup;
} experts_point;

/* A value at the limit or beyond has a derivative of 0, and a NaN passes. */
HR_INLINE experts_point experts_at(float gate, float up, const experts_unit *unit,
                                   hr_activation activation, int gated)
{
    const float g = hr_at_most(gate, unit->limit);
    const float u = hr_at_least(hr_at_most(up, unit->limit), -unit->limit);
    glu_point at;
    float factor = gated ? u : 1.0f;
    if (activation == HR_SWIGLU_ALPHA) {
        at = glu_silu(unit->alpha * g);
        at.value *= unit->inverse;
        factor = gated ? u + 1.0f : 1.0f;
    } else {
        at = glu_at(g, activation);
    }
    experts_point point;
    point.value = gated ? at.value * factor : at.value;
    point.dgate = gate >= unit->limit ? 0.0f : gated ? at.slope * factor : at.slope;
    point.dup = glu_size(up) >= unit->limit ? 0.0f : at.value;
    return point;
}

/* Runs the body with the constant `name` equal to `activation`. */
#define FOR_EXPERTS_ACTIVATION(activation, name, body) \
    switch (activation) {                              \
    case HR_GELU_TANH: {                               \
        const hr_activation name = HR_GELU_TANH;       \
        body;                                          \
        break;                                         \
    }                                                  \
    case HR_RELU_SQUARED: {                            \
        const hr_activation name = HR_RELU_SQUARED;    \
        body;                                          \
        break;                                         \
    }                                                  \
    case HR_SWIGLU_ALPHA: {                            \
        const hr_activation name = HR_SWIGLU_ALPHA;    \
        body;                                          \
        break;                                         \
    }                                                  \
    default: {                                         \
        const hr_activation name = HR_SILU;            \
        body;                                          \
        break;                                         \
    }                                                  \
    }

/* out[j] = sum over the rows of w * dy[token][j]: the gradient of the bias of an expert. */
typedef struct experts_bias_args {
    experts_tile tile;
    void *out;
    hr_rows dy;
    const void *weight;
    hr_dtype dtype, weight_dtype;
    int64_t cols;
} experts_bias_args;

#ifdef __cplusplus
extern "C" {
#endif
hr_status experts_route_cpu(const experts_route_args *args);
hr_status experts_gather_cpu(const experts_gather_args *args);
hr_status experts_add_cpu(const experts_add_args *args);
hr_status experts_activate_cpu(const experts_activate_args *args);
hr_status experts_bias_cpu(const experts_bias_args *args);
hr_status experts_zero_cpu(void *memory, size_t bytes);
hr_status experts_route_cuda(const experts_route_args *args, const hr_exec *exec);
hr_status experts_gather_cuda(const experts_gather_args *args, const hr_exec *exec);
hr_status experts_add_cuda(const experts_add_args *args, const hr_exec *exec);
hr_status experts_activate_cuda(const experts_activate_args *args, const hr_exec *exec);
hr_status experts_bias_cuda(const experts_bias_args *args, const hr_exec *exec);
hr_status experts_zero_cuda(void *memory, size_t bytes, const hr_exec *exec);
/* Whether work of the stream is captured into a graph. */
hr_status experts_capture_cuda(int *captured, const hr_exec *exec);
hr_status experts_capture_cpu(int *captured);
#ifdef __cplusplus
}
#endif

#endif
