// Memory of the devices and pinned memory of the host, and copies between them.
#include "device.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace rehearsal
{
namespace
{
constexpr size_t kPage = size_t(2) << 20; // what a driver gives at least

struct Block {
    size_t bytes,
        mapped; // mapped: 0 for memory of the caller, registered or of a larger reservation
    cudaMemoryType type;
    int device;
};
std::map<const char *, Block> blocks;
struct Usage {
    size_t used = 0, peak = 0;
};
std::map<int, Usage> usages;

// What is to be filled before anyone writes to it, in the order of a stream that may come later than
// the writes of another.
struct Poison {
    const Stream *stream;
    char *begin;
    size_t bytes;
    bool over = false;
    void fill()
    {
        if (!std::exchange(over, true))
            memset(begin, 0xFF, bytes);
    }
};
std::vector<std::weak_ptr<Poison>> poisons;

// Fills what a stream is about to write, where another stream is yet to poison it. Its own poison
// comes after what it runs now: it is for who has the memory next.
void fill_poison(const Stream *writer, const char *begin, size_t bytes)
{
    poisons.erase(
        std::remove_if(poisons.begin(), poisons.end(), [](const auto &p) { return p.expired(); }),
        poisons.end());
    for (const auto &pending : poisons)
        if (const auto p = pending.lock())
            if (p->stream != writer && p->begin < begin + bytes && begin < p->begin + p->bytes)
                p->fill();
}

std::map<const char *, Block>::iterator block_of(const void *address)
{
    auto next = blocks.upper_bound(static_cast<const char *>(address));
    if (next == blocks.begin())
        return blocks.end();
    --next;
    return static_cast<const char *>(address) < next->first + next->second.bytes ? next
                                                                                 : blocks.end();
}

char *map_nothing(void *at, size_t bytes)
{
    const int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED : 0);
    void *const found = mmap(at, bytes, PROT_NONE, kind, -1, 0);
    return found == MAP_FAILED ? nullptr : static_cast<char *>(found);
}

// Pages at a multiple of the device's, behind all that were there before, with one between that
// nobody may touch. That the order is always the same matters: of two free blocks of a size torch
// takes the one at the lower address.
char *map_pages(size_t bytes, int access)
{
    constexpr size_t kSpace = size_t(16) << 40;
    static char *next = nullptr, *end = nullptr;
    if (size_t(end - next) < bytes + 2 * kPage) {
        next = map_nothing(nullptr, kSpace);
        end = next ? next + kSpace : nullptr;
    }
    if (size_t(end - next) < bytes + 2 * kPage)
        return nullptr;
    char *const begin = reinterpret_cast<char *>((uintptr_t(next) + kPage) / kPage * kPage);
    next = begin + bytes;
    mprotect(begin, bytes, access);
    return begin;
}

cudaError_t allocate(void **address, size_t bytes, cudaMemoryType type)
{
    *address = nullptr;
    if (bytes == 0)
        return cudaSuccess;
    Lock lock(mutex);
    const cudaError_t refused = refused_in_capture("an allocation");
    if (refused != cudaSuccess)
        return refused;
    const size_t whole = (bytes + kPage - 1) / kPage * kPage;
    const bool is_on_device = type == cudaMemoryTypeDevice;
    const int device = current_device();
    if (whole < bytes || (is_on_device && !reserve(device, whole)))
        return fail(cudaErrorMemoryAllocation);
    char *const begin = map_pages(whole, PROT_READ | PROT_WRITE);
    if (!begin) {
        if (is_on_device)
            give_back(device, whole);
        return fail(cudaErrorMemoryAllocation);
    }
    if (!is_on_device && !take_host(HostKind::pinned, begin, bytes)) {
        map_nothing(begin, whole);
        mutex.without([=] { tell_refused(HostKind::pinned, bytes); });
        return fail(cudaErrorMemoryAllocation);
    }
    blocks[begin] = {bytes, whole, type, device};
    *address = begin;
    return cudaSuccess;
}

cudaError_t release(void *address, cudaMemoryType type)
{
    if (!address)
        return cudaSuccess;
    Lock lock(mutex);
    const cudaError_t refused = refused_in_capture("freeing memory");
    if (refused != cudaSuccess)
        return refused;
    synchronize_all();
    const auto block = blocks.find(static_cast<char *>(address));
    if (block == blocks.end() || block->second.type != type || block->second.mapped == 0)
        return fail(cudaErrorInvalidValue);
    forget(address, block->second.bytes);
    if (type == cudaMemoryTypeDevice)
        give_back(block->second.device, block->second.mapped);
    else
        give_host(address);
    map_nothing(address, block->second.mapped);
    blocks.erase(block);
    return cudaSuccess;
}

bool kind_fits(const void *to, const void *from, cudaMemcpyKind kind)
{
    switch (kind) {
    case cudaMemcpyHostToDevice:
        return is_device(to) && !is_device(from);
    case cudaMemcpyDeviceToHost:
        return !is_device(to) && is_device(from);
    case cudaMemcpyDeviceToDevice:
        return is_device(to) && is_device(from);
    default:
        return true;
    }
}

// From pageable memory the call takes the bytes along; to pageable memory it waits.
cudaError_t copy(cudaStream_t stream, void *to, size_t to_pitch, const void *from,
                 size_t from_pitch, size_t bytes, size_t rows, bool waits, const char *name)
{
    if (bytes == 0 || rows == 0)
        return cudaSuccess;
    Lock lock(mutex);
    Stream *const s = stream_of(stream);
    waits = waits || is_pageable(to);
    if (waits)
        if (const cudaError_t refused = refused_in_capture(name); refused != cudaSuccess)
            return refused;
    const auto row = [](auto *begin, size_t pitch, size_t i) {
        using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(begin)>>,
                                        const char, char>;
        return static_cast<Byte *>(begin) + i * pitch;
    };
    tick(s);
    for (size_t i = 0; i < rows && settings().ordered; i++) {
        touch(s, row(from, from_pitch, i), bytes, false, name);
        touch(s, row(to, to_pitch, i), bytes, true, name);
    }
    std::function<void(Stream *)> run = [](Stream *) {};
    if (bytes * rows <= settings().computed) {
        std::shared_ptr<std::string> taken;
        if (is_pageable(from) && settings().late && !waits && rows == 1)
            taken = std::make_shared<std::string>(static_cast<const char *>(from), bytes);
        run = [=, text = std::string(name)](Stream *now_on) {
            for (size_t i = 0; i < rows; i++) {
                char *const target = row(to, to_pitch, i);
                const char *const source = row(from, from_pitch, i);
                end_copies(source, bytes);
                end_copies(target, bytes);
                fill_poison(now_on, target, bytes);
                memmove(target, taken ? taken->data() : source, bytes);
                note_copy(now_on, target, source, bytes, text.c_str());
            }
        };
    }
    enqueue(s, std::move(run), waits || (is_pageable(from) && rows > 1));
    if (waits)
        synchronize(s);
    return cudaSuccess;
}
} // namespace

