// What code compiled with
//
//     -fsanitize=thread,alignment,bounds,bool,integer-divide-by-zero,shift,signed-integer-overflow
//
// calls, in place of the sanitizers' own runtimes: the compiler marks every access, and we check it in
// the terms of CUDA.
#include "tests/c/emulator/race.h"

using hr_emu::note_access;
using hr_emu::report;

#define CALLER __builtin_return_address(0)

#define HR_EMU_HOOK(bytes)                      \
    void __tsan_read##bytes(void *p)            \
    {                                           \
        note_access(p, bytes, false, CALLER);   \
    }                                           \
    void __tsan_write##bytes(void *p)           \
    {                                           \
        note_access(p, bytes, true, CALLER);    \
    }                                           \
    void __tsan_unaligned_read##bytes(void *p)  \
    {                                           \
        note_access(p, bytes, false, CALLER);   \
    }                                           \
    void __tsan_unaligned_write##bytes(void *p) \
    {                                           \
        note_access(p, bytes, true, CALLER);    \
    }

extern "C" {
HR_EMU_HOOK(1)
HR_EMU_HOOK(2)
HR_EMU_HOOK(4)
HR_EMU_HOOK(8)
HR_EMU_HOOK(16)

void __tsan_read_range(void *p, size_t bytes)
{
    note_access(p, bytes, false, CALLER);
}
void __tsan_write_range(void *p, size_t bytes)
{
    note_access(p, bytes, true, CALLER);
}
void __tsan_vptr_read(void **) {}
void __tsan_vptr_update(void **, void *) {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_init()
{
    hr_emu::watch_accesses();
}

// Atomics of host code in the same file. CUDA's own go through note_atomic().
#define HR_EMU_ATOMIC_HOOKS(bits, type)                            \
    type __tsan_atomic##bits##_load(const type *p, int)            \
    {                                                              \
        return __atomic_load_n(p, __ATOMIC_SEQ_CST);               \
    }                                                              \
    void __tsan_atomic##bits##_store(type *p, type value, int)     \
    {                                                              \
        __atomic_store_n(p, value, __ATOMIC_SEQ_CST);              \
    }                                                              \
    type __tsan_atomic##bits##_fetch_add(type *p, type value, int) \
    {                                                              \
        return __atomic_fetch_add(p, value, __ATOMIC_SEQ_CST);     \
    }                                                              \
    type __tsan_atomic##bits##_fetch_sub(type *p, type value, int) \
    {                                                              \
        return __atomic_fetch_sub(p, value, __ATOMIC_SEQ_CST);     \
    }
HR_EMU_ATOMIC_HOOKS(8, uint8_t)
HR_EMU_ATOMIC_HOOKS(32, uint32_t)
HR_EMU_ATOMIC_HOOKS(64, uint64_t)

// The layout of these is part of the compilers' interface.
struct SourceLocation {
    const char *file;
    uint32_t line, column;
};
struct TypeDescriptor {
    uint16_t kind, information;
    char name[1];
};
struct TypeMismatch {
    SourceLocation location;
    const TypeDescriptor *type;
    unsigned char log_alignment, access;
};
struct OutOfBounds {
    SourceLocation location;
    const TypeDescriptor *array, *index;
};
struct Overflow {
    SourceLocation location;
    const TypeDescriptor *type;
};
struct Shift {
    SourceLocation location;
    const TypeDescriptor *left, *right;
};

static std::string at(const SourceLocation &l)
{
    return std::string(" at ") + l.file + ":" + std::to_string(l.line);
}

// Only in a kernel: host code is for the sanitized program.
static void report_in_kernel(const std::string &problem, const SourceLocation &location)
{
    if (!hr_emu::machine.current || !hr_emu::machine.current->in_kernel)
        return;
    const hr_emu::OutOfKernel out;
    report(problem + at(location));
    hr_emu::stop_if_failed();
}

void __ubsan_handle_type_mismatch_v1(TypeMismatch *data, uintptr_t address)
{
    const size_t needed = size_t(1) << data->log_alignment;
    report_in_kernel("misaligned access: " + std::string(data->type->name) +
                         " needs a multiple of " + std::to_string(needed) +
                         " bytes, the address is " + std::to_string(address % needed) + " past one",
                     data->location);
}
void __ubsan_handle_out_of_bounds(OutOfBounds *data, uintptr_t index)
{
    report_in_kernel("out-of-bounds access: index " + std::to_string(intptr_t(index)) + " of " +
                         data->array->name,
                     data->location);
}

#define HR_EMU_OVERFLOW_HOOK(kind)                                                             \
    void __ubsan_handle_##kind(Overflow *data, uintptr_t, uintptr_t)                           \
    {                                                                                          \
        report_in_kernel(std::string("undefined arithmetic: overflow of ") + data->type->name, \
                         data->location);                                                      \
    }
HR_EMU_OVERFLOW_HOOK(add_overflow)
HR_EMU_OVERFLOW_HOOK(sub_overflow)
HR_EMU_OVERFLOW_HOOK(mul_overflow)
HR_EMU_OVERFLOW_HOOK(negate_overflow) // which passes one operand
HR_EMU_OVERFLOW_HOOK(divrem_overflow) // and division by zero

void __ubsan_handle_shift_out_of_bounds(Shift *data, uintptr_t, uintptr_t)
{
    report_in_kernel(std::string("undefined arithmetic: shift of ") + data->left->name + " by " +
                         data->right->name,
                     data->location);
}
void __ubsan_handle_load_invalid_value(Overflow *data, uintptr_t value)
{
    report_in_kernel("undefined arithmetic: " + std::to_string(value) + " is no value of " +
                         data->type->name,
                     data->location);
}
}
