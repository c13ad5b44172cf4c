/* values.h: what registers hold, as the types of C. A register has 64 bits, of which the low ones count. */
#ifndef PTX_VALUES_H
#define PTX_VALUES_H

#include <math.h>
#include <string.h>

#include "tests/ptx/ptx.h"

#define A (t->r[i->s[0]])
#define B (t->r[i->s[1]])
#define C (t->r[i->s[2]])
#define D (t->r[i->d[0]])

static inline float ptx_f32(uint64_t bits)
{
    const uint32_t low = (uint32_t)bits;
    float x;
    memcpy(&x, &low, sizeof x);
    return x;
}

static inline double ptx_f64(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint64_t ptx_bits64(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline uint64_t ptx_bits32(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* What an instruction of binary32 gives: a NaN has no payload and no sign (9.7.3). */
static inline uint64_t ptx_result32(float x)
{
    return isnan(x) ? 0x7FFFFFFFu : ptx_bits32(x);
}

/* Of binary64 a NaN may keep what it held; ours is always the same, so that no result leans on it. */
static inline uint64_t ptx_result64(double x)
{
    return isnan(x) ? 0x7FF8000000000000u : ptx_bits64(x);
}

/* A subnormal number as the zero of its sign, which .ftz makes of it. */
static inline float ptx_flush(float x)
{
    return fpclassify(x) == FP_SUBNORMAL ? copysignf(0, x) : x;
}

static inline int ptx_bytes(ptx_type type)
{
    static const signed char bytes[] = {
        [PTX_PRED] = 1, [PTX_B8] = 1,  [PTX_B16] = 2,   [PTX_B32] = 4,    [PTX_B64] = 8,
        [PTX_U8] = 1,   [PTX_U16] = 2, [PTX_U32] = 4,   [PTX_U64] = 8,    [PTX_S8] = 1,
        [PTX_S16] = 2,  [PTX_S32] = 4, [PTX_S64] = 8,   [PTX_F16] = 2,    [PTX_BF16] = 2,
        [PTX_F32] = 4,  [PTX_F64] = 8, [PTX_F16X2] = 4, [PTX_BF16X2] = 4,
    };
    return bytes[type];
}

static inline bool ptx_is_signed(ptx_type type)
{
    return type >= PTX_S8 && type <= PTX_S64;
}

/* The low bits of a register as a number of the type. */
static inline int64_t ptx_signed(uint64_t bits, ptx_type type)
{
    const int unused = 64 - 8 * ptx_bytes(type);
    return (int64_t)(bits << unused) >> unused;
}

static inline uint64_t ptx_unsigned(uint64_t bits, ptx_type type)
{
    const int unused = 64 - 8 * ptx_bytes(type);
    return bits << unused >> unused;
}

/* The same number in a register, whatever its sign. */
static inline uint64_t ptx_integer_of(uint64_t bits, ptx_type type)
{
    return ptx_is_signed(type) ? (uint64_t)ptx_signed(bits, type) : ptx_unsigned(bits, type);
}

#endif
