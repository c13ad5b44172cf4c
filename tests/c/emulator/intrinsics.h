// What kernels call: barriers, warp operations, atomics, cache hints, bit casts.
#pragma once

#include "tests/c/emulator/emulator.h"

#define HR_EMU_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace hr_emu
{
struct Site {
    const char *file;
    int line;
};
struct Value {
    alignas(16) unsigned char bytes[16];
};

// Waits for the block; gives the number of threads with a true predicate.
int sync_block(const char *operation, bool predicate, Site site);
// Waits for the lanes of `mask`; gives what lane `source` brought.
Value exchange(const char *operation, unsigned mask, Value mine, int source, Site site);
// Waits for the lanes of `mask`; gives the lanes with a true predicate.
unsigned vote(const char *operation, unsigned mask, bool predicate, Site site);
void fence();

int lane();

template <class T> T shuffle(const char *operation, unsigned mask, T value, int source, Site site)
{
    static_assert(sizeof(T) <= sizeof(Value) && std::is_trivially_copyable_v<T>);
    Value mine{};
    memcpy(&mine, &value, sizeof value);
    mine = exchange(operation, mask, mine, source, site);
    memcpy(&value, &mine, sizeof value);
    return value;
}
} // namespace hr_emu

// ---- Barriers -----------------------------------------------------------------------------------

inline void __syncthreads(HR_EMU_SITE)
{
    hr_emu::sync_block("__syncthreads", false, {file, line});
}
inline int __syncthreads_count(int predicate, HR_EMU_SITE)
{
    return hr_emu::sync_block("__syncthreads_count", predicate, {file, line});
}
inline int __syncthreads_or(int predicate, HR_EMU_SITE)
{
    return hr_emu::sync_block("__syncthreads_or", predicate, {file, line}) != 0;
}
inline int __syncthreads_and(int predicate, HR_EMU_SITE)
{
    return hr_emu::sync_block("__syncthreads_and", !predicate, {file, line}) == 0;
}
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, HR_EMU_SITE)
{
    hr_emu::vote("__syncwarp", mask, false, {file, line});
}
inline void __threadfence_block() {}
inline void __threadfence()
{
    hr_emu::fence();
}
inline void __threadfence_system()
{
    hr_emu::fence();
}

// ---- Warp operations: `width` divides the warp into independent parts ---------------------------

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize, HR_EMU_SITE)
{
    const int lane = hr_emu::lane(), from = (lane & -width) | (source & (width - 1));
    return hr_emu::shuffle("__shfl_sync", mask, value, from, {file, line});
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = warpSize, HR_EMU_SITE)
{
    const int lane = hr_emu::lane(), from = lane ^ bits, end = (lane & -width) + width;
    return hr_emu::shuffle("__shfl_xor_sync", mask, value, from < end ? from : lane, {file, line});
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize, HR_EMU_SITE)
{
    const int lane = hr_emu::lane(), from = lane + int(delta), end = (lane & -width) + width;
    return hr_emu::shuffle("__shfl_down_sync", mask, value, from < end ? from : lane, {file, line});
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize, HR_EMU_SITE)
{
    const int lane = hr_emu::lane(), from = lane - int(delta), begin = lane & -width;
    return hr_emu::shuffle("__shfl_up_sync", mask, value, from >= begin ? from : lane,
                           {file, line});
}
inline unsigned __ballot_sync(unsigned mask, int predicate, HR_EMU_SITE)
{
    return hr_emu::vote("__ballot_sync", mask, predicate, {file, line});
}
inline int __any_sync(unsigned mask, int predicate, HR_EMU_SITE)
{
    return hr_emu::vote("__any_sync", mask, predicate, {file, line}) != 0;
}
inline int __all_sync(unsigned mask, int predicate, HR_EMU_SITE)
{
    return hr_emu::vote("__all_sync", mask, !predicate, {file, line}) == 0;
}

