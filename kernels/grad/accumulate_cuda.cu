/*
 * accumulate_cuda.cu: the grid. The loop has an instance for each dtype, with compensation and
 * without, chosen once per block. A group is 4 elements of each thread, so that every access of a
 * warp is one run of memory; all loads of a turn are in flight before the first is used.
 */
#include "kernels/grad/accumulate.h"
#include "kernels/core/list.cuh"
#include "kernels/core/pack.cuh"

#define THREADS   256
#define GROUP     (4 * THREADS) /* elements of a block */
#define IN_FLIGHT 4             /* groups */

typedef struct sum_record {
    float *sum, *lost;
    void *grad;
    int64_t numel;
    uint32_t first_block;
    uint32_t dtype;
} sum_record;

typedef struct accumulate_shared {
    hr_accumulate_config config;
} accumulate_shared;

typedef list_launch<accumulate_shared, sum_record> accumulate_launch;

/* The block's elements of a tensor. */
typedef struct sum_chunk {
    float *sum, *lost;
    void *grad;
    int count;
    float factor;
    bool zero_grads;
} sum_chunk;

template <bool compensated>
static __device__ __forceinline__ float add(float sum, float x, float *lost)
{
    return compensated ? accumulate_compensated(sum, x, lost) : accumulate_plain(sum, x);
}

template <hr_dtype dtype, bool compensated>
static __device__ __forceinline__ void add_one(const sum_chunk &t, int i)
{
    const float x = hr_load(t.grad, i, dtype) * t.factor;
    float lost = compensated ? t.lost[i] : 0.0f;
    const float total = add<compensated>(t.sum[i], x, &lost);
    if (compensated)
        hr_store(t.lost, i, lost, HR_F32);
    hr_store(t.sum, i, total, HR_F32);
    if (t.zero_grads)
        hr_store(t.grad, i, 0.0f, dtype);
}

/* Four elements of each of `count` groups, the first at `first`. */
template <hr_dtype dtype, bool compensated, int count>
static __device__ __forceinline__ void add_groups(const sum_chunk &t, int first)
{
    pack<4> grads[count], sums[count], losts[count];
#pragma unroll
    for (int k = 0; k < count; k++) {
        const int i = first + k * GROUP;
        grads[k] = pack_load<4>(t.grad, i, dtype);
        sums[k] = pack_load<4>(t.sum, i, HR_F32);
        if (compensated)
            losts[k] = pack_load<4>(t.lost, i, HR_F32);
    }
#pragma unroll
    for (int k = 0; k < count; k++) {
        const int i = first + k * GROUP;
        float total[4], lost[4] = {};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float x = pack_get(grads[k], e, dtype) * t.factor;
            if (compensated)
                lost[e] = pack_get(losts[k], e, HR_F32);
            total[e] = add<compensated>(pack_get(sums[k], e, HR_F32), x, &lost[e]);
        }
        pack_store(t.sum, i, pack_of(total, HR_F32), HR_F32);
        if (compensated)
            pack_store(t.lost, i, pack_of(lost, HR_F32), HR_F32);
    }
    if (t.zero_grads) {
        const pack<4> zeros = {{0, 0, 0, 0}};
#pragma unroll
        for (int k = 0; k < count; k++)
            pack_store(t.grad, first + k * GROUP, zeros, dtype);
    }
}

template <hr_dtype dtype, bool compensated>
static __device__ __forceinline__ void add_chunk(const sum_chunk &t)
{
    constexpr int in_flight = compensated ? IN_FLIGHT / 2 : IN_FLIGHT;
    const uintptr_t addresses = (uintptr_t)t.sum | (uintptr_t)t.lost | (uintptr_t)t.grad;
    const int vector_end = addresses % 16 == 0 ? t.count / 4 * 4 : 0;
    int i = (int)threadIdx.x * 4;
#pragma unroll 1
    for (; i + (in_flight - 1) * GROUP < vector_end; i += in_flight * GROUP)
        add_groups<dtype, compensated, in_flight>(t, i);
#pragma unroll 1
    for (; i < vector_end; i += GROUP)
        add_groups<dtype, compensated, 1>(t, i);
#pragma unroll 1
    for (i = vector_end + (int)threadIdx.x; i < t.count; i += THREADS)
        add_one<dtype, compensated>(t, i);
}

template <bool compensated>
static __device__ __forceinline__ void add_any(const sum_chunk &t, hr_dtype dtype)
{
    switch (dtype) {
    case HR_BF16:
        return add_chunk<HR_BF16, compensated>(t);
    case HR_F16:
        return add_chunk<HR_F16, compensated>(t);
    default:
        return add_chunk<HR_F32, compensated>(t);
    }
}

static __global__ void __launch_bounds__(THREADS, 4)
    accumulate_kernel(const accumulate_launch __grid_constant__ args)
{
    const sum_record &t = args.tensors[list_find(args.tensors, args.count, blockIdx.x)];
    const hr_dtype dtype = (hr_dtype)t.dtype;
    const int64_t begin = list_begin(t);
    sum_chunk chunk;
    chunk.sum = t.sum + begin;
    chunk.lost = t.lost ? t.lost + begin : nullptr;
    chunk.grad = (char *)t.grad + begin * (dtype == HR_F32 ? 4 : 2);
    chunk.count = (int)(list_end(t, begin) - begin);
    chunk.factor = accumulate_factor(&args.config);
    chunk.zero_grads = args.config.zero_grads;
    if (t.lost)
        add_any<true>(chunk, dtype);
    else
        add_any<false>(chunk, dtype);
}

hr_status accumulate_cuda(const accumulate_args *args, const hr_exec *exec)
{
    accumulate_launch launch;
    launch.config = *args->config;
    const auto fill = [=](sum_record &t, int64_t k) {
        t.sum = (float *)args->sums->data[k];
        t.lost = args->losts ? (float *)args->losts->data[k] : nullptr;
        t.grad = args->grads->data[k];
        t.dtype = (uint32_t)args->grads->dtype[k];
    };
    const auto queue = [&](uint32_t blocks, int64_t) {
        if (blocks > 0)
            HR_LAUNCH(accumulate_kernel, blocks, THREADS, 0, exec->stream, launch);
    };
    return list_launch_all(&launch, args->grads, "hr_accumulate", fill, queue);
}
