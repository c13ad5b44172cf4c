/*
 * adafactor_matrix.cuh: the passes over the blocks of matrices.
 *
 * In a block, `lanes` threads side by side take 8 columns each, and the groups of so many take 8 rows
 * each, every groups-th row: in whole blocks several at a time, whose loads are in flight together.
 * Eight elements per thread and row, in 16-byte accesses where every address of the tensor allows
 * them, else one by one.
 */
#ifndef HR_ADAFACTOR_MATRIX_CUH
#define HR_ADAFACTOR_MATRIX_CUH

#include "kernels/optim/adafactor.cuh"

#define WHOLE_LANES 32 /* of matrices with as many columns as a block takes at most */

/* The columns and rows of a thread in a block of a matrix. */
typedef struct thread_place {
    adafactor_place block;
    int lanes, lane, group;
    int step;       /* from a row of the thread to its next */
    int count;      /* of columns, 0 to 8 */
    bool vector;    /* whether rows begin at multiples of 16 bytes */
    bool whole;     /* whether all of that is so for all threads, with WHOLE_LANES */
    int64_t column; /* in the matrix */
} thread_place;

static __device__ __forceinline__ thread_place place_of_thread(const adafactor_tensor &t,
                                                               uint32_t block)
{
    thread_place p;
    p.block = place_of_block(t, block);
    p.lanes = (int)(t.cut.block_cols / 8);
    p.lane = (int)threadIdx.x & (p.lanes - 1); /* lanes are a power of two */
    p.step = THREADS >> (31 - __clz(p.lanes));
    p.group = (int)threadIdx.x >> (31 - __clz(p.lanes));
    const int64_t left = p.block.cols - p.lane * 8;
    p.count = left >= 8 ? 8 : left > 0 ? (int)left : 0;
    p.column = p.block.col + p.lane * 8;
    p.vector = ((uintptr_t)t.param | (uintptr_t)t.grad | (uintptr_t)t.exp_avg) % 16 == 0 &&
               t.shape.cols % 8 == 0;
    p.whole = p.vector && p.lanes == WHOLE_LANES && p.block.rows == t.cut.block_rows &&
              p.block.cols == t.cut.block_cols;
    return p;
}

/* The row that the thread takes j-th. */
static __device__ __forceinline__ int row_of_thread(const thread_place &p, int j)
{
    return j * p.step + p.group;
}

/* Eight elements of a row, of which `count` are there. */
template <bool whole>
static __device__ __forceinline__ pack<8> load_row(const void *base, int64_t i, hr_dtype dtype,
                                                   int count, bool vector)
{
    if constexpr (whole)
        return pack_load<8>(base, i, dtype);
    const void *const at = (const char *)base + i * (dtype == HR_F32 ? 4 : 2);
    return pack_load<8>(at, 0, dtype, vector && count == 8, count);
}

/* The same for what should not take the place of gradients in the cache. */
template <bool whole>
static __device__ __forceinline__ pack<8> load_row_once(const void *base, int64_t i, hr_dtype dtype,
                                                        int count, bool vector)
{
    if constexpr (!whole)
        return load_row<whole>(base, i, dtype, count, vector);
    const uint4 *const vectors =
        (const uint4 *)((const char *)base + i * (dtype == HR_F32 ? 4 : 2));
    pack<8> p;
    p.low = __ldcs(vectors);
    p.high = dtype == HR_F32 ? __ldcs(vectors + 1) : p.low;
    return p;
}

template <bool whole>
static __device__ __forceinline__ void store_row(void *base, int64_t i, const float (&x)[8],
                                                 hr_dtype dtype, int count, bool vector)
{
    if constexpr (whole) {
        pack_store(base, i, pack_of(x, dtype), dtype);
    } else {
        void *const at = (char *)base + i * (dtype == HR_F32 ? 4 : 2);
        pack_store(at, 0, dtype, vector && count == 8, count, pack_of(x, dtype));
    }
}

/* ---- Instances ------------------------------------------------------------------------------- */

/* Whole blocks of params and grads of one dtype have an instance each of the loops over rows. Its
 * rows in flight are about 128 bytes of a thread, so that their registers leave room for three
 * blocks on a multiprocessor. */
