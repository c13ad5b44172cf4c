/*
 * norm_rows.cuh: what a team of threads does with a row, forward and backward, and what a block adds
 * up over its rows.
 */
#ifndef HR_NORM_ROWS_CUH
#define HR_NORM_ROWS_CUH

#include "kernels/core/rows.cuh"
#include "kernels/nn/norm.h"

/* Sums that fit into the shared memory of a block, which is 48 KB. The others are in the
 * workspace. */
#define SHARED_SUMS 11264

/* Weights of the elements from j on, as binary32. */
template <int E>
static __device__ __forceinline__ void read_weights(const norm_args &a, int j, float (&w)[E])
{
    const float offset = (float)a.config.offset;
    if (a.weight)
        few_floats<E>(few_load<E>(a.weight, j, a.config.weight_dtype), a.config.weight_dtype, w);
#pragma unroll
    for (int e = 0; e < E; e++)
        w[e] = a.weight ? w[e] + offset : 1.0f;
}

/* The normed value of each x. */
template <int E>
static __device__ __forceinline__ void read_hat(const norm_args &a, const few<E> &x, float mean,
                                                float factor, hr_dtype dtype, float (&hat)[E])
{
#pragma unroll
    for (int e = 0; e < E; e++)
        hat[e] = norm_hat(few_get(x, e, dtype), mean, factor, 0, dtype);
    if (norm_rounds(&a.config)) {
#pragma unroll
        for (int e = 0; e < E; e++)
            hat[e] = norm_rounded(hat[e], dtype);
    }
}

/* y of the elements from j on. */
template <int E>
static __device__ __forceinline__ void write_y(const norm_args &a, void *y, int j,
                                               const float (&hat)[E], hr_dtype dtype)
{
    float out[E], b[E];
    read_weights<E>(a, j, out);
#pragma unroll
    for (int e = 0; e < E; e++)
        out[e] = norm_y(hat[e], out[e], NORM_NO_BIAS);
    if (a.bias) {
        pack_all_loaded(); /* the bias needs no registers before */
        few_floats<E>(few_load<E>(a.bias, j, a.config.weight_dtype), a.config.weight_dtype, b);
#pragma unroll
        for (int e = 0; e < E; e++)
            out[e] += b[e];
    }
    few_store<E>(y, j, out, dtype);
}

/* ---- Forward --------------------------------------------------------------------------------- */

template <int E>
static __device__ __forceinline__ void forward_row(const norm_args &a, int width, hr_dtype dtype)
{
    const row_team team = team_of(width);
    const int64_t row = (int64_t)blockIdx.x * team.count + team.index;
    const int cols = row < a.rows ? (int)a.cols : 0; /* a team without a row helps at barriers */
    const void *in = row_at(a.x, row, dtype);
    row_walk walk = walk_of(team, E);
    few<E> x = {};
    const auto load = [&](int j) { x = few_load<E>(in, j, dtype); };
    if (walk.j < cols)
        load(walk.j);
    if (a.sum.data) {
        const void *const residual = row_at(a.residual, row, dtype);
        void *const sum = row_at(a.sum, row, dtype);
        row_visit(walk, cols, load, [&](int j) {
            const few<E> right = few_load<E>(residual, j, dtype);
            float total[E];
#pragma unroll
            for (int e = 0; e < E; e++)
                total[e] = few_get(x, e, dtype) + few_get(right, e, dtype);
            x = few_rounded<E>(sum, j, total, dtype);
        });
        in = sum;
    }
    float mean = 0.0f;
    const auto total_of = [&](int squares) {
        float total[1] = {0.0f};
        row_visit(walk, cols, load, [&](int) {
            float part = 0.0f;
#pragma unroll
            for (int e = 0; e < E; e++) {
                const float centered = few_get(x, e, dtype) - mean;
                part += squares ? centered * centered : centered;
            }
            total[0] += part;
        });
        team_totals(team, squares, total);
        return total[0];
    };
    if (a.config.kind == HR_NORM_LAYER)
        mean = total_of(0) / (float)a.cols;
    const float rstd = norm_rstd(total_of(1), a.cols, (float)a.config.eps);
    const float factor = norm_factor(rstd, a.config.casting, dtype);
    if (team.lane == 0 && cols > 0) {
        if (a.mean)
            hr_store(a.mean, row, mean, HR_F32); /* every NaN as the same */
        if (a.rstd)
            hr_store(a.rstd, row, rstd, HR_F32);
    }
    void *const y = row_at(a.y, row, dtype);
    row_visit(walk, cols, load, [&](int j) {
        float hat[E];
        read_hat<E>(a, x, mean, factor, dtype, hat);
        write_y<E>(a, y, j, hat, dtype);
    });
}

/* ---- Backward -------------------------------------------------------------------------------- */

/* Adds x to sums, in shared or in global memory. */
template <int E> static __device__ __forceinline__ void add_to(float *sums, const float (&x)[E])
{
    if constexpr (E == 8) {
        uint4 *const vectors = (uint4 *)sums;
#pragma unroll
        for (int v = 0; v < 2; v++) {
            const uint4 old = vectors[v];
            vectors[v] = make_uint4(
                hr_bits(hr_float(old.x) + x[4 * v]), hr_bits(hr_float(old.y) + x[4 * v + 1]),
                hr_bits(hr_float(old.z) + x[4 * v + 2]), hr_bits(hr_float(old.w) + x[4 * v + 3]));
        }
    } else {
        sums[0] += x[0];
    }
}

static __device__ __forceinline__ int sums_count(const norm_args &a)
{
    return norm_sums(a.config.kind) * (int)a.cols;
}

