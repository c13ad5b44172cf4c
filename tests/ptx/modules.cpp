// Which modules there are, and which function an address belongs to.
#include <algorithm>
#include <map>

#include "tests/c/emulator/machine.h"
#include "tests/ptx/machine.h"

namespace ptx_machine
{
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
