/*
 * unscale_norm_cuda.cu: the grid. One launch per list reads (and, if asked, writes) every gradient
 * and leaves a sum per chunk and the first chunk of each tensor in the workspace; a second, of one
 * block, adds them up: a warp per tensor, then the block over the tensors.
 */
#include <limits.h>

#include "kernels/core/list.cuh"
#include "kernels/core/pack.cuh"
#include "kernels/core/reduce.cuh"
#include "kernels/grad/unscale_norm.h"

#define THREADS       256
#define FINAL_THREADS 512
#define WARP          32

static_assert(NORM_CHUNK == CUDA_CHUNK, "a block sums one chunk");

typedef struct grad_record {
    void *grad;
    int64_t numel;
    uint32_t first_block;
    uint32_t dtype;
} grad_record;

typedef struct unscale_shared {
    hr_unscale_norm_config config;
    double *sums;         /* [chunks] of the list, or NULL: nothing to measure */
    int64_t *first_chunk; /* [count] */
    int64_t chunk_offset; /* of this launch in the list */
    int64_t first_tensor; /* likewise */
    norm_order order;
} unscale_shared;

typedef list_launch<unscale_shared, grad_record> unscale_launch;

struct reduce_norm {
    norm_order order;
    __device__ __forceinline__ double operator()(double a, double b) const
    {
        return norm_combine(a, b, order);
    }
};

/* Eight squares. Where none can overflow binary32 or matter and underflow, they are added there,
 * because many GPUs have one binary64 unit per 64 of binary32. Each passes 4 roundings on its way
 * up the tree, which is at most 2 units in the last place of a norm. */
static __device__ __forceinline__ double sum_of_squares(const float (&x)[8])
{
    float largest = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++)
        largest = fmaxf(largest, fabsf(x[j]));
    if (largest < 0x1p60f && (largest > 0x1p-40f || largest == 0.0f)) {
        float pairs[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            pairs[j] = fmaf(x[j + 4], x[j + 4], x[j] * x[j]);
        /* A NaN is in the sum, whatever fmaxf made of it. */
        return (pairs[0] + pairs[1]) + (pairs[2] + pairs[3]);
    }
    double wide = 0.0;
#pragma unroll
    for (int j = 0; j < 8; j++)
        wide += (double)x[j] * (double)x[j];
    return wide;
}

static __global__ void __launch_bounds__(THREADS)
    unscale_norm_kernel(const unscale_launch __grid_constant__ args)
{
    const grad_record &t = args.tensors[list_find(args.tensors, args.count, blockIdx.x)];
    const float factor = unscale_factor(&args.config);
    const bool write = args.config.write && factor != 1.0f;
    if (!args.sums && !write)
        return;
    const hr_dtype dtype = (hr_dtype)t.dtype;
    const int64_t begin = list_begin(t), end = list_end(t, begin);
    const int64_t vector_end = list_vector_end((uintptr_t)t.grad, begin, end);
    double sum = 0.0;
    for (int64_t i = begin + threadIdx.x * 8; i < vector_end; i += THREADS * 8) {
        const pack<8> grads = pack_load<8>(t.grad, i, dtype);
        float x[8];
#pragma unroll
        for (int j = 0; j < 8; j++)
            x[j] = pack_get(grads, j, dtype) * factor;
        if (write)
            pack_store(t.grad, i, pack_of(x, dtype), dtype);
        if (args.order == NORM_2) {
            sum += sum_of_squares(x);
        } else {
            for (int j = 0; j < 8; j++)
                sum = norm_combine(sum, norm_term(x[j], args.order, args.config.p), args.order);
        }
    }
    for (int64_t i = vector_end + threadIdx.x; i < end; i += THREADS) {
        const float x = hr_load(t.grad, i, dtype) * factor;
        if (write)
            hr_store(t.grad, i, x, dtype);
        sum = norm_combine(sum, norm_term(x, args.order, args.config.p), args.order);
    }
    if (!args.sums)
        return;
    sum = reduce_block<THREADS>(sum, reduce_norm{args.order});
    if (threadIdx.x == 0)
        args.sums[args.chunk_offset + blockIdx.x] = sum;
    for (uint32_t k = threadIdx.x; blockIdx.x == 0 && k < args.count; k += THREADS)
        args.first_chunk[args.first_tensor + k] = args.chunk_offset + args.tensors[k].first_block;
}

