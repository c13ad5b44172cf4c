// The GPUs that the device can pretend to be, the environment, and errors.
#include "device.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <utility>
#include <strings.h>

#define MiB (size_t(1) << 20)

namespace rehearsal
{
Mutex mutex;

namespace
{
// Memory: what torch's messages about memory print as the total of these GPUs, which is less than
// what they are sold with. The rest: NVIDIA's tables of compute capabilities and data sheets.
const Gpu kGpus[] = {
    {"T4", 14913 * MiB, 75, 40, 64, 4, 256, 1590},
    {"RTX 3090", 24258 * MiB, 86, 82, 100, 6, 384, 1695},
    {"RTX 4090", 24207 * MiB, 89, 128, 100, 72, 384, 2520},
    {"RTX 5090", 32110 * MiB, 120, 170, 100, 96, 512, 2407},
    {"A100", 81049 * MiB, 80, 108, 164, 40, 5120, 1410},
    {"H100", 81008 * MiB, 90, 132, 228, 50, 5120, 1980},
    {"H200", 143167 * MiB, 90, 132, 228, 50, 6144, 1980},
    {"B200", 182642 * MiB, 100, 148, 228, 126, 8192, 1965},
};

const char *text_of(const char *name)
{
    const char *const text = getenv(name);
    return text && *text ? text : nullptr;
}

size_t number(const char *name, size_t otherwise)
{
    const char *const text = text_of(name);
    return text ? strtoull(text, nullptr, 0) : otherwise;
}

Settings read_settings()
{
    const char *const wanted = text_of("HEADROOM_REHEARSAL_GPU");
    Settings s{};
    s.gpu = kGpus[5];
    bool found = !wanted;
    for (const Gpu &gpu : kGpus)
        if (wanted && strcasecmp(gpu.name, wanted) == 0)
            s.gpu = gpu, found = true;
    if (!found) {
        std::string names;
        for (const Gpu &gpu : kGpus)
            names += std::string(names.empty() ? "" : ", ") + gpu.name;
        fprintf(stderr, "HEADROOM_REHEARSAL_GPU is \"%s\", expected one of %s\n", wanted,
                names.c_str());
        exit(2);
    }
    s.name = std::string("Software ") + s.gpu.name;
    s.gpu.name = s.name.c_str();
    s.gpu.memory = number("HEADROOM_REHEARSAL_MEMORY", s.gpu.memory);
    s.gpu.capability = int(number("HEADROOM_REHEARSAL_CAPABILITY", size_t(s.gpu.capability)));
    s.context = number("HEADROOM_REHEARSAL_CONTEXT", 0);
    s.computed = number("HEADROOM_REHEARSAL_COMPUTED", SIZE_MAX);
    s.devices = int(number("HEADROOM_REHEARSAL_DEVICES", 1));
    s.late = number("HEADROOM_REHEARSAL_LATE", 0);
    s.ordered = number("HEADROOM_REHEARSAL_ORDERED", 0);
    s.logged = number("HEADROOM_REHEARSAL_LOG", 0);
    return s;
}

thread_local cudaError_t last_error = cudaSuccess;
thread_local std::string last_text;

std::set<std::string> &missing()
{
    static auto *const names = new std::set<std::string>;
    return *names;
}
} // namespace

const Settings &settings()
{
    static const Settings *const read = new Settings(read_settings());
    return *read;
}

cudaError_t fail(cudaError_t error, const std::string &text)
{
    last_error = error;
    last_text = text;
    return error;
}

void note_missing(const std::string &name)
{
    Lock lock(mutex);
    if (missing().insert(name).second && settings().logged)
        fprintf(stderr, "software device: %s is not implemented\n", name.c_str());
}
} // namespace rehearsal

using namespace rehearsal;

EXPORT const char *rehearsal_gpus() // "name bytes capability" of each, a line each
{
    static std::string text;
    Lock lock(mutex);
    text.clear();
    for (const Gpu &gpu : kGpus)
        text += std::string(gpu.name) + "\t" + std::to_string(gpu.memory) + "\t" +
                std::to_string(gpu.capability) + "\n";
    return text.c_str();
}

EXPORT const char *rehearsal_missing() // what was called and is not there, a line each
{
    static std::string text;
    Lock lock(mutex);
    text.clear();
    for (const std::string &name : missing())
        text += name + "\n";
    return text.c_str();
}

// Called by the generated stubs: of the driver, whose errors are only returned, and of the runtime.
EXPORT int rehearsal_lacks(const char *name)
{
    note_missing(name);
    return 801; // CUDA_ERROR_NOT_SUPPORTED
}
EXPORT int rehearsal_refuse(const char *name)
{
    note_missing(name);
    return fail(cudaErrorNotSupported, std::string("the software device has no ") + name);
}

EXPORT void rehearsal_set_last_error(int error, const char *text)
{
    fail(cudaError_t(error), text ? text : "");
}

CALL(cudaError_t cudaGetLastError(), return std::exchange(last_error, cudaSuccess);)
CALL(cudaError_t cudaPeekAtLastError(), return last_error;)

namespace
{
const struct {
    cudaError_t error;
    const char *name, *text;
} kErrors[] = {
#define ERROR(name, text) \
    {                     \
        name, #name, text \
    }
    ERROR(cudaSuccess, "no error"),
    ERROR(cudaErrorInvalidValue, "invalid argument"),
    ERROR(cudaErrorMemoryAllocation, "out of memory"),
    ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    ERROR(cudaErrorNotReady, "device not ready"),
    ERROR(cudaErrorNotSupported, "operation not supported"),
    ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    ERROR(cudaErrorHostMemoryAlreadyRegistered, "part or all of the memory is registered already"),
    ERROR(cudaErrorHostMemoryNotRegistered, "pointer does not correspond to registered memory"),
    ERROR(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled"),
    ERROR(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    ERROR(cudaErrorStreamCaptureInvalidated,
          "operation failed due to a previous error during capture"),
    ERROR(cudaErrorStreamCaptureUnmatched, "capture was not initiated in this stream"),
    ERROR(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    ERROR(cudaErrorStreamCaptureIsolation,
          "dependency created on uncaptured work in another stream"),
    ERROR(cudaErrorStreamCaptureImplicit,
          "operation would make the legacy stream depend on a capturing blocking stream"),
    ERROR(cudaErrorCapturedEvent,
          "operation not permitted on an event last recorded in a capturing stream"),
#undef ERROR
};
} // namespace

EXPORT const char *cudaGetErrorName(cudaError_t error)
{
    for (const auto &e : kErrors)
        if (e.error == error)
            return e.name;
    return "cudaErrorUnknown";
}
EXPORT const char *cudaGetErrorString(cudaError_t error)
{
    if (error == cudaErrorNotSupported && !last_text.empty())
        return last_text.c_str();
    for (const auto &e : kErrors)
        if (e.error == error)
            return e.text;
    return "unknown error";
}
