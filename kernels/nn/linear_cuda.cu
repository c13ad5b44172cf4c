/*
 * linear_cuda.cu: few rows of x. A warp takes one or two rows of the matrix, a tile of columns at a
 * time: 16 or 8 bytes of codes of each row per lane, which are asked for a tile ahead. The
 * block's warps share the columns of x that belong to the tile, as binary32 in shared memory.
 */
#include "kernels/core/pack.cuh"
#include "kernels/core/rows.cuh"
#include "kernels/nn/linear.h"
#include "kernels/quant/quantize_matrix.cuh"

#define THREADS 256
#define WARPS   (THREADS / 32)

typedef struct few_launch {
    linear_few_args args;
    int32_t x_vectors; /* 16-byte accesses reach every group of eight of x */
} few_launch;

/* Columns of a lane in a tile: 16 bytes of codes, or 8 where many rows of x must fit into shared
 * memory. */
template <int M, bool NIBBLES> constexpr int lane_columns = (M > 8 ? 8 : 16) * (NIBBLES ? 2 : 1);

/* Rows of the matrix that a warp takes, and blocks that share a multiprocessor: as many as registers
 * allow. */
template <int M, bool NIBBLES> constexpr int warp_rows = NIBBLES || M <= 4 ? 2 : 1;
template <int M, bool NIBBLES> constexpr int resident = !NIBBLES || M > 4 ? 2 : M > 1 ? 3 : 4;

/* The block's share of memory. x: [M][lane_columns / 4][32 lanes][4], so that lanes next to each
 * other read 16 bytes next to each other. */
template <int M, bool NIBBLES> struct few_shared {
    float4 x[M * lane_columns<M, NIBBLES> * 8];
    matrix_tables tables;
};

/* ---- x --------------------------------------------------------------------------------------- */

