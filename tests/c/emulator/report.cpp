// What is said about a problem, and where it was.
#include "tests/c/emulator/machine.h"

#include <dlfcn.h>

#include <cstdio>
#include <utility>

namespace hr_emu
{
namespace
{
std::string reports;
}

std::string take_report()
{
    close_device_memory();
    return std::exchange(reports, {});
}

void report(const std::string &problem, cudaError_t error)
{
    reports += problem + "\n  in " + where(machine.launch->kernel) + ", block " + name(here.block);
    if (machine.current)
        reports += ", thread " + name(here.thread);
    reports += "; HEADROOM_EMULATOR_SEED=" + std::to_string(machine.seed) + " repeats the order\n";
    set_last_error(error);
    machine.failed = true;
}

void report_host(const std::string &problem, cudaError_t error)
{
    reports += problem + "\n";
    set_last_error(error);
}

void stop_if_failed()
{
    if (machine.failed && machine.current)
        Fiber::suspend();
}

uint3 position(uint32_t rank, dim3 size)
{
    return {rank % size.x, rank / size.x % size.y, rank / size.x / size.y};
}

std::string name(uint3 index)
{
    return "(" + std::to_string(index.x) + "," + std::to_string(index.y) + "," +
           std::to_string(index.z) + ")";
}

std::string where(const void *code)
{
    const std::string known = machine.name_code ? machine.name_code(code) : "";
    if (!known.empty())
        return known;
    Dl_info info{};
    char text[1024] = "";
    if (dladdr(code, &info)) {
        const size_t offset = static_cast<const char *>(code) - static_cast<char *>(info.dli_fbase);
        std::snprintf(text, sizeof text, "addr2line -s -f -C -p -e '%s' 0x%zx 2>/dev/null",
                      info.dli_fname, offset);
        FILE *const pipe = popen(text, "r");
        text[0] = 0;
        if (pipe && !std::fgets(text, sizeof text, pipe))
            text[0] = 0;
        if (pipe)
            pclose(pipe);
        text[strcspn(text, "\n")] = 0;
    }
    if (text[0] == 0)
        std::snprintf(text, sizeof text, "%p", code);
    return text;
}
} // namespace hr_emu
