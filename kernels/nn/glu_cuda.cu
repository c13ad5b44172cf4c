/*
 * glu_cuda.cu: the grids. A thread takes 16 bytes of every input in one access each, and stores when
 * all are read. A block takes part of a row, or several short rows; matrices
 * without gaps are one long row. What 16-byte accesses do not reach goes element by element.
 */
#include "kernels/core/rows.cuh"
#include "kernels/nn/glu.h"

#define THREADS 256

/* For 12.0 the compiler keeps a register on the stack, unless four blocks are to share a
 * multiprocessor. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#define GLU_BOUNDS __launch_bounds__(THREADS, 4)
#else
#define GLU_BOUNDS __launch_bounds__(THREADS)
#endif

typedef struct glu_launch {
    glu_args args;
    int64_t groups;  /* of a row */
    int32_t vectors; /* 16-byte accesses reach the groups of every row */
    int32_t one_row; /* blockIdx.x counts parts of the row, not rows */
} glu_launch;

/* The place of an element. */
static __device__ __forceinline__ void *glu_place(const hr_rows &rows, int64_t row, int64_t j,
                                                  hr_dtype dtype)
{
    return (char *)rows.data + (row * rows.stride + j) * (dtype == HR_F32 ? 4 : 2);
}

template <hr_activation A, bool BACKWARD, hr_dtype dtype>
static __device__ __forceinline__ void glu_group(const glu_args &a, int64_t row, int64_t group,
                                                 bool vectors)
{
    constexpr int GROUP = vector_of<dtype>;
    const int64_t j = group * GROUP;
    const int left = a.cols - j < GROUP ? (int)(a.cols - j) : GROUP;
    const bool whole = vectors && left == GROUP, has_up = a.up.data;
    const auto load = [&](const hr_rows &rows) {
        return pack_load<GROUP>(glu_place(rows, row, j, dtype), 0, dtype, whole, left);
    };
    const auto store = [&](const hr_rows &rows, const float(&x)[GROUP]) {
        pack_store(glu_place(rows, row, j, dtype), 0, dtype, whole, left, pack_of(x, dtype));
    };
    const pack<GROUP> gates = load(a.gate);
    pack<GROUP> ups{}, dhs{};
    if (has_up)
        ups = load(a.up);
    if (BACKWARD)
        dhs = load(a.dh);
    pack_all_loaded();
    float gate[GROUP], up[GROUP], dh[GROUP], h[GROUP], dgate[GROUP], dup[GROUP];
    pack_floats(gates, dtype, gate);
    pack_floats(ups, dtype, up);
    pack_floats(dhs, dtype, dh);
#pragma unroll
    for (int e = 0; e < GROUP; e++) {
        const glu_point point = glu_at(gate[e], A);
        h[e] = has_up ? point.value * up[e] : point.value;
        dup[e] = dh[e] * point.value;
        dgate[e] = glu_dgate(has_up ? dh[e] * up[e] : dh[e], point.slope, A);
    }
    if (!BACKWARD || a.h.data)
        store(a.h, h);
    if (BACKWARD) {
        store(a.dgate, dgate);
        if (has_up)
            store(a.dup, dup);
    }
}

template <hr_activation A, bool BACKWARD, hr_dtype dtype>
static __device__ __forceinline__ void glu_groups(const glu_launch &l, int64_t row, int64_t first,
                                                  int64_t step)
{
    for (int64_t group = first; group < l.groups; group += step)
        glu_group<A, BACKWARD, dtype>(l.args, row, group, l.vectors);
}

template <hr_activation A, bool BACKWARD>
static __global__ void GLU_BOUNDS glu_kernel(const glu_launch __grid_constant__ l)
{
    const int64_t row = l.one_row ? 0 : (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    const int64_t first = (int64_t)(l.one_row ? blockIdx.x : blockIdx.y) * blockDim.x + threadIdx.x;
    const int64_t step = (int64_t)(l.one_row ? gridDim.x : gridDim.y) * blockDim.x;
    if (row >= l.args.rows)
        return;
    FOR_DTYPE(l.args.dtype, D, (glu_groups<A, BACKWARD, D>(l, row, first, step)))
}

static int is_vectorizable(const glu_args *a)
{
    const uintptr_t bytes = a->dtype == HR_F32 ? 4 : 2;
    uintptr_t bits = 0;
    const hr_rows *const all[] = {&a->gate, &a->up, &a->dh, &a->h, &a->dgate, &a->dup};
    for (const hr_rows *rows : all)
        if (rows->data)
            bits |= (uintptr_t)rows->data | (a->rows > 1 ? (uintptr_t)rows->stride * bytes : 0);
    return bits % 16 == 0;
}

hr_status glu_cuda(const glu_args *args, const hr_exec *exec)
{
    const char *const function = args->dh.data ? "hr_glu_backward" : "hr_glu_forward";
    glu_launch l;
    l.args = *args;
    const int64_t group = args->dtype == HR_F32 ? vector_of<HR_F32> : vector_of<HR_BF16>;
    l.groups = (args->cols + group - 1) / group;
    l.vectors = is_vectorizable(args);
    l.one_row = args->rows == 1;
    const int64_t width = l.groups < THREADS ? l.groups : THREADS, height = THREADS / width;
    const int64_t parts = (l.groups + width - 1) / width;
    const int64_t stacks = (args->rows + height - 1) / height;
    if (stacks > INT32_MAX)
        return hr_fail(HR_UNSUPPORTED, "%s: rows is more than a grid of CUDA can take", function);
    const dim3 block((uint32_t)width, l.one_row ? 1 : (uint32_t)height);
    const dim3 grid(l.one_row ? (uint32_t)(parts < INT32_MAX ? parts : INT32_MAX)
                              : (uint32_t)stacks,
                    l.one_row ? 1 : (uint32_t)(parts < 65535 ? parts : 65535));
    FOR_ACTIVATION(
        args->activation, A,
        if (args->dh.data) {
            HR_LAUNCH((glu_kernel<A, true>), grid, block, 0, exec->stream, l);
        } else { HR_LAUNCH((glu_kernel<A, false>), grid, block, 0, exec->stream, l); })
    return cuda_launch_status(function);
}
