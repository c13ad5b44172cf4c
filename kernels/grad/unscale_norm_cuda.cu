/*
 * unscale_norm_cuda.cu: the grid. One launch per list reads (and, if asked, writes) every gradient
 * and leaves a sum per chunk and the first chunk of each tensor in the workspace; a second, of one
 * block, adds them up: a warp per tensor, then the block over the tensors.
 */
#include <limits.h>

#include "kernels/core/cuda.cuh"
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

#define MAX_TENSORS \
    ((CUDA_PARAMETER_BYTES - sizeof(hr_unscale_norm_config) - 64) / sizeof(grad_record))

typedef struct unscale_launch {
    hr_unscale_norm_config config;
    double *sums;         /* [chunks] of the list, or NULL: nothing to measure */
    int64_t *first_chunk; /* [count] */
    int64_t chunk_offset; /* of this launch in the list */
    int64_t first_tensor; /* likewise */
    norm_order order;
    uint32_t count;
    grad_record tensors[MAX_TENSORS];
} unscale_launch;

static_assert(sizeof(unscale_launch) <= CUDA_PARAMETER_BYTES, "must fit in a launch");

/* The sum over the block, in thread 0. The order is that of a tree, always the same. */
template <int threads>
static __device__ __forceinline__ double sum_of_block(double sum, norm_order order)
{
    __shared__ double sums[threads];
    sums[threadIdx.x] = sum;
    for (int width = threads / 2; width > 0; width /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < width)
            sums[threadIdx.x] = norm_combine(sums[threadIdx.x], sums[threadIdx.x + width], order);
    }
    return threadIdx.x == 0 ? sums[0] : 0.0;
}

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
    const grad_record &t = args.tensors[cuda_find(args.tensors, args.count, blockIdx.x)];
    const float factor = unscale_factor(&args.config);
    const bool write = args.config.write && factor != 1.0f;
    if (!args.sums && !write)
        return;
    const hr_dtype dtype = (hr_dtype)t.dtype;
    const int64_t begin = (int64_t)(blockIdx.x - t.first_block) * CUDA_CHUNK;
    const int64_t end = t.numel - begin < CUDA_CHUNK ? t.numel : begin + CUDA_CHUNK;
    const int64_t vector_end = (uintptr_t)t.grad % 16 == 0 ? begin + (end - begin) / 8 * 8 : begin;
    double sum = 0.0;
    for (int64_t i = begin + threadIdx.x * 8; i < vector_end; i += THREADS * 8) {
        const cuda_pack pack = cuda_load8(t.grad, i, dtype);
        float x[8];
#pragma unroll
        for (int j = 0; j < 8; j++)
            x[j] = cuda_unpack(pack, j, dtype) * factor;
        if (write)
            cuda_store8(t.grad, i, cuda_repack(x, dtype), dtype);
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
    sum = sum_of_block<THREADS>(sum, args.order);
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
    total = sum_of_block<FINAL_THREADS>(total, args.order);
    if (threadIdx.x == 0)
        norm_store(&args.result, &args.config, args.order, total,
                   culprit == LLONG_MAX ? -1 : (int64_t)culprit);
}

/* Queues the launches that cover the list and returns how many chunks they have. */
static int64_t launch_list(unscale_launch *launch, const hr_tensor_list *grads, hr_stream stream)
{
    launch->chunk_offset = 0;
    for (int64_t k = 0; k < grads->count;) {
        uint32_t blocks = 0;
        launch->count = 0;
        launch->first_tensor = k;
        for (; k < grads->count && launch->count < MAX_TENSORS; k++) {
            grad_record *const t = &launch->tensors[launch->count++];
            t->grad = grads->data[k];
            t->numel = grads->numel[k];
            t->first_block = blocks;
            t->dtype = (uint32_t)grads->dtype[k];
            blocks += cuda_blocks(t->numel);
        }
        /* A launch of empty tensors has a block too: it tells where their chunks would be. */
        HR_LAUNCH(unscale_norm_kernel, blocks > 0 ? blocks : 1, THREADS, 0, stream, *launch);
        launch->chunk_offset += blocks;
    }
    return launch->chunk_offset;
}

hr_status unscale_norm_cuda(const unscale_norm_args *args, const hr_exec *exec)
{
    const int64_t count = args->grads->count;
    unscale_launch launch;
    launch.config = *args->config;
    launch.order = args->order;
    launch.first_chunk = (int64_t *)args->workspace;
    launch.sums = args->result ? (double *)args->workspace + 2 * count : nullptr;
    const int64_t chunks = launch_list(&launch, args->grads, exec->stream);
    if (args->result) {
        const norm_launch final = {*args->config,
                                   *args->result,
                                   launch.sums,
                                   launch.first_chunk,
                                   (double *)args->workspace + count,
                                   chunks,
                                   count,
                                   args->order};
        HR_LAUNCH(norm_kernel, 1, FINAL_THREADS, 0, exec->stream, final);
    }
    return cuda_launch_status("hr_unscale_norm");
}
