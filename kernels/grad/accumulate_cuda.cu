/* accumulate_cuda.cu: the grid, as in adamw_cuda.cu. */
#include "kernels/grad/accumulate.h"
#include "kernels/core/cuda.cuh"

#define THREADS 256

typedef struct sum_record {
    float *sum, *lost;
    void *grad;
    int64_t numel;
    uint32_t first_block;
    uint32_t dtype;
} sum_record;

#define MAX_TENSORS \
    ((CUDA_PARAMETER_BYTES - sizeof(hr_accumulate_config) - 16) / sizeof(sum_record))

typedef struct accumulate_launch {
    hr_accumulate_config config;
    uint32_t count;
    sum_record tensors[MAX_TENSORS];
} accumulate_launch;

static_assert(sizeof(accumulate_launch) <= CUDA_PARAMETER_BYTES, "must fit in a launch");

static __device__ __forceinline__ void add_one(const sum_record &t, float factor, int zero_grads,
                                               int64_t i)
{
    const hr_dtype dtype = (hr_dtype)t.dtype;
    const float x = hr_load(t.grad, i, dtype) * factor;
    float total;
    if (t.lost) {
        float lost = t.lost[i];
        total = accumulate_compensated(t.sum[i], x, &lost);
        hr_store(t.lost, i, lost, HR_F32);
    } else {
        total = accumulate_plain(t.sum[i], x);
    }
    hr_store(t.sum, i, total, HR_F32);
    if (zero_grads)
        hr_store(t.grad, i, 0.0f, dtype);
}

static __device__ __forceinline__ void add_eight(const sum_record &t, float factor, int zero_grads,
                                                 int64_t i)
{
    const hr_dtype dtype = (hr_dtype)t.dtype;
    const cuda_pack grads = cuda_load8(t.grad, i, dtype);
    const cuda_pack sums = cuda_load8(t.sum, i, HR_F32);
    const cuda_pack losts = t.lost ? cuda_load8(t.lost, i, HR_F32) : sums;
    float total[8], lost[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float x = cuda_unpack(grads, j, dtype) * factor;
        const float sum = cuda_unpack(sums, j, HR_F32);
        lost[j] = cuda_unpack(losts, j, HR_F32);
        total[j] = t.lost ? accumulate_compensated(sum, x, &lost[j]) : accumulate_plain(sum, x);
    }
    cuda_store8(t.sum, i, cuda_repack(total, HR_F32), HR_F32);
    if (t.lost)
        cuda_store8(t.lost, i, cuda_repack(lost, HR_F32), HR_F32);
    if (zero_grads) {
        const float zeros[8] = {0};
        cuda_store8(t.grad, i, cuda_repack(zeros, dtype), dtype);
    }
}

static __global__ void __launch_bounds__(THREADS)
    accumulate_kernel(const accumulate_launch __grid_constant__ args)
{
    const sum_record &t = args.tensors[cuda_find(args.tensors, args.count, blockIdx.x)];
    const float factor = accumulate_factor(&args.config);
    const uintptr_t addresses = (uintptr_t)t.sum | (uintptr_t)t.lost | (uintptr_t)t.grad;
    const int64_t begin = (int64_t)(blockIdx.x - t.first_block) * CUDA_CHUNK;
    const int64_t end = t.numel - begin < CUDA_CHUNK ? t.numel : begin + CUDA_CHUNK;
    const int64_t vector_end = addresses % 16 == 0 ? begin + (end - begin) / 8 * 8 : begin;
    for (int64_t i = begin + threadIdx.x * 8; i < vector_end; i += THREADS * 8)
        add_eight(t, factor, args.config.zero_grads, i);
    for (int64_t i = vector_end + threadIdx.x; i < end; i += THREADS)
        add_one(t, factor, args.config.zero_grads, i);
}

hr_status accumulate_cuda(const accumulate_args *args, const hr_exec *exec)
{
    accumulate_launch launch;
    launch.config = *args->config;
    hr_status status = HR_OK;
    for (int64_t k = 0; k < args->grads->count && status == HR_OK;) {
        uint32_t blocks = 0;
        launch.count = 0;
        for (; k < args->grads->count && launch.count < MAX_TENSORS; k++) {
            sum_record *const t = &launch.tensors[launch.count++];
            t->sum = (float *)args->sums->data[k];
            t->lost = args->losts ? (float *)args->losts->data[k] : nullptr;
            t->grad = args->grads->data[k];
            t->numel = args->grads->numel[k];
            t->first_block = blocks;
            t->dtype = (uint32_t)args->grads->dtype[k];
            blocks += cuda_blocks(t->numel);
        }
        if (blocks > 0)
            HR_LAUNCH(accumulate_kernel, blocks, THREADS, 0, exec->stream, launch);
        status = cuda_launch_status("hr_accumulate");
    }
    return status;
}
