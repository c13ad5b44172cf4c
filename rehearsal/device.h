// What the parts of the software device share: GPUs, streams, memory, and who may touch what when.
//
// A device is a limit on memory, a list of streams and the properties of a named GPU. Its memory is
// memory of the host, or only its addresses. A stream is a queue of functions. "Late" means that a
// queue runs when something must wait for it; "ordered" that accesses which neither a stream, an
// event nor a wait of the host puts in order are reported.
#pragma once

#include "export.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace rehearsal
{
// Of all that is here; a thread may hold it several times.
class Mutex
{
  public:
    void lock()
    {
        held_.lock(), times_++;
    }
    void unlock()
    {
        times_--, held_.unlock();
    }

    // Lets other threads go on while `call` runs, which may wait for one of them: for Python's lock.
    template <typename Call> void without(Call call)
    {
        const int times = times_;
        for (int i = 0; i < times; i++)
            unlock();
        call();
        for (int i = 0; i < times; i++)
            lock();
    }

  private:
    std::recursive_mutex held_;
    int times_ = 0;
};
extern Mutex mutex;
using Lock = std::lock_guard<Mutex>;

// ---- settings.cpp: the environment, read once ---------------------------------------------------

struct Gpu {
    const char *name;
    size_t memory; // bytes
    int capability, multiprocessors, shared_kilobytes, l2_megabytes, bus_bits, clock_mhz;
};
struct Settings {
    Gpu gpu;
    std::string name; // of the GPU, as torch.cuda.get_device_name() says it
    size_t context;   // bytes of a device that its context takes
    size_t computed;  // copies and fills of more bytes are not done
    int devices;
    bool late, ordered, logged;
};
const Settings &settings();
int current_device();

// The error of the thread that cudaGetLastError() returns, which is also returned here.
cudaError_t fail(cudaError_t error, const std::string &text = "");

// Notes that a call or a kernel is not there, once by name.
void note_missing(const std::string &name);

// ---- streams.cpp --------------------------------------------------------------------------------

using Clock =
    std::map<uint32_t, uint64_t>; // number of a stream -> how many of its operations are over
void join(Clock &into, const Clock &other);

struct Capture;
struct Stream {
    struct Work {
        std::function<void(Stream *)> run; // with the stream that runs it
        uint64_t at = 0;                   // the stream's own clock
        Stream *after = nullptr;           // whose first `count` operations come first
        uint64_t count = 0;
    };
    uint32_t number;
    int device, priority;
    bool waits_for_default; // and the default stream for it
    std::deque<Work> queue{};
    uint64_t queued = 0, done = 0;
    uint64_t at = 0;          // its own clock when the work that runs was queued
    std::thread::id runner{}; // which runs it
    Clock clock{};
    std::shared_ptr<Capture> capture{};
};
Stream *stream_of(cudaStream_t stream); // 0, 1 and 2 are the default stream of the current device

// An operation begins on a stream: it comes after all that the host knows to be over.
void tick(Stream *stream);
// Puts work on the queue, or into the graph that is being captured. It runs now if `now`, or if
// streams are not late.
void enqueue(Stream *stream, std::function<void(Stream *)> run, bool now = false);
// Notes an access of the graph that is being captured, at each launch.
void note_at_launch(Stream *stream, std::function<void(Stream *)> access);
void synchronize(Stream *stream);
void synchronize_all(int device = -1);

// cudaErrorStreamCaptureUnsupported, and an invalid capture, if `call` waits for the device or changes
// its memory while the thread may not do so because of a capture; else cudaSuccess.
cudaError_t refused_in_capture(const char *call);

// ---- memory.cpp ---------------------------------------------------------------------------------

bool is_device(const void *address, size_t bytes = 1); // all of them, in one allocation
bool is_pageable(const void *address);                 // host memory that CUDA does not know
bool reserve(int device, size_t bytes);                // counts them; false: they do not fit
void give_back(int device, size_t bytes);

// ---- host_memory.cpp: what the program has of the host's -----------------------------------------

enum class HostKind { pinned, tensors, arena };
bool take_host(HostKind kind, const void *address, size_t bytes); // false: it is above the limit
void give_host(const void *address);
void tell_refused(HostKind kind,
                  size_t bytes); // without a lock: what is told may wait for Python's

// ---- host.cpp -----------------------------------------------------------------------------------

extern Clock host_clock; // what the host has waited for
void host_waits(const Clock &clock);
// Notes a copy that the stream has just run, if it is one between a device and pinned memory.
void note_copy(Stream *stream, void *to, const void *from, size_t bytes, const char *name);
// What follows reads or writes bytes of the host in the order of the device.
void end_copies(const void *host, size_t bytes);

// ---- order.cpp ----------------------------------------------------------------------------------

// Notes that an operation of a stream reads or writes bytes.
void touch(Stream *stream, const void *address, size_t bytes, bool write, const char *name);
void forget(const void *address, size_t bytes); // memory that is freed
void report(const std::string &text);           // a fault, for which a test fails
} // namespace rehearsal
