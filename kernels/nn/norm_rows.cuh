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

/* What most calls ask for is an instance of its own, `plain`, in which nothing is decided per vector:
 * weights of the rows' type, no offset and no bias; backward all gradients and no y. */
static __device__ __forceinline__ bool is_plain(const norm_args &a)
{
    return a.weight && a.config.weight_dtype == a.config.dtype && a.config.offset == 0.0 && !a.bias;
}

static __device__ __forceinline__ bool is_plain_backward(const norm_args &a)
{
    return is_plain(a) && a.dx.data && a.dy.data && a.partials && !a.y.data;
}

/* Weights of the elements from j on, as binary32. */
template <int E>
static __device__ __forceinline__ void read_weights(const norm_args &a, int j, hr_dtype dtype,
                                                    bool plain, float (&w)[E])
{
    const hr_dtype of_weight = plain ? dtype : a.config.weight_dtype;
    if (plain || a.weight) {
        few_floats<E>(few_load<E>(a.weight, j, of_weight), of_weight, w);
        const float offset = plain ? -0.0f : (float)a.config.offset; /* -0 changes nothing */
#pragma unroll
        for (int e = 0; e < E; e++)
            w[e] += offset;
    } else {
#pragma unroll
        for (int e = 0; e < E; e++)
            w[e] = 1.0f;
    }
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
                                               const float (&hat)[E], hr_dtype dtype, bool plain)
{
    float out[E], b[E];
    read_weights<E>(a, j, dtype, plain, out);
#pragma unroll
    for (int e = 0; e < E; e++)
        out[e] = norm_y(hat[e], out[e], NORM_NO_BIAS);
    if (!plain && a.bias) {
        pack_all_loaded(); /* the bias needs no registers before */
        few_floats<E>(few_load<E>(a.bias, j, a.config.weight_dtype), a.config.weight_dtype, b);
#pragma unroll
        for (int e = 0; e < E; e++)
            out[e] += b[e];
    }
    few_store<E>(y, j, out, dtype);
}

/* ---- Forward --------------------------------------------------------------------------------- */

template <int E, int V, bool layer>
static __device__ __forceinline__ void forward_row(const norm_args &a, int width, hr_dtype dtype,
                                                   bool plain)
{
    const row_team team = team_of(width);
    const int64_t row = (int64_t)blockIdx.x * team.count + team.index;
    const int cols = row < a.rows ? (int)a.cols : 0; /* a team without a row helps at barriers */
    const int apart = team.width * E;
    const void *in = row_at(a.x, row, dtype);
    row_walk walk = {team.lane * E, V * apart};
    few<E> x[V] = {};
    const auto load = [&](int j) {
        each_vector<V>(j, apart, cols, [&](int v, int at) { x[v] = few_load<E>(in, at, dtype); });
        pack_all_loaded();
    };
    if (walk.j < cols)
        load(walk.j);
    if (a.sum.data) {
        const void *const residual = row_at(a.residual, row, dtype);
        void *const sum = row_at(a.sum, row, dtype);
        row_visit(walk, cols, load, [&](int j) {
            few<E> right[V] = {};
            each_vector<V>(j, apart, cols,
                           [&](int v, int at) { right[v] = few_load<E>(residual, at, dtype); });
            pack_all_loaded();
            each_vector<V>(j, apart, cols, [&](int v, int at) {
                float total[E];
#pragma unroll
                for (int e = 0; e < E; e++)
                    total[e] = few_get(x[v], e, dtype) + few_get(right[v], e, dtype);
                x[v] = few_rounded<E>(sum, at, total, dtype);
            });
        });
        in = sum;
    }
    float mean = 0.0f;
    const auto total_of = [&](int squares) {
        float total[1] = {0.0f};
        row_visit(walk, cols, load, [&](int j) {
            each_vector<V>(j, apart, cols, [&](int v, int) {
                float part = 0.0f;
#pragma unroll
                for (int e = 0; e < E; e++) {
                    const float centered = few_get(x[v], e, dtype) - mean;
                    part += squares ? centered * centered : centered;
                }
                total[0] += part;
            });
        });
        team_totals(team, squares, total);
        return total[0];
    };
    if constexpr (layer)
        mean = total_of(0) / (float)a.cols;
    const float rstd = norm_rstd_f32(total_of(1), a.cols, (float)a.config.eps);
    const float factor = norm_factor(rstd, a.config.casting, dtype);
    if (team.lane == 0 && cols > 0) {
        if (a.mean)
            hr_store(a.mean, row, mean, HR_F32); /* every NaN as the same */
        if (a.rstd)
            hr_store(a.rstd, row, rstd, HR_F32);
    }
    void *const y = row_at(a.y, row, dtype);
    row_visit(walk, cols, load, [&](int j) {
        each_vector<V>(j, apart, cols, [&](int v, int at) {
            float hat[E];
            read_hat<E>(a, x[v], mean, factor, dtype, hat);
            write_y<E>(a, y, at, hat, dtype, plain);
        });
    });
}

