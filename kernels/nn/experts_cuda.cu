/*
 * experts_cuda.cu: the grids between the products of experts. A block takes a row of a tile, 16 bytes
 * a thread and turn where addresses allow it. A block of the sort takes an expert and looks at all
 * rows, which the caches hold: nothing is counted by atomics, and the order of rows is theirs.
 */
#include "kernels/core/rows.cuh"
#include "kernels/nn/experts.h"

#define THREADS 128
#define SORTERS 256

/* ---- Routing --------------------------------------------------------------------------------- */

/* Block e counts the rows of experts up to e. */
static __global__ void __launch_bounds__(SORTERS)
    experts_count_kernel(const experts_route_args __grid_constant__ a)
{
    int64_t count = 0;
    for (int64_t row = threadIdx.x; row < a.rows; row += SORTERS)
        count += experts_of(&a, row) <= (int64_t)blockIdx.x;
    const double total = reduce_block<SORTERS>((double)count, reduce_add());
    if (threadIdx.x == 0) {
        a.offsets[blockIdx.x + 1] = (int32_t)total;
        if (blockIdx.x == 0)
            a.offsets[0] = 0;
    }
}

/* Block e writes the numbers of its rows, ascending; the last block those of no expert. */
static __global__ void __launch_bounds__(SORTERS)
    experts_place_kernel(const experts_route_args __grid_constant__ a)
{
    __shared__ int counts[SORTERS / 32];
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    int64_t base = a.offsets[blockIdx.x];
    for (int64_t first = 0; first < a.rows; first += SORTERS) {
        const int64_t row = first + threadIdx.x;
        const bool mine = row < a.rows && experts_of(&a, row) == (int64_t)blockIdx.x;
        const unsigned votes = __ballot_sync(0xFFFFFFFFu, mine);
        if (lane == 0)
            counts[warp] = __popc(votes);
        __syncthreads();
        int before = __popc(votes & ((1u << lane) - 1u)), total = 0;
#pragma unroll
        for (int w = 0; w < SORTERS / 32; w++) {
            before += w < warp ? counts[w] : 0;
            total += counts[w];
        }
        if (mine)
            a.order[base + before] = (int32_t)row;
        base += total;
        __syncthreads(); /* counts have been read */
    }
}

hr_status experts_route_cuda(const experts_route_args *args, const hr_exec *exec)
{
    const dim3 blocks((uint32_t)args->experts), and_none((uint32_t)args->experts + 1);
    HR_LAUNCH(experts_count_kernel, blocks, dim3(SORTERS), 0, exec->stream, *args);
    if (args->rows > 0)
        HR_LAUNCH(experts_place_kernel, and_none, dim3(SORTERS), 0, exec->stream, *args);
    return cuda_launch_status("hr_route");
}

/* ---- Rows of tokens -------------------------------------------------------------------------- */

typedef struct experts_gather_launch {
    experts_gather_args args;
    int32_t vectors; /* 16-byte accesses reach all of every row */
} experts_gather_launch;

static __global__ void __launch_bounds__(THREADS)
    experts_gather_kernel(const experts_gather_launch __grid_constant__ l)
{
    const experts_gather_args &a = l.args;
    const int64_t row = blockIdx.x;
    const char *const from = (const char *)a.from + experts_token(&a.tile, row) * a.from_pitch;
    char *const to = (char *)a.to + row * a.bytes;
    const int step = l.vectors ? 16 * THREADS : 2 * THREADS;
    for (int64_t j = (int64_t)(l.vectors ? 16 : 2) * threadIdx.x; j < a.bytes; j += step) {
        if (l.vectors)
            *(uint4 *)(to + j) = *(const uint4 *)(from + j);
        else
            *(uint16_t *)(to + j) = *(const uint16_t *)(from + j);
    }
}

hr_status experts_gather_cuda(const experts_gather_args *args, const hr_exec *exec)
{
    experts_gather_launch l;
    l.args = *args;
    l.vectors = ((uintptr_t)args->to | (uintptr_t)args->from | (uintptr_t)args->from_pitch |
                 (uintptr_t)args->bytes) %
                    16 ==
                0;
    HR_LAUNCH(experts_gather_kernel, dim3((uint32_t)args->tile.count), dim3(THREADS), 0,
              exec->stream, l);
    return cuda_launch_status("experts");
}

