// What every load and store of a kernel is checked against: the memory it may touch, and the
// accesses before it to the same byte. Two accesses race when they come from different threads, at
// least one writes, they are not both atomic, and no barrier lies between them; the order in which
// the emulator happened to run them does not matter.
#include "tests/c/emulator/race.h"

#include <set>
#include <unordered_map>

extern "C" char __ehdr_start[] __attribute__((visibility("hidden")));
extern "C" char _end[] __attribute__((visibility("hidden")));

namespace hr_emu
{
namespace
{
struct Access {
    const void *code; // nullptr: there was none
    uint32_t block;
    uint32_t clock : 21, thread : 10, atomic : 1;
};

// A second reader is kept so that the first cannot hide behind the thread that writes next.
struct Byte {
    Access write, read[2];
};

struct Line {
    static constexpr size_t kBytes = 256;
    uint64_t launch;
    Byte bytes[kBytes];
};

std::unordered_map<uintptr_t, std::unique_ptr<Line>> lines;
bool watching;

// What blocks have made visible with a fence and an atomic, and what the running block has seen so.
std::unordered_map<const void *, std::set<uint32_t>> published;
std::set<uint32_t> acquired;
uint64_t acquired_in_launch, published_in_launch;
uint32_t acquired_in_block;

Byte &byte_at(const char *address)
{
    static uintptr_t last_key;
    static Line *last;
    const uintptr_t key = reinterpret_cast<uintptr_t>(address) / Line::kBytes;
    if (!last || key != last_key || last->launch != machine.launches) {
        std::unique_ptr<Line> &line = lines[key];
        if (!line)
            line.reset(new Line());
        else if (line->launch != machine.launches)
            *line = Line();
        line->launch = machine.launches;
        last = line.get();
        last_key = key;
    }
    return last->bytes[reinterpret_cast<uintptr_t>(address) % Line::kBytes];
}

void begin_epoch()
{
    if (published_in_launch != machine.launches)
        published.clear();
    if (acquired_in_launch != machine.launches || acquired_in_block != machine.block)
        acquired.clear();
    published_in_launch = acquired_in_launch = machine.launches;
    acquired_in_block = machine.block;
}

// Whether the access was over, for the running thread, before the present one.
bool is_over(const Access &a)
{
    const Thread &me = *machine.current;
    if (a.block != machine.block) {
        begin_epoch();
        return acquired.count(a.block) != 0;
    }
    if (a.thread == me.rank)
        return true;
    return a.clock <= (a.thread / warpSize == me.rank / warpSize
                           ? me.seen[a.thread % warpSize]
                           : machine.threads[a.thread].at_barrier);
}

std::string describe(const Access &a, bool write)
{
    const Launch &l = *machine.launch;
    return std::string(a.atomic ? "atomic " : "") + (write ? "write" : "read") + " by thread " +
           name(position(a.thread, l.block)) + " of block " + name(position(a.block, l.grid)) +
           " in " + where(static_cast<const char *>(a.code) - 1);
}

void check_race(const Access &before, bool before_writes, const Access &now, bool now_writes,
                const char *space)
{
    if (machine.failed || !before.code || (before.atomic && now.atomic) || is_over(before))
        return;
    report(std::string("race on ") + space + " memory, no barrier between\n    " +
           describe(before, before_writes) + "\n    " + describe(now, now_writes));
}

void remember_read(Byte &byte, const Access &now)
{
    for (Access &slot : byte.read)
        if (!slot.code || is_over(slot)) {
            slot = now;
            return;
        }
}

enum class Space { shared, device, unchecked };

Space space_of(const void *address, size_t bytes, Allocation *&allocation, const Access &now,
               bool write)
{
    const char *const p = static_cast<const char *>(address);
    const Launch &l = *machine.launch;
    const Range parameters{static_cast<char *>(const_cast<void *>(l.call)), l.call_bytes};
    const Range builtins{reinterpret_cast<char *>(&here), sizeof here};
    if (machine.current->fiber->owns(p) || parameters.holds(p, bytes) || builtins.holds(p, bytes))
        return Space::unchecked;
    if (static_shared().holds(p, bytes) || dynamic_shared_range().holds(p, bytes))
        return Space::shared;
    allocation = find_allocation(p, bytes);
    if (allocation)
        return Space::device;
    const Range globals{__ehdr_start, size_t(_end - __ehdr_start)};
    if (globals.holds(p, bytes) && !write) // a constant table
        return Space::unchecked;
    char text[96];
    std::snprintf(text, sizeof text, "out-of-bounds access to %zu bytes at %p, %s:\n    ", bytes,
                  address,
                  find_allocation(p, 1)     ? "across an allocation's end"
                  : globals.holds(p, bytes) ? "a variable of the host"
                                            : "not device memory");
    report(text + describe(now, write), cudaErrorIllegalAddress);
    return Space::unchecked;
}

void check(const void *address, size_t bytes, bool write, bool atomic, const void *code)
{
    const Thread &me = *machine.current;
    const Access now{code, machine.block, me.clock, me.rank, atomic};
    Allocation *allocation = nullptr;
    const Space space = space_of(address, bytes, allocation, now, write);
    if (space == Space::unchecked)
        return;
    const char *const first = static_cast<const char *>(address);
    const bool shared = space == Space::shared;
    const char *const space_name = shared ? "shared" : "device";
    for (const char *p = first; p != first + bytes; p++) {
        Byte &byte = byte_at(p);
        if (shared && byte.write.block != machine.block)
            byte.write = Access{};
        for (Access &slot : byte.read)
            if (shared && slot.block != machine.block)
                slot = Access{};
        const bool reads = !write || atomic;
        const bool initialized = shared ? byte.write.code != nullptr : allocation->is_written(p);
        if (reads && !initialized && !machine.failed)
            report(std::string("uninitialized read of ") + space_name + " memory:\n    " +
                   describe(now, write));
        check_race(byte.write, true, now, write, space_name);
        for (const Access &slot : byte.read)
            if (write)
                check_race(slot, false, now, true, space_name);
        if (machine.failed)
            return;
        if (write) {
            byte.write = now;
            if (!shared)
                allocation->write(p);
        } else {
            remember_read(byte, now);
        }
    }
}
} // namespace

void watch_accesses()
{
    watching = true;
}

void note_access(const void *address, size_t bytes, bool write, const void *caller)
{
    if (!machine.current || !machine.current->in_kernel || bytes == 0)
        return;
    const OutOfKernel out;
    check(address, bytes, write, false, caller);
    stop_if_failed();
}

void note_atomic(const void *address, size_t bytes, const void *caller)
{
    if (!watching || !machine.current)
        return;
    const OutOfKernel out;
    check(address, bytes, true, true, caller);
    stop_if_failed();
    begin_epoch();
    std::set<uint32_t> &blocks = published[address];
    acquired.insert(blocks.begin(), blocks.end());
    if (machine.current->fenced)
        blocks.insert(machine.block);
    machine.current->fenced = false;
}
} // namespace hr_emu
