// failing_allocator.cpp: a CPU allocator for torch that counts, and fails at one allocation with the
// error of the default allocator, which it wraps. Loaded by failing_allocator.py.
#include <atomic>
#include <mutex>
#include <unordered_map>

#include <c10/core/CPUAllocator.h>
#include <c10/util/Logging.h>

namespace
{

std::atomic<long> made{0};
std::atomic<long> failing{0};       // the number of the allocation that fails; 0: none
std::atomic<bool> as_device{false}; // with the error of a device's allocator
std::atomic<long long> live{0};
std::mutex mutex;
std::unordered_map<void *, size_t> *sizes = new std::unordered_map<void *, size_t>; // never freed

void release(void *pointer)
{
    {
        const std::lock_guard<std::mutex> lock(mutex);
        const auto found = sizes->find(pointer);
        if (found != sizes->end()) {
            live -= static_cast<long long>(found->second);
            sizes->erase(found);
        }
    }
    c10::GetDefaultCPUAllocator()->raw_deleter()(pointer);
}

struct FailingAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override
    {
        // No bytes are no allocation: the default allocator cannot fail at them either.
        const bool fails = bytes > 0 && ++made == failing;
        if (fails && as_device)
            throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__},
                                        "CUDA out of memory. Tried to allocate 2.00 KiB. GPU 0");
        if (fails)
            CAFFE_ENFORCE(false,
                          "DefaultCPUAllocator: can't allocate memory: you tried to allocate ",
                          bytes, " bytes. Error code 12 (Cannot allocate memory)");
        void *pointer = c10::GetDefaultCPUAllocator()->allocate(bytes).release_context();
        if (pointer) {
            const std::lock_guard<std::mutex> lock(mutex);
            (*sizes)[pointer] = bytes;
            live += static_cast<long long>(bytes);
        }
        return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
    }

    c10::DeleterFnPtr raw_deleter() const override
    {
        return &release;
    }

    void copy_data(void *to, const void *from, std::size_t bytes) const override
    {
        default_copy_data(to, from, bytes);
    }
};

} // namespace

extern "C" {

// What the allocator has made may outlive its time: each allocation knows how it is freed.
void install(int failing)
{
    static FailingAllocator allocator;
    c10::SetCPUAllocator(failing ? &allocator : c10::GetDefaultCPUAllocator(), 255);
}

void fail_as_device(int device)
{
    as_device = device;
}

// Counts from here on, and fails at allocation number `at`.
void fail_at(long at)
{
    failing = at;
    made = 0;
}

long allocations()
{
    return made;
}

// The bytes that were allocated since the installation and have not been freed.
long long live_bytes()
{
    return live;
}
}
