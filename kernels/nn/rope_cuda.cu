/*
 * rope_cuda.cu: the grid. A thread takes E elements of a token from each half of what is rotated, and
 * rotates their pairs in several heads of q and k, so that it reads their cosines and sines once. E
 * elements are 16 bytes where such accesses reach them all, else 1, in the same code. Threads next to
 * each other have neighbors of a vector, and after these the elements that are copied, 2 E a thread.
 */
#include "kernels/core/rows.cuh"
#include "kernels/nn/rope.h"

#define THREADS 256
#define HEADS   8 /* of a thread */
#define TURN    2 /* of these at a time, all of whose loads are in flight before the first is used */

typedef struct rope_grid {
    rope_args args;
    int64_t threads;  /* of all tokens of all batches */
    int64_t turns;    /* threads that a token needs: those that rotate, then those that copy */
    int64_t rotating; /* how many of these rotate */
    uint32_t q_rows;  /* rows of the grid that are heads of q; those after them are heads of k */
    int interleaved, inverse;
} rope_grid;

/* Element e of two packs. */
template <int E>
static __device__ __forceinline__ float two_get(const few<E> &a, const few<E> &b, int e,
                                                hr_dtype dtype)
{
    return e < E ? few_get(a, e < E ? e : 0, dtype) : few_get(b, e < E ? 0 : e - E, dtype);
}

/* E entries of a table, from pair i on, or where the pairs of a thread are neighbors half of them, and
 * half from pair `other` on. */
template <int E>
static __device__ __forceinline__ void read_table(float (&x)[E], const hr_rows &table, int64_t row,
                                                  int64_t i, int64_t other, bool interleaved,
                                                  hr_dtype dtype)
{
    const void *const from = row_at(table, row, dtype);
    constexpr int HALF = E == 8 ? 4 : 1; /* in an access */
    if (E == 1 || !interleaved) {
        const few<E> values = few_load<E>(from, i, dtype);
#pragma unroll
        for (int e = 0; e < E; e++)
            x[e] = few_get(values, e, dtype);
    } else {
#pragma unroll
        for (int e = 0; e < E; e += HALF) {
            const int64_t at = e < E / 2 ? i + e : other + (e - E / 2);
            const few<HALF> values = few_load<HALF>(from, at, dtype);
#pragma unroll
            for (int k = 0; k < HALF; k++)
                x[e + k] = few_get(values, k, dtype);
        }
    }
}

/* Where a thread's elements of a vector begin: the first and the second E. */
struct place {
    int64_t first, second;
};

/* The heads of a thread: `count` vectors, the first at `in`, with these bytes between two. */
struct run_of_heads {
    const char *in;
    char *out;
    int64_t in_step, out_step;
    int count;
};

static __device__ __forceinline__ run_of_heads heads_of(const rope_grid &g, int64_t batch,
                                                        int64_t token, hr_dtype dtype)
{
    const bool is_q = blockIdx.y < g.q_rows;
    const rope_part part = is_q ? g.args.q : g.args.k;
    const int64_t begin = (int64_t)(is_q ? blockIdx.y : blockIdx.y - g.q_rows) * HEADS;
    const int size = dtype == HR_F32 ? 4 : 2;
    return {(const char *)rope_vector(&part.in, batch, token, begin, dtype),
            (char *)rope_vector(&part.out, batch, token, begin, dtype), part.in.head_stride * size,
            part.out.head_stride * size,
            part.heads - begin < HEADS ? (int)(part.heads - begin) : HEADS};
}

