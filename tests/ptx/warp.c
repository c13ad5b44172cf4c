/* warp.c: barriers, shuffles and votes (9.7.13). */
#include "tests/ptx/values.h"

static void bar_sync(ptx_thread *t, const ptx_instruction *i)
{
    if (A != 0)
        ptx_problem(i, "only barrier 0 is known here");
    ptx_wait_for_block(i);
}

static void bar_warp_sync(ptx_thread *t, const ptx_instruction *i)
{
    (void)ptx_vote(i, (uint32_t)A, false);
}

/* The lane that the value comes from is within the part of the warp that c describes, or else the own
 * one; the second result says which. */
static void shfl(ptx_thread *t, const ptx_instruction *i)
{
    const int lane = (int)t->special[PTX_LANEID], b = (int)(B & 31);
    const int parts = (int)(C >> 8 & 31), clamp = (int)(C & 31);
    const int first = lane & parts, last = first | (clamp & ~parts);
    const int from = i->mode == PTX_UP     ? lane - b
                     : i->mode == PTX_DOWN ? lane + b
                     : i->mode == PTX_BFLY ? lane ^ b
                                           : first | (b & ~parts);
    const bool is_there = i->mode == PTX_UP ? from >= last : from <= last;
    D = (uint32_t)ptx_exchange(i, (uint32_t)t->r[i->s[3]], A, (uint32_t)(is_there ? from : lane));
    if (i->destinations > 1)
        t->r[i->d[1]] = is_there;
}

static void vote(ptx_thread *t, const ptx_instruction *i)
{
    const uint32_t mask = (uint32_t)B;
    const bool mine = A & 1;
    const uint32_t true_ones = ptx_vote(i, mask, mine);
    if (i->mode == PTX_BALLOT)
        D = true_ones;
    else if (i->mode == PTX_ANY)
        D = true_ones != 0;
    else
        D = ptx_vote(i, mask, !mine) == 0;
}

const ptx_row ptx_warp[] = {
    {"bar|barrier sync", "a", bar_sync, "waits for the block", "9.7.13.1"},
    {"bar warp sync", "a", bar_warp_sync, "waits for the lanes of a", "9.7.13.2"},
    {"shfl sync up|down|bfly|idx b32", "daaaa", shfl, "what another lane of d has for a",
     "9.7.9.6"},
    {"vote sync ballot b32", "daa", vote, "the lanes of b whose a is true", "9.7.13.9"},
    {"vote sync any|all pred", "daa", vote, "whether one is, or all are", "9.7.13.9"},
    {0},
};
