/*
 * quantize_matrix_cuda.cu: the grids of hr_quantize_matrix and hr_dequantize_matrix. A thread takes 8
 * elements at a time, so that a warp's accesses are contiguous, of 16 bytes to a matrix of 16 bits.
 */
#include "kernels/core/reduce.cuh"
#include "kernels/core/rows.cuh"
#include "kernels/quant/quantize_blocks.cuh"
#include "kernels/quant/quantize_matrix.cuh"

#define THREADS 256
#define GROUP   8 /* elements that a thread has at a time */

/* ---- Quantizing ------------------------------------------------------------------------------ */

typedef struct quantize_matrix_grid {
    quantize_matrix_args args;
    int64_t blocks, size; /* how many have a scale, of how many elements: blocks, or rows */
    int width;            /* threads that take a block: a power of two, at most a warp */
} quantize_matrix_grid;

/* Calls visit(k, x) for each group of N elements of a thread, with zeros after the last element: it
 * begins at element k of the block that begins at `begin`, of `count` elements. */
template <int N, typename Visit>
static __device__ __forceinline__ void visit_block(const quantize_matrix_grid &g, int64_t begin,
                                                   int64_t count, Visit visit)
{
    const quantize_matrix_args &a = g.args;
    const int lane = (int)threadIdx.x & (g.width - 1);
#pragma unroll 1
    for (int64_t k = lane * N; k < count; k += g.width * N) {
        float x[N];
        if constexpr (N == GROUP) {
            pack_floats(pack_load<GROUP>(a.x.data, begin + k, a.dtype), a.dtype, x);
        } else {
            const int64_t cols = a.matrix.cols, row = (begin + k) / cols;
            const int64_t left = cols - (begin + k - row * cols); /* elements of the row */
            const int64_t at = row * a.x.stride + cols - left;
#pragma unroll
            for (int e = 0; e < N; e++) {
                const int64_t gap = e < left ? 0 : a.x.stride - cols;
                x[e] = k + e < count ? hr_load(a.x.data, at + e + gap, a.dtype) : 0.0f;
            }
        }
        visit(k, x);
    }
}

/* The sum, or the largest, of all threads of a block, in each. */
template <typename T, typename Join>
static __device__ __forceinline__ T joined(const quantize_matrix_grid &g, T x, Join join)
{
    for (int width = g.width / 2; width > 0; width /= 2)
        x = join(x, __shfl_xor_sync(0xFFFFFFFFu, x, width));
    return x;
}

template <hr_format format, int N>
static __device__ __forceinline__ float best_multiple(const quantize_matrix_grid &g, int64_t begin,
                                                      int64_t count, matrix_scale scale)
{
    int32_t least = INT32_MAX;
    float best = 1.0f;
#pragma unroll 1
    for (int trial = -1; trial < MATRIX_TRIALS; trial++) {
        const float multiple = matrix_multiple(trial);
        uint32_t total = 0; // of a block that is not searched, it may be anything
        visit_block<N>(g, begin, count, [&](int64_t, const float(&x)[N]) {
#pragma unroll
            for (int e = 0; e < N; e++)
                total +=
                    (uint32_t)matrix_error(x[e] * scale.first * scale.second, multiple, format);
        });
        const int32_t sum = (int32_t)joined(g, total, [](uint32_t a, uint32_t b) { return a + b; });
        best = sum < least ? multiple : best;
        least = sum < least ? sum : least;
    }
    return best;
}

/* N: GROUP, or 2 where x has gaps or a block does not begin at a multiple of 16 bytes; a division of
 * 64 bits then needs the registers of four blocks to a multiprocessor. */
