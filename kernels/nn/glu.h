/*
 * glu.h: the formulas of activations and gated units, see hr_glu_forward and hr_glu_backward in
 * headroom.h.
 *
 * Where an activation approaches -0 or x, its argument is held at a bound beyond which it has
 * arrived, so that no infinity is multiplied by 0. A NaN passes every bound.
 */
#ifndef HR_GLU_H
#define HR_GLU_H

#include "kernels/core/math.h"

/* An activation and its derivative. */
typedef struct glu_point {
    float value, slope;
} glu_point;

/* s = 1 / (1 + e^-x) and its derivative. `size` is |x|, at most 88: e^-88 is 0 here. */
typedef struct glu_logistic {
    float s, turn;
} glu_logistic;

HR_INLINE glu_logistic glu_logistic_at(int is_negative, float size)
{
    const float e = hr_exp_to_1(-size), upper = hr_inverse(1.0f + e), lower = e * upper;
    return (glu_logistic){is_negative ? lower : upper, lower * upper};
}

/* By its sign bit. A comparison of floats is another one where it must be false for a NaN. */
HR_INLINE int glu_is_negative(float x)
{
    return (int32_t)hr_bits(x) < 0;
}

HR_INLINE float glu_size(float x)
{
    return hr_float(hr_bits(x) & 0x7FFFFFFFu);
}

HR_INLINE glu_point glu_silu(float x)
{
    const float size = hr_at_most(glu_size(x), 88.0f), lowest = glu_is_negative(x) ? -size : x;
    const glu_logistic at = glu_logistic_at(glu_is_negative(x), size);
    return (glu_point){lowest * at.s, fmaf(hr_with_sign_of(size, x), at.turn, at.s)};
}

HR_INLINE glu_point glu_gelu(float x)
{
    const float size = hr_at_most(glu_size(x), 16.0f), lowest = glu_is_negative(x) ? -size : x;
    const hr_normal_at normal = hr_normal(x);
    return (glu_point){lowest * normal.below,
                       fmaf(hr_with_sign_of(size, x), normal.density, normal.below)};
}

/* (1 + tanh(u)) / 2 is the logistic function of 2 u, which loses nothing where tanh is near -1. */
HR_INLINE glu_point glu_gelu_tanh(float x)
{
    const float size = hr_at_most(glu_size(x), 16.0f), lowest = glu_is_negative(x) ? -size : x;
    const float linear = 1.595769122f, cubic = 0.07135481283f; /* 2 sqrt(2 / pi), 0.044715 of it */
    const float square = size * size, inner = size * fmaf(square, cubic, linear);
    const glu_logistic at = glu_logistic_at(glu_is_negative(x), hr_at_most(inner, 88.0f));
    const float rate = hr_with_sign_of(size, x) * fmaf(square, 3.0f * cubic, linear);
    return (glu_point){lowest * at.s, fmaf(rate, at.turn, at.s)};
}

HR_INLINE glu_point glu_relu(float gate)
{
    return (glu_point){hr_at_least(gate, 0.0f), gate <= 0.0f ? 0.0f : 1.0f};
}

HR_INLINE glu_point glu_relu_squared(float gate)
{
    const float x = hr_at_least(gate, 0.0f);
    return (glu_point){x * x, 2.0f * x};
}

/* With a constant `activation`, and where the slope is not used, this compiles to one formula. */
HR_INLINE glu_point glu_at(float gate, hr_activation activation)
{
    switch (activation) {
    case HR_GELU:
        return glu_gelu(gate);
    case HR_GELU_TANH:
        return glu_gelu_tanh(gate);
    case HR_RELU:
        return glu_relu(gate);
    case HR_RELU_SQUARED:
        return glu_relu_squared(gate);
    default:
        return glu_silu(gate);
    }
}

/* `reached`: the gradient that reached the activation. A ReLU stops infinities and NaNs too. */
HR_INLINE float glu_dgate(float reached, float slope, hr_activation activation)
{
    const int stops = activation == HR_RELU || activation == HR_RELU_SQUARED;
    return stops && slope == 0.0f ? 0.0f : reached * slope;
}

/* Runs the body with the constant `name` equal to `activation`. */
#define FOR_ACTIVATION(activation, name, body)      \
    switch (activation) {                           \
    case HR_GELU: {                                 \
        const hr_activation name = HR_GELU;         \
        body;                                       \
        break;                                      \
    }                                               \
    case HR_GELU_TANH: {                            \
        const hr_activation name = HR_GELU_TANH;    \
        body;                                       \
        break;                                      \
    }                                               \
    case HR_RELU: {                                 \
        const hr_activation name = HR_RELU;         \
        body;                                       \
        break;                                      \
    }                                               \
    case HR_RELU_SQUARED: {                         \
        const hr_activation name = HR_RELU_SQUARED; \
        body;                                       \
        break;                                      \
    }                                               \
    default: {                                      \
        const hr_activation name = HR_SILU;         \
        body;                                       \
        break;                                      \
    }                                               \
    }

/* Backward where there is a dh. */
typedef struct glu_args {
    hr_rows gate, up, dh; /* NULL data where absent, here and below */
    hr_rows h, dgate, dup;
    int64_t rows, cols;
    hr_activation activation;
    hr_dtype dtype;
} glu_args;

#ifdef __cplusplus
extern "C" {
#endif
hr_status glu_cpu(const glu_args *args);
hr_status glu_cuda(const glu_args *args, const hr_exec *exec);
#ifdef __cplusplus
}
#endif

#endif
