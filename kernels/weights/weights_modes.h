/*
 * weights_modes.h: the facts of every hr_weights_mode, in one table. The library asks it which
 * types a mode takes, what its residuals are and whether it rounds at random;
 * hr_get_weights_mode_info() shows it to callers.
 *
 * A new mode is a row here, a number and a row in headroom.h, its formula in weights.h, and its
 * options in ops/_core/weight_modes.py, which a test compares with this table.
 */
#ifndef HR_WEIGHTS_MODES_H
#define HR_WEIGHTS_MODES_H

#include "kernels/core/dtype.h"

/* Values of the column `residual` that are not the type of a residual. */
#define WEIGHTS_NO_RESIDUAL HR_F64
#define WEIGHTS_LIKE_PARAM  HR_U8 /* the residual has the type of its param */

#define WEIGHTS_HALVES (HR_BIT(HR_BF16) | HR_BIT(HR_F16))
#define WEIGHTS_BF16   HR_BIT(HR_BF16)

/* Expands ROW(context, mode, params, residual, is_random, nearest) for each mode. `nearest` is the
 * mode with the same residuals that rounds to nearest. */
#define WEIGHTS_MODES(ROW, context)                                           \
    ROW(context, NEAREST, HR_FLOATS, WEIGHTS_NO_RESIDUAL, 0, NEAREST)         \
    ROW(context, STOCHASTIC, WEIGHTS_HALVES, WEIGHTS_NO_RESIDUAL, 1, NEAREST) \
    ROW(context, KAHAN, WEIGHTS_HALVES, WEIGHTS_LIKE_PARAM, 0, KAHAN)         \
    ROW(context, MASTER, WEIGHTS_HALVES, HR_F32, 0, MASTER)                   \
    ROW(context, REMAINDER16, WEIGHTS_BF16, HR_I16, 0, REMAINDER16)           \
    ROW(context, REMAINDER8, WEIGHTS_BF16, HR_I8, 0, REMAINDER8)              \
    ROW(context, REMAINDER8_STOCHASTIC, WEIGHTS_BF16, HR_I8, 1, REMAINDER8)

/* A column of the table as a number with 4 bits for each mode, so that even a mode that is no
 * constant costs a shift and a mask. 8 modes fit. */
#define WEIGHTS_BITS_(mode, bits) (uint32_t)(bits) << (4 * HR_WEIGHTS_##mode) |
#define WEIGHTS_COLUMN(mode, bits_of) \
    (((WEIGHTS_MODES(bits_of, ) 0u) >> (4 * (uint32_t)(mode))) & 15u)

/* The type of the residuals, or HR_F64 if the mode has none. */
HR_INLINE hr_dtype weights_residual_dtype(hr_weights_mode mode, hr_dtype param)
{
#define WEIGHTS_RESIDUAL_(context, mode_, params_, residual_, is_random_, nearest_) \
    WEIGHTS_BITS_(mode_, residual_)
    const hr_dtype residual = (hr_dtype)WEIGHTS_COLUMN(mode, WEIGHTS_RESIDUAL_);
    return residual == WEIGHTS_LIKE_PARAM ? param : residual;
#undef WEIGHTS_RESIDUAL_
}

/* Bytes of a residual, or 0 if the mode has none. */
HR_INLINE int weights_residual_size(hr_weights_mode mode, hr_dtype param)
{
    const hr_dtype residual = weights_residual_dtype(mode, param);
    return residual == WEIGHTS_NO_RESIDUAL ? 0 : hr_element_size(residual);
}

/* Whether the mode rounds at random, and so needs a seed. */
HR_INLINE int weights_are_random(hr_weights_mode mode)
{
#define WEIGHTS_RANDOM_(context, mode_, params_, residual_, is_random_, nearest_) \
    WEIGHTS_BITS_(mode_, is_random_)
    return (int)WEIGHTS_COLUMN(mode, WEIGHTS_RANDOM_);
#undef WEIGHTS_RANDOM_
}

/* Whether params of a type, which is f32, bf16 or f16, can be stored in the mode. */
HR_INLINE int weights_take(hr_weights_mode mode, hr_dtype param)
{
#define WEIGHTS_TAKE_(context, mode_, params_, residual_, is_random_, nearest_) \
    WEIGHTS_BITS_(mode_, params_)
    return (WEIGHTS_COLUMN(mode, WEIGHTS_TAKE_) & HR_BIT(param)) != 0;
#undef WEIGHTS_TAKE_
}

/* Runs the body with the constants `D` and `M` equal to the type and the mode of weights. */
#define WEIGHTS_FOR_MODE_(body, mode_, params_, residual_, is_random_, nearest_) \
    case HR_WEIGHTS_##mode_: {                                                   \
        const hr_weights_mode M = HR_WEIGHTS_##mode_;                            \
        body;                                                                    \
        break;                                                                   \
    }
#define WEIGHTS_FOR_MODE(mode, body)           \
    switch (mode) {                            \
        WEIGHTS_MODES(WEIGHTS_FOR_MODE_, body) \
    }

#endif
