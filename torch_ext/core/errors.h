// errors.h: the errors of calls into torch. Include it before torch's headers, whose functions use
// one of the macros that it replaces.
//
// torch's stable ABI returns a status where torch has thrown, and its headers throw a
// std::runtime_error with torch's text then. Of memory that has run out on a device torch throws a
// class of its own, which Python knows as torch.OutOfMemoryError, and loops catch.
#pragma once

#include <cstdint>
#include <cstring>
#include <cxxabi.h>
#include <exception>
#include <string>

#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/shim_utils.h>

namespace headroom
{

// Throws torch's own class, which the stable ABI does not have, by the names of its constructor and
// its type in libc10. Returns if this torch has none of these names.
inline void throw_out_of_memory(const char *message)
{
    struct SourceLocation {
        const char *function, *file;
        uint32_t line;
    };
    using Constructor = void (*)(void *, SourceLocation, std::string);
    constexpr const char *parameters =
        "C1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE";
    constexpr size_t enough = 4096; // bytes: the class may grow
    using torch::stable::detail::lookup_stable_symbol;
    void *constructor = nullptr;
    for (const char *name : {"_ZN3c1016OutOfMemoryError", "_ZN3c105Error"}) // it adds no members
        if (!constructor)
            constructor = lookup_stable_symbol((std::string(name) + parameters).c_str());
    void *const type = lookup_stable_symbol("_ZTIN3c1016OutOfMemoryErrorE");
    if (!constructor || !type)
        return;
    void *const error = abi::__cxa_allocate_exception(enough);
    reinterpret_cast<Constructor>(constructor)(error, {__func__, __FILE__, __LINE__}, message);
    abi::__cxa_throw(error, static_cast<std::type_info *>(type),
                     [](void *e) { static_cast<std::exception *>(e)->~exception(); });
}

// Throws what the last call into torch has thrown.
inline void throw_error_of_torch(const char *call, const char *file, int64_t line)
{
    const char *const message =
        TORCH_DYNAMIC_VERSION_CALL_2_13_0(torch_exception_get_what_without_backtrace,
                                          torch::stable::detail::torch_shim_bc_const_char_ptr);
    if (message && std::strstr(message, " out of memory. Tried to allocate "))
        throw_out_of_memory(message);
    torch::stable::detail::throw_exception(call, file, line);
}

} // namespace headroom

#undef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK(call)                        \
    if ((call) != TORCH_SUCCESS) {                                 \
        headroom::throw_error_of_torch(#call, __FILE__, __LINE__); \
    }
#undef TORCH_ERROR_CODE_CHECK
#define TORCH_ERROR_CODE_CHECK(call) STABLE_TORCH_ERROR_CODE_CHECK(call)
