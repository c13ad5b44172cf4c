// numbers.h: the numbers of an op, which are members of a config of headroom.h and have its names in
// Python too. They are listed once, as
//
//     #define NUMBERS(of) of(int, mode) of(float, softcap) of(bool, check_target)
//
// and from the list follow the schema, the parameters of functions, and the config.
#pragma once

#include <type_traits>

#include "torch_ext/core/tensor.h"

#define HR_SCHEMA(kind, name)    ", " #kind " " #name
#define HR_PARAMETER(kind, name) , number_##kind name
#define HR_ARGUMENT(kind, name)  , name
#define HR_SET(kind, name)       set(config.name, name, #name);

namespace headroom
{

using number_int = int64_t;
using number_float = double;
using number_bool = bool;

// Gives a number to a member of a config; -1, which is none of any, for what no enum has.
template <typename Member, typename Number>
void set(Member &member, Number number, [[maybe_unused]] const char *name)
{
    if constexpr (std::is_enum_v<Member>) {
        member = static_cast<Member>(number >= 0 && number < 1 << 16 ? int(number) : -1);
    } else {
        if constexpr (std::is_unsigned_v<Member>)
            if (number < 0)
                fail(std::string(name) + " is " + std::to_string(number) + ", wanted 0 or more");
        member = static_cast<Member>(number);
    }
}

// Gives a config what torch's settings allow products, as headroom.functional.gemm adds it up.
template <typename Config> void set_precision(Config &config, int64_t precision)
{
    config.allow_tf32 = precision & 1;
    config.allow_reduced_precision_reduction = precision >> 1 & 1;
    config.deterministic = precision >> 2 & 1;
}

} // namespace headroom
