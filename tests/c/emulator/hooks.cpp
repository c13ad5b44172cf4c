// What code compiled with `-fsanitize=thread,alignment,bounds` calls, in place of the sanitizers'
// own runtimes: the compiler marks every access, and we check it in the terms of CUDA.
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

static std::string at(const SourceLocation &l)
{
    return std::string(" at ") + l.file + ":" + std::to_string(l.line);
}

void __ubsan_handle_type_mismatch_v1(TypeMismatch *data, uintptr_t address)
{
    if (!hr_emu::machine.current || !hr_emu::machine.current->in_kernel)
        return;
    const hr_emu::OutOfKernel out;
    const size_t needed = size_t(1) << data->log_alignment;
    report("misaligned access: " + std::string(data->type->name) + " needs a multiple of " +
           std::to_string(needed) + " bytes, the address is " + std::to_string(address % needed) +
           " past one" + at(data->location));
    hr_emu::stop_if_failed();
}
void __ubsan_handle_out_of_bounds(OutOfBounds *data, uintptr_t index)
{
    if (!hr_emu::machine.current || !hr_emu::machine.current->in_kernel)
        return;
    const hr_emu::OutOfKernel out;
    report("out-of-bounds access: index " + std::to_string(intptr_t(index)) + " of " +
           data->array->name + at(data->location));
    hr_emu::stop_if_failed();
}
}