template <int E>
static __device__ __forceinline__ void rotate_heads(const rope_grid &g, int64_t batch,
                                                    int64_t token, int64_t turn, hr_dtype dtype,
                                                    bool interleaved)
{
    const rope_args &a = g.args;
    const int64_t i = turn * E;
    const place at = E == 1 && interleaved ? place{2 * i, 2 * i + 1} : place{i, a.pairs + i};
    const bool halves = E > 1 && interleaved; /* pairs i / 2 and, of the second half, others */
    const int64_t pair = halves ? i / 2 : i, other = (a.pairs + i) / 2;
    float cos[E], sin[E];
    const int64_t row = rope_position(&a, batch, token);
    if (row >= 0 && row < a.table_rows) {
        read_table<E>(cos, a.cos, row, pair, other, interleaved, a.config.table_dtype);
        read_table<E>(sin, a.sin, row, pair, other, interleaved, a.config.table_dtype);
    } else {
#pragma unroll
        for (int e = 0; e < E; e++)
            cos[e] = sin[e] = hr_float(0x7FFFFFFFu);
    }
    if (g.inverse) {
#pragma unroll
        for (int e = 0; e < E; e++)
            sin[e] = -sin[e];
    }
    run_of_heads heads = heads_of(g, batch, token, dtype);
#pragma unroll 1
    for (int h = 0; h < heads.count; h += TURN) {
        few<E> first[TURN], second[TURN];
#pragma unroll
        for (int t = 0; t < TURN; t++)
            if (h + t < heads.count) {
                first[t] = few_load<E>(heads.in, at.first, dtype);
                second[t] = few_load<E>(heads.in, at.second, dtype);
                heads.in += heads.in_step;
            }
        pack_all_loaded();
#pragma unroll
        for (int t = 0; t < TURN; t++)
            if (h + t < heads.count) {
                float x[E], y[E];
#pragma unroll
                for (int e = 0; e < E; e++) {
                    const int one = interleaved ? 2 * e : e,
                              other = interleaved ? 2 * e + 1 : e + E;
                    const float left = two_get<E>(first[t], second[t], one, dtype);
                    const float right = two_get<E>(first[t], second[t], other, dtype);
                    const float turned[2] = {rope_first(left, right, cos[e], sin[e]),
                                             rope_second(left, right, cos[e], sin[e])};
#pragma unroll
                    for (int k = 0; k < 2; k++) {
                        const int to = k ? other : one;
                        (to < E ? x : y)[to % E] = turned[k];
                    }
                }
                few_store<E>(heads.out, at.first, x, dtype);
                few_store<E>(heads.out, at.second, y, dtype);
                heads.out += heads.out_step;
            }
    }
}

/* The elements that no pair has, bit for bit. */
template <int E>
static __device__ __forceinline__ void copy_rest(const rope_grid &g, int64_t batch, int64_t token,
                                                 int64_t turn, hr_dtype dtype)
{
    const rope_args &a = g.args;
    run_of_heads heads = heads_of(g, batch, token, dtype);
    if (heads.in == heads.out)
        return;
#pragma unroll 1
    for (int h = 0; h < heads.count; h++) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int64_t j = 2 * a.pairs + (turn + k * (g.turns - g.rotating)) * E;
            if (j >= a.head_dim)
                continue;
            if constexpr (E > 1)
                pack_store(heads.out, j, pack_load<E>(heads.in, j, dtype), dtype);
            else if (dtype == HR_F32)
                ((uint32_t *)heads.out)[j] = ((const uint32_t *)heads.in)[j];
            else
                ((uint16_t *)heads.out)[j] = ((const uint16_t *)heads.in)[j];
        }
        heads.in += heads.in_step;
        heads.out += heads.out_step;
    }
}

/* Divides *n and leaves the remainder there. A division of 64 bits would take as long as all else
 * that a thread computes. */
static __device__ __forceinline__ int64_t divide(int64_t *n, int64_t by, bool is_small)
{
    const int64_t whole = is_small ? (uint32_t)*n / (uint32_t)by : *n / by;
    *n -= whole * by;
    return whole;
}

