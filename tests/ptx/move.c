/* move.c: moves, the parts of a register, and addresses of other spaces (9.7.9). */
#include "tests/ptx/values.h"

/* One to one, several parts to a whole, or a whole to its parts, the low one first. */
static void mov(ptx_thread *t, const ptx_instruction *i)
{
    const int bits = 8 * ptx_bytes(i->type);
    uint64_t whole = 0;
    for (int k = 0; k < i->sources; k++) {
        const int part = bits / i->sources;
        const uint64_t mask = part == 64 ? ~(uint64_t)0 : ((uint64_t)1 << part) - 1;
        whole |= (t->r[i->s[k]] & mask) << k * part;
    }
    for (int k = 0; k < i->destinations; k++) {
        const int part = bits / i->destinations;
        const uint64_t mask = part == 64 ? ~(uint64_t)0 : ((uint64_t)1 << part) - 1;
        t->r[i->d[k]] = whole >> k * part & mask;
    }
}

static void cvta(ptx_thread *t, const ptx_instruction *i)
{
    const uint64_t shared = (uint64_t)(uintptr_t)t->launch->shared;
    if (i->form->space != PTX_SHARED) {
        D = A;
    } else if (i->mode != PTX_TO) {
        D = shared + (uint32_t)A;
    } else {
        if (A - shared >= (uint64_t)t->launch->shared_bytes)
            ptx_problem(i, "the generic address is not one of shared memory");
        D = A - shared;
    }
}

const ptx_row ptx_move[] = {
    {"mov pred|b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64", "da", mov, "a, its parts, or of parts",
     "9.7.9.3"},
    {"cvta to? global|shared|local|param|const u64", "da", cvta, "the address in another space",
     "9.7.9.20"},
    {0},
};
