// CUDA C++ on the host: a .cu file compiled as C++17 with `-x c++ -include emulator.h` runs here.
//
// The threads of a block are fibers that run in a seeded random order, one at a time, each until it
// must wait; blocks run one after another, in a random order too. What a GPU would let pass
// silently is reported and ends the launch:
//
//     divergent barrier      some threads wait at a barrier that others miss, or left before
//     deadlock               nobody can go on; the report lists who waits where
//     bad warp mask          a lane outside the mask, or a shuffle from a lane that takes no part
//     out-of-bounds access   outside cudaMalloc'ed, shared, local and parameter memory
//     race                   two threads, same byte, no barrier between, at least one writes
//     uninitialized read     of shared or device memory
//     misaligned access
//     undefined arithmetic   overflow, shifts too far, a bool that is neither
//     access by the host     to device memory, outside launches and copies
//     not in a capture       what waits for the device or allocates, while one is pretended
//
// The five before the last two need what the compiler's sanitizers call: compile the .cu with the flags
// that hooks.cpp names, and link it in place of their runtimes. Without that, memory is filled with NaN
// (0xFF) before use and has guards at both ends.
//
// Not seen: one static __shared__ array overrun into the next through a pointer, and what needs two
// blocks to run at the same time.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>

#include "tests/c/emulator/cuda_runtime.h"

// ---- For tests ----------------------------------------------------------------------------------

namespace hr_emu
{
// The order of threads and blocks follows from the seed and the launches since it was set alone.
void set_seed(uint64_t seed);
uint64_t default_seed(); // of the environment variable HEADROOM_EMULATOR_SEED, or 1

// Everything reported since the last call, "" if nothing was. A test that does not ask hides a bug,
// so the test program asks after each test.
std::string take_report();

// Pretends from now on that every stream is being captured into a CUDA graph, or no more: work is
// done at once all the same, but what a capture refuses fails and is reported.
void pretend_capture(bool on);
} // namespace hr_emu

// ---- Qualifiers ---------------------------------------------------------------------------------

#define __host__
#define __device__
#define __constant__
#define __global__
// Thread-local, because the linker gathers such variables in one block that can be found, filled
// and watched; a section attribute would do the same, but GCC drops it in templates.
#define __shared__      static thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n)    __attribute__((aligned(n)))
#define __launch_bounds__(...)
// To be written after the type, `const Args __grid_constant__ args`: all threads see one object,
// as on a GPU, and there is no copy per thread.
#define __grid_constant__ &

// ---- Where a thread is --------------------------------------------------------------------------

namespace hr_emu
{
struct Here {
    uint3 thread, block;
    dim3 block_size, grid_size;
};
extern Here here;
} // namespace hr_emu

#define threadIdx hr_emu::here.thread
#define blockIdx  hr_emu::here.block
#define blockDim  hr_emu::here.block_size
#define gridDim   hr_emu::here.grid_size
constexpr int warpSize = 32;

// ---- Launches -----------------------------------------------------------------------------------

namespace hr_emu
{
struct Launch {
    const void *kernel;
    dim3 grid, block;
    size_t shared_bytes;
    void (*thread)(const void *call); // runs one thread
    const void *call;
    size_t call_bytes;
};
void run(const Launch &launch);

// Puts work on a stream. The emulator's runtime does it at once; another runtime may keep it.
void submit(cudaStream_t stream, std::function<void()> work);

// The dynamic shared memory of the block.
void *dynamic_shared();

template <class... P> struct Call {
    void (*kernel)(P...);
    std::tuple<std::decay_t<P>...> parameters;

    static void thread(const void *call)
    {
        const Call &self = *static_cast<const Call *>(call);
        std::apply(self.kernel, self.parameters);
    }
};

template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
            A &&...args)
{
    static_assert((sizeof(std::decay_t<P>) + ... + 0) <= 32764,
                  "more parameters than CUDA can pass");
    const std::shared_ptr<const Call<P...>> call(
        new Call<P...>{kernel, {std::forward<A>(args)...}});
    submit(stream, [=] {
        run({reinterpret_cast<const void *>(kernel), grid, block, shared_bytes, Call<P...>::thread,
             call.get(), sizeof *call});
    });
}
} // namespace hr_emu

#define HR_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
    hr_emu::launch(kernel, grid, block, shared_bytes, stream, ##__VA_ARGS__)
#define HR_DYNAMIC_SHARED(type, name) \
    type *const name = static_cast<type *>(hr_emu::dynamic_shared())

#include "tests/c/emulator/intrinsics.h"
