// What the parts of the emulator share: the launch that runs, its threads, and how to stop it.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/c/emulator/emulator.h"
#include "tests/c/emulator/fiber.h"

namespace hr_emu
{
struct Thread {
    uint3 index;
    uint32_t rank; // in the block
    Fiber *fiber;  // nullptr before the start
    bool done;
    bool in_kernel; // and not in the emulator, whose accesses are not the kernel's

    // Where it waits. `operation` is nullptr while it can run.
    const char *operation;
    Site site;
    unsigned mask; // lanes it waits for; 0 at a barrier of the block
    Value brought; // to the operation that it waits at
    Value offered; // to the operation that it left last, for the other lanes to read
    uint64_t met;  // number of that operation, the same for all who took part
    int count;     // true predicates at a barrier of the block

    // Happens-before. `clock` counts the barriers passed; `seen` is how far the other lanes of the
    // warp had got when this thread last waited for them, `at_barrier` how far it had got itself at
    // the block's last barrier. An access at a clock that is seen is over.
    uint32_t clock, at_barrier, seen[warpSize];
    bool fenced; // since its last atomic: the next one publishes what the block has written
};

struct Machine {
    const Launch *launch;
    uint64_t launches; // so far; the number of the current one
    bool failed;       // the current one
    uint32_t block;    // rank in the grid
    std::vector<Thread> threads;
    Thread *current;             // nullptr on the host
    std::vector<Thread *> fresh; // not started, in random order
    std::vector<Thread *> ready; // have waited and may go on, in random order
    std::vector<std::unique_ptr<Fiber>> fibers;
    uint64_t seed = default_seed(), launches_since_seed;
    std::mt19937_64 random;
    int capability = 80; // of the device, 10 * major + minor
    // Names instructions and kernels that are not code of this process; "" for what it does not know.
    std::string (*name_code)(const void *code) = nullptr;
};
extern Machine machine;

// Put at the entries from kernels to the emulator.
class OutOfKernel
{
  public:
    OutOfKernel() : thread_(machine.current), was_(thread_->in_kernel)
    {
        thread_->in_kernel = false;
    }
    ~OutOfKernel()
    {
        thread_->in_kernel = was_;
    }

  private:
    Thread *const thread_;
    const bool was_;
};

// ---- report.cpp ---------------------------------------------------------------------------------

// Records the problem, with the place in the grid and the seed; the launch has then failed.
void report(const std::string &problem, cudaError_t error = cudaErrorLaunchFailure);

// Records what the host did wrong.
void report_host(const std::string &problem, cudaError_t error);

// Whether a call is one that a capture refuses, because the host waits in it or memory changes; it is
// then reported. A thread in the relaxed mode may do it.
bool refused_in_capture(const char *call);

// Leaves the thread for good if the launch has failed. The fiber's stack is reused without running
// destructors, so nothing on it may own memory.
void stop_if_failed();

std::string name(uint3 index);            // "(1,0,0)"
std::string where(const void *code);      // "function at file:line" of an instruction
uint3 position(uint32_t rank, dim3 size); // of a thread or block

// ---- waiting.cpp --------------------------------------------------------------------------------

// Releases the threads whose operation is complete. False if there is none: nobody can go on.
bool release_waiting();
std::string who_waits();

// ---- memory.cpp ---------------------------------------------------------------------------------

struct Range {
    char *begin;
    size_t bytes;
    bool holds(const void *address, size_t n = 1) const
    {
        const char *const p = static_cast<const char *>(address);
        return p >= begin && n <= bytes && p - begin <= ptrdiff_t(bytes - n);
    }
};

void enter_shared(); // around a launch
void leave_shared();
Range static_shared();
Range dynamic_shared_range();
void begin_shared(size_t dynamic_bytes); // both, filled with NaN
void check_shared_guards();              // after a block

// Fills `bytes` bytes with NaN and puts guards around them, which later tell of a write.
constexpr size_t kGuard = 256;
void prepare(char *begin, size_t bytes);
void check_guards(const char *begin, size_t bytes, const char *kind);

// ---- device_memory.cpp --------------------------------------------------------------------------

// Device memory that the host may touch, for as long as this lives.
class DeviceMemoryOpen
{
  public:
    DeviceMemoryOpen();
    ~DeviceMemoryOpen();
    DeviceMemoryOpen(const DeviceMemoryOpen &) = delete;
};
void close_device_memory(); // after an access of the host was reported, for which it was opened
void check_device_guards(); // after a launch

// The allocation that holds all the bytes, or nullptr. `written` has one flag per byte, or none where
// that is not known.
struct Allocation {
    Range range;
    std::vector<bool> written;
    bool is_written(const void *byte) const
    {
        return written.empty() || written[size_t(static_cast<const char *>(byte) - range.begin)];
    }
    void write(const void *byte)
    {
        if (!written.empty())
            written[size_t(static_cast<const char *>(byte) - range.begin)] = true;
    }
};
Allocation *find_allocation(const void *address, size_t bytes);
void *allocate_device(size_t bytes);
bool free_device(const void *pointer); // false if it is not the begin of an allocation

// Notes that a product reads or writes memory. Returns what is wrong with that, or nullptr.
const char *use_device_memory(const void *address, size_t bytes, bool write);

// The same byte at an address where the host may always touch it; elsewhere the address itself.
void *always_open(const void *address);

void set_last_error(cudaError_t error); // runtime.cpp
} // namespace hr_emu
