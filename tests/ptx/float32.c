/* float32.c: arithmetic of binary32, each result rounded once (9.7.3). Subnormal numbers stay what they
 * are unless .ftz is there. Contraction is off, and the host rounds to nearest, as .rn does. */
#include <fenv.h>

#include "tests/ptx/values.h"

static float operand(const ptx_thread *t, const ptx_instruction *i, int which)
{
    const float x = ptx_f32(t->r[i->s[which]]);
    return i->form->ftz ? ptx_flush(x) : x;
}

static void result(ptx_thread *t, const ptx_instruction *i, float x)
{
    if (i->form->ftz)
        x = ptx_flush(x);
    if (i->form->sat)
        x = !(x > 0) ? 0 : x > 1 ? 1 : x; /* a NaN becomes zero */
    D = ptx_result32(x);
}

/* Evaluates with the rounding of the form. What is volatile is computed between the two fesetround. */
#define ROUNDED(name, expression)                                                             \
    static void name(ptx_thread *t, const ptx_instruction *i)                                 \
    {                                                                                         \
        static const int modes[] = {                                                          \
            [PTX_RZ] = FE_TOWARDZERO, [PTX_RM] = FE_DOWNWARD, [PTX_RP] = FE_UPWARD};          \
        const ptx_rounding rounding = i->form->rounding;                                      \
        const bool nearest = rounding == PTX_UNROUNDED || rounding == PTX_RN;                 \
        const float first = operand(t, i, 0), second = i->sources > 1 ? operand(t, i, 1) : 0, \
                    third = i->sources > 2 ? operand(t, i, 2) : 0;                            \
        if (nearest) {                                                                        \
            const float a = first, b = second, c = third;                                     \
            (void)b, (void)c;                                                                 \
            result(t, i, (expression));                                                       \
        } else {                                                                              \
            const volatile float a = first, b = second, c = third;                            \
            (void)b, (void)c;                                                                 \
            fesetround(modes[rounding]);                                                      \
            const volatile float x = (expression);                                            \
            fesetround(FE_TONEAREST);                                                         \
            result(t, i, x);                                                                  \
        }                                                                                     \
    }
ROUNDED(add, a + b)
ROUNDED(sub, a - b)
ROUNDED(mul, a *b)
ROUNDED(fma_, fmaf(a, b, c))
ROUNDED(quotient, a / b)
ROUNDED(reciprocal, 1 / a)
ROUNDED(root, sqrtf(a))

static void neg(ptx_thread *t, const ptx_instruction *i)
{
    result(t, i, -operand(t, i, 0));
}

static void absolute(ptx_thread *t, const ptx_instruction *i)
{
    result(t, i, fabsf(operand(t, i, 0)));
}

static void copysign_(ptx_thread *t, const ptx_instruction *i)
{
    D = (B & 0x7FFFFFFFu) | (A & 0x80000000u);
}

/* Of a number and a NaN the number, unless .NaN is there; -0 is less than +0. */
static float extreme(float a, float b, bool greater, bool nan)
{
    if (isnan(a) || isnan(b))
        return nan || (isnan(a) && isnan(b)) ? NAN : isnan(a) ? b : a;
    if (a == b)
        return (signbit(a) != 0) == greater ? b : a;
    return (a > b) == greater ? a : b;
}

static void min(ptx_thread *t, const ptx_instruction *i)
{
    result(t, i, extreme(operand(t, i, 0), operand(t, i, 1), false, i->form->nan));
}

static void max(ptx_thread *t, const ptx_instruction *i)
{
    result(t, i, extreme(operand(t, i, 0), operand(t, i, 1), true, i->form->nan));
}

#define ROUNDING "rn|rz|rm|rp"

const ptx_row ptx_float32[] = {
    {"copysign f32", "daa", copysign_, "b with the sign of a", "9.7.3.2"},
    {"add " ROUNDING "? ftz? sat? f32", "daa", add, "a + b", "9.7.3.3"},
    {"sub " ROUNDING "? ftz? sat? f32", "daa", sub, "a - b", "9.7.3.4"},
    {"mul " ROUNDING "? ftz? sat? f32", "daa", mul, "a * b", "9.7.3.5"},
    {"fma " ROUNDING " ftz? sat? f32", "daaa", fma_, "a * b + c, rounded once", "9.7.3.6"},
    {"div " ROUNDING " ftz? f32", "daa", quotient, "a / b", "9.7.3.8"},
    {"abs ftz? f32", "da", absolute, "|a|", "9.7.3.9"},
    {"neg ftz? f32", "da", neg, "-a", "9.7.3.10"},
    {"min ftz? NaN? f32", "daa", min, "the lesser; of a NaN and a number the number", "9.7.3.11"},
    {"max ftz? NaN? f32", "daa", max, "the greater; of a NaN and a number the number", "9.7.3.12"},
    {"rcp " ROUNDING " ftz? f32", "da", reciprocal, "1 / a", "9.7.3.13"},
    {"sqrt " ROUNDING " ftz? f32", "da", root, "the square root", "9.7.3.15"},
    {0},
};