typedef struct norm_launch {
    hr_unscale_norm_config config;
    hr_unscale_norm_result result;
    const double *sums;
    const int64_t *first_chunk;
    double *tensor_sums; /* [count] */
    int64_t chunks, count;
    norm_order order;
} norm_launch;

/* The sum of tensor k, in every lane of the warp. */
static __device__ __forceinline__ double sum_of_tensor(const norm_launch &args, int64_t k)
{
    const int64_t end = k + 1 < args.count ? args.first_chunk[k + 1] : args.chunks;
    double sum = 0.0;
    for (int64_t c = args.first_chunk[k] + threadIdx.x % WARP; c < end; c += WARP)
        sum = norm_combine(sum, args.sums[c], args.order);
#pragma unroll
    for (int width = WARP / 2; width > 0; width /= 2)
        sum = norm_combine(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, width), args.order);
    return sum;
}

static __global__ void __launch_bounds__(FINAL_THREADS)
    norm_kernel(const norm_launch __grid_constant__ args)
{
    __shared__ long long culprit;
    if (threadIdx.x == 0)
        culprit = LLONG_MAX;
    for (int64_t k = threadIdx.x / WARP; k < args.count; k += FINAL_THREADS / WARP) {
        const double sum = sum_of_tensor(args, k);
        if (threadIdx.x % WARP != 0)
            continue;
        args.tensor_sums[k] = sum;
        if (args.result.norms)
            hr_store(args.result.norms, k, (float)norm_of(sum, args.order, args.config.p), HR_F32);
    }
    __syncthreads();
    double total = 0.0;
    for (int64_t k = threadIdx.x; k < args.count; k += FINAL_THREADS) {
        total = norm_combine(total, args.tensor_sums[k], args.order);
        if (!isfinite(args.tensor_sums[k]))
            atomicMin(&culprit, (long long)k);
    }
    total = reduce_block<FINAL_THREADS>(total, reduce_norm{args.order});
    if (threadIdx.x == 0)
        norm_store(&args.result, &args.config, args.order, total,
                   culprit == LLONG_MAX ? -1 : (int64_t)culprit);
}

hr_status unscale_norm_cuda(const unscale_norm_args *args, const hr_exec *exec)
{
    const int64_t count = args->grads->count;
    unscale_launch launch;
    launch.config = *args->config;
    launch.order = args->order;
    launch.first_chunk = (int64_t *)args->workspace;
    launch.sums = args->result ? (double *)args->workspace + 2 * count : nullptr;
    launch.chunk_offset = 0;
    const auto fill = [=](grad_record &t, int64_t k) {
        t.grad = args->grads->data[k];
        t.dtype = (uint32_t)args->grads->dtype[k];
    };
    const auto queue = [&](uint32_t blocks, int64_t first) {
        launch.first_tensor = first;
        /* A launch of empty tensors has a block too: it tells where their chunks would be. */
        HR_LAUNCH(unscale_norm_kernel, blocks > 0 ? blocks : 1, THREADS, 0, exec->stream, launch);
        launch.chunk_offset += blocks;
    };
    const hr_status status = list_launch_all(&launch, args->grads, "hr_unscale_norm", fill, queue);
    if (args->result && status == HR_OK) {
        const norm_launch final = {*args->config,
                                   *args->result,
                                   launch.sums,
                                   launch.first_chunk,
                                   (double *)args->workspace + count,
                                   launch.chunk_offset,
                                   count,
                                   args->order};
        HR_LAUNCH(norm_kernel, 1, FINAL_THREADS, 0, exec->stream, final);
        return cuda_launch_status("hr_unscale_norm");
    }
    return status;
}