template <hr_format format, int N>
static __global__ void __launch_bounds__(THREADS, 4)
    quantize_matrix_kernel(const quantize_matrix_grid __grid_constant__ g)
{
    const hr_matrix &m = g.args.matrix;
    const int64_t b = (int64_t)blockIdx.x * (THREADS / g.width) + threadIdx.x / g.width;
    const int64_t begin = b * g.size, rest = m.rows * m.cols - begin;
    const int64_t count = rest < 0 ? 0 : rest < g.size ? rest : g.size; /* 0: past the last block */
    uint32_t largest = 0;
    visit_block<N>(g, begin, count, [&](int64_t, const float(&x)[N]) {
#pragma unroll
        for (int e = 0; e < N; e++)
            largest = max(largest, matrix_magnitude(x[e]));
    });
    largest = joined(g, largest, [](uint32_t a, uint32_t b) { return max(a, b); });
    float absmax = matrix_absmax_of(largest);
    matrix_scale scale = matrix_scale_of(absmax, format);
    if constexpr (format != HR_INT8_ROWS)
        if (g.args.search) { /* by all threads of a warp, because they exchange sums */
            const float multiple = best_multiple<format, N>(g, begin, count, scale);
            absmax *= matrix_can_search(absmax) ? multiple : 1.0f;
            scale = matrix_scale_of(absmax, format);
        }
    if (count > 0 && (threadIdx.x & (g.width - 1)) == 0)
        m.absmax[b] = absmax;
    visit_block<N>(g, begin, count, [&](int64_t k, const float(&x)[N]) {
        constexpr bool bytes = format == HR_INT8_ROWS;
        uint32_t words[2] = {0, 0};
#pragma unroll
        for (int e = 0; e < N; e++) {
            const uint32_t code = (uint32_t)matrix_encode(x[e], scale, format);
            const int bit = bytes ? 8 * e : 8 * (e / 2) + 4 * (1 - e % 2);
            words[bit / 32] |= code << (bit % 32);
        }
        uint8_t *const codes = (uint8_t *)m.data + (begin + k) / (bytes ? 1 : 2);
        if constexpr (N == GROUP && bytes) {
            *(uint2 *)codes = make_uint2(words[0], words[1]);
        } else if constexpr (N == GROUP) {
            *(uint32_t *)codes = words[0];
        } else {
            codes[0] = (uint8_t)words[0];
            if (bytes && k + 1 < count)
                codes[1] = (uint8_t)(words[0] >> 8);
        }
    });
}

/* The mean of all absmax, by one block of MATRIX_SUMS threads. */
static __global__ void __launch_bounds__(MATRIX_SUMS)
    matrix_mean_kernel(float *mean, const float *absmax, int64_t n)
{
    double sum = 0.0;
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < n; i += MATRIX_SUMS)
        sum += absmax[i];
    sum = reduce_block<MATRIX_SUMS>(sum, reduce_add());
    if (threadIdx.x == 0)
        hr_store(mean, 0, (float)(sum / (double)n), HR_F32); // every NaN as the same
}

static __global__ void __launch_bounds__(THREADS)
    matrix_subtract_kernel(float *absmax, const float *offset, int64_t n)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < n)
        hr_store(absmax, i, absmax[i] - *offset, HR_F32);
}

hr_status quantize_matrix_cuda(const quantize_matrix_args *args, const hr_exec *exec)
{
    const hr_matrix *const m = &args->matrix;
    const bool rows = m->format == HR_INT8_ROWS;
    const int64_t size = rows ? m->cols : m->block_size;
    const bool dense = m->rows == 1 || args->x.stride == m->cols;
    const bool vectors = dense && (m->rows * m->cols | size) % GROUP == 0 &&
                         ((uintptr_t)args->x.data % 16 | (uintptr_t)m->data % (rows ? 8 : 4)) == 0;
    quantize_matrix_grid g = {
        .args = *args, .blocks = rows ? m->rows : matrix_blocks(m), .size = size, .width = 1};
    while (g.width < 32 && g.width * (vectors ? GROUP : 2) < size)
        g.width *= 2;
    const int64_t grid = (g.blocks + THREADS / g.width - 1) / (THREADS / g.width);
    if (grid > INT32_MAX)
        return hr_fail(HR_UNSUPPORTED, "hr_quantize_matrix: the matrix has more blocks than a grid "
                                       "of CUDA can take");
    const auto kernel_for = [&](auto *by_group, auto *by_two) {
        return vectors ? by_group : by_two;
    };
    const auto kernel =
        rows ? kernel_for(quantize_matrix_kernel<HR_INT8_ROWS, GROUP>,
                          quantize_matrix_kernel<HR_INT8_ROWS, 2>)
        : m->format == HR_NF4
            ? kernel_for(quantize_matrix_kernel<HR_NF4, GROUP>, quantize_matrix_kernel<HR_NF4, 2>)
            : kernel_for(quantize_matrix_kernel<HR_FP4, GROUP>, quantize_matrix_kernel<HR_FP4, 2>);
    HR_LAUNCH(kernel, (uint32_t)grid, THREADS, 0, exec->stream, g);
    if (m->absmax_codes) {
        const uint32_t threads = (uint32_t)((g.blocks + THREADS - 1) / THREADS);
        HR_LAUNCH(matrix_mean_kernel, 1, MATRIX_SUMS, 0, exec->stream, m->offset, m->absmax,
                  g.blocks);
        HR_LAUNCH(matrix_subtract_kernel, threads, THREADS, 0, exec->stream, m->absmax, m->offset,
                  g.blocks);
    }
    return cuda_launch_status("hr_quantize_matrix");
}

