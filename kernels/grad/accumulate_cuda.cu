/*
 * accumulate_cuda.cu: the grid. The loop has an instance for each dtype, with compensation and
 * without, chosen once per block; all loads of a turn are in flight before the first is used.
 */
#include "kernels/grad/accumulate.h"
#include "kernels/core/list.cuh"
#include "kernels/core/pack.cuh"

#define THREADS 256

/* A tensor; and in a block, from the block's first element on. */
typedef struct sum_record {
    float *sum, *lost;
    void *grad;
    int64_t numel;
    uint32_t first_block, dtype;
} sum_record;

typedef list_launch<hr_accumulate_config, sum_record> accumulate_launch;

/* Four elements of each of `count` groups, the first at `first`. */
template <hr_dtype dtype, int compensated, int count>
static __device__ __forceinline__ void add_groups(const sum_record &t, float factor, int zero_grads,
                                                  int first)
{
    pack<4> grads[count], sums[count], compensations[count];
#pragma unroll
    for (int k = 0; k < count; k++) {
        const int i = first + k * 4 * THREADS;
        grads[k] = pack_load<4>(t.grad, i, dtype);
        sums[k] = pack_load<4>(t.sum, i, HR_F32);
        if (compensated)
            compensations[k] = pack_load<4>(t.lost, i, HR_F32);
    }
#pragma unroll
    for (int k = 0; k < count; k++) {
        const int i = first + k * 4 * THREADS;
        float total[4], lost[4] = {};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float x = pack_get(grads[k], e, dtype) * factor;
            if (compensated)
                lost[e] = pack_get(compensations[k], e, HR_F32);
            total[e] = accumulate_sum(pack_get(sums[k], e, HR_F32), x, &lost[e], compensated);
        }
        pack_store(t.sum, i, pack_of(total, HR_F32), HR_F32);
        if (compensated)
            pack_store(t.lost, i, pack_of(lost, HR_F32), HR_F32);
        if (zero_grads)
            pack_store(t.grad, i, pack<4>{{0, 0, 0, 0}}, dtype);
    }
}

template <hr_dtype dtype, int compensated>
static __device__ __forceinline__ void add_chunk(const sum_record &t, float factor, int zero_grads,
                                                 int count)
{
    constexpr int many = compensated ? 2 : 4;
    const uintptr_t addresses = (uintptr_t)t.sum | (uintptr_t)t.lost | (uintptr_t)t.grad;
    list_in_groups<THREADS, many>(
        addresses % 16 == 0 ? count / 4 * 4 : 0, count,
        [&](int i) { add_groups<dtype, compensated, many>(t, factor, zero_grads, i); },
        [&](int i) { add_groups<dtype, compensated, 1>(t, factor, zero_grads, i); },
        [&](int i) {
            accumulate_element(t.sum, t.lost, t.grad, i, factor, dtype, compensated, zero_grads);
        });
}

static __global__ void __launch_bounds__(THREADS, 4)
    accumulate_kernel(const accumulate_launch __grid_constant__ args)
{
    sum_record t = args.tensors[list_find(args.tensors, args.count, blockIdx.x)];
    const hr_dtype dtype = (hr_dtype)t.dtype;
    const int64_t begin = list_begin(t);
    const int count = (int)(list_end(t, begin) - begin);
    t.sum += begin;
    t.lost = t.lost ? t.lost + begin : nullptr;
    t.grad = (char *)t.grad + begin * hr_element_size(dtype);
    const float factor = accumulate_factor(&args);
    FOR_FLAG(t.lost, C, FOR_DTYPE(dtype, D, (add_chunk<D, C>(t, factor, args.zero_grads, count))))
}

hr_status accumulate_cuda(const accumulate_args *args, const hr_exec *exec)
{
    accumulate_launch launch;
    (hr_accumulate_config &)launch = *args->config;
    const auto fill = [=](sum_record &t, int64_t k) {
        t.sum = (float *)args->sums->data[k];
        t.lost = args->compensations ? (float *)args->compensations->data[k] : nullptr;
        t.grad = args->grads->data[k];
        t.dtype = (uint32_t)args->grads->dtype[k];
    };
    const auto queue = [&](uint32_t blocks, int64_t) {
        if (blocks > 0)
            HR_LAUNCH(accumulate_kernel, blocks, THREADS, 0, exec->stream, launch);
    };
    return list_launch_all(&launch, args->grads, "hr_accumulate", fill, queue);
}