template <int E>
static __global__ void __launch_bounds__(THREADS) rope_kernel(const rope_grid __grid_constant__ g)
{
    const rope_args &a = g.args;
    int64_t turn = (int64_t)blockIdx.x * THREADS + (int)threadIdx.x;
    if (turn >= g.threads)
        return;
    const bool is_small = g.threads <= INT32_MAX;
    int64_t token = divide(&turn, g.turns, is_small);
    const int64_t batch = divide(&token, a.tokens, is_small);
    const auto run = [&](hr_dtype dtype, bool interleaved) {
        if (turn < g.rotating)
            rotate_heads<E>(g, batch, token, turn, dtype, interleaved);
        else
            copy_rest<E>(g, batch, token, turn - g.rotating, dtype);
    };
    if constexpr (E == 1)
        run(a.config.dtype, g.interleaved);
    else if constexpr (E == vector_of<HR_F32>)
        g.interleaved ? run(HR_F32, true) : run(HR_F32, false);
    else if (a.config.dtype == HR_BF16)
        g.interleaved ? run(HR_BF16, true) : run(HR_BF16, false);
    else
        g.interleaved ? run(HR_F16, true) : run(HR_F16, false);
}

/* The bits that 16-byte accesses want to be zero. */
static uintptr_t bits_of(const hr_heads *heads, const rope_args *a, int64_t count)
{
    const uintptr_t bytes = a->config.dtype == HR_F32 ? 4 : 2;
    if (!heads->data || count == 0)
        return 0;
    return (uintptr_t)heads->data | (a->batch > 1 ? (uintptr_t)heads->batch_stride * bytes : 0) |
           (a->tokens > 1 ? (uintptr_t)heads->token_stride * bytes : 0) |
           (count > 1 ? (uintptr_t)heads->head_stride * bytes : 0);
}

static uintptr_t bits_of(const hr_rows *table, const rope_args *a)
{
    const uintptr_t bytes = a->config.table_dtype == HR_F32 ? 4 : 2;
    return (uintptr_t)table->data | (a->table_rows > 1 ? (uintptr_t)table->stride * bytes : 0);
}

static bool is_vectorizable(const rope_args *a)
{
    const uintptr_t bits = bits_of(&a->q.in, a, a->q.heads) | bits_of(&a->q.out, a, a->q.heads) |
                           bits_of(&a->k.in, a, a->k.heads) | bits_of(&a->k.out, a, a->k.heads) |
                           bits_of(&a->cos, a) | bits_of(&a->sin, a);
    return bits % 16 == 0 && a->pairs % 8 == 0 && a->head_dim % 8 == 0;
}

hr_status rope_cuda(const rope_args *args, const hr_exec *exec)
{
    const int64_t heads = args->q.heads + args->k.heads, tokens = args->batch * args->tokens;
    if (heads == 0 || tokens == 0)
        return HR_OK;
    const bool is_f32 = args->config.dtype == HR_F32;
    const int64_t elements = !is_vectorizable(args) ? 1 : is_f32 ? 4 : 8;
    const int64_t rotating = args->pairs / elements;
    const int64_t each = 2 * elements, rest = args->head_dim - 2 * args->pairs;
    const int64_t turns = rotating + (rest + each - 1) / each;
    const int64_t q_rows = (args->q.heads + HEADS - 1) / HEADS;
    const int64_t x = (tokens * turns + THREADS - 1) / THREADS;
    const int64_t y = q_rows + (args->k.heads + HEADS - 1) / HEADS;
    if (x > INT32_MAX || y > 65535)
        return hr_fail(HR_UNSUPPORTED,
                       "hr_rope: there are more tokens or heads than a grid of CUDA can take");
    const rope_grid grid = {.args = *args,
                            .threads = tokens * turns,
                            .turns = turns,
                            .rotating = rotating,
                            .q_rows = (uint32_t)q_rows,
                            .interleaved = args->config.interleaved != 0,
                            .inverse = args->config.inverse != 0};
    const dim3 blocks((uint32_t)x, (uint32_t)y);
    const auto kernel = elements == 1 ? rope_kernel<1> : is_f32 ? rope_kernel<4> : rope_kernel<8>;
    HR_LAUNCH(kernel, blocks, THREADS, 0, exec->stream, grid);
    return cuda_launch_status("hr_rope");
}
