/*
 * cross_entropy_rows.cuh: what grids over rows of logits share: which accesses reach their elements,
 * what a thread has seen of a row, and what the threads of a row have seen together.
 */
#ifndef HR_CROSS_ENTROPY_ROWS_CUH
#define HR_CROSS_ENTROPY_ROWS_CUH

#include "kernels/core/rows.cuh"
#include "kernels/loss/cross_entropy.h"

#define THREADS 256
#define SHORT   1024 /* classes of a row that a warp takes; a thread block takes a longer one */

/* ---- The elements of a row ------------------------------------------------------------------- */

/* [0, head) and [end, cols) go element by element, what lies between in groups of eight. */
struct row_cut {
    int64_t head, end;
};

/* `out` may be NULL. */
static __device__ __forceinline__ row_cut cut_row(const void *in, hr_dtype in_dtype,
                                                  const void *out, hr_dtype out_dtype, int64_t cols)
{
    const uintptr_t in_bytes = in_dtype == HR_F32 ? 4 : 2, out_bytes = out_dtype == HR_F32 ? 4 : 2;
    const int64_t head = (int64_t)(-(uintptr_t)in % 16 / in_bytes);
    if (head > cols || (out && ((uintptr_t)out + (uintptr_t)head * out_bytes) % 16 != 0))
        return {cols, cols};
    return {head, head + (cols - head) / 8 * 8};
}

/* Calls one(j) for each single element of the thread. */
template <typename One>
static __device__ __forceinline__ void for_single(const row_cut &cut, int64_t cols, int lane,
                                                  int width, One one)
{
    const int64_t singles = cut.head + (cols - cut.end);
    for (int64_t k = lane; k < singles; k += width)
        one(k < cut.head ? k : cut.end + (k - cut.head));
}

/* Threads of a row meet, and see what each has written. */
static __device__ __forceinline__ void meet(int width)
{
    if (width == 32)
        __syncwarp();
    else
        __syncthreads();
}

static __device__ __forceinline__ double row_sum(double x, int width)
{
    return width == 32 ? row_total<32>(x) : row_total<THREADS>(x);
}

/* The largest over the threads of a row, in all of them; a NaN does not count. */
template <typename T> static __device__ __forceinline__ T row_largest(T x, int width)
{
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        const T other = __shfl_xor_sync(0xFFFFFFFFu, x, lanes);
        x = other > x ? other : x;
    }
    if (width > 32) {
        __shared__ T warps[THREADS / 32];
        __syncthreads(); /* the last result has been read */
        if (threadIdx.x % 32 == 0)
            warps[threadIdx.x / 32] = x;
        __syncthreads();
#pragma unroll
        for (int w = 0; w < THREADS / 32; w++)
            x = warps[w] > x ? warps[w] : x;
    }
    return x;
}

static __device__ __forceinline__ float capped(float z, float cap)
{
    return cap > 0.0f ? cap * hr_tanh(z / cap) : z;
}

static __device__ __attribute__((noinline, unused)) double
sum_of_weights(const cross_entropy_args &a, int lane, int width)
{
    if (a.given_sum)
        return *a.given_sum;
    if (!a.weight || a.config.label_smoothing == 0.0)
        return (double)a.all;
    double sum = 0.0;
    for (int64_t j = lane; j < a.all; j += width)
        sum += (double)a.weight[j];
    return row_sum(sum, width);
}

/* What a thread has seen of a row. */
struct seen {
    float top, sum, weighted;
};

template <int E> static __device__ __forceinline__ void see(seen &s, const float (&z)[E])
{
    float top = z[0];
#pragma unroll
    for (int e = 1; e < E; e++)
        top = z[e] > top ? z[e] : top;
    if (top > s.top) {
        s.sum *= ce_exp(s.top - top);
        s.top = top;
    }
    const float base = ce_base(s.top);
    float p[E];
#pragma unroll
    for (int e = 0; e < E; e++)
        p[e] = ce_exp(z[e] - base);
#pragma unroll
    for (int n = E / 2; n > 0; n /= 2)
#pragma unroll
        for (int e = 0; e < n; e++)
            p[e] += p[e + n];
    s.sum += p[0];
}

/* `plain`: no softcap and no label smoothing. */
template <int E>
static __device__ __forceinline__ void take(seen &s, float (&z)[E], int64_t j,
                                            const cross_entropy_args &a, bool plain)
{
    if (!plain) {
        const float cap = (float)a.config.softcap;
        if (cap > 0.0f) {
#pragma unroll
            for (int e = 0; e < E; e++)
                z[e] = cap * hr_tanh(z[e] / cap);
        }
        if (a.config.label_smoothing > 0.0) {
#pragma unroll
            for (int e = 0; e < E; e++)
                s.weighted += a.weight ? a.weight[a.first + j + e] * z[e] : z[e];
        }
    }
    see(s, z);
}

#endif
