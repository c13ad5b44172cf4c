/* approximate.c: what a GPU computes with tables (9.7.3). Only bounds of the error are documented, so
 * the error is drawn within them, from the operand and the seed of the run: the same operand gives the same
 * result, as on a GPU, and a result that leans on one error differs in a run with another seed. */
#include "tests/ptx/values.h"

/* In [-1, 1], a function of the operand and the seed. */
static double drawn(const ptx_thread *t, uint64_t bits)
{
    uint64_t x = (bits + 0x9E3779B97F4A7C15u) ^ t->launch->seed * 0xD1B54A32D192ED03u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    x ^= x >> 31;
    return (double)(int64_t)x * 0x1p-63;
}

static double operand(const ptx_thread *t, const ptx_instruction *i)
{
    const float a = ptx_f32(A);
    return i->form->ftz ? ptx_flush(a) : a;
}

/* Stores exact * (1 + drawn * bound), where that is a number. */
static void relative(ptx_thread *t, const ptx_instruction *i, double exact, double bound)
{
    const double x = isfinite(exact) ? exact * (1 + drawn(t, A) * bound) : exact;
    /* Half of the spacing goes to the rounding, which is part of the documented error. */
    const float rounded = (float)x;
    D = ptx_result32(i->form->ftz ? ptx_flush(rounded) : rounded);
}

static void rcp(ptx_thread *t, const ptx_instruction *i)
{
    relative(t, i, 1 / operand(t, i), 0x1p-24);
}

static void root(ptx_thread *t, const ptx_instruction *i)
{
    relative(t, i, sqrt(operand(t, i)), 0x1p-24);
}

static void ex2(ptx_thread *t, const ptx_instruction *i)
{
    const double a = operand(t, i);
    if (a == rint(a) && fabs(a) < 126) /* a power of two comes exactly */
        D = ptx_result32((float)exp2(a));
    else
        relative(t, i, exp2(a), 0x1p-22 - 0x1p-24);
}

static void tanh_(ptx_thread *t, const ptx_instruction *i)
{
    relative(t, i, tanh(operand(t, i)), 0x1p-11);
}

/* The error is absolute where the logarithm is small, and relative elsewhere. */
static void lg2(ptx_thread *t, const ptx_instruction *i)
{
    const double a = operand(t, i), exact = log2(a);
    if (a > 0.5 && a < 2)
        D = ptx_result32((float)(exact + drawn(t, A) * (0x1p-22 - 0x1p-24)));
    else
        relative(t, i, exact, 0x1p-22 - 0x1p-24);
}

/* Only the high half of the operand is looked at, and only that of the result is given. No error is
 * documented: Newton's steps after it want some 20 bits. */
static void rcp64(ptx_thread *t, const ptx_instruction *i)
{
    const double a = ptx_f64(A & ~(uint64_t)0xFFFFFFFF);
    const bool flushed = fabs(a) < 0x1p-1022;
    double x = 1 / (flushed ? copysign(0, a) : a);
    if (isfinite(x))
        x *= 1 + drawn(t, A) * 0x1p-21;
    if (fabs(x) < 0x1p-1022)
        x = copysign(0, x);
    D = isnan(x) ? ptx_result64(x) : ptx_bits64(x) & ~(uint64_t)0xFFFFFFFF;
}

const ptx_row ptx_approximate[] = {
    {"rcp approx ftz? f32", "da", rcp, "1 / a within 2^-23", "9.7.3.13"},
    {"rcp approx ftz f64", "da", rcp64, "1 / a, of 32 bits, of 32 bits", "9.7.3.14"},
    {"sqrt approx ftz? f32", "da", root, "the square root within 2^-23", "9.7.3.15"},
    {"lg2 approx ftz? f32", "da", lg2, "log2(a) within 2^-22", "9.7.3.20"},
    {"ex2 approx ftz? f32", "da", ex2, "2^a within 2^-22", "9.7.3.21"},
    {"tanh approx f32", "da", tanh_, "tanh(a) within 2^-11", "9.7.3.22"},
    {0},
};
