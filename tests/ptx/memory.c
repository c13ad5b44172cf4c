/* memory.c: loads, stores and atomics (9.7.9, 9.7.13). */
#include "tests/ptx/values.h"

static bool within(uint64_t address, size_t bytes, const void *begin, int64_t size)
{
    const uint64_t from = address - (uint64_t)(uintptr_t)begin;
    return size > 0 && from <= (uint64_t)size && bytes <= (uint64_t)size - from;
}

static bool is_variable(const ptx_module *m, uint64_t address, size_t bytes)
{
    for (int k = 0; k < m->variable_count; k++)
        if (within(address, bytes, m->variables[k].data, m->variables[k].bytes))
            return true;
    return false;
}

/* The frame that holds the bytes: parameters of calls, and local memory, which functions may be given
 * the address of. NULL if none does. */
static const ptx_thread *frame_of(const ptx_thread *t, uint64_t address, size_t bytes)
{
    while (t && !within(address, bytes, t->memory, t->function->frame_bytes))
        t = t->caller;
    return t;
}

static void check_frame(const ptx_thread *frame, const ptx_instruction *i, const char *place,
                        size_t bytes, bool write)
{
    uint8_t *const is_set = frame->memory_is_set + (place - frame->memory);
    for (size_t k = 0; k < bytes; k++) {
        if (!write && !is_set[k])
            ptx_problem(i, "uninitialized read of a parameter of a call or of local memory");
        is_set[k] = is_set[k] || write;
    }
}

/* Where the host has the bytes that the instruction accesses, once all is checked. */
static char *locate(ptx_thread *t, const ptx_instruction *i, size_t bytes, bool write, bool atomic)
{
    const ptx_launch *const l = t->launch;
    const ptx_space space = i->form->space;
    uint64_t address = A + (uint64_t)i->offset;
    if (space == PTX_SHARED) {
        address = (uint32_t)address;
        if (address > (uint64_t)l->shared_bytes || bytes > (uint64_t)l->shared_bytes - address)
            ptx_problem(i, "out-of-bounds access to %zu bytes at %llu of %lld of shared memory",
                        bytes, (unsigned long long)address, (long long)l->shared_bytes);
        address += (uint64_t)(uintptr_t)l->shared;
    }
    if (address % bytes != 0)
        ptx_problem(i, "misaligned access to %zu bytes at %p", bytes, (void *)(uintptr_t)address);
    char *const place = (char *)(uintptr_t)address;
    const bool in_shared = within(address, bytes, l->shared, l->shared_bytes);
    const ptx_thread *const frame = frame_of(t, address, bytes);
    const bool in_parameters = within(address, bytes, l->parameters, l->entry->parameter_bytes);
    const bool is_ours = in_shared || frame || in_parameters;
    if ((space == PTX_GLOBAL && is_ours) || (space == PTX_PARAM && !frame && !in_parameters) ||
        (space == PTX_LOCAL && !frame))
        ptx_problem(i, "out-of-bounds access: the address %p is not of the instruction's space",
                    (void *)place);
    if (frame)
        check_frame(frame, i, place, bytes, write);
    else if (in_parameters || is_variable(t->function->module, address, bytes)) {
        if (write)
            ptx_problem(i, "a write to what is constant");
    } else if (atomic)
        ptx_note_atomic(i, place, bytes);
    else
        ptx_note_access(i, place, bytes, write);
    return place;
}

static uint64_t load(const char *place, ptx_type type)
{
    uint64_t bits = 0;
    memcpy(&bits, place, (size_t)ptx_bytes(type));
    return ptx_integer_of(bits, type);
}

static void ld(ptx_thread *t, const ptx_instruction *i)
{
    const int bytes = ptx_bytes(i->type), count = i->form->vector;
    const char *const place = locate(t, i, (size_t)(bytes * count), false, false);
    for (int k = 0; k < count; k++)
        t->r[i->d[k]] = load(place + k * bytes, i->type);
}

static void st(ptx_thread *t, const ptx_instruction *i)
{
    const int bytes = ptx_bytes(i->type), count = i->form->vector;
    char *const place = locate(t, i, (size_t)(bytes * count), true, false);
    for (int k = 0; k < count; k++)
        memcpy(place + k * bytes, &t->r[i->s[1 + k]], (size_t)bytes);
}

static uint64_t added(uint64_t a, uint64_t b, ptx_type type)
{
    if (type == PTX_F32)
        return ptx_result32(ptx_f32(a) + ptx_f32(b));
    return type == PTX_F64 ? ptx_result64(ptx_f64(a) + ptx_f64(b)) : a + b;
}

static uint64_t updated(const ptx_thread *t, const ptx_instruction *i, uint64_t old)
{
    const bool less = ptx_is_signed(i->type)
                          ? ptx_signed(old, i->type) < ptx_signed(B, i->type)
                          : ptx_unsigned(old, i->type) < ptx_unsigned(B, i->type);
    switch (i->mode) {
    case PTX_ADD:
        return added(old, B, i->type);
    case PTX_MIN:
        return less ? old : B;
    case PTX_MAX:
        return less ? B : old;
    case PTX_AND:
        return old & B;
    case PTX_OR:
        return old | B;
    case PTX_XOR:
        return old ^ B;
    case PTX_CAS:
        return ptx_unsigned(old, i->type) == ptx_unsigned(B, i->type) ? C : old;
    default:
        return B;
    }
}

/* The threads of a launch run one at a time, so what is done here is not divided. */
static void atom(ptx_thread *t, const ptx_instruction *i)
{
    const size_t bytes = (size_t)ptx_bytes(i->type);
    char *const place = locate(t, i, bytes, true, true);
    const uint64_t old = load(place, i->type), next = updated(t, i, old);
    memcpy(place, &next, bytes);
    if (i->destinations > 0)
        D = ptx_unsigned(old, i->type);
}

#define TYPE   "b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64"
#define UPDATE "add|min|max|and|or|xor|exch|cas b32|b64|u32|u64|s32|s64|f32|f64"
#define ORDER  "relaxed|acquire|release|acq_rel? cta|gpu|sys?"
#define SPACE  "global|shared|param|local|const?"

const ptx_row ptx_memory[] = {
    {"ld volatile|weak? " SPACE " ca|cg|cs|lu|cv|nc? v2|v4? " TYPE, "dm", ld, "what stands there",
     "9.7.9.8"},
    {"st volatile|weak? " SPACE " wb|cg|cs|wt? v2|v4? " TYPE, "ma", st, "a goes there", "9.7.9.12"},
    {"atom " ORDER " global|shared? " UPDATE, "dmaa?", atom,
     "what stood there; the new one goes there", "9.7.13.5"},
    {"red " ORDER " global|shared? " UPDATE, "ma", atom, "the new one goes there", "9.7.13.7"},
    {0},
};
