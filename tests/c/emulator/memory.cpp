// Shared memory: filled with NaN, with guards at both ends.
#include "tests/c/emulator/machine.h"

#include <link.h>

#include <algorithm>

namespace hr_emu
{
namespace
{
constexpr char kGuardByte = char(0xC5);
constexpr size_t kAlignment = 256;
constexpr int kPoison = 0xFF; // a NaN in every floating-point format, and a bad index

// Of the running block.
struct Dynamic {
    std::unique_ptr<char[]> memory;
    Range range;
} dynamic;

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
    dynamic.memory.reset(new char[kAlignment + kGuard + dynamic_bytes + kGuard]);
    const uintptr_t first = reinterpret_cast<uintptr_t>(dynamic.memory.get()) + kGuard;
    dynamic.range = {reinterpret_cast<char *>((first + kAlignment - 1) / kAlignment * kAlignment),
                     dynamic_bytes};
    prepare(dynamic.range.begin, dynamic_bytes);
}

void check_shared_guards()
{
    check_guards(dynamic.range.begin, dynamic.range.bytes, "dynamic shared memory");
}

void prepare(char *begin, size_t bytes)
{
    memset(begin - kGuard, kGuardByte, kGuard);
    memset(begin, kPoison, bytes);
    memset(begin + bytes, kGuardByte, kGuard);
}

void check_guards(const char *begin, size_t bytes, const char *kind)
{
    const auto intact = [](char c) { return c == kGuardByte; };
    if (!std::all_of(begin - kGuard, begin, intact))
        report(std::string("out-of-bounds write: the guard before ") + kind + " was overwritten");
    else if (!std::all_of(begin + bytes, begin + bytes + kGuard, intact))
        report(std::string("out-of-bounds write: the guard after ") + kind + " was overwritten");
}
} // namespace hr_emu
