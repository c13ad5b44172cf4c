// The machine that PTX runs on is the emulator's: its fibers are the threads, its barriers and warps
// wait, and its memory notes who touched what.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <map>

#include "tests/c/emulator/machine.h"
#include "tests/c/emulator/race.h"
#include "tests/ptx/machine.h"

namespace
{
// Sites and codes are taken back by one byte when they are named, because a caller's is a return address.
const void *code_of(const ptx_instruction *i)
{
    return reinterpret_cast<const char *>(i) + 1;
}

const ptx_function *function_of(const ptx_instruction *i)
{
    return ptx_machine::find_function(i);
}

hr_emu::Site site_of(const ptx_instruction *i)
{
    return {function_of(i)->module->name, int(i->line)};
}

hr_emu::Value value_of(uint64_t bits)
{
    hr_emu::Value value{};
    memcpy(&value, &bits, sizeof bits);
    return value;
}
} // namespace

void ptx_problem(const ptx_instruction *i, const char *format, ...)
{
    char text[512];
    va_list rest;
    va_start(rest, format);
    std::vsnprintf(text, sizeof text, format, rest);
    va_end(rest);
    hr_emu::machine.current->in_kernel = false;
    hr_emu::report(std::string(text) + "\n    " + ptx_machine::name(i), cudaErrorIllegalAddress);
    hr_emu::stop_if_failed();
    __builtin_unreachable();
}

void ptx_note_access(const ptx_instruction *i, const void *address, size_t bytes, bool write)
{
    hr_emu::note_access(address, bytes, write, code_of(i));
}

void ptx_note_atomic(const ptx_instruction *i, const void *address, size_t bytes)
{
    hr_emu::note_atomic(address, bytes, code_of(i));
}

void ptx_wait_for_block(const ptx_instruction *i)
{
    hr_emu::sync_block(i->form->text, false, site_of(i));
}

uint64_t ptx_exchange(const ptx_instruction *i, uint32_t mask, uint64_t value, uint32_t lane)
{
    const hr_emu::Value got =
        hr_emu::exchange(i->form->text, mask, value_of(value), int(lane), site_of(i));
    uint64_t bits;
    memcpy(&bits, &got, sizeof bits);
    return bits;
}

uint32_t ptx_vote(const ptx_instruction *i, uint32_t mask, bool predicate)
{
    return hr_emu::vote(i->form->text, mask, predicate, site_of(i));
}

// ---- Launches -----------------------------------------------------------------------------------

namespace ptx_machine
{
namespace
{
// Runs on a fiber that a failed launch leaves for good: nothing here owns memory.
void run_thread(const void *call)
{
    ptx_launch launch = *static_cast<const ptx_launch *>(call);
    launch.shared = static_cast<char *>(hr_emu::dynamic_shared());
    const uint3 t = hr_emu::here.thread, b = hr_emu::here.block;
    const dim3 n = hr_emu::here.block_size, g = hr_emu::here.grid_size;
    const uint32_t lane = uint32_t(hr_emu::lane());
    ptx_thread thread{};
    thread.launch = &launch;
    const uint32_t special[] = {t.x, t.y, t.z, n.x, n.y, n.z, b.x, b.y, b.z, g.x, g.y, g.z, lane};
    static_assert(std::size(special) == PTX_SPECIAL_REGISTERS);
    std::copy(std::begin(special), std::end(special), thread.special);
    ptx_run(&thread);
}
} // namespace

void launch(const ptx_function *entry, dim3 grid, dim3 block, char *parameters,
            size_t dynamic_bytes)
{
    const int64_t fixed = (entry->shared_bytes + 15) / 16 * 16;
    ptx_launch launch{};
    launch.entry = entry;
    launch.parameters = parameters;
    launch.shared_bytes = fixed + int64_t(dynamic_bytes);
    /* Another order of threads is no other GPU. */
    static const uint64_t errors = hr_emu::machine.seed;
    launch.seed = errors;
    hr_emu::run(
        {entry, grid, block, size_t(launch.shared_bytes), run_thread, &launch, sizeof launch});
}

std::string name(const ptx_instruction *i)
{
    const ptx_function *const f = function_of(i);
    const char *line = f->module->text;
    for (uint32_t n = 1; n < i->line; n++)
        line = strchr(line, '\n') + 1;
    while (isspace(*line))
        line++;
    return std::string(f->module->name) + ":" + std::to_string(i->line) + ": " +
           std::string(line, strcspn(line, "\n")) + "  in " + f->name;
}

// ---- Which modules there are, and which function an address belongs to ---------------------------

namespace
{
std::vector<const ptx_module *> known;
std::map<const void *, const ptx_function *> begins; // of code, and of functions themselves

std::string name_code(const void *code)
{
    const ptx_function *const f = find_function(code);
    if (!f)
        return "";
    if (code == f)
        return std::string(f->name) + " of " + f->module->name;
    const size_t index =
        size_t(static_cast<const char *>(code) - reinterpret_cast<const char *>(f->code)) /
        sizeof(ptx_instruction);
    return name(&f->code[index]);
}
} // namespace

const ptx_function *find_function(const void *address)
{
    auto next = begins.upper_bound(address);
    if (next == begins.begin())
        return nullptr;
    const ptx_function *const f = std::prev(next)->second;
    const char *const byte = static_cast<const char *>(address);
    const bool in_code = byte < reinterpret_cast<const char *>(f->code + f->count);
    return address == f || (f->code && byte >= reinterpret_cast<const char *>(f->code) && in_code)
               ? f
               : nullptr;
}

void add_module(const ptx_module *module)
{
    known.push_back(module);
    hr_emu::machine.name_code = name_code;
    for (int k = 0; k < module->function_count; k++) {
        const ptx_function *const f = module->functions[k];
        begins[f] = f;
        begins[f->code] = f;
    }
}

void forget_module(const ptx_module *module)
{
    known.erase(std::remove(known.begin(), known.end(), module), known.end());
    for (auto at = begins.begin(); at != begins.end();)
        at = at->second->module == module ? begins.erase(at) : std::next(at);
}

const std::vector<const ptx_module *> &modules()
{
    return known;
}
} // namespace ptx_machine