template <int M, bool NIBBLES>
static __device__ __forceinline__ void few_stage(few_shared<M, NIBBLES> &shared,
                                                 const few_launch &l, int64_t k0, hr_dtype dtype)
{
    constexpr int L = lane_columns<M, NIBBLES>;
    const linear_few_args &a = l.args;
#pragma unroll
    for (int turn = 0; turn < (M * L * 4 + THREADS - 1) / THREADS; turn++) {
        const int index = turn * THREADS + (int)threadIdx.x;
        if (index >= M * L * 4)
            break;
        const int lane = index % 32, group = index / 32 % (L / 8), i = index / (L * 4);
        const int64_t k = k0 + lane * L + group * 8, left = a.matrix.cols - k;
        float x[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (i < a.m && left > 0) {
            const int count = left < 8 ? (int)left : 8;
            const char *const from =
                (const char *)a.x.data + (i * a.x.stride + k) * hr_element_size(dtype);
            pack_floats(pack_load<8>(from, 0, dtype, l.x_vectors && count == 8, count), dtype, x);
        }
        float4 *const to = shared.x + (i * (L / 4) + group * 2) * 32 + lane;
        to[0] = make_float4(x[0], x[1], x[2], x[3]);
        to[32] = make_float4(x[4], x[5], x[6], x[7]);
    }
}

/* ---- Rows of the matrix ---------------------------------------------------------------------- */

/* What a lane reads of a row for a tile: whole bytes of one block of 4-bit codes, or bytes. */
template <int M, bool NIBBLES> struct few_codes {
    static constexpr int words = lane_columns<M, NIBBLES> / (NIBBLES ? 8 : 4);
    uint32_t word[words];
    float absmax;
};

template <int M, bool NIBBLES>
static __device__ __forceinline__ void few_read(few_codes<M, NIBBLES> &codes,
                                                const few_shared<M, NIBBLES> &shared,
                                                const hr_matrix &matrix, int64_t row, int64_t k)
{
    constexpr int words = few_codes<M, NIBBLES>::words;
    const bool is_there = row < matrix.rows && k < matrix.cols;
    const int64_t first = is_there ? row * matrix.cols + k : 0;
    const char *const from = (const char *)matrix.data + (NIBBLES ? first / 2 : first);
    if constexpr (words % 4 == 0) {
#pragma unroll
        for (int w = 0; w < words; w += 4) {
            const uint4 four = is_there ? ((const uint4 *)from)[w / 4] : make_uint4(0, 0, 0, 0);
            codes.word[w] = four.x, codes.word[w + 1] = four.y;
            codes.word[w + 2] = four.z, codes.word[w + 3] = four.w;
        }
    } else {
        const uint2 two = is_there ? *(const uint2 *)from : make_uint2(0, 0);
        codes.word[0] = two.x, codes.word[1] = two.y;
    }
    codes.absmax = !is_there ? 0.0f
                   : NIBBLES ? matrix_absmax(&matrix, first / matrix.block_size, shared.tables.map)
                             : matrix.absmax[row];
}

/* Element e of a lane. */
template <int M, bool NIBBLES>
static __device__ __forceinline__ float few_element(const few_codes<M, NIBBLES> &codes, int e,
                                                    const few_shared<M, NIBBLES> &shared,
                                                    hr_dtype dtype)
{
    float product;
    if (NIBBLES) {
        const int shift = e % 8 / 2 * 8 + (e % 2 ? 0 : 4);
        product = shared.tables.values[codes.word[e / 8] >> shift & 15u] * codes.absmax;
    } else {
        const int8_t code = (int8_t)(codes.word[e / 4] >> e % 4 * 8 & 255u);
        product = (float)code * codes.absmax * MATRIX_INT8_UNIT;
    }
    return dtype == HR_F32 ? product : hr_from_half(hr_to_half(product, dtype), dtype);
}

template <int M, bool NIBBLES>
static __device__ __forceinline__ void few_block(few_shared<M, NIBBLES> &shared,
                                                 const few_launch &l, hr_dtype dtype)
{
    constexpr int L = lane_columns<M, NIBBLES>, ROWS = warp_rows<M, NIBBLES>;
    const linear_few_args &a = l.args;
    const hr_matrix &matrix = a.matrix;
    const int lane = (int)threadIdx.x % 32;
    const int64_t first = ((int64_t)blockIdx.x * WARPS + threadIdx.x / 32) * ROWS;
    float sums[ROWS][M];
    few_codes<M, NIBBLES> codes[ROWS], next[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
        for (int i = 0; i < M; i++)
            sums[r][i] = 0.0f;
        few_read<M, NIBBLES>(next[r], shared, matrix, first + r, lane * L);
    }
    for (int64_t k0 = 0; k0 < matrix.cols; k0 += 32 * L) {
        __syncthreads(); /* the tile before has been read */
        few_stage<M, NIBBLES>(shared, l, k0, dtype);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            codes[r] = next[r];
            few_read<M, NIBBLES>(next[r], shared, matrix, first + r, k0 + (32 + lane) * L);
        }
        __syncthreads();
#pragma unroll
        for (int q = 0; q < L / 4; q++) {
            float w[ROWS][4];
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    w[r][e] = few_element<M, NIBBLES>(codes[r], q * 4 + e, shared, dtype);
#pragma unroll
            for (int i = 0; i < M; i++) {
                const float4 x = shared.x[(i * (L / 4) + q) * 32 + lane];
#pragma unroll
                for (int r = 0; r < ROWS; r++)
                    sums[r][i] = fmaf(
                        w[r][3], x.w,
                        fmaf(w[r][2], x.z, fmaf(w[r][1], x.y, fmaf(w[r][0], x.x, sums[r][i]))));
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int i = 0; i < M; i++) {
            const float total = warp_total(sums[r][i]);
            const int64_t row = first + r;
            if (lane == 0 && row < matrix.rows && i < a.m)
                linear_store(&a, i, row, total, dtype);
        }
}

template <int M, bool NIBBLES>
static __global__ void __launch_bounds__(THREADS, (resident<M, NIBBLES>))
    linear_few_kernel(const few_launch __grid_constant__ l)
{
    __shared__ few_shared<M, NIBBLES> shared;
    const hr_matrix &matrix = l.args.matrix;
    if (NIBBLES) {
        copy_tables(&shared.tables, matrix);
        __syncthreads();
    }
    FOR_DTYPE(matrix.dtype, D, (few_block<M, NIBBLES>(shared, l, D)))
}

template <int M, bool NIBBLES> static hr_status launch(const few_launch &l, const hr_exec *exec)
{
    constexpr int rows = WARPS * warp_rows<M, NIBBLES>;
    const int64_t blocks = (l.args.matrix.rows + rows - 1) / rows;
    if (blocks > INT32_MAX)
        return hr_fail(HR_UNSUPPORTED,
                       "hr_linear_forward: matrix->rows is more than a grid of CUDA can take");
    HR_LAUNCH((linear_few_kernel<M, NIBBLES>), (uint32_t)blocks, THREADS, 0, exec->stream, l);
    return cuda_launch_status("hr_linear_forward");
}

template <bool NIBBLES> static hr_status launch_for(const few_launch &l, const hr_exec *exec)
{
    return l.args.m == 1   ? launch<1, NIBBLES>(l, exec)
           : l.args.m <= 4 ? launch<4, NIBBLES>(l, exec)
                           : launch<16, NIBBLES>(l, exec);
}

hr_status linear_few_cuda(const linear_few_args *args, const hr_exec *exec)
{
    const uintptr_t size = (uintptr_t)hr_element_size(args->matrix.dtype);
    const uintptr_t stride = args->m > 1 ? (uintptr_t)args->x.stride * size : 0;
    few_launch l;
    l.args = *args;
    l.x_vectors = ((uintptr_t)args->x.data | stride) % 16 == 0;
    return args->matrix.format == HR_INT8_ROWS ? launch_for<false>(l, exec)
                                               : launch_for<true>(l, exec);
}
