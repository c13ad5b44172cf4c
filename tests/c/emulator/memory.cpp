// Device and shared memory: filled with NaN, with guards at both ends.
#include "tests/c/emulator/asan.h"
#include "tests/c/emulator/machine.h"

#include <link.h>

#include <algorithm>
#include <map>
#include <utility>

namespace hr_emu
{
namespace
{
constexpr size_t kGuard = 256, kAlignment = 256; // cudaMalloc's alignment
constexpr char kGuardByte = char(0xC5);
constexpr int kPoison = 0xFF; // a NaN in every floating-point format, and a bad index

std::map<const char *, Allocation> allocations; // by begin
Allocation dynamic;

Allocation allocate(size_t bytes)
{
    Allocation a;
    a.memory.reset(new char[kAlignment + kGuard + bytes + kGuard]);
    const uintptr_t first = reinterpret_cast<uintptr_t>(a.memory.get()) + kGuard;
    a.range = {reinterpret_cast<char *>((first + kAlignment - 1) / kAlignment * kAlignment), bytes};
    a.written.resize(bytes);
    memset(a.range.begin, kPoison, bytes);
    memset(a.range.begin - kGuard, kGuardByte, kGuard);
    memset(a.range.begin + bytes, kGuardByte, kGuard);
#ifdef HR_EMU_ASAN
    __asan_poison_memory_region(a.range.begin - kGuard, kGuard);
    __asan_poison_memory_region(a.range.begin + bytes, kGuard);
#endif
    return a;
}

void check_guards_of(const Allocation &a, const char *kind)
{
#ifdef HR_EMU_ASAN
    (void)a, (void)kind; // it saw the access
#else
    const char *const begin = a.range.begin, *const end = begin + a.range.bytes;
    const auto intact = [](char c) { return c == kGuardByte; };
    if (!std::all_of(begin - kGuard, begin, intact))
        report(std::string("out-of-bounds write: the guard before ") + kind + " was overwritten");
    else if (!std::all_of(end, end + kGuard, intact))
        report(std::string("out-of-bounds write: the guard after ") + kind + " was overwritten");
#endif
}

// __shared__ variables: the thread-local block of this program. What of it belongs to the host is
// put back after the launch; no host code that could use it runs meanwhile.
Range fixed;
std::vector<char> host_thread_locals;
thread_local char anchor; // so that there is a block

Range thread_local_block()
{
    Range block{&anchor, 0};
    dl_iterate_phdr(
        [](dl_phdr_info *module, size_t, void *result) {
            Range &block = *static_cast<Range *>(result);
            for (int i = 0; i < module->dlpi_phnum; i++) {
                const Range found{static_cast<char *>(module->dlpi_tls_data),
                                  module->dlpi_phdr[i].p_memsz};
                if (module->dlpi_phdr[i].p_type == PT_TLS && found.holds(block.begin)) {
                    block = found;
                    return 1;
                }
            }
            return 0;
        },
        &block);
    return block;
}

} // namespace

void enter_shared()
{
    fixed = thread_local_block();
    host_thread_locals.assign(fixed.begin, fixed.begin + fixed.bytes);
}

void leave_shared()
{
    std::copy(host_thread_locals.begin(), host_thread_locals.end(), fixed.begin);
}

Range static_shared()
{
    return fixed;
}

Range dynamic_shared_range()
{
    return dynamic.range;
}

void *dynamic_shared()
{
    return dynamic.range.begin;
}

void begin_shared(size_t dynamic_bytes)
{
    memset(fixed.begin, kPoison, fixed.bytes);
    if (dynamic.memory && dynamic.range.bytes == dynamic_bytes) {
        memset(dynamic.range.begin, kPoison, dynamic_bytes);
        return;
    }
    dynamic = allocate(dynamic_bytes);
}

void check_shared_guards()
{
    check_guards_of(dynamic, "dynamic shared memory");
}

void check_device_guards()
{
    for (const auto &[begin, a] : allocations)
        check_guards_of(a, "an allocation");
}

void *allocate_device(size_t bytes)
{
    Allocation a = allocate(bytes);
    char *const begin = a.range.begin;
    allocations[begin] = std::move(a);
    return begin;
}

bool free_device(const void *pointer)
{
    return allocations.erase(static_cast<const char *>(pointer)) != 0;
}

Allocation *find_allocation(const void *address, size_t bytes)
{
    auto next = allocations.upper_bound(static_cast<const char *>(address));
    if (next == allocations.begin())
        return nullptr;
    Allocation &a = std::prev(next)->second;
    return a.range.holds(address, bytes) ? &a : nullptr;
}
} // namespace hr_emu
