/* integer.c: integer arithmetic, modulo 2^n (9.7.1). */
#include "tests/ptx/values.h"

#define INTEGER "u16|u32|u64|s16|s32|s64"

static void add(ptx_thread *t, const ptx_instruction *i)
{
    D = ptx_unsigned(A + B, i->type);
}

static void sub(ptx_thread *t, const ptx_instruction *i)
{
    D = ptx_unsigned(A - B, i->type);
}

/* The low half of a product, the high one, or both. */
static uint64_t product(uint64_t a, uint64_t b, ptx_type type, ptx_mode mode)
{
    const __int128 whole =
        ptx_is_signed(type)
            ? (__int128)ptx_signed(a, type) * ptx_signed(b, type)
            : (__int128)((unsigned __int128)ptx_unsigned(a, type) * ptx_unsigned(b, type));
    if (mode == PTX_HI)
        return ptx_unsigned((uint64_t)(whole >> (8 * ptx_bytes(type))), type);
    if (mode == PTX_LO)
        return ptx_unsigned((uint64_t)whole, type);
    return ptx_bytes(type) == 2 ? (uint32_t)whole : (uint64_t)whole;
}

static void mul(ptx_thread *t, const ptx_instruction *i)
{
    D = product(A, B, i->type, i->mode);
}

static void mad(ptx_thread *t, const ptx_instruction *i)
{
    const uint64_t sum = product(A, B, i->type, i->mode) + C;
    if (i->mode != PTX_WIDE)
        D = ptx_unsigned(sum, i->type);
    else
        D = ptx_bytes(i->type) == 2 ? (uint32_t)sum : sum;
}

/* Division by zero gives an unspecified value: here it is a problem. */
static void divide(ptx_thread *t, const ptx_instruction *i, bool remainder)
{
    const uint64_t by = ptx_unsigned(B, i->type);
    if (by == 0)
        ptx_problem(i, "division of an integer by zero");
    if (!ptx_is_signed(i->type)) {
        const uint64_t a = ptx_unsigned(A, i->type);
        D = remainder ? a % by : a / by;
        return;
    }
    const __int128 a = ptx_signed(A, i->type), b = ptx_signed(B, i->type);
    D = ptx_unsigned((uint64_t)(remainder ? a % b : a / b), i->type);
}

static void quotient(ptx_thread *t, const ptx_instruction *i)
{
    divide(t, i, false);
}

static void rem(ptx_thread *t, const ptx_instruction *i)
{
    divide(t, i, true);
}

static void neg(ptx_thread *t, const ptx_instruction *i)
{
    D = ptx_unsigned(0 - A, i->type);
}

static void absolute(ptx_thread *t, const ptx_instruction *i)
{
    D = ptx_unsigned(ptx_signed(A, i->type) < 0 ? 0 - A : A, i->type);
}

static bool less(uint64_t a, uint64_t b, ptx_type type)
{
    return ptx_is_signed(type) ? ptx_signed(a, type) < ptx_signed(b, type)
                               : ptx_unsigned(a, type) < ptx_unsigned(b, type);
}

static void min(ptx_thread *t, const ptx_instruction *i)
{
    D = ptx_unsigned(less(A, B, i->type) ? A : B, i->type);
}

static void max(ptx_thread *t, const ptx_instruction *i)
{
    D = ptx_unsigned(less(A, B, i->type) ? B : A, i->type);
}

static void popc(ptx_thread *t, const ptx_instruction *i)
{
    D = (uint64_t)__builtin_popcountll(ptx_unsigned(A, i->type));
}

static void clz(ptx_thread *t, const ptx_instruction *i)
{
    const uint64_t a = ptx_unsigned(A, i->type);
    const int bits = 8 * ptx_bytes(i->type);
    D = (uint64_t)(a ? __builtin_clzll(a) - (64 - bits) : bits);
}

/* Bits [b, b + c) of a; of a signed type the last of them fills what is above. */
static void bfe(ptx_thread *t, const ptx_instruction *i)
{
    const int bits = 8 * ptx_bytes(i->type), from = (int)(B & 0xFF), length = (int)(C & 0xFF);
    const uint64_t a = ptx_unsigned(A, i->type);
    const int last = from + length - 1 < bits - 1 ? from + length - 1 : bits - 1;
    const uint64_t fill = ptx_is_signed(i->type) && length > 0 ? a >> last & 1 : 0;
    uint64_t d = 0;
    for (int k = 0; k < bits; k++)
        d |= (k < length && from + k < bits ? a >> (from + k) & 1 : fill) << k;
    D = d;
}

/* b, with the low bits of a at [c, c + length). */
static void bfi(ptx_thread *t, const ptx_instruction *i)
{
    const int bits = 8 * ptx_bytes(i->type), from = (int)(C & 0xFF);
    const int length = (int)(t->r[i->s[3]] & 0xFF);
    uint64_t d = ptx_unsigned(B, i->type);
    for (int k = 0; k < length && from + k < bits; k++)
        d = (d & ~((uint64_t)1 << (from + k))) | (A >> k & 1) << (from + k);
    D = d;
}

const ptx_row ptx_integer[] = {
    {"add " INTEGER, "daa", add, "a + b", "9.7.1.1"},
    {"sub " INTEGER, "daa", sub, "a - b", "9.7.1.2"},
    {"mul lo|hi|wide " INTEGER, "daa", mul, "half or all of a * b", "9.7.1.3"},
    {"mad lo|hi|wide " INTEGER, "daaa", mad, "half or all of a * b, + c", "9.7.1.4"},
    {"div " INTEGER, "daa", quotient, "a / b, toward zero", "9.7.1.8"},
    {"rem " INTEGER, "daa", rem, "a - a / b * b, of the sign of a", "9.7.1.9"},
    {"abs s16|s32|s64", "da", absolute, "|a|", "9.7.1.10"},
    {"neg s16|s32|s64", "da", neg, "-a", "9.7.1.11"},
    {"min " INTEGER, "daa", min, "the lesser", "9.7.1.12"},
    {"max " INTEGER, "daa", max, "the greater", "9.7.1.13"},
    {"popc b32|b64", "da", popc, "number of ones", "9.7.1.14"},
    {"clz b32|b64", "da", clz, "number of zeros above the first one", "9.7.1.15"},
    {"bfe u32|u64|s32|s64", "daaa", bfe, "bits of a from b on, c of them", "9.7.1.19"},
    {"bfi b32|b64", "daaaa", bfi, "b with d bits of a from c on", "9.7.1.20"},
    {0},
};