/* ---- Decoding -------------------------------------------------------------------------------- */

#define TURN 4 /* groups of a thread in flight */

typedef struct dequantize_matrix_grid {
    dequantize_matrix_args args;
    int shift; /* of an element's number, which gives its block */
    int width; /* threads that are side by side in a row: a power of two */
} dequantize_matrix_grid;

template <bool all> struct turn_is_whole {
    static constexpr bool whole = all;
};

/* Calls body(turn, r, c) for the rows of the rectangle that a thread has; c is the first of its
 * columns. turn.whole: there are all of a turn. */
template <int elements, typename Body>
static __device__ __forceinline__ void visit_rows(const dequantize_matrix_grid &g, Body body)
{
    const int lane = (int)threadIdx.x & (g.width - 1), teams = THREADS / g.width;
    const int64_t c = ((int64_t)blockIdx.x * TURN * g.width + lane) * elements;
    const int64_t team = (int64_t)blockIdx.y * teams + (int)threadIdx.x / g.width;
#pragma unroll 1
    for (int64_t r = team; r < g.args.rows; r += (int64_t)gridDim.y * teams)
        if (c + (TURN - 1) * g.width * elements < g.args.cols)
            body(turn_is_whole<true>(), r, c);
        else
            body(turn_is_whole<false>(), r, c);
}

/* What gives a block its scale. */
enum matrix_scales { PLAIN, NESTED, POWERS };

template <int N, matrix_scales kind>
static __device__ __forceinline__ void decode_4_bits(const dequantize_matrix_grid &g,
                                                     const matrix_tables &tables, float offset,
                                                     hr_dtype dtype)
{
    const dequantize_matrix_args &a = g.args;
    const hr_matrix &m = a.matrix;
    visit_rows<N>(g, [&](auto turn, int64_t r, int64_t c) {
        const int64_t i = (a.row + r) * m.cols + a.col + c;
        uint32_t codes[TURN], quantized[TURN];
        float scales[TURN];
#pragma unroll
        for (int t = 0; t < TURN; t++) {
            const int64_t at = t * g.width * N, b = (i + at) >> g.shift;
            if (!turn.whole && c + at >= a.cols)
                continue;
            if constexpr (N == GROUP)
                codes[t] = *(const uint32_t *)((const uint8_t *)m.data + (i + at) / 2);
            else
                codes[t] =
                    ((const uint8_t *)m.data)[(i + at) / 2] >> matrix_shift(i + at, kind == POWERS);
            if constexpr (kind != PLAIN)
                quantized[t] = m.absmax_codes[b];
            if constexpr (kind == NESTED)
                scales[t] = m.absmax_scales[b / MATRIX_SCALES];
            else if constexpr (kind == PLAIN)
                scales[t] = m.absmax[b];
        }
        pack_all_loaded();
        void *const out = row_at(a.out, r, dtype);
#pragma unroll
        for (int t = 0; t < TURN; t++) {
            const int64_t at = t * g.width * N;
            if (!turn.whole && c + at >= a.cols)
                continue;
            const float absmax = kind == POWERS ? matrix_power(quantized[t])
                                 : kind == NESTED
                                     ? matrix_nested(tables.map[quantized[t]], scales[t], offset)
                                     : scales[t];
            float x[N];
#pragma unroll
            for (int e = 0; e < N; e++) {
                const int bit = N == 1 ? 0 : 8 * (e / 2) + matrix_shift(e, kind == POWERS);
                x[e] = tables.values[(codes[t] >> bit) & 15u] * absmax;
            }
            few_store<N>(out, c + at, x, dtype);
        }
    });
}

