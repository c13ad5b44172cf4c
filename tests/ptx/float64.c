/* float64.c: arithmetic of binary64, rounded to nearest, subnormal numbers kept (9.7.3). */
#include "tests/ptx/values.h"

#define EXACT(name, expression)                                           \
    static void name(ptx_thread *t, const ptx_instruction *i)             \
    {                                                                     \
        const double a = ptx_f64(A), b = i->sources > 1 ? ptx_f64(B) : 0, \
                     c = i->sources > 2 ? ptx_f64(C) : 0;                 \
        (void)b, (void)c;                                                 \
        D = ptx_result64(expression);                                     \
    }

/* Of a number and a NaN the number; -0 is less than +0. */
static double lesser(double a, double b)
{
    if (isnan(a) || isnan(b))
        return isnan(a) ? b : a;
    return a == b ? (signbit(a) ? a : b) : a < b ? a : b;
}

EXACT(add, a + b)
EXACT(sub, a - b)
EXACT(mul, a *b)
EXACT(fma_, fma(a, b, c))
EXACT(quotient, a / b)
EXACT(reciprocal, 1 / a)
EXACT(root, sqrt(a))
EXACT(neg, -a)
EXACT(absolute, fabs(a))
EXACT(min, lesser(a, b))
EXACT(max, -lesser(-a, -b))

const ptx_row ptx_float64[] = {
    {"add rn? f64", "daa", add, "a + b", "9.7.3.3"},
    {"sub rn? f64", "daa", sub, "a - b", "9.7.3.4"},
    {"mul rn? f64", "daa", mul, "a * b", "9.7.3.5"},
    {"fma rn f64", "daaa", fma_, "a * b + c, rounded once", "9.7.3.6"},
    {"div rn f64", "daa", quotient, "a / b", "9.7.3.8"},
    {"abs f64", "da", absolute, "|a|", "9.7.3.9"},
    {"neg f64", "da", neg, "-a", "9.7.3.10"},
    {"min f64", "daa", min, "the lesser; of a NaN and a number the number", "9.7.3.11"},
    {"max f64", "daa", max, "the greater; of a NaN and a number the number", "9.7.3.12"},
    {"rcp rn f64", "da", reciprocal, "1 / a", "9.7.3.13"},
    {"sqrt rn f64", "da", root, "the square root", "9.7.3.15"},
    {0},
};
