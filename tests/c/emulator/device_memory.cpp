// Device memory: one range of addresses that the host cannot touch, so that host code which
// follows a device pointer is reported where a GPU would end the process. A launch opens the range;
// copies go through a second mapping of the same pages, which is always open.
#include "tests/c/emulator/machine.h"

#include <execinfo.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <map>
#include <new>

namespace hr_emu
{
namespace
{
constexpr size_t kArena = size_t(256) << 20; // addresses; pages are taken when they are used
constexpr size_t kAlignment = 256;           // cudaMalloc's

std::map<const char *, Allocation> allocations; // by begin

// Addresses are given out upwards, so that those of freed memory rest before they return. `used`
// ends where the highest one since the arena was last empty does.
struct Arena {
    Arena();
    char *allocate(size_t bytes);
    void open(size_t bytes); // the first, and all that are in use
    void close();

    char *device = nullptr, *host = nullptr; // the two mappings
    size_t next = 0, used = 0, opened = 0;
};

Arena &arena()
{
    static Arena one;
    return one;
}

struct sigaction sigsegv_before;

// The instruction that touched device memory, if the processor says which, and who called it.
std::string who_touched(const void *instruction)
{
    void *frames[16];
    const int count = backtrace(frames, 16);
    int first = 0;
    while (first < count && frames[first] != instruction)
        first++;
    std::string text;
    for (int i = first; i < count && i < first + 4; i++)
        text += "\n    in " + where(static_cast<char *>(frames[i]) - (i > first));
    return text;
}

// Reports the access and lets it happen, so that the test goes on, and fails with the report.
void on_fault(int signal, siginfo_t *info, void *context)
{
    Arena &a = arena();
    const char *const address = static_cast<char *>(info->si_addr);
    if (address < a.device + a.opened || address >= a.device + kArena) {
        sigaction(signal, &sigsegv_before, nullptr); // the access faults again, and for good
        return;
    }
    const char *verb = "touched";
    const void *instruction = nullptr;
#if defined(__x86_64__)
    const auto &registers = static_cast<ucontext_t *>(context)->uc_mcontext.gregs;
    verb = registers[REG_ERR] & 2 ? "wrote" : "read";
    instruction = reinterpret_cast<void *>(registers[REG_RIP]);
#else
    (void)context;
#endif
    const Allocation *const found = find_allocation(address, 1);
    const std::string place = found ? "byte " + std::to_string(address - found->range.begin) +
                                          " of " + std::to_string(found->range.bytes)
                                    : "not allocated";
    report_host(std::string("host code ") + verb + " device memory (" + place + ")" +
                    who_touched(instruction),
                cudaErrorIllegalAddress);
    a.open(size_t(address - a.device) + 1);
}

Arena::Arena()
{
    const int file = memfd_create("device memory", MFD_CLOEXEC);
    void *mappings[2] = {MAP_FAILED, MAP_FAILED};
    if (file >= 0 && ftruncate(file, kArena) == 0) {
        mappings[0] = mmap(nullptr, kArena, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
        mappings[1] =
            mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
        ::close(file);
    }
    if (mappings[0] == MAP_FAILED || mappings[1] == MAP_FAILED)
        throw std::bad_alloc();
    device = static_cast<char *>(mappings[0]);
    host = static_cast<char *>(mappings[1]);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, &sigsegv_before);
}

char *Arena::allocate(size_t bytes)
{
    const auto rounded = [](size_t n) { return (n + kAlignment - 1) / kAlignment * kAlignment; };
    const size_t size = kGuard + rounded(bytes) + kGuard;
    if (bytes > kArena || size > kArena)
        throw std::bad_alloc();
    if (allocations.empty())
        next = used = 0;
    // Behind the last one, or else, from the begin on, where there is room.
    for (int turn = 0; turn < 2; turn++) {
        auto after = allocations.lower_bound(device + next);
        size_t at = turn == 0 ? next : 0;
        for (after = turn == 0 ? after : allocations.begin(); at + size <= kArena; after++) {
            const size_t end =
                after == allocations.end() ? kArena : size_t(after->first - device) - kGuard;
            if (at + size <= end) {
                next = at + size;
                used = std::max(used, next);
                return device + at + kGuard;
            }
            if (after == allocations.end())
                break;
            at = size_t(after->first - device) + rounded(after->second.range.bytes) + kGuard;
        }
    }
    throw std::bad_alloc();
}

void Arena::open(size_t bytes)
{
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    opened = (std::max({bytes, used, opened}) + page - 1) / page * page;
    if (opened > 0 && mprotect(device, opened, PROT_READ | PROT_WRITE) != 0)
        throw std::bad_alloc();
}

void Arena::close()
{
    if (opened > 0 && mprotect(device, opened, PROT_NONE) != 0)
        throw std::bad_alloc();
    opened = 0;
}
} // namespace

DeviceMemoryOpen::DeviceMemoryOpen()
{
    arena().open(0);
}

DeviceMemoryOpen::~DeviceMemoryOpen()
{
    arena().close();
}

void close_device_memory()
{
    arena().close();
}

void *always_open(const void *address)
{
    const Arena &a = arena();
    const ptrdiff_t offset = static_cast<const char *>(address) - a.device;
    char *const same = static_cast<char *>(const_cast<void *>(address));
    return offset >= 0 && offset < ptrdiff_t(kArena) ? a.host + offset : same;
}

void check_device_guards()
{
    for (const auto &[begin, a] : allocations)
        check_guards(static_cast<char *>(always_open(begin)), a.range.bytes, "an allocation");
}

void *allocate_device(size_t bytes)
{
    char *const begin = arena().allocate(bytes);
    prepare(static_cast<char *>(always_open(begin)), bytes);
    Allocation &a = allocations[begin];
    a.range = {begin, bytes};
    a.written.assign(bytes, false);
    return begin;
}

bool free_device(const void *pointer)
{
    const auto found = allocations.find(static_cast<const char *>(pointer));
    if (found == allocations.end())
        return false;
    allocations.erase(found);
    return true;
}

Allocation *find_allocation(const void *address, size_t bytes)
{
    auto next = allocations.upper_bound(static_cast<const char *>(address));
    if (next == allocations.begin())
        return nullptr;
    Allocation &a = std::prev(next)->second;
    return a.range.holds(address, bytes) ? &a : nullptr;
}

const char *use_device_memory(const void *address, size_t bytes, bool write)
{
    Allocation *const found = find_allocation(address, bytes);
    if (!found)
        return "is not in one allocation of the device";
    const auto first =
        found->written.begin() + (static_cast<const char *>(address) - found->range.begin);
    if (write)
        std::fill(first, first + ptrdiff_t(bytes), true);
    else if (!std::all_of(first, first + ptrdiff_t(bytes), [](bool b) { return b; }))
        return "is read before it was written";
    return nullptr;
}
} // namespace hr_emu
