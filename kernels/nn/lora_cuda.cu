/*
 * lora_cuda.cu: the grid. A thread takes eight consecutive elements, which share 128 random bits, in
 * one access; a block takes part of a row, or several short rows. What 16-byte accesses do not reach
 * goes element by element.
 */
#include "kernels/core/rows.cuh"
#include "kernels/nn/lora.h"

#define THREADS 256
#define GROUP   LORA_GROUP

typedef struct lora_launch {
    lora_rows_args args;
    int64_t groups;  /* of a row */
    int32_t vectors; /* 16-byte accesses reach the groups of every row */
} lora_launch;

/* With DROPS elements keep their type; else they are rounded from f32. */
template <bool DROPS>
static __device__ __forceinline__ void lora_group(const lora_launch &l, int64_t row, int64_t group,
                                                  uint64_t seed, hr_dtype out_dtype)
{
    const lora_rows_args &a = l.args;
    const hr_dtype dtype = DROPS ? out_dtype : HR_F32;
    const int64_t j = group * GROUP;
    const int left = a.cols - j < GROUP ? (int)(a.cols - j) : GROUP;
    const bool whole = l.vectors && left == GROUP;
    float x[GROUP];
    pack_floats(
        pack_load<GROUP>((const char *)a.x.data + (row * a.x.stride + j) * hr_element_size(dtype),
                         0, dtype, whole, left),
        dtype, x);
    if (DROPS) {
        const hr_random4 random = hr_philox(lora_counter(a.row + row, a.col / GROUP + group), seed);
#pragma unroll
        for (int e = 0; e < GROUP; e++)
            x[e] = lora_keeps(random.word[e / 2], e, a.threshold) ? x[e] : 0.0f;
    }
    pack_store((char *)a.out.data + (row * a.out.stride + j) * hr_element_size(out_dtype), 0,
               out_dtype, whole, left, pack_of(x, out_dtype));
}

template <bool DROPS>
static __global__ void __launch_bounds__(THREADS)
    lora_rows_kernel(const lora_launch __grid_constant__ l)
{
    const lora_rows_args &a = l.args;
    const int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    const int64_t first = (int64_t)blockIdx.y * blockDim.x + threadIdx.x;
    const int64_t step = (int64_t)gridDim.y * blockDim.x;
    if (row >= a.rows)
        return;
    const uint64_t seed = DROPS ? (uint64_t)*a.seed : 0;
    const auto run = [&](hr_dtype out_dtype) {
        for (int64_t group = first; group < l.groups; group += step)
            lora_group<DROPS>(l, row, group, seed, out_dtype);
    };
    if (DROPS && a.out_dtype == HR_F32)
        run(HR_F32);
    else if (a.out_dtype == HR_BF16)
        run(HR_BF16);
    else
        run(HR_F16);
}

hr_status lora_rows_cuda(const lora_rows_args *args, const hr_exec *exec)
{
    uintptr_t bits = (uintptr_t)args->x.data | (uintptr_t)args->out.data;
    if (args->rows > 1)
        bits |= (uintptr_t)args->x.stride * (uintptr_t)hr_element_size(lora_dtype(args)) |
                (uintptr_t)args->out.stride * (uintptr_t)hr_element_size(args->out_dtype);
    lora_launch l;
    l.args = *args;
    l.groups = (args->cols + GROUP - 1) / GROUP;
    l.vectors = bits % 16 == 0;
    const int64_t width = l.groups < THREADS ? l.groups : THREADS, height = THREADS / width;
    const int64_t parts = (l.groups + width - 1) / width;
    const int64_t stacks = (args->rows + height - 1) / height;
    if (stacks > INT32_MAX)
        return hr_fail(HR_UNSUPPORTED,
                       "hr_lora: a matrix has more rows than a grid of CUDA can take");
    const dim3 grid((uint32_t)stacks, (uint32_t)(parts < 65535 ? parts : 65535));
    const dim3 block((uint32_t)width, (uint32_t)height);
    if (args->threshold)
        HR_LAUNCH(lora_rows_kernel<true>, grid, block, 0, exec->stream, l);
    else
        HR_LAUNCH(lora_rows_kernel<false>, grid, block, 0, exec->stream, l);
    return cuda_launch_status("hr_lora");
}

/* ---- Norms ----------------------------------------------------------------------------------- */

#define WARPS (THREADS / 32)

typedef struct norms_launch {
    lora_norms_args args;
    int32_t vectors; /* 16-byte accesses reach the groups of every row of W */
} norms_launch;

/* A warp takes a row. */
static __device__ __forceinline__ void norms_row(const norms_launch &l, int64_t i, hr_dtype dtype)
{
    const lora_norms_args &a = l.args;
    const int lane = (int)threadIdx.x % 32;
    const char *const row = (const char *)a.w.data + i * a.w.stride * hr_element_size(dtype);
    float square = 0.0f;
    for (int64_t j = lane * GROUP; j < a.cols; j += 32 * GROUP) {
        const int left = a.cols - j < GROUP ? (int)(a.cols - j) : GROUP;
        float x[GROUP];
        pack_floats(pack_load<GROUP>(row + j * hr_element_size(dtype), 0, dtype,
                                     l.vectors && left == GROUP, left),
                    dtype, x);
#pragma unroll
        for (int e = 0; e < GROUP; e++)
            square = fmaf(x[e], x[e], square);
    }
    double total = square;
    for (int64_t k = lane; k < a.rank; k += 32)
        total += lora_norm_term(&a, i, k, dtype);
    total = row_total<32>(total);
    if (lane == 0)
        a.norms[i] = lora_norm(total);
}

static __global__ void __launch_bounds__(THREADS)
    lora_norms_kernel(const norms_launch __grid_constant__ l)
{
    const int64_t i = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (i < l.args.rows)
        FOR_DTYPE(l.args.dtype, D, norms_row(l, i, D))
}

hr_status lora_norms_cuda(const lora_norms_args *args, const hr_exec *exec)
{
    norms_launch l;
    l.args = *args;
    l.vectors = ((uintptr_t)args->w.data |
                 (uintptr_t)args->w.stride * (uintptr_t)hr_element_size(args->dtype)) %
                    16 ==
                0;
    const int64_t blocks = (args->rows + WARPS - 1) / WARPS;
    if (blocks > INT32_MAX)
        return hr_fail(HR_UNSUPPORTED,
                       "hr_lora_norms: a matrix has more rows than a grid of CUDA can take");
    HR_LAUNCH(lora_norms_kernel, (uint32_t)blocks, THREADS, 0, exec->stream, l);
    return cuda_launch_status("hr_lora_norms");
}