template <int N>
static __device__ __forceinline__ void decode_8_bits(const dequantize_matrix_grid &g,
                                                     hr_dtype dtype)
{
    const dequantize_matrix_args &a = g.args;
    const hr_matrix &m = a.matrix;
    visit_rows<N>(g, [&](auto turn, int64_t r, int64_t c) {
        const int8_t *const from = (const int8_t *)m.data + (a.row + r) * m.cols + a.col + c;
        const float absmax = m.absmax[a.row + r];
        uint2 codes[TURN];
#pragma unroll
        for (int t = 0; t < TURN; t++) {
            const int64_t at = t * g.width * N;
            if (!turn.whole && c + at >= a.cols)
                continue;
            if constexpr (N == GROUP)
                codes[t] = *(const uint2 *)(from + at);
            else
                codes[t].x = (uint8_t)from[at];
        }
        pack_all_loaded();
        void *const out = row_at(a.out, r, dtype);
#pragma unroll
        for (int t = 0; t < TURN; t++) {
            const int64_t at = t * g.width * N;
            if (!turn.whole && c + at >= a.cols)
                continue;
            const uint32_t words[2] = {codes[t].x, codes[t].y};
            float x[N];
#pragma unroll
            for (int e = 0; e < N; e++)
                x[e] = (float)(int8_t)(words[e / 4] >> (8 * (e % 4))) * absmax * MATRIX_INT8_UNIT;
            few_store<N>(out, c + at, x, dtype);
        }
    });
}

/* Runs body(dtype) with a literal, if elements go in packs: one by one, their type is looked at for
 * each. */
template <int N, typename Body>
static __device__ __forceinline__ void for_dtype(hr_dtype dtype, Body body)
{
    if (N == 1)
        body(dtype);
    else
        FOR_DTYPE(dtype, D, body(D))
}

template <int N>
static __global__ void __launch_bounds__(THREADS)
    dequantize_matrix_kernel(const dequantize_matrix_grid __grid_constant__ g)
{
    const hr_matrix &m = g.args.matrix;
    if (m.format == HR_INT8_ROWS) {
        for_dtype<N>(m.dtype, [&](hr_dtype dtype) { decode_8_bits<N>(g, dtype); });
        return;
    }
    __shared__ matrix_tables tables;
    const bool nested = m.absmax_codes, powers = m.format == HR_MXFP4;
    copy_tables(&tables, m);
    __syncthreads();
    for_dtype<N>(m.dtype, [&](hr_dtype dtype) {
        if (powers)
            decode_4_bits<N, POWERS>(g, tables, 0.0f, dtype);
        else if (nested)
            decode_4_bits<N, NESTED>(g, tables, *m.offset, dtype);
        else
            decode_4_bits<N, PLAIN>(g, tables, 0.0f, dtype);
    });
}

/* If the rectangle has no gaps in either matrix, and rows have no scales, it is one long row. */
static void join_rows(dequantize_matrix_args *a)
{
    if (a->matrix.format == HR_INT8_ROWS || a->cols != a->matrix.cols || a->out.stride != a->cols)
        return;
    a->col = a->row * a->cols;
    a->matrix.cols *= a->matrix.rows;
    a->cols *= a->rows;
    a->row = 0;
    a->matrix.rows = a->rows = 1;
}

hr_status dequantize_matrix_cuda(const dequantize_matrix_args *args, const hr_exec *exec)
{
    dequantize_matrix_grid g = {.args = *args, .shift = 5, .width = 32};
    dequantize_matrix_args &a = g.args;
    join_rows(&a);
    const hr_matrix &m = a.matrix;
    const bool rows = m.format == HR_INT8_ROWS;
    const int64_t pitch = a.rows > 1 ? a.out.stride : 0;
    const int64_t bits = a.col | a.cols | (a.rows > 1 || a.row > 0 ? m.cols : 0) | pitch;
    const uintptr_t aligned = (uintptr_t)a.out.data % 16 | (uintptr_t)m.data % (rows ? 8 : 4);
    const bool vectors = bits % GROUP == 0 && aligned == 0;
    while (1 << g.shift < m.block_size)
        g.shift++;
    const int64_t groups = (a.cols + (vectors ? GROUP : 1) - 1) / (vectors ? GROUP : 1);
    while (g.width < THREADS && g.width * TURN < groups)
        g.width *= 2;
    const int64_t x = (groups + TURN * g.width - 1) / (TURN * g.width);
    const int64_t y = (a.rows * g.width + THREADS - 1) / THREADS;
    if (x > INT32_MAX)
        return hr_fail(HR_UNSUPPORTED, "hr_dequantize_matrix: the matrix has more elements than a "
                                       "grid of CUDA can take");
    const dim3 grid((uint32_t)x, (uint32_t)(y < 65535 ? y : 65535));
    if (vectors)
        HR_LAUNCH(dequantize_matrix_kernel<GROUP>, grid, THREADS, 0, exec->stream, g);
    else
        HR_LAUNCH(dequantize_matrix_kernel<1>, grid, THREADS, 0, exec->stream, g);
    return cuda_launch_status("hr_dequantize_matrix");
}
