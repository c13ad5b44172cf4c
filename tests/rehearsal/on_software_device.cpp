// The emulator's runtime, on the software device: kernels and products go to its streams, and memory
// is the device's. In the places of the emulator's own runtime.cpp and device_memory.cpp.
#include "tests/c/emulator/machine.h"
#include "tests/ptx/registration.h"

#include <cstdio>
#include <cstdlib>

extern "C" { // of rehearsal/
void rehearsal_enqueue_owned(void *stream, void (*run)(void *), void *data,
                             void (*destroy)(void *));
void rehearsal_set_last_error(int error, const char *text);
int rehearsal_on_device(const void *address, size_t bytes);
int rehearsal_computes();
}

namespace hr_emu
{
namespace
{
using Work = std::function<void()>;

void run_work(void *work)
{
    (*static_cast<Work *>(work))();
    const std::string report = take_report();
    if (!report.empty()) { // a kernel went wrong: nothing after it can be right
        fprintf(stderr, "software device, in a kernel: %s\n", report.c_str());
        abort();
    }
}
} // namespace

void submit(cudaStream_t stream, Work work)
{
    if (!rehearsal_computes())
        work = [] {};
    rehearsal_enqueue_owned(stream, run_work, new Work(std::move(work)),
                            [](void *done) { delete static_cast<Work *>(done); });
}

void set_last_error(cudaError_t error)
{
    rehearsal_set_last_error(error, nullptr);
}

// What the device does by itself.
void pretend_capture(bool) {}
bool refused_in_capture(const char *)
{
    return false;
}
DeviceMemoryOpen::DeviceMemoryOpen() {}
DeviceMemoryOpen::~DeviceMemoryOpen() {}
void close_device_memory() {}
void check_device_guards() {}
void *always_open(const void *address)
{
    return const_cast<void *>(address);
}
Allocation *find_allocation(const void *address, size_t bytes)
{
    static Allocation whole;
    return rehearsal_on_device(address, bytes) ? &whole : nullptr;
}
const char *use_device_memory(const void *address, size_t bytes, bool)
{
    return rehearsal_on_device(address, bytes) ? nullptr : "is not in one allocation of the device";
}
} // namespace hr_emu

std::string ptx_registration::running_test()
{
    return "";
}
