/* compare.c: comparison and selection (9.7.6). */
#include "tests/ptx/values.h"

/* 1 for what an ordered comparison says, 0, or -1 if a NaN is there; a mode's unordered form is true. */
#define COMPARE(a, b, unordered)           \
    switch (mode) {                        \
    case PTX_EQU:                          \
        return (unordered) || (a) == (b);  \
    case PTX_NEU:                          \
        return (unordered) || (a) != (b);  \
    case PTX_LTU:                          \
        return (unordered) || (a) < (b);   \
    case PTX_LEU:                          \
        return (unordered) || (a) <= (b);  \
    case PTX_GTU:                          \
        return (unordered) || (a) > (b);   \
    case PTX_GEU:                          \
        return (unordered) || (a) >= (b);  \
    case PTX_EQ:                           \
        return !(unordered) && (a) == (b); \
    case PTX_NE:                           \
        return !(unordered) && (a) != (b); \
    case PTX_LT:                           \
        return !(unordered) && (a) < (b);  \
    case PTX_LE:                           \
        return !(unordered) && (a) <= (b); \
    case PTX_GT:                           \
        return !(unordered) && (a) > (b);  \
    case PTX_GE:                           \
        return !(unordered) && (a) >= (b); \
    case PTX_NUM:                          \
        return !(unordered);               \
    default:                               \
        return unordered;                  \
    }

static bool compare_float(double a, double b, ptx_mode mode)
{
    COMPARE(a, b, isnan(a) || isnan(b))
}

static bool compare_signed(int64_t a, int64_t b, ptx_mode mode)
{
    COMPARE(a, b, false)
}

static bool compare_unsigned(uint64_t a, uint64_t b, ptx_mode mode)
{
    COMPARE(a, b, false)
}

/* lo, ls, hi, hs are not among the forms that nvcc makes. */
static bool compare(const ptx_thread *t, const ptx_instruction *i)
{
    if (i->type == PTX_F64)
        return compare_float(ptx_f64(A), ptx_f64(B), i->mode);
    if (i->type == PTX_F32) {
        const float a = ptx_f32(A), b = ptx_f32(B);
        return i->form->ftz ? compare_float(ptx_flush(a), ptx_flush(b), i->mode)
                            : compare_float(a, b, i->mode);
    }
    if (ptx_is_signed(i->type))
        return compare_signed(ptx_signed(A, i->type), ptx_signed(B, i->type), i->mode);
    return compare_unsigned(ptx_unsigned(A, i->type), ptx_unsigned(B, i->type), i->mode);
}

static void setp(ptx_thread *t, const ptx_instruction *i)
{
    const bool is = compare(t, i);
    D = is;
    if (i->destinations > 1)
        t->r[i->d[1]] = !is;
}

void ptx_select(ptx_thread *t, const ptx_instruction *i)
{
    D = ptx_unsigned(C & 1 ? A : B, i->type);
}

#define NUMBERS "b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64"

const ptx_row ptx_compare[] = {
    {"setp eq|ne|lt|le|gt|ge b16|b32|b64|u16|u32|u64|s16|s32|s64", "daa", setp,
     "whether; the second result is its opposite", "9.7.6.2"},
    {"setp eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan ftz? f32", "daa", setp,
     "whether, and if a NaN is there whether the u is", "9.7.6.2"},
    {"setp eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan f64", "daa", setp,
     "whether, and if a NaN is there whether the u is", "9.7.6.2"},
    {"selp " NUMBERS, "daaa", ptx_select, "c ? a : b", "9.7.6.3"},
    {0},
};