bool is_device(const void *address, size_t bytes)
{
    const auto block = block_of(address);
    return block != blocks.end() && block->second.type == cudaMemoryTypeDevice &&
           static_cast<const char *>(address) + bytes <= block->first + block->second.bytes;
}

bool is_pageable(const void *address)
{
    return block_of(address) == blocks.end();
}

bool reserve(int device, size_t bytes)
{
    Usage &usage = usages[device];
    if (usage.used + bytes + settings().context > settings().gpu.memory)
        return false;
    usage.used += bytes;
    usage.peak = std::max(usage.peak, usage.used);
    return true;
}

void give_back(int device, size_t bytes)
{
    usages[device].used -= bytes;
}
} // namespace rehearsal

using namespace rehearsal;

EXPORT size_t rehearsal_used(int device)
{
    Lock lock(mutex);
    return usages[device].used;
}
EXPORT size_t rehearsal_peak(int device)
{
    Lock lock(mutex);
    return usages[device].peak;
}
EXPORT int rehearsal_on_device(const void *address, size_t bytes)
{
    Lock lock(mutex);
    return is_device(address, bytes);
}

// ---- Allocation ---------------------------------------------------------------------------------

EXPORT cudaError_t cudaMalloc(void **address, size_t bytes)
{
    return allocate(address, bytes, cudaMemoryTypeDevice);
}
CALL(cudaError_t cudaFree(void *address), return release(address, cudaMemoryTypeDevice);)
EXPORT cudaError_t cudaMallocManaged(void **address, size_t bytes, unsigned)
{
    return allocate(address, bytes, cudaMemoryTypeDevice);
}
EXPORT cudaError_t cudaMallocAsync(void **address, size_t bytes, cudaStream_t)
{
    return allocate(address, bytes, cudaMemoryTypeDevice);
}
EXPORT cudaError_t cudaFreeAsync(void *address, cudaStream_t)
{
    return release(address, cudaMemoryTypeDevice);
}
EXPORT cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned)
{
    return allocate(address, bytes, cudaMemoryTypeHost);
}
EXPORT cudaError_t cudaMallocHost(void **address, size_t bytes)
{
    return allocate(address, bytes, cudaMemoryTypeHost);
}
CALL(cudaError_t cudaFreeHost(void *address), return release(address, cudaMemoryTypeHost);)
EXPORT cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned)
{
    Lock lock(mutex);
    if (!address || bytes == 0)
        return fail(cudaErrorInvalidValue);
    if (block_of(address) != blocks.end())
        return fail(cudaErrorHostMemoryAlreadyRegistered);
    blocks[static_cast<char *>(address)] = {bytes, 0, cudaMemoryTypeHost, current_device()};
    return cudaSuccess;
}
EXPORT cudaError_t cudaHostUnregister(void *address)
{
    Lock lock(mutex);
    const auto block = blocks.find(static_cast<char *>(address));
    if (block == blocks.end() || block->second.mapped != 0)
        return fail(cudaErrorHostMemoryNotRegistered);
    synchronize_all();
    forget(address, block->second.bytes);
    blocks.erase(block);
    return cudaSuccess;
}
EXPORT cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned)
{
    *device = host;
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemGetInfo(size_t *free, size_t *total)
{
    Lock lock(mutex);
    *total = settings().gpu.memory;
    *free = *total - settings().context - usages[current_device()].used;
    return cudaSuccess;
}
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *address)
{
    Lock lock(mutex);
    *attributes = {};
    const auto block = block_of(address);
    if (block == blocks.end()) {
        attributes->type = cudaMemoryTypeUnregistered;
        attributes->device = -2;
        return cudaSuccess;
    }
    attributes->type = block->second.type;
    attributes->device = block->second.device;
    attributes->devicePointer = const_cast<void *>(address);
    if (attributes->type == cudaMemoryTypeHost)
        attributes->hostPointer = const_cast<void *>(address);
    return cudaSuccess;
}