typedef struct experts_add_launch {
    experts_add_args args;
    int32_t vectors;
} experts_add_launch;

static __global__ void __launch_bounds__(THREADS)
    experts_add_kernel(const experts_add_launch __grid_constant__ l)
{
    const experts_add_args &a = l.args;
    const int64_t row = blockIdx.x, token = experts_token(&a.tile, row);
    if (row > 0 && experts_token(&a.tile, row - 1) == token)
        return; /* the first row of a token adds those behind it, too */
    float *const to = a.to + token * a.cols;
    for (int64_t j = 4 * threadIdx.x; j < a.cols; j += 4 * THREADS) {
        const int left = a.cols - j < 4 ? (int)(a.cols - j) : 4;
        const bool whole = l.vectors && left == 4;
        float sums[4], bias[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        pack_floats(pack_load<4>(to + j, 0, HR_F32, whole, left), HR_F32, sums);
        if (a.bias)
#pragma unroll
            for (int e = 0; e < 4; e++)
                bias[e] = e < left ? hr_load(a.bias, j + e, a.bias_dtype) : 0.0f;
        for (int64_t r = row; r < a.tile.count && experts_token(&a.tile, r) == token; r++) {
            const float w = a.weight ? hr_load(a.weight, a.tile.order[r], a.weight_dtype) : 1.0f;
            float x[4];
            pack_floats(pack_load<4>(a.from + r * a.cols + j, 0, HR_F32, whole, left), HR_F32, x);
#pragma unroll
            for (int e = 0; e < 4; e++)
                sums[e] = experts_added(sums[e], w, x[e], bias[e]);
        }
        pack_store(to + j, 0, HR_F32, whole, left, pack_of(sums, HR_F32));
    }
}

hr_status experts_add_cuda(const experts_add_args *args, const hr_exec *exec)
{
    experts_add_launch l;
    l.args = *args;
    l.vectors =
        ((uintptr_t)args->to | (uintptr_t)args->from | (uintptr_t)(4 * args->cols)) % 16 == 0;
    HR_LAUNCH(experts_add_kernel, dim3((uint32_t)args->tile.count), dim3(THREADS), 0, exec->stream,
              l);
    return cuda_launch_status("experts");
}

static hr_status runtime_status(cudaError_t error, const char *what)
{
    if (error == cudaSuccess)
        return HR_OK;
    (void)cudaGetLastError(); /* or the next launch would report it again */
    return hr_fail(HR_CUDA_ERROR, "%s failed: %s", what, cudaGetErrorString(error));
}

hr_status experts_zero_cuda(void *memory, size_t bytes, const hr_exec *exec)
{
    return runtime_status(cudaMemsetAsync(memory, 0, bytes, (cudaStream_t)exec->stream),
                          "writing zeros");
}

hr_status experts_capture_cuda(int *captured, const hr_exec *exec)
{
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t error = cudaStreamIsCapturing((cudaStream_t)exec->stream, &status);
    if (error != cudaSuccess)
        (void)cudaGetLastError(); /* what is run later says it again */
    *captured = error == cudaSuccess && status != cudaStreamCaptureStatusNone;
    return HR_OK;
}

/* ---- The activation -------------------------------------------------------------------------- */

typedef struct experts_activate_launch {
    experts_activate_args args;
    int32_t vectors; /* 16-byte accesses reach whole groups of all rows */
} experts_activate_launch;

template <hr_dtype dtype>
static __device__ __forceinline__ char *experts_element(const void *base, int64_t i)
{
    return (char *)base + i * (dtype == HR_F32 ? 4 : 2);
}

/* Where the two halves of a group of gate and up lie: elements `left[0]` and `left[1]` of each. */
template <int GROUP> struct experts_halves {
    int64_t at[2];
    int left[2];

    __device__ __forceinline__ experts_halves(const experts_activate_args &a, int64_t row,
                                              int64_t j, int n)
    {
        const int64_t width = a.unit.gated ? 2 * a.features : a.features;
        const bool between = a.unit.interleaved;
        at[0] = row * width + (between ? 2 * j : j);
        at[1] = between ? at[0] + GROUP : at[0] + a.features;
        const int both = 2 * n;
        left[0] = between ? (both < GROUP ? both : GROUP) : n;
        left[1] = !a.unit.gated ? 0 : between ? both - left[0] : n;
    }
};

/* The sum of dy * bias over a row, this thread's part of it. */
template <hr_dtype dtype>
static __device__ __forceinline__ double experts_bias_part(const experts_activate_args &a,
                                                           int64_t row, bool vectors)
{
    constexpr int GROUP = vector_of<dtype>;
    float sum = 0.0f;
    for (int64_t j = GROUP * threadIdx.x; j < a.hidden; j += GROUP * THREADS) {
        const int left = a.hidden - j < GROUP ? (int)(a.hidden - j) : GROUP;
        const bool whole = vectors && left == GROUP;
        float x[GROUP], y[GROUP];
        pack_floats(pack_load<GROUP>(experts_element<dtype>(a.dy, row * a.hidden + j), 0, dtype,
                                     whole, left),
                    dtype, x);
        pack_floats(pack_load<GROUP>(experts_element<dtype>(a.down_bias, j), 0, dtype, whole, left),
                    dtype, y);
#pragma unroll
        for (int e = 0; e < GROUP; e++)
            sum = fmaf(x[e], y[e], sum);
    }
    return (double)sum;
}

template <hr_activation A, bool BACKWARD, hr_dtype dtype>
static __device__ __forceinline__ void experts_row(const experts_activate_launch &l)
{
    constexpr int GROUP = vector_of<dtype>;
    const experts_activate_args &a = l.args;
    const int64_t row = blockIdx.x, number = BACKWARD ? a.tile.order[row] : 0;
    const float w = BACKWARD ? hr_load(a.weight, number, a.weight_dtype) : 1.0f;
    float sum = 0.0f;
    for (int64_t j = GROUP * threadIdx.x; j < a.features; j += GROUP * THREADS) {
        const int n = a.features - j < GROUP ? (int)(a.features - j) : GROUP;
        const bool whole = l.vectors && n == GROUP;
        const experts_halves<GROUP> halves(a, row, j, n);
        const int64_t inner = row * a.features + j;
        float both[2][GROUP], q[GROUP], kept[GROUP], h[GROUP], grads[2][GROUP];
#pragma unroll
        for (int k = 0; k < 2; k++)
            pack_floats(pack_load<GROUP>(experts_element<dtype>(a.gate_up, halves.at[k]), 0, dtype,
                                         whole && halves.left[k] == GROUP, halves.left[k]),
                        dtype, both[k]);
        if (BACKWARD)
            pack_floats(pack_load<GROUP>(a.q + inner, 0, HR_F32, whole, n), HR_F32, q);
        if (BACKWARD && a.h)
            pack_floats(pack_load<GROUP>(experts_element<dtype>(a.h, inner), 0, dtype, whole, n),
                        dtype, kept);
#pragma unroll
        for (int e = 0; e < GROUP; e++) {
            const float between[2] = {both[2 * e / GROUP][2 * e % GROUP],
                                      both[(2 * e + 1) / GROUP][(2 * e + 1) % GROUP]};
            const float gate = a.unit.interleaved ? between[0] : both[0][e];
            const float up = a.unit.interleaved ? between[1] : both[1][e];
            const experts_point at = experts_at(gate, up, &a.unit, A, a.unit.gated);
            h[e] = at.value;
            if (BACKWARD) {
                const float dh = w * q[e];
                const float dgate = glu_dgate(dh, at.dgate, A), dup = dh * at.dup;
                float *const first = &grads[2 * e / GROUP][2 * e % GROUP];
                float *const second = &grads[(2 * e + 1) / GROUP][(2 * e + 1) % GROUP];
                if (a.unit.interleaved) {
                    *first = dgate, *second = dup;
                } else {
                    grads[0][e] = dgate, grads[1][e] = dup;
                }
            }
        }
        const pack<GROUP> rounded = pack_of(h, dtype);
        if constexpr (BACKWARD) {
#pragma unroll
            for (int k = 0; k < 2; k++)
                if (halves.left[k] > 0)
                    pack_store(experts_element<dtype>(a.grads, halves.at[k]), 0, dtype,
                               whole && halves.left[k] == GROUP, halves.left[k],
                               pack_of(grads[k], dtype));
            pack_floats(rounded, dtype, h); /* as forward rounded it */
#pragma unroll
            for (int e = 0; e < GROUP; e++) {
                h[e] = a.h ? kept[e] : h[e];
                if (e < n)
                    sum = fmaf(h[e], q[e], sum);
                h[e] *= w;
            }
            if (a.weighted)
                pack_store(experts_element<dtype>(a.weighted, inner), 0, dtype, whole, n,
                           pack_of(h, dtype));
        } else {
            pack_store(experts_element<dtype>(a.h, inner), 0, dtype, whole, n, rounded);
        }
    }
    if (!BACKWARD || !a.dweight)
        return;
    double total = (double)sum;
    if (a.down_bias)
        total += experts_bias_part<dtype>(a, row, l.vectors);
    total = reduce_block<THREADS>(total, reduce_add());
    if (threadIdx.x == 0)
        hr_store(a.dweight, number, (float)total, a.weight_dtype);
}

template <hr_activation A, bool BACKWARD>
static __global__ void __launch_bounds__(THREADS)
    experts_activate_kernel(const experts_activate_launch __grid_constant__ l)
{
    FOR_DTYPE(l.args.dtype, D, (experts_row<A, BACKWARD, D>(l)))
}

static int is_vectorizable(const experts_activate_args *a)
{
    const uintptr_t size = a->dtype == HR_F32 ? 4 : 2;
    const void *const all[] = {a->gate_up, a->h, a->q, a->grads, a->weighted, a->dy, a->down_bias};
    uintptr_t bits = (uintptr_t)a->features * size;
    if (a->down_bias)
        bits |= (uintptr_t)a->hidden * size;
    for (const void *address : all)
        bits |= (uintptr_t)address;
    return bits % 16 == 0;
}

hr_status experts_activate_cuda(const experts_activate_args *args, const hr_exec *exec)
{
    experts_activate_launch l;
    l.args = *args;
    l.vectors = is_vectorizable(args);
    const dim3 grid((uint32_t)args->tile.count), block(THREADS);
    FOR_EXPERTS_ACTIVATION(
        args->unit.activation, A,
        if (args->q) {
            HR_LAUNCH((experts_activate_kernel<A, true>), grid, block, 0, exec->stream, l);
        } else { HR_LAUNCH((experts_activate_kernel<A, false>), grid, block, 0, exec->stream, l); })
    return cuda_launch_status("experts");
}

/* ---- The gradient of a bias ------------------------------------------------------------------ */

/* A thread takes a column, so that a warp's accesses to a row lie together. */
static __global__ void __launch_bounds__(THREADS)
    experts_bias_kernel(const experts_bias_args __grid_constant__ a)
{
    const int64_t j = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (j >= a.cols)
        return;
    double sum = 0.0;
    for (int64_t r = 0; r < a.tile.count; r++) {
        const float w = hr_load(a.weight, a.tile.order[r], a.weight_dtype);
        const void *const row = row_at(a.dy, experts_token(&a.tile, r), a.dtype);
        sum += (double)w * (double)hr_load(row, j, a.dtype);
    }
    hr_store(a.out, j, (float)sum, a.dtype);
}

hr_status experts_bias_cuda(const experts_bias_args *args, const hr_exec *exec)
{
    const dim3 grid((uint32_t)((args->cols + THREADS - 1) / THREADS));
    HR_LAUNCH(experts_bias_kernel, grid, dim3(THREADS), 0, exec->stream, *args);
    return cuda_launch_status("experts");
}