template <int dtype> struct whole_block {
    static constexpr bool whole = true;
    static __device__ constexpr int rows(int arrays)
    {
        return arrays > 2 ? (dtype == HR_F32 ? 1 : 2) : arrays == 2 && dtype == HR_F32 ? 2 : 4;
    }
    static __device__ constexpr hr_dtype param(const adafactor_tensor &)
    {
        return (hr_dtype)dtype;
    }
    static __device__ constexpr hr_dtype grad(const adafactor_tensor &)
    {
        return (hr_dtype)dtype;
    }
    static __device__ constexpr int lanes(const thread_place &)
    {
        return WHOLE_LANES;
    }
    static __device__ constexpr int count(const thread_place &, int)
    {
        return 8;
    }
};

/* Blocks at the edge of a matrix, addresses that allow no vectors, and other mixes of dtypes. */
struct any_block {
    static constexpr bool whole = false;
    static __device__ constexpr int rows(int)
    {
        return 1;
    }
    static __device__ __forceinline__ hr_dtype param(const adafactor_tensor &t)
    {
        return t.param_dtype;
    }
    static __device__ __forceinline__ hr_dtype grad(const adafactor_tensor &t)
    {
        return t.grad_dtype;
    }
    static __device__ __forceinline__ int lanes(const thread_place &p)
    {
        return p.lanes;
    }
    static __device__ __forceinline__ int count(const thread_place &p, int j)
    {
        return row_of_thread(p, j) < p.block.rows ? p.count : 0;
    }
};

template <typename Run>
static __device__ __forceinline__ double by_kind(const adafactor_tensor &t, const thread_place &p,
                                                 Run run)
{
    const bool whole = p.whole && t.param_dtype == t.grad_dtype;
    if (whole && t.param_dtype == HR_F32)
        return run(whole_block<HR_F32>());
    if (whole && t.param_dtype == HR_BF16)
        return run(whole_block<HR_BF16>());
    if (whole)
        return run(whole_block<HR_F16>());
    return run(any_block());
}

/* ---- Sums ------------------------------------------------------------------------------------ */

/* The squares of eight elements of a row. */
static __device__ __forceinline__ void squares_of(float (&x)[8], const pack<8> &p, hr_dtype dtype,
                                                  float factor)
{
#pragma unroll
    for (int c = 0; c < 8; c++) {
        const float value = pack_get(p, c, dtype) * factor;
        x[c] = value * value;
    }
}

/* Leaves the sums of squares of the block's rows and columns of the gradient, and returns the
 * thread's sum of those of the parameters, if the step is `scaled` by them. `sums`: shared memory for
 * 8 * THREADS of them. */
template <typename Kind, bool scaled>
static __device__ __forceinline__ double
sums_of_matrix(const adafactor_tensor &t, const thread_place &p, float factor, float *sums)
{
    constexpr int in_flight = Kind::rows(2);
    const hr_dtype param = Kind::param(t), grad = Kind::grad(t);
    const int64_t first = p.block.first + p.lane * 8, stride = p.step * t.shape.cols;
    float columns[8] = {0}, squared_param = 0.0f;
    int64_t i = first + p.group * t.shape.cols;
#pragma unroll 1
    for (int j = 0; j < ROWS; j += in_flight, i += in_flight * stride) {
        pack<8> params[in_flight], grads[in_flight];
#pragma unroll
        for (int k = 0; k < in_flight; k++) {
            const int count = Kind::count(p, j + k);
            grads[k] = load_row<Kind::whole>(t.grad, i + k * stride, grad, count, p.vector);
            if (scaled)
                params[k] =
                    load_row_once<Kind::whole>(t.param, i + k * stride, param, count, p.vector);
        }
#pragma unroll
        for (int k = 0; k < in_flight; k++) {
            float x[8];
            if (scaled) {
                squares_of(x, params[k], param, 1.0f);
                squared_param += sum_of_eight(x);
            }
            squares_of(x, grads[k], grad, factor);
#pragma unroll
            for (int c = 0; c < 8; c++)
                columns[c] += x[c];
            float sum = sum_of_eight(x);
            for (int width = Kind::lanes(p) / 2; width > 0; width /= 2)
                sum += __shfl_xor_sync(0xFFFFFFFFu, sum, width);
            const int row = row_of_thread(p, j + k);
            if (p.lane == 0 && row < p.block.rows)
                t.row_parts[(p.block.matrix * t.shape.rows + p.block.row + row) * t.cut.col_blocks +
                            p.block.col_block] = (double)sum;
        }
    }
#pragma unroll
    for (int c = 0; c < 8; c++)
        sums[c * THREADS + threadIdx.x] = columns[c];
    for (int width = THREADS / 2; width >= p.lanes; width /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < width) {
#pragma unroll
            for (int c = 0; c < 8; c++)
                sums[c * THREADS + threadIdx.x] += sums[c * THREADS + threadIdx.x + width];
        }
    }
    double *const parts =
        t.col_parts + (p.block.matrix * t.cut.row_blocks + p.block.row_block) * t.shape.cols;
    if (p.group == 0) {
        for (int c = 0; c < p.count; c++)
            parts[p.column + c] = (double)sums[c * THREADS + threadIdx.x];
    }
    return (double)squared_param;
}

