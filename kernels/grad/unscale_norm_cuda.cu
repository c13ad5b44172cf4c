/*
 * unscale_norm_cuda.cu: the grid. One launch per list reads (and, if asked, writes) every gradient
 * and leaves a sum per chunk and the first chunk of each tensor in the workspace. A second adds up
 * the chunks, a block per tensor, and a third, of one block, the tensors.
 *
 * The loop over 2-norms has an instance for each dtype, chosen once per block. A group is 8 elements
 * of each thread; the loads of several groups are in flight before the first is used.
 */
#include <limits.h>

#include "kernels/core/list.cuh"
#include "kernels/core/pack.cuh"
#include "kernels/core/reduce.cuh"
#include "kernels/grad/unscale_norm.h"

#define THREADS        256
#define TENSOR_THREADS 512
#define TOTAL_THREADS  512
#define GROUP          (8 * THREADS) /* elements of a block */

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

/* ---- The sum of the squares of a chunk -------------------------------------------------------- */

/* Of eight numbers, in binary32, because many GPUs have one binary64 unit per 64 of binary32. Each
 * passes 4 roundings on its way up the tree, which is at most 2 units in the last place of a norm.
 */
static __device__ __forceinline__ float narrow_sum_of_squares(const float (&x)[8])
{
    float pairs[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
        pairs[j] = fmaf(x[j + 4], x[j + 4], x[j] * x[j]);
    return (pairs[0] + pairs[1]) + (pairs[2] + pairs[3]);
}

/* Whether no square overflowed, and none that matters underflowed. Not if there is a NaN. */
static __device__ __forceinline__ bool narrow_is_right(float sum)
{
    return sum > 0x1p-80f && sum < 0x1p124f;
}

static __device__ __forceinline__ double sum_of_squares(const float (&x)[8])
{
    const float narrow = narrow_sum_of_squares(x);
    if (narrow_is_right(narrow))
        return (double)narrow;
    double wide = 0.0;
#pragma unroll
    for (int j = 0; j < 8; j++)
        wide += (double)x[j] * (double)x[j];
    return wide;
}

/* The thread's eight of the group that begins at `i`: side by side, or of binary32 two runs of four,
 * so that every access of a warp is one run of memory. */
template <hr_dtype dtype>
static __device__ __forceinline__ pack<8> load_group(const void *base, int i)
{
    if constexpr (dtype == HR_F32) {
        const uint4 *const vectors = (const uint4 *)((const float *)base + i) + threadIdx.x;
        pack<8> p;
        p.low = vectors[0];
        p.high = vectors[THREADS];
        return p;
    } else {
        return pack_load<8>(base, i + (int)threadIdx.x * 8, dtype);
    }
}

template <hr_dtype dtype>
static __device__ __forceinline__ void store_group(void *base, int i, const float (&x)[8])
{
    const pack<8> p = pack_of(x, dtype);
    if constexpr (dtype == HR_F32) {
        uint4 *const vectors = (uint4 *)((float *)base + i) + threadIdx.x;
        __stcs(vectors, p.low);
        __stcs(vectors + THREADS, p.high);
    } else {
        pack_store(base, i + (int)threadIdx.x * 8, p, dtype);
    }
}

template <hr_dtype dtype>
static __device__ __forceinline__ void unscale(float (&x)[8], const pack<8> &grads, float factor)
{
#pragma unroll
    for (int j = 0; j < 8; j++)
        x[j] = pack_get(grads, j, dtype) * factor;
}

/* Whether all are 0 or -0: their sum is right then, and gradients of embeddings are full of them. */
template <hr_dtype dtype> static __device__ __forceinline__ bool is_zero(const pack<8> &p)
{
    const uint32_t all =
        (p.low.x | p.low.y) | (p.low.z | p.low.w) | (p.high.x | p.high.y) | (p.high.z | p.high.w);
    return (all & (dtype == HR_F32 ? 0x7FFFFFFFu : 0x7FFF7FFFu)) == 0;
}

/* The squares of `count` groups from element `i` on, and their place in memory if `write`. */
template <hr_dtype dtype, bool write, int count>
static __device__ __forceinline__ double squares_of_groups(void *base, int i, float factor)
{
    pack<8> grads[count];
    float x[8], narrow[count];
    bool right = true;
#pragma unroll
    for (int k = 0; k < count; k++)
        grads[k] = load_group<dtype>(base, i + k * GROUP);
#pragma unroll
    for (int k = 0; k < count; k++) {
        unscale<dtype>(x, grads[k], factor);
        narrow[k] = narrow_sum_of_squares(x);
        right = right && (narrow_is_right(narrow[k]) || is_zero<dtype>(grads[k]));
    }
    double sum = 0.0;
#pragma unroll
    for (int k = 0; k < count; k++)
        sum += (double)narrow[k];
    if (!right) { /* read again, because several groups at once would take too many registers */
        sum = 0.0;
#pragma unroll 1
        for (int k = 0; k < count; k++) {
            unscale<dtype>(x, load_group<dtype>(base, i + k * GROUP), factor);
            sum += sum_of_squares(x);
        }
    }
    if constexpr (write) {
#pragma unroll
        for (int k = 0; k < count; k++) {
            unscale<dtype>(x, grads[k], factor);
            store_group<dtype>(base, i + k * GROUP, x);
        }
    }
    return sum;
}

/* The thread's part of the sum over the `count` elements at `base`. */
template <hr_dtype dtype, bool write>
static __device__ __forceinline__ double squares_of_chunk(void *base, int count, float factor)
{
    constexpr int in_flight = write ? 2 : 4; /* groups */
    double sum = 0.0;
    const bool aligned = (uintptr_t)base % 16 == 0;
    const int groups = aligned ? count / GROUP : 0;
    int k = 0;
#pragma unroll 1
    for (; k + in_flight <= groups; k += in_flight)
        sum += squares_of_groups<dtype, write, in_flight>(base, k * GROUP, factor);
#pragma unroll 1
    for (; k < groups; k++)
        sum += squares_of_groups<dtype, write, 1>(base, k * GROUP, factor);
    /* Less than a group: eight at once where they are there, then the last few elements. */
    const int eights = aligned ? count / 8 * 8 : 0, i = groups * GROUP + (int)threadIdx.x * 8;
    if (i < eights) {
        float x[8];
        unscale<dtype>(x, pack_load<8>(base, i, dtype), factor);
        if (write)
            pack_store(base, i, pack_of(x, dtype), dtype);
        sum += sum_of_squares(x);
    }
#pragma unroll 1
    for (int j = eights + (int)threadIdx.x; j < count; j += THREADS) {
        const float x = hr_load(base, j, dtype) * factor;
        if (write)
            hr_store(base, j, x, dtype);
        sum += (double)x * (double)x;
    }
    return sum;
}

template <bool write>
static __device__ __forceinline__ double squares_of(void *base, int count, float factor,
                                                    hr_dtype dtype)
{
    switch (dtype) {
    case HR_BF16:
        return squares_of_chunk<HR_BF16, write>(base, count, factor);
    case HR_F16:
        return squares_of_chunk<HR_F16, write>(base, count, factor);
    default:
        return squares_of_chunk<HR_F32, write>(base, count, factor);
    }
}

/* ---- Any order ------------------------------------------------------------------------------- */

static __device__ __forceinline__ double terms_of(const unscale_shared &args, void *base, int count,
                                                  float factor, hr_dtype dtype, bool write)
{
    double sum = 0.0;
    const int vector_end = (uintptr_t)base % 16 == 0 ? count / 8 * 8 : 0;
#pragma unroll 1
    for (int i = (int)threadIdx.x * 8; i < vector_end; i += THREADS * 8) {
        const pack<8> grads = pack_load<8>(base, i, dtype);
        float x[8];
#pragma unroll
        for (int j = 0; j < 8; j++)
            x[j] = pack_get(grads, j, dtype) * factor;
        if (write)
            pack_store(base, i, pack_of(x, dtype), dtype);
        for (int j = 0; j < 8; j++)
            sum = norm_combine(sum, norm_term(x[j], args.order, args.config.p), args.order);
    }
#pragma unroll 1
    for (int i = vector_end + (int)threadIdx.x; i < count; i += THREADS) {
        const float x = hr_load(base, i, dtype) * factor;
        if (write)
            hr_store(base, i, x, dtype);
        sum = norm_combine(sum, norm_term(x, args.order, args.config.p), args.order);
    }
    return sum;
}

/* ---- The kernels ----------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(THREADS, 4)
    unscale_norm_kernel(const unscale_launch __grid_constant__ args)
{
    const grad_record &t = args.tensors[list_find(args.tensors, args.count, blockIdx.x)];
    const float factor = unscale_factor(&args.config);
    const bool write = args.config.write && factor != 1.0f;
    if (!args.sums && !write)
        return;
    const hr_dtype dtype = (hr_dtype)t.dtype;
    const int64_t begin = list_begin(t);
    const int count = (int)(list_end(t, begin) - begin);
    void *const base = (char *)t.grad + begin * (dtype == HR_F32 ? 4 : 2);
    double sum;
    if (args.order != NORM_2)
        sum = terms_of(args, base, count, factor, dtype, write);
    else if (write)
        sum = squares_of<true>(base, count, factor, dtype);
    else
        sum = squares_of<false>(base, count, factor, dtype);
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

/* A block per tensor. */
static __global__ void __launch_bounds__(TENSOR_THREADS)
    tensor_sums_kernel(const norm_launch __grid_constant__ args)
{
    const int64_t k = blockIdx.x;
    const int64_t end = k + 1 < args.count ? args.first_chunk[k + 1] : args.chunks;
    double sum = 0.0;
#pragma unroll 4
    for (int64_t c = args.first_chunk[k] + threadIdx.x; c < end; c += TENSOR_THREADS)
        sum = norm_combine(sum, args.sums[c], args.order);
    sum = reduce_block<TENSOR_THREADS>(sum, reduce_norm{args.order});
    if (threadIdx.x != 0)
        return;
    args.tensor_sums[k] = sum;
    if (args.result.norms)
        hr_store(args.result.norms, k, (float)norm_of(sum, args.order, args.config.p), HR_F32);
}

static __global__ void __launch_bounds__(TOTAL_THREADS)
    norm_kernel(const norm_launch __grid_constant__ args)
{
    __shared__ long long culprit;
    if (threadIdx.x == 0)
        culprit = LLONG_MAX;
    __syncthreads();
    double total = 0.0;
#pragma unroll 4
    for (int64_t k = threadIdx.x; k < args.count; k += TOTAL_THREADS) {
        const double sum = args.tensor_sums[k];
        total = norm_combine(total, sum, args.order);
        if (!isfinite(sum))
            atomicMin(&culprit, (long long)k);
    }
    total = reduce_block<TOTAL_THREADS>(total, reduce_norm{args.order});
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
        if (count > 0)
            HR_LAUNCH(tensor_sums_kernel, (uint32_t)count, TENSOR_THREADS, 0, exec->stream, final);
        HR_LAUNCH(norm_kernel, 1, TOTAL_THREADS, 0, exec->stream, final);
        return cuda_launch_status("hr_unscale_norm");
    }
    return status;
}