// Pools of cudaMallocAsync: one for each device, which keeps nothing.
EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device)
{
    *pool = reinterpret_cast<cudaMemPool_t>(size_t(device) + 1);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *)
{
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute,
                                           void *value)
{
    Lock lock(mutex);
    const Usage &usage = usages[int(reinterpret_cast<size_t>(pool)) - 1];
    const bool is_peak =
        attribute == cudaMemPoolAttrUsedMemHigh || attribute == cudaMemPoolAttrReservedMemHigh;
    *static_cast<uint64_t *>(value) = is_peak ? usage.peak : usage.used;
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc *, size_t)
{
    return cudaSuccess;
}
CALL(cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t), return cudaSuccess;)

// ---- Virtual memory, for expandable segments: calls of the driver -------------------------------

EXPORT int cuMemGetAllocationGranularity(size_t *bytes, const void *, int)
{
    *bytes = kPage;
    return 0;
}
EXPORT int cuMemAddressReserve(char **address, size_t bytes, size_t, char *, unsigned long long)
{
    Lock lock(mutex);
    *address = map_pages(bytes, PROT_NONE);
    if (!*address)
        return 2; // CUDA_ERROR_OUT_OF_MEMORY
    blocks[*address] = {bytes, 0, cudaMemoryTypeDevice, current_device()};
    return 0;
}
EXPORT int cuMemAddressFree(char *address, size_t bytes)
{
    Lock lock(mutex);
    blocks.erase(address);
    map_nothing(address, bytes);
    return 0;
}
// A handle is the address of its device and its bytes.
struct Physical {
    int device;
    size_t bytes;
};
EXPORT int cuMemCreate(Physical **handle, size_t bytes, const void *, unsigned long long)
{
    Lock lock(mutex);
    if (!reserve(current_device(), bytes))
        return 2;
    *handle = new Physical{current_device(), bytes};
    return 0;
}
EXPORT int cuMemRelease(Physical *handle)
{
    Lock lock(mutex);
    give_back(handle->device, handle->bytes);
    delete handle;
    return 0;
}
EXPORT int cuMemMap(char *address, size_t bytes, size_t, Physical *, unsigned long long)
{
    mprotect(address, bytes, PROT_READ | PROT_WRITE);
    return 0;
}
CALL(int cuMemSetAccess(char *, size_t, const void *, size_t), return 0;)
EXPORT int cuMemUnmap(char *address, size_t bytes)
{
    Lock lock(mutex);
    synchronize_all();
    forget(address, bytes);
    madvise(address, bytes, MADV_DONTNEED);
    mprotect(address, bytes, PROT_NONE);
    return 0;
}