/* ---- Updates --------------------------------------------------------------------------------- */

static __device__ __forceinline__ float square_of(const float (&update)[8], int count)
{
    float squares[8];
#pragma unroll
    for (int j = 0; j < 8; j++)
        squares[j] = j < count ? update[j] * update[j] : 0.0f;
    return sum_of_eight(squares);
}

template <typename Kind, bool is_norm, bool momentum>
static __device__ __forceinline__ double
matrix_updates(const adafactor_tensor &t, const thread_place &p, const block_constants &c,
               const float *row_factors)
{
    constexpr int in_flight = Kind::rows(is_norm ? 1 : momentum ? 4 : 2);
    const hr_dtype param = Kind::param(t), grad = Kind::grad(t);
    const int64_t stride = p.step * t.shape.cols;
    float columns[8], sum = 0.0f;
    load_eight(columns, t.col_factors, p.block.matrix * t.shape.cols + p.column, p.count, false,
               HR_F32);
    int64_t i = p.block.first + p.lane * 8 + p.group * t.shape.cols;
#pragma unroll 1
    for (int j = 0; j < ROWS; j += in_flight, i += in_flight * stride) {
        pack<8> grads[in_flight], params[in_flight], averages[in_flight];
#pragma unroll
        for (int k = 0; k < in_flight; k++) {
            const int64_t at = i + k * stride;
            const int count = Kind::count(p, j + k);
            grads[k] = load_row<Kind::whole>(t.grad, at, grad, count, p.vector);
            if (!is_norm)
                params[k] = load_row<Kind::whole>(t.param, at, param, count, p.vector);
            if (momentum)
                averages[k] = load_row<Kind::whole>(t.exp_avg, at, HR_F32, count, p.vector);
        }
#pragma unroll
        for (int k = 0; k < in_flight; k++) {
            const int row = row_of_thread(p, j + k), count = Kind::count(p, j + k);
            if (count == 0)
                continue;
            const adafactor_row factors =
                adafactor_row_of(row_factors[row], c.bound, c.grad_factor);
            float update[8], x[8];
#pragma unroll
            for (int e = 0; e < 8; e++)
                update[e] = adafactor_update(factors, pack_get(grads[k], e, grad), columns[e]);
            if (is_norm) {
                sum += square_of(update, count);
                continue;
            }
            const int64_t at = i + k * stride;
            if (momentum) {
                float average[8];
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    average[e] = pack_get(averages[k], e, HR_F32);
                    x[e] = adafactor_apply(c.step, pack_get(params[k], e, param), update[e],
                                           &average[e]);
                }
                store_row<Kind::whole>(t.exp_avg, at, average, HR_F32, count, p.vector);
            } else {
#pragma unroll
                for (int e = 0; e < 8; e++)
                    x[e] =
                        adafactor_apply(c.step, pack_get(params[k], e, param), update[e], nullptr);
            }
            store_row<Kind::whole>(t.param, at, x, param, count, p.vector);
        }
    }
    return (double)sum;
}

#endif
