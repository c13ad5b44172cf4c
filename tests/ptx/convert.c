/* convert.c: conversions between types (9.7.9.21). */
#include "tests/ptx/values.h"

static void integer_to_integer(ptx_thread *t, const ptx_instruction *i)
{
    const uint64_t d = ptx_unsigned(ptx_integer_of(A, i->type2), i->type);
    // No register has 8 bits: in one of 16, a signed result fills the others with its sign.
    D = i->type == PTX_S8 ? ptx_unsigned(ptx_integer_of(d, PTX_S8), PTX_S16) : d;
}

static double to_integer(double x, ptx_rounding rounding)
{
    switch (rounding) {
    case PTX_RNI:
        return rint(x);
    case PTX_RMI:
        return floor(x);
    case PTX_RPI:
        return ceil(x);
    default:
        return trunc(x);
    }
}

static double source(const ptx_thread *t, const ptx_instruction *i)
{
    if (i->type2 == PTX_F64)
        return ptx_f64(A);
    return i->form->ftz ? ptx_flush(ptx_f32(A)) : ptx_f32(A);
}

/* Of what lies outside the range comes its end. Of a NaN comes zero, or the top bit alone where one of
 * the types has 64 bits. */
static void float_to_integer(ptx_thread *t, const ptx_instruction *i)
{
    const double x = to_integer(source(t, i), i->form->rounding);
    const int bits = 8 * ptx_bytes(i->type);
    const bool sign = ptx_is_signed(i->type);
    const double end = ldexp(1, sign ? bits - 1 : bits); /* the first that does not fit */
    if (isnan(x))
        D = bits == 64 || i->type2 == PTX_F64 ? (uint64_t)1 << (bits - 1) : 0;
    else if (sign)
        D = ptx_unsigned(x >= end    ? ((uint64_t)1 << (bits - 1)) - 1
                         : x <= -end ? (uint64_t)1 << (bits - 1)
                                     : (uint64_t)(int64_t)x,
                         i->type);
    else
        D = x >= end ? ptx_unsigned(~(uint64_t)0, i->type) : x > 0 ? (uint64_t)x : 0;
}

/* The host rounds once, to nearest, from 64 bits too. */
static void integer_to_float(ptx_thread *t, const ptx_instruction *i)
{
    const uint64_t a = ptx_integer_of(A, i->type2);
    const bool sign = ptx_is_signed(i->type2);
    if (i->type == PTX_F64)
        D = ptx_result64(sign ? (double)(int64_t)a : (double)a);
    else
        D = ptx_result32(sign ? (float)(int64_t)a : (float)a);
}

static void float_to_integral(ptx_thread *t, const ptx_instruction *i)
{
    const double x = to_integer(source(t, i), i->form->rounding);
    D = i->type == PTX_F64 ? ptx_result64(x) : ptx_result32((float)x);
}

static void widen(ptx_thread *t, const ptx_instruction *i)
{
    D = ptx_result64(source(t, i));
}

static void narrow(ptx_thread *t, const ptx_instruction *i)
{
    const float x = (float)ptx_f64(A);
    D = ptx_result32(i->form->ftz ? ptx_flush(x) : x);
}

/* To nearest, ties to even, in a format of 16 bits whose least exponent is `least`. All NaNs become
 * 0x7FFF. */
static uint32_t to_16_bits(float x, int fraction_bits, int least)
{
    if (isnan(x))
        return 0x7FFF;
    const uint32_t sign = signbit(x) ? 0x8000 : 0;
    const uint32_t infinity = 0x7FFFu >> fraction_bits << fraction_bits;
    const double size = fabs((double)x);
    if (size == 0 || isinf(size))
        return sign | (size == 0 ? 0 : infinity);
    const int exponent = ilogb(size) > least ? ilogb(size) : least;
    const double units = rint(ldexp(size, fraction_bits - exponent)); /* with the leading one */
    const double bits = units + ldexp(exponent - least, fraction_bits);
    return sign | (bits >= infinity ? infinity : (uint32_t)bits);
}

static uint32_t to_16(float x, ptx_type type)
{
    return type == PTX_F16 || type == PTX_F16X2 ? to_16_bits(x, 10, -14) : to_16_bits(x, 7, -126);
}

static void to_half(ptx_thread *t, const ptx_instruction *i)
{
    D = to_16(ptx_f32(A), i->type);
}

static void to_halves(ptx_thread *t, const ptx_instruction *i)
{
    D = (uint64_t)to_16(ptx_f32(A), i->type) << 16 | to_16(ptx_f32(B), i->type);
}

static void from_half(ptx_thread *t, const ptx_instruction *i)
{
    const uint32_t a = (uint32_t)A & 0xFFFF;
    if (i->type2 == PTX_BF16) {
        D = ptx_result32(ptx_f32((uint64_t)a << 16));
        return;
    }
    const int exponent = a >> 10 & 31, fraction = a & 0x3FF;
    const float size = exponent == 31  ? (fraction ? NAN : INFINITY)
                       : exponent == 0 ? ldexpf((float)fraction, -24)
                                       : ldexpf((float)(fraction + 1024), exponent - 25);
    D = ptx_result32(a & 0x8000 ? -size : size);
}

#define INTEGER  "u8|u16|u32|u64|s8|s16|s32|s64"
#define INTEGRAL "rni|rzi|rmi|rpi"

const ptx_row ptx_convert[] = {
    {"cvt " INTEGER " " INTEGER, "da", integer_to_integer, "the low bits, or more by the sign of a",
     "9.7.9.21"},
    {"cvt " INTEGRAL " ftz? " INTEGER " f32|f64", "da", float_to_integer,
     "rounded to an integer, within the range", "9.7.9.21"},
    {"cvt rn f32|f64 " INTEGER, "da", integer_to_float, "rounded once", "9.7.9.21"},
    {"cvt " INTEGRAL " ftz? f32 f32", "da", float_to_integral, "rounded to an integer", "9.7.9.21"},
    {"cvt " INTEGRAL " f64 f64", "da", float_to_integral, "rounded to an integer", "9.7.9.21"},
    {"cvt ftz? f64 f32", "da", widen, "exact", "9.7.9.21"},
    {"cvt rn ftz? f32 f64", "da", narrow, "rounded once", "9.7.9.21"},
    {"cvt rn f16|bf16 f32", "da", to_half, "rounded once; a NaN is 0x7FFF", "9.7.9.21"},
    {"cvt rn f16x2|bf16x2 f32", "daa", to_halves, "a above b, each rounded once", "9.7.9.21"},
    {"cvt f32 f16|bf16", "da", from_half, "exact", "9.7.9.21"},
    {0},
};
