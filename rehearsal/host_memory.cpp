// What a program has of the memory of the host, counted and held to a limit: pinned memory, tensors
// on the CPU and Headroom's arena. All of these are address space until something writes to them,
// so that the host of a rehearsal needs no memory for what a real one would.
#include "device.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>

namespace rehearsal
{
namespace
{
constexpr size_t kPage = 4096;
constexpr int kKinds = 3;
using Told = void (*)(int kind, size_t asked, size_t held);

struct Block {
    size_t bytes;
    HostKind kind;
};
// Held by a process that forks, since the child goes on with its own copy of what is here.
std::mutex held;
std::map<const char *, Block> blocks;
size_t by_kind[kKinds], total; // of the blocks
size_t rest, least_rest;       // what the process has besides, when it was last looked at
size_t looked_at;              // `total` at that time
size_t peak, at_peak[kKinds + 1];
size_t limit = SIZE_MAX, least = SIZE_MAX; // bytes, and from how many on an allocation is counted
Told told;

// The bytes of the blocks that have been written to.
size_t resident()
{
    static std::vector<unsigned char> pages(size_t(1) << 18);
    size_t found = 0;
    for (const auto &[begin, block] : blocks) {
        char *const first = reinterpret_cast<char *>(uintptr_t(begin) / kPage * kPage);
        size_t left = size_t(begin + block.bytes - first + kPage - 1) / kPage;
        for (char *at = first; left;) {
            const size_t some = std::min(left, pages.size());
            if (mincore(at, some * kPage, pages.data()) == 0)
                found += kPage * size_t(std::count_if(pages.begin(), pages.begin() + long(some),
                                                      [](unsigned char page) { return page & 1; }));
            at += some * kPage, left -= some;
        }
    }
    return found;
}

void look()
{
    size_t all = 0, pages = 0;
    if (FILE *const file = fopen("/proc/self/statm", "r")) {
        if (fscanf(file, "%zu %zu", &all, &pages) != 2)
            pages = 0;
        fclose(file);
    }
    // Pages that were only read count as resident there, but not as pages of the process.
    const size_t ours = resident();
    rest = std::max(least_rest, pages * kPage > ours ? pages * kPage - ours : 0);
    looked_at = total;
}

void note_peak()
{
    if (total + rest <= peak)
        return;
    peak = total + rest;
    std::copy(by_kind, by_kind + kKinds, at_peak);
    at_peak[kKinds] = rest;
}
} // namespace

bool take_host(HostKind kind, const void *address, size_t bytes)
{
    std::lock_guard lock(held);
    // Looking takes a while, so that it is done where it may matter.
    const bool watched = least != SIZE_MAX;
    if (watched && total + bytes > looked_at + looked_at / 64 + (size_t(16) << 20))
        look();
    if (total + bytes > limit || rest > limit - total - bytes)
        return false;
    blocks[static_cast<const char *>(address)] = {bytes, kind};
    by_kind[int(kind)] += bytes, total += bytes;
    note_peak();
    return true;
}

void give_host(const void *address)
{
    std::lock_guard lock(held);
    const auto block = blocks.find(static_cast<const char *>(address));
    if (block == blocks.end())
        return;
    by_kind[int(block->second.kind)] -= block->second.bytes, total -= block->second.bytes;
    looked_at = std::min(looked_at, total);
    blocks.erase(block);
}

void tell_refused(HostKind kind, size_t bytes)
{
    if (told)
        told(int(kind), bytes, total + rest);
}
} // namespace rehearsal

using namespace rehearsal;

// From now on allocations of more than `computed` bytes are counted, and refused above `bytes`;
// `call` is told of those.
EXPORT void rehearsal_watch_host(size_t bytes, size_t computed, Told call)
{
    pthread_atfork([] { held.lock(); }, [] { held.unlock(); }, [] { held.unlock(); });
    std::lock_guard lock(held);
    look();
    limit = bytes, least = computed, told = call, least_rest = rest;
}

// The peak, and of it by kind, and what the process had besides.
EXPORT void rehearsal_host_peak(size_t found[kKinds + 2])
{
    std::lock_guard lock(held);
    look();
    note_peak();
    found[0] = peak;
    std::copy(at_peak, at_peak + kKinds + 1, found + 1);
}

EXPORT size_t rehearsal_host_left()
{
    std::lock_guard lock(held);
    look();
    return total + rest < limit ? limit - total - rest : 0;
}

EXPORT int rehearsal_take_arena(const void *address, size_t bytes)
{
    return take_host(HostKind::arena, address, bytes);
}
EXPORT void rehearsal_give_arena(const void *address)
{
    give_host(address);
}

// In the place of posix_memalign() and free() for tensors on the CPU.
EXPORT int rehearsal_posix_memalign(void **address, size_t alignment, size_t bytes)
{
    if (bytes <= least || alignment > kPage)
        return posix_memalign(address, alignment, bytes);
    void *const found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED)
        return ENOMEM;
    if (!take_host(HostKind::tensors, found, bytes)) {
        munmap(found, bytes);
        tell_refused(HostKind::tensors, bytes);
        return ENOMEM;
    }
    *address = found;
    return 0;
}
EXPORT void rehearsal_free(void *address)
{
    if (uintptr_t(address) % kPage == 0 && address) {
        size_t bytes = 0;
        {
            std::lock_guard lock(held);
            const auto block = blocks.find(static_cast<char *>(address));
            if (block != blocks.end() && block->second.kind == HostKind::tensors)
                bytes = block->second.bytes;
        }
        if (bytes) {
            give_host(address);
            munmap(address, bytes);
            return;
        }
    }
    free(address);
}