/* The sums of the block's group in the workspace. Computed again each time, or the compiler would
 * keep two registers for it. */
static __device__ __forceinline__ float *sums_in_workspace(const norm_args &a)
{
    int block = (int)blockIdx.x;
    asm volatile("" : "+r"(block));
    return a.partials + (int64_t)block * sums_count(a);
}

/* Where a team adds dweight, which is s = 0, or dbias of the columns from j on. Short rows, of which
 * a block takes several at a time, all fit into shared memory. */
static __device__ __forceinline__ float *sums_of(const norm_args &a, const row_team &team,
                                                 float *shared, int s, int j)
{
    const int i = team.index * sums_count(a) + s * (int)a.cols + j;
    return i < SHARED_SUMS ? shared + i : sums_in_workspace(a) + i;
}

template <int E, bool once>
static __device__ __forceinline__ void backward_row(const norm_args &a, const row_team &team,
                                                    int turn, int64_t row, int cols, float *shared,
                                                    hr_dtype dtype)
{
    row_walk walk = walk_of(team, E);
    few<E> x = {}, dy = {};
    const auto load = [&](int j) {
        x = few_load<E>(row_at(a.x, row, dtype), j, dtype);
        if (a.dy.data)
            dy = few_load<E>(row_at(a.dy, row, dtype), j, dtype);
    };
    float rstd = 0.0f, mean = 0.0f;
    if (walk.j < cols) {
        load(walk.j);
        rstd = a.rstd[row];
        mean = a.mean ? a.mean[row] : 0.0f;
    }
    const float factor = norm_factor(rstd, a.config.casting, dtype);
    float means[2] = {0.0f, 0.0f}; /* of g * hat and of g */
    if (a.dx.data) {
        row_visit<once>(walk, cols, load, [&](int j) {
            float w[E], part = 0.0f, g_part = 0.0f;
            read_weights<E>(a, j, w);
#pragma unroll
            for (int e = 0; e < E; e++) {
                const float g = few_get(dy, e, dtype) * w[e];
                part += g * norm_hat(few_get(x, e, dtype), mean, rstd, 0, dtype);
                g_part += g;
            }
            means[0] += part;
            means[1] += g_part;
        });
        team_totals(team, turn, means);
        means[0] /= (float)a.cols;
        means[1] = a.config.kind == HR_NORM_LAYER ? means[1] / (float)a.cols : 0.0f;
    }
    row_visit<once>(walk, cols, load, [&](int j) {
        float hat[E], g[E], out[E];
        read_hat<E>(a, x, mean, factor, dtype, hat);
        if (a.y.data)
            write_y<E>(a, row_at(a.y, row, dtype), j, hat, dtype);
        pack_all_loaded(); /* or loads for later come first, and take registers */
        if (!a.dy.data)
            return;
        few_floats<E>(dy, dtype, g);
        if (a.partials) {
            if (a.config.kind == HR_NORM_LAYER)
                add_to<E>(sums_of(a, team, shared, 1, j), g);
#pragma unroll
            for (int e = 0; e < E; e++)
                out[e] = g[e] * hat[e];
            add_to<E>(sums_of(a, team, shared, 0, j), out);
            pack_all_loaded();
        }
        if (!a.dx.data)
            return;
        /* Read again, from the cache: held until here they take registers that there are not. */
        if (dtype != HR_F32)
            x = few_load<E>(row_at(a.x, row, dtype), j, dtype);
        read_weights<E>(a, j, out);
#pragma unroll
        for (int e = 0; e < E; e++)
            out[e] = norm_dx(g[e] * out[e], norm_hat(few_get(x, e, dtype), mean, rstd, 0, dtype),
                             rstd, means[0], means[1]);
        if (a.dsum.data) {
            const few<E> dsum = few_load<E>(row_at(a.dsum, row, dtype), j, dtype);
#pragma unroll
            for (int e = 0; e < E; e++)
                out[e] += few_get(dsum, e, dtype);
        }
        few_store<E>(row_at(a.dx, row, dtype), j, out, dtype);
    });
}

template <int E, bool once>
static __device__ __forceinline__ void backward_group(const norm_args &a, int width, hr_dtype dtype)
{
    HR_DYNAMIC_SHARED(float, shared);
    const row_team team = team_of(width);
    const int count = sums_count(a);
    const int held = team.count * count < SHARED_SUMS ? team.count * count : SHARED_SUMS;
    if (a.partials) {
        for (int i = (int)threadIdx.x; i < held; i += (int)blockDim.x)
            shared[i] = 0.0f;
        float *const others = sums_in_workspace(a);
        for (int i = held + (int)threadIdx.x; i < count; i += (int)blockDim.x)
            others[i] = 0.0f;
        __syncthreads();
    }
    const int64_t size = norm_group_rows(a.rows), begin = blockIdx.x * size;
    const int rows = (int)(begin + size < a.rows ? size : a.rows - begin);
    for (int next = 0; next < rows; next += team.count) {
        const int r = next + team.index;
        backward_row<E, once>(a, team, next & team.count ? 1 : 0, begin + r,
                              r < rows ? (int)a.cols : 0, shared, dtype);
    }
    if (!a.partials)
        return;
    __syncthreads();
    float *const sums = sums_in_workspace(a);
    for (int i = (int)threadIdx.x; i < count && i < SHARED_SUMS; i += (int)blockDim.x) {
        float total = 0.0f;
        for (int t = 0; t < team.count; t++)
            total += shared[t * count + i];
        sums[i] = total;
    }
}

#endif
