// What code made by nvcc calls to register its device code and to launch it, in place of CUDA's
// runtime; the other calls of the runtime are the emulator's. The device code is the PTX in the fat
// binaries; HEADROOM_PTX_ARCH says for which architecture, 90 if it is not set.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "tests/c/emulator/machine.h"
#include "tests/c/emulator/race.h"
#include "tests/ptx/registration.h"

namespace
{
constexpr int kMostParameterBytes = 32764; // from 7.0 on, and what the library counts on

// The layout of fat binaries is what `fatbinary` of the toolkit writes: a header, then parts, each with
// a header of its own and the text or machine code.
struct Wrapper {
    int32_t magic, version;
    const char *data;
    const void *unused;
};
struct Header {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes; // of all parts
};
struct Part {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t bytes;
    uint32_t compressed_bytes, unused, minor_major, arch, name_offset, name_bytes;
    uint64_t flags, zero, whole_bytes;
};
constexpr uint32_t kFatBinary = 0xBA55ED50;
constexpr uint16_t kPtx = 1;
constexpr uint64_t kLz4 = 0x2000; // of the flags: the text is compressed so

struct Binary {
    const char *data;
    ptx_module *module; // once something of it was launched
    std::string name;
};

struct Kernel {
    Binary *binary;
    std::string name;
    ptx_function *entry;
};

// Registered before main(), in whatever order.
std::vector<std::unique_ptr<Binary>> &binaries()
{
    static std::vector<std::unique_ptr<Binary>> all;
    return all;
}

std::map<const void *, Kernel> &kernels()
{
    static std::map<const void *, Kernel> all; // by the function of the host
    return all;
}

struct Configuration {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
};
std::vector<Configuration> configurations;

// Returns what a block of LZ4 holds: sequences of literals and of a copy of what came before, until the
// last, which has literals alone (lz4_Block_format.md of github.com/lz4/lz4).
std::string decompressed(const char *block, size_t bytes)
{
    const auto *at = reinterpret_cast<const unsigned char *>(block);
    const auto *const end = at + bytes;
    const auto length = [&](size_t nibble) {
        if (nibble == 15)
            do
                nibble += *at;
            while (*at++ == 255);
        return nibble;
    };
    std::string text;
    while (at < end) {
        const unsigned token = *at++;
        const size_t literals = length(token >> 4);
        text.append(reinterpret_cast<const char *>(at), literals);
        at += literals;
        if (at == end)
            break;
        const size_t back = at[0] | at[1] << 8;
        at += 2;
        const size_t copied = length(token & 15) + 4;
        for (size_t from = text.size() - back, k = 0; k < copied; k++)
            text += text[from + k]; // what is copied may be of this copy
    }
    return text;
}

std::string text_of(const Binary &binary, int arch)
{
    const auto *const header = reinterpret_cast<const Header *>(binary.data);
    if (header->magic != kFatBinary)
        return "";
    const char *at = binary.data + header->header_bytes;
    const char *const end = at + header->bytes;
    while (at < end) {
        const auto *const part = reinterpret_cast<const Part *>(at);
        if (part->kind == kPtx && int(part->arch) == arch) {
            const char *const text = at + part->header_bytes;
            if (part->flags & kLz4)
                return decompressed(text, part->compressed_bytes).c_str(); // up to the first zero
            if (part->whole_bytes == 0)
                return std::string(text, strnlen(text, part->bytes));
        }
        at += part->header_bytes + part->bytes;
    }
    return "";
}

// A fault that a test wants to be noticed: "kernel|from|to" in HEADROOM_PTX_FAULT replaces what stands in
// every kernel whose name has the first part.
bool planted;

void plant_fault(std::string &text)
{
    const char *const fault = std::getenv("HEADROOM_PTX_FAULT");
    if (!fault)
        return;
    const std::string all = fault;
    const size_t first = all.find('|'), second = all.find('|', first + 1);
    const std::string kernel = all.substr(0, first), to = all.substr(second + 1);
    const std::string from = all.substr(first + 1, second - first - 1);
    for (size_t at = text.find(".entry"); at != std::string::npos;) {
        size_t end = text.find(".entry", at + 1);
        const std::string name = text.substr(at, text.find('(', at) - at);
        for (size_t k = at; name.find(kernel) != std::string::npos;) {
            k = text.find(from, k);
            if (k >= end || k == std::string::npos)
                break;
            text.replace(k, from.size(), to);
            end += end == std::string::npos ? 0 : to.size() - from.size();
            k += to.size();
            planted = true;
        }
        at = end;
    }
}

ptx_module *module_of(Binary &binary)
{
    if (binary.module)
        return binary.module;
    std::string text = text_of(binary, ptx_registration::arch());
    plant_fault(text);
    char why[256] = "the fat binary has no such PTX as text or LZ4";
    if (!text.empty())
        binary.module = ptx_parse(text.data(), text.size(), binary.name.c_str(), why, sizeof why);
    if (!binary.module)
        hr_emu::report_host("PTX for " + std::to_string(ptx_registration::arch()) + ": " + why,
                            cudaErrorInvalidValue);
    else
        ptx_machine::add_module(binary.module);
    return binary.module;
}

ptx_function *entry_of(Kernel &kernel)
{
    if (!kernel.entry && module_of(*kernel.binary))
        kernel.entry = ptx_find(kernel.binary->module, kernel.name.c_str());
    return kernel.entry;
}

// Where the parameters of a launch are as the entry's layout has them.
struct alignas(16) Parameters {
    char bytes[kMostParameterBytes + 4];
};

cudaError_t launch(Kernel &kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                   cudaStream_t stream)
{
    ptx_function *const entry = entry_of(kernel);
    if (!entry)
        return cudaErrorInvalidValue;
    if (entry->parameter_bytes > kMostParameterBytes)
        hr_emu::report_host("more parameters than a launch passes: " + kernel.name,
                            cudaErrorInvalidValue);
    const uint64_t threads = uint64_t(block.x) * block.y * block.z;
    if (entry->most_threads && threads > entry->most_threads) {
        hr_emu::report_host("more threads than .maxntid allows: " + kernel.name,
                            cudaErrorInvalidConfiguration);
        return cudaErrorInvalidConfiguration;
    }
    const auto parameters = std::make_shared<Parameters>();
    for (int k = 0; k < entry->parameters; k++)
        memcpy(parameters->bytes + entry->parameter[k].offset, arguments[k],
               entry->parameter[k].bytes);
    entry->launches++;
    const std::string test = entry->ran_in ? "" : ptx_registration::running_test();
    if (!test.empty())
        entry->ran_in = strdup(test.c_str());
    hr_emu::submit(stream,
                   [=] { ptx_machine::launch(entry, grid, block, parameters->bytes, shared); });
    return cudaPeekAtLastError();
}
} // namespace

