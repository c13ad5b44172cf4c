/* accumulate_cuda.cu: the grid, as in adamw_cuda.cu. */
#include "kernels/grad/accumulate.h"
#include "kernels/core/list.cuh"
#include "kernels/core/pack.cuh"

#define THREADS 256

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

static __device__ __forceinline__ void add_eight(const sum_record &t, float factor, int zero_grads,
                                                 int64_t i)
{
    const hr_dtype dtype = (hr_dtype)t.dtype;
    const pack<8> grads = pack_load<8>(t.grad, i, dtype);
    const pack<8> sums = pack_load<8>(t.sum, i, HR_F32);
    const pack<8> losts = t.lost ? pack_load<8>(t.lost, i, HR_F32) : sums;
    float total[8], lost[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float x = pack_get(grads, j, dtype) * factor;
        const float sum = pack_get(sums, j, HR_F32);
        lost[j] = pack_get(losts, j, HR_F32);
        total[j] = t.lost ? accumulate_compensated(sum, x, &lost[j]) : accumulate_plain(sum, x);
    }
    pack_store(t.sum, i, pack_of(total, HR_F32), HR_F32);
    if (t.lost)
        pack_store(t.lost, i, pack_of(lost, HR_F32), HR_F32);
    if (zero_grads) {
        const float zeros[8] = {0};
        pack_store(t.grad, i, pack_of(zeros, dtype), dtype);
    }
}

static __global__ void __launch_bounds__(THREADS)
    accumulate_kernel(const accumulate_launch __grid_constant__ args)
{
    const sum_record &t = args.tensors[list_find(args.tensors, args.count, blockIdx.x)];
    const float factor = accumulate_factor(&args.config);
    const uintptr_t addresses = (uintptr_t)t.sum | (uintptr_t)t.lost | (uintptr_t)t.grad;
    const int64_t begin = list_begin(t), end = list_end(t, begin);
    const int64_t vector_end = list_vector_end(addresses, begin, end);
    for (int64_t i = begin + threadIdx.x * 8; i < vector_end; i += THREADS * 8)
        add_eight(t, factor, args.config.zero_grads, i);
    for (int64_t i = vector_end + threadIdx.x; i < end; i += THREADS)
        accumulate_element(t.sum, t.lost, t.grad, i, factor, (hr_dtype)t.dtype, t.lost != nullptr,
                           args.config.zero_grads);
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