// ---- Atomics: the types that CUDA offers, and no others -----------------------------------------

namespace hr_emu
{
void note_atomic(const void *address, size_t bytes, const void *caller);

template <class T, class... Allowed> constexpr bool one_of = (std::is_same_v<T, Allowed> || ...);
template <class T> struct Same {
    using type = T;
};
template <class T> using same = typename Same<T>::type; // not deduced: atomicAdd(&a_float, 1) works

// Not inlined and not instrumented: the access itself must not look like a plain one.
template <class T, class F>
__attribute__((noinline, no_sanitize("thread"))) T update(T *address, const F &next)
{
    note_atomic(address, sizeof(T), __builtin_return_address(0));
    const T old = *address;
    *address = next(old);
    return old;
}
} // namespace hr_emu

#define HR_EMU_ATOMIC(name, next, ...)                                                     \
    template <class T> __forceinline__ T name(T *address, hr_emu::same<T> value)           \
    {                                                                                      \
        static_assert(hr_emu::one_of<T, __VA_ARGS__>, #name " has no such type in CUDA");  \
        return hr_emu::update(address, [=]([[maybe_unused]] T old) -> T { return next; }); \
    }

using hr_emu_ull = unsigned long long;
HR_EMU_ATOMIC(atomicAdd, old + value, int, unsigned, hr_emu_ull, float, double)
HR_EMU_ATOMIC(atomicSub, old - value, int, unsigned)
HR_EMU_ATOMIC(atomicExch, value, int, unsigned, hr_emu_ull, float)
HR_EMU_ATOMIC(atomicMax, old < value ? value : old, int, unsigned, long long, hr_emu_ull)
HR_EMU_ATOMIC(atomicMin, value < old ? value : old, int, unsigned, long long, hr_emu_ull)
HR_EMU_ATOMIC(atomicAnd, old &value, int, unsigned, hr_emu_ull)
HR_EMU_ATOMIC(atomicOr, old | value, int, unsigned, hr_emu_ull)
HR_EMU_ATOMIC(atomicInc, old >= value ? 0 : old + 1, unsigned)

template <class T>
__forceinline__ T atomicCAS(T *address, hr_emu::same<T> expected, hr_emu::same<T> value)
{
    static_assert(hr_emu::one_of<T, int, unsigned, hr_emu_ull, unsigned short>);
    return hr_emu::update(address, [=](T old) -> T { return old == expected ? value : old; });
}

// ---- Loads and stores with cache hints ----------------------------------------------------------

#define HR_EMU_LOAD(name)                                       \
    template <class T> __forceinline__ T name(const T *address) \
    {                                                           \
        return *address;                                        \
    }
#define HR_EMU_STORE(name)                                                          \
    template <class T> __forceinline__ void name(T *address, hr_emu::same<T> value) \
    {                                                                               \
        *address = value;                                                           \
    }
HR_EMU_LOAD(__ldg)
HR_EMU_LOAD(__ldca)
HR_EMU_LOAD(__ldcg)
HR_EMU_LOAD(__ldcs)
HR_EMU_STORE(__stcg)
HR_EMU_STORE(__stcs)
HR_EMU_STORE(__stwt)

// ---- Arithmetic ---------------------------------------------------------------------------------

inline unsigned __float_as_uint(float x)
{
    unsigned bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline float __uint_as_float(unsigned bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
inline int __float_as_int(float x)
{
    return int(__float_as_uint(x));
}
inline float __int_as_float(int bits)
{
    return __uint_as_float(unsigned(bits));
}
inline int __clz(int x)
{
    return x ? __builtin_clz(unsigned(x)) : 32;
}
inline int __popc(unsigned x)
{
    return __builtin_popcount(x);
}
inline int __ffs(int x)
{
    return __builtin_ffs(x);
}
template <class T> constexpr T min(T a, T b)
{
    return b < a ? b : a;
}
template <class T> constexpr T max(T a, T b)
{
    return a < b ? b : a;
}
