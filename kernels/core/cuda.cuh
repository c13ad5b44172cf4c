/*
 * cuda.cuh: what every CUDA kernel shares.
 *
 * The same .cu files also compile as C++ for the host under the emulator in tests/c/emulator, which
 * brings its own CUDA types and HR_LAUNCH. So they use plain CUDA C, no library, and launch only
 * through HR_LAUNCH.
 */
#ifndef HR_CUDA_CUH
#define HR_CUDA_CUH

#if !defined(HR_EMULATE)
#include <cuda_runtime.h>
#define HR_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
    kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#define HR_DYNAMIC_SHARED(type, name) extern __shared__ __align__(16) type name[]
#endif

#include "kernels/core/dtype.h"
#include "kernels/core/runtime.h"

/* Tensor lists travel in the launch parameters, which hold this many bytes (CUDA 12.1 and later).
 */
#define CUDA_PARAMETER_BYTES 32764

/* The status of the launch just made, with CUDA's words for hr_last_error(). */
static inline hr_status cuda_launch_status(const char *function)
{
    const cudaError_t error = cudaGetLastError();
    if (error == cudaSuccess)
        return HR_OK;
    return hr_fail(HR_CUDA_ERROR, "%s: the launch failed: %s", function, cudaGetErrorString(error));
}

/* How many elements one block takes. */
#define CUDA_CHUNK 16384

/* The record whose blocks include `block`: the last one that starts at or before it. Records of
 * empty tensors start where the next one does, so they are never the last. */
template <typename Record>
static __device__ __forceinline__ uint32_t cuda_find(const Record *records, uint32_t count,
                                                     uint32_t block)
{
    uint32_t low = 0, high = count;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (records[middle].first_block <= block)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static inline uint32_t cuda_blocks(int64_t numel)
{
    return (uint32_t)((numel + CUDA_CHUNK - 1) / CUDA_CHUNK);
}

/* Adds 1 to the step counters of a launch's records. A launch of its own, after the update: every
 * block of a tensor reads its counter. */
template <typename Launch>
static __global__ void cuda_count_kernel(const Launch __grid_constant__ args)
{
    const uint32_t k = blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= args.count || (args.config.found_inf && *args.config.found_inf != 0.0f))
        return;
    const hr_dtype dtype = (hr_dtype)args.tensors[k].step_dtype;
    hr_store_scalar(args.tensors[k].step, hr_load_scalar(args.tensors[k].step, dtype) + 1.0, dtype);
}

/* Eight consecutive elements as they lie in memory: 16 bytes of a 16-bit type, 32 of f32. Loads are
 * kept apart from conversions so that all loads of a thread are in flight before the first use. */
typedef struct cuda_pack {
    uint4 low, high;
} cuda_pack;

static __device__ __forceinline__ cuda_pack cuda_load8(const void *base, int64_t i, hr_dtype dtype)
{
    cuda_pack pack;
    if (dtype == HR_F32) {
        const uint4 *const vectors = (const uint4 *)((const float *)base + i);
        pack.low = vectors[0];
        pack.high = vectors[1];
    } else {
        pack.low = *(const uint4 *)((const uint16_t *)base + i);
        pack.high = pack.low;
    }
    return pack;
}

/* __stcs, because plain stores of a uint4 that was put together from words come out of the compiler
 * as four scalar ones; and what an optimizer writes is not read again soon. */
static __device__ __forceinline__ void cuda_store8(void *base, int64_t i, cuda_pack pack,
                                                   hr_dtype dtype)
{
    if (dtype == HR_F32) {
        uint4 *const vectors = (uint4 *)((float *)base + i);
        __stcs(vectors, pack.low);
        __stcs(vectors + 1, pack.high);
    } else {
        __stcs((uint4 *)((uint16_t *)base + i), pack.low);
    }
}

/* Element j of 0 to 7. The words are copied out, so that j unrolls to registers. */
static __device__ __forceinline__ float cuda_unpack(const cuda_pack &pack, int j, hr_dtype dtype)
{
    const uint32_t words[8] = {pack.low.x,  pack.low.y,  pack.low.z,  pack.low.w,
                               pack.high.x, pack.high.y, pack.high.z, pack.high.w};
    if (dtype == HR_F32)
        return hr_float(words[j]);
    const uint16_t half = (uint16_t)(words[j / 2] >> (16 * (j % 2)));
    return dtype == HR_BF16 ? hr_from_bf16(half) : hr_from_f16(half);
}

static __device__ __forceinline__ cuda_pack cuda_repack(const float *x, hr_dtype dtype)
{
    uint32_t words[8] = {0};
#pragma unroll
    for (int j = 0; j < 8; j++) {
        if (dtype == HR_F32)
            hr_store(words, j, x[j], HR_F32);
        else
            words[j / 2] |= (uint32_t)(dtype == HR_BF16 ? hr_to_bf16(x[j]) : hr_to_f16(x[j]))
                            << (16 * (j % 2));
    }
    cuda_pack pack;
    pack.low = make_uint4(words[0], words[1], words[2], words[3]);
    pack.high = make_uint4(words[4], words[5], words[6], words[7]);
    return pack;
}

#endif