/* ---- Backward -------------------------------------------------------------------------------- */

/* E numbers of a vector, in shared or in global memory. */
template <int E> static __device__ __forceinline__ void put(float *to, const float (&x)[E])
{
    if constexpr (E > 1) {
        uint4 *const vectors = (uint4 *)to;
#pragma unroll
        for (int v = 0; v < E / 4; v++)
            vectors[v] = make_uint4(hr_bits(x[4 * v]), hr_bits(x[4 * v + 1]), hr_bits(x[4 * v + 2]),
                                    hr_bits(x[4 * v + 3]));
    } else {
        *to = x[0];
    }
}

template <int E> static __device__ __forceinline__ void add_to(float *sums, const float (&x)[E])
{
    float total[E];
#pragma unroll
    for (int e = 0; e < E; e++)
        total[e] = sums[e] + x[e];
    put(sums, total);
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

/* The sums of dweight, s = 0, and dbias, s = 1, over the rows of a group. */

/* Those of rows that a thread has V vectors of, in its registers. */
template <int E, int V, bool layer> struct sums_in_registers {
    float of[layer ? 2 : 1][V][E];

    __device__ __forceinline__ void add(int s, int v, int, const float (&x)[E])
    {
#pragma unroll
        for (int e = 0; e < E; e++)
            of[layer ? s : 0][v][e] += x[e];
    }
};

/* Those of longer rows: in shared memory as far as they fit, and in the workspace. */
template <int E> struct sums_in_memory {
    const norm_args &a;
    float *shared;

    __device__ __forceinline__ void add(int s, int, int j, const float (&x)[E])
    {
        const int i = s * (int)a.cols + j;
        add_to<E>(i < SHARED_SUMS ? shared + i : sums_in_workspace(a) + i, x);
    }
};

template <int E, int V, bool once, bool layer, typename Sums>
static __device__ __forceinline__ void
backward_row(const norm_args &a, const row_team &team, int turn, int64_t row, int cols,
             const few<E> (&weights)[V], Sums &sums, hr_dtype dtype, bool plain)
{
    const int apart = team.width * E;
    row_walk walk = {team.lane * E, V * apart};
    few<E> x[V] = {}, dy[V] = {};
    const auto load = [&](int j) {
        const void *const of_x = row_at(a.x, row, dtype), *const of_dy = row_at(a.dy, row, dtype);
        each_vector<V>(j, apart, cols, [&](int v, int at) {
            x[v] = few_load<E>(of_x, at, dtype);
            if (plain || a.dy.data)
                dy[v] = few_load<E>(of_dy, at, dtype);
        });
    };
    const auto weights_of = [&](int v, int at, float(&w)[E]) {
        if (plain)
            few_floats<E>(weights[v], dtype, w);
        else
            read_weights<E>(a, at, dtype, plain, w);
    };
    float rstd = 0.0f, mean = 0.0f;
    if (walk.j < cols) {
        load(walk.j);
        rstd = a.rstd[row];
        if (layer)
            mean = a.mean[row];
        pack_all_loaded();
    }
    const float factor = norm_factor(rstd, a.config.casting, dtype);
    float means[layer ? 2 : 1] = {}; /* of g * hat, and of g for a layer norm */
    if (plain || a.dx.data) {
        row_visit<once>(walk, cols, load, [&](int j) {
            each_vector<V>(j, apart, cols, [&](int v, int at) {
                float w[E], part = 0.0f, g_part = 0.0f;
                weights_of(v, at, w);
#pragma unroll
                for (int e = 0; e < E; e++) {
                    const float g = few_get(dy[v], e, dtype) * w[e];
                    part += g * norm_hat(few_get(x[v], e, dtype), mean, rstd, 0, dtype);
                    g_part += g;
                }
                means[0] += part;
                if constexpr (layer)
                    means[1] += g_part;
            });
        });
        team_totals(team, turn, means);
        for (float &mean_of : means)
            mean_of /= (float)a.cols;
    }
    const float mean_g = layer ? means[layer] : 0.0f;
    row_visit<once>(walk, cols, load, [&](int j) {
        each_vector<V>(j, apart, cols, [&](int v, int at) {
            float hat[E], g[E], out[E];
            read_hat<E>(a, x[v], mean, factor, dtype, hat);
            if (!plain && a.y.data)
                write_y<E>(a, row_at(a.y, row, dtype), at, hat, dtype, plain);
            if (!plain && !a.dy.data)
                return;
            few_floats<E>(dy[v], dtype, g);
            if (plain || a.partials) {
                if (layer)
                    sums.add(1, v, at, g);
#pragma unroll
                for (int e = 0; e < E; e++)
                    out[e] = g[e] * hat[e];
                sums.add(0, v, at, out);
            }
            if (!plain && !a.dx.data)
                return;
            weights_of(v, at, out);
#pragma unroll
            for (int e = 0; e < E; e++)
                out[e] =
                    norm_dx(g[e] * out[e], norm_hat(few_get(x[v], e, dtype), mean, rstd, 0, dtype),
                            rstd, means[0], mean_g);
            if (a.dsum.data) {
                const few<E> dsum = few_load<E>(row_at(a.dsum, row, dtype), at, dtype);
#pragma unroll
                for (int e = 0; e < E; e++)
                    out[e] += few_get(dsum, e, dtype);
            }
            few_store<E>(row_at(a.dx, row, dtype), at, out, dtype);
        });
    });
}

/* The rows of a block's group, as many at a time as there are teams. */
template <int E, int V, bool once, bool layer, typename Sums>
static __device__ __forceinline__ void backward_rows(const norm_args &a, const row_team &team,
                                                     Sums &sums, hr_dtype dtype, bool plain)
{
    const int64_t size = norm_group_rows(a.rows), begin = blockIdx.x * size;
    const int rows = (int)(begin + size < a.rows ? size : a.rows - begin);
    few<E> weights[V] = {}; /* of the columns that a thread has in each row */
    if (plain)
        each_vector<V>(team.lane * E, team.width * E, (int)a.cols,
                       [&](int v, int at) { weights[v] = few_load<E>(a.weight, at, dtype); });
    for (int next = 0; next < rows; next += team.count) {
        const int r = next + team.index;
        backward_row<E, V, once, layer>(a, team, next & team.count ? 1 : 0, begin + r,
                                        r < rows ? (int)a.cols : 0, weights, sums, dtype, plain);
    }
}

/* Of rows that a thread has at most V vectors of. */
template <int E, int V, bool layer>
static __device__ __forceinline__ void backward_group(const norm_args &a, int width, hr_dtype dtype)
{
    HR_DYNAMIC_SHARED(float, shared);
    const row_team team = team_of(width);
    sums_in_registers<E, V, layer> sums = {};
    FOR_FLAG(is_plain_backward(a), P, (backward_rows<E, V, true, layer>(a, team, sums, dtype, P)))
    if (!a.partials)
        return;
    const int cols = (int)a.cols, count = sums_count(a);
    float *const out = sums_in_workspace(a);
    float *const to = team.count > 1 ? shared + team.index * count : out;
#pragma unroll
    for (int s = 0; s < (layer ? 2 : 1); s++)
        each_vector<V>(team.lane * E, team.width * E, cols,
                       [&](int v, int at) { put(to + s * cols + at, sums.of[s][v]); });
    if (team.count == 1)
        return;
    __syncthreads();
    for (int i = (int)threadIdx.x; i < count; i += (int)blockDim.x) {
        float total = 0.0f;
        for (int t = 0; t < team.count; t++)
            total += shared[t * count + i];
        out[i] = total;
    }
}

/* Of rows of any length, each of which takes the whole block. */
template <int E, bool layer>
static __device__ __forceinline__ void backward_long_group(const norm_args &a, hr_dtype dtype)
{
    HR_DYNAMIC_SHARED(float, shared);
    const row_team team = team_of((int)blockDim.x);
    const int count = sums_count(a), held = count < SHARED_SUMS ? count : SHARED_SUMS;
    float *const out = sums_in_workspace(a);
    if (a.partials) {
        for (int i = (int)threadIdx.x; i < count; i += (int)blockDim.x)
            *(i < held ? shared + i : out + i) = 0.0f;
        __syncthreads();
    }
    sums_in_memory<E> sums = {a, shared};
    backward_rows<E, 1, false, layer>(a, team, sums, dtype, false);
    if (!a.partials)
        return;
    __syncthreads();
    for (int i = (int)threadIdx.x; i < held; i += (int)blockDim.x)
        out[i] = shared[i];
}

#endif
