/* logic.c: bits and shifts (9.7.8), and bytes in another order (9.7.9.7). */
#include "tests/ptx/values.h"

static void and_(ptx_thread *t, const ptx_instruction *i)
{
    D = ptx_unsigned(A & B, i->type);
}

static void or_(ptx_thread *t, const ptx_instruction *i)
{
    D = ptx_unsigned(A | B, i->type);
}

static void xor_(ptx_thread *t, const ptx_instruction *i)
{
    D = ptx_unsigned(A ^ B, i->type);
}

static void not_(ptx_thread *t, const ptx_instruction *i)
{
    D = i->type == PTX_PRED ? !A : ptx_unsigned(~A, i->type);
}

/* The truth table `d` of three bits. */
static void lop3(ptx_thread *t, const ptx_instruction *i)
{
    uint32_t d = 0;
    for (int bit = 0; bit < 32; bit++) {
        const uint64_t row = (A >> bit & 1) << 2 | (B >> bit & 1) << 1 | (C >> bit & 1);
        d |= (uint32_t)(t->r[i->s[3]] >> row & 1) << bit;
    }
    D = d;
}

/* A shift by as many bits as there are, or more, leaves none of them. */
static void shl(ptx_thread *t, const ptx_instruction *i)
{
    const uint32_t by = (uint32_t)B;
    D = by >= 8u * (uint32_t)ptx_bytes(i->type) ? 0 : ptx_unsigned(A << by, i->type);
}

static void shr(ptx_thread *t, const ptx_instruction *i)
{
    const uint32_t bits = 8u * (uint32_t)ptx_bytes(i->type);
    const uint32_t by = (uint32_t)B;
    if (ptx_is_signed(i->type))
        D = ptx_unsigned((uint64_t)(ptx_signed(A, i->type) >> (by < bits ? by : bits - 1)),
                         i->type);
    else
        D = by < bits ? ptx_unsigned(A, i->type) >> by : 0;
}

/* A half of {b, a} after a shift: .l gives the high one, .r the low one. */
static void shf(ptx_thread *t, const ptx_instruction *i)
{
    const uint64_t both = (uint64_t)(uint32_t)B << 32 | (uint32_t)A;
    const uint32_t by = i->form->clamp ? ((uint32_t)C < 32 ? (uint32_t)C : 32) : (uint32_t)C & 31;
    D = i->mode == PTX_L ? (uint32_t)(both << by >> 32) : (uint32_t)(both >> by);
}

/* Each nibble of c picks one of the eight bytes of {b, a}, or copies of that byte's sign. */
static void prmt(ptx_thread *t, const ptx_instruction *i)
{
    const uint64_t both = (uint64_t)(uint32_t)B << 32 | (uint32_t)A;
    uint32_t d = 0;
    for (int byte = 0; byte < 4; byte++) {
        const uint32_t select = (uint32_t)(C >> 4 * byte) & 15;
        uint32_t picked = (uint32_t)(both >> 8 * (select & 7)) & 0xFF;
        if (select & 8)
            picked = picked & 0x80 ? 0xFF : 0;
        d |= picked << 8 * byte;
    }
    D = d;
}

#define BITS "pred|b16|b32|b64"

const ptx_row ptx_logic[] = {
    {"and " BITS, "daa", and_, "a & b", "9.7.8.1"},
    {"or " BITS, "daa", or_, "a | b", "9.7.8.2"},
    {"xor " BITS, "daa", xor_, "a ^ b", "9.7.8.3"},
    {"not " BITS, "da", not_, "~a", "9.7.8.4"},
    {"lop3 b32", "daaaa", lop3, "the truth table d of a, b, c", "9.7.8.6"},
    {"shf l|r wrap|clamp b32", "daaa", shf, "32 bits of {b, a} shifted by c", "9.7.8.7"},
    {"shl b16|b32|b64", "daa", shl, "a << b, 0 from the width on", "9.7.8.8"},
    {"shr b16|b32|b64|u16|u32|u64|s16|s32|s64", "daa", shr, "a >> b, of signed types its sign",
     "9.7.8.9"},
    {"prmt b32", "daaa", prmt, "bytes of {b, a} that c picks", "9.7.9.7"},
    {0},
};