namespace ptx_registration
{
int arch()
{
    const char *const text = std::getenv("HEADROOM_PTX_ARCH");
    return text ? std::atoi(text) : 90;
}

bool lacks_fault()
{
    return std::getenv("HEADROOM_PTX_FAULT") && !planted;
}

std::vector<const ptx_function *> entries()
{
    std::vector<const ptx_function *> all;
    for (auto &[address, kernel] : kernels())
        if (const ptx_function *const entry = entry_of(kernel))
            all.push_back(entry);
    return all;
}
} // namespace ptx_registration

extern "C" {
void **__cudaRegisterFatBinary(void *wrapper)
{
    binaries().emplace_back(new Binary{static_cast<Wrapper *>(wrapper)->data, nullptr, ""});
    hr_emu::watch_accesses();
    return reinterpret_cast<void **>(binaries().back().get());
}
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
char __cudaInitModule(void **)
{
    return 1;
}
void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}

void __cudaRegisterFunction(void **handle, const char *host, char *, const char *name, int, uint3 *,
                            uint3 *, dim3 *, dim3 *, int *)
{
    auto *const binary = reinterpret_cast<Binary *>(handle);
    kernels()[host] = {binary, name, nullptr};
    char *end;
    const size_t length = std::strtoul(name + 2, &end, 10); // of _Z17accumulate_kernel...
    if (binary->name.empty())
        binary->name = std::string(end, strnlen(end, length)) + ".ptx"; // the file's first kernel's
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream)
{
    configurations.push_back({grid, block, shared, stream});
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
    const Configuration last = configurations.back();
    configurations.pop_back();
    *grid = last.grid;
    *block = last.block;
    *shared = last.shared;
    *static_cast<cudaStream_t *>(stream) = last.stream;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(void **kernel, const void *host)
{
    *kernel = &kernels().at(host);
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream)
{
    return launch(*static_cast<Kernel *>(kernel), grid, block, arguments, shared, stream);
}

cudaError_t cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **arguments,
                             size_t shared, cudaStream_t stream)
{
    return launch(kernels().at(host), grid, block, arguments, shared, stream);
}
}