// ---- Copies and fills ---------------------------------------------------------------------------

EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream)
{
    Lock lock(mutex);
    if (bytes > 0 && !kind_fits(to, from, kind))
        return fail(cudaErrorInvalidValue);
    return copy(stream, to, 0, from, 0, bytes, 1, false, "cudaMemcpyAsync");
}
EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind)
{
    Lock lock(mutex);
    if (bytes > 0 && !kind_fits(to, from, kind))
        return fail(cudaErrorInvalidValue);
    return copy(nullptr, to, 0, from, 0, bytes, 1, true, "cudaMemcpy");
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t bytes,
                                       cudaStream_t stream)
{
    return copy(stream, to, 0, from, 0, bytes, 1, false, "cudaMemcpyPeerAsync");
}
EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                                     size_t bytes, size_t rows, cudaMemcpyKind, cudaStream_t stream)
{
    return copy(stream, to, to_pitch, from, from_pitch, bytes, rows, false, "cudaMemcpy2DAsync");
}
EXPORT cudaError_t cudaMemsetAsync(void *address, int value, size_t bytes, cudaStream_t stream)
{
    Lock lock(mutex);
    if (bytes == 0)
        return cudaSuccess;
    if (is_pageable(address))
        return fail(cudaErrorInvalidValue);
    Stream *const s = stream_of(stream);
    tick(s);
    touch(s, address, bytes, true, "cudaMemsetAsync");
    std::function<void(Stream *)> run = [](Stream *) {};
    if (bytes <= settings().computed)
        run = [=](Stream *) { memset(address, value, bytes); };
    enqueue(s, std::move(run));
    return cudaSuccess;
}
// Fills memory that was just allocated, in the order of a stream; it is no access, since no GPU does
// it. Of large memory the begin is enough to be noticed, and the rest is not touched.
EXPORT void rehearsal_poison(void *stream, void *address, size_t bytes)
{
    Lock lock(mutex);
    const size_t filled = std::min(bytes, size_t(64) << 20);
    Stream *const s = stream_of(static_cast<cudaStream_t>(stream));
    if (s->capture) { // at each launch
        enqueue(s, [=](Stream *) { memset(address, 0xFF, filled); });
        return;
    }
    const auto poison = std::make_shared<Poison>(Poison{s, static_cast<char *>(address), filled});
    poisons.push_back(poison);
    enqueue(s, [=](Stream *) { poison->fill(); });
}
EXPORT cudaError_t cudaMemset(void *address, int value, size_t bytes)
{
    return cudaMemsetAsync(address, value, bytes, nullptr);
}
