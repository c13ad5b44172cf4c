/* run.c: one thread, from the first instruction of its entry to the last. */
#include <alloca.h>

#include "tests/ptx/values.h"

#define MOST_DEPTH_BYTES (192 << 10) /* of a fiber's stack */

static uint64_t constant(const ptx_thread *t, const ptx_constant *c)
{
    switch (c->origin) {
    case PTX_OF_FRAME:
        return (uint64_t)(uintptr_t)t->memory + c->value;
    case PTX_OF_ENTRY:
        return (uint64_t)(uintptr_t)t->launch->parameters + c->value;
    case PTX_OF_DYNAMIC:
        return (uint64_t)t->launch->entry->shared_bytes + c->value;
    case PTX_SPECIAL:
        return t->special[c->value];
    default:
        return c->value;
    }
}

/* Whether what the instruction makes of registers is known. Compilers move and compute ahead of time
 * what may never be used, so that is no problem of its own, but for what is seen outside: memory,
 * addresses, branches, other lanes. */
static bool is_known(const ptx_thread *t, const ptx_instruction *i)
{
    if (i->form->row->run == ptx_select) /* of the two only the one that is taken counts */
        return t->is_set[i->s[2]] && t->is_set[i->s[t->r[i->s[2]] & 1 ? 0 : 1]];
    uint8_t all = 1;
    for (int k = 0; k < i->sources; k++)
        all &= t->is_set[i->s[k]];
    return all;
}

static void execute(ptx_thread *t)
{
    const ptx_function *const f = t->function;
    while (t->next < f->count) {
        ptx_instruction *const i = &f->code[t->next++];
        if (i->guard >= 0) {
            if (!t->is_set[i->guard])
                ptx_problem(i, "a branch on a register that was never written");
            if ((t->r[i->guard] & 1) == i->guard_not)
                continue;
        }
        i->executed++;
        const bool known = is_known(t, i);
        if (!known && i->form->observes)
            ptx_problem(i, "a use of a register that was never written");
        i->run(t, i);
        for (int k = 0; k < i->destinations; k++)
            t->is_set[i->d[k]] = known;
    }
}

/* A frame on the stack: registers, constants behind them, memory, and what of both is written. */
static void enter(ptx_thread *t, const ptx_function *f, const ptx_thread *caller,
                  const ptx_call *call)
{
    const size_t registers = (size_t)f->registers, constants = (size_t)f->constant_count;
    const size_t memory = (size_t)f->frame_bytes;
    const size_t bytes = (registers + constants) * 9 + 2 * memory + 32;
    if (bytes > MOST_DEPTH_BYTES)
        ptx_problem(f->code, "a frame of %zu bytes", bytes);
    t->function = f;
    t->next = 0;
    char *const frame = (char *)(((uintptr_t)alloca(bytes) + 15) / 16 * 16);
    t->memory = frame;
    t->memory_is_set = (uint8_t *)frame + memory;
    t->r = (uint64_t *)(frame + 2 * memory);
    t->is_set = (uint8_t *)(t->r + registers + constants);
    memset(t->memory_is_set, 0, memory);
    memset(t->is_set, 0, registers);
    memset(t->is_set + registers, 1, constants);
    for (size_t k = 0; k < constants; k++)
        t->r[registers + k] = constant(t, &f->constants[k]);
    for (int k = 0; call && k < f->parameters; k++) {
        const ptx_place from = call->parameter[k], to = f->parameter[k];
        memcpy(t->memory + to.offset, caller->memory + from.offset, (size_t)to.bytes);
        memcpy(t->memory_is_set + to.offset, caller->memory_is_set + from.offset, (size_t)to.bytes);
    }
    execute(t);
    if (call && call->returns) {
        const ptx_place from = f->result, to = call->result;
        memcpy(caller->memory + to.offset, t->memory + from.offset, (size_t)from.bytes);
        memcpy(caller->memory_is_set + to.offset, t->memory_is_set + from.offset,
               (size_t)from.bytes);
    }
}

void ptx_run(ptx_thread *t)
{
    enter(t, t->launch->entry, NULL, NULL);
}

void ptx_call_function(ptx_thread *t, const ptx_call *call)
{
    ptx_thread callee = *t;
    callee.caller = t;
    enter(&callee, call->function, t, call);
}
