/*
 * rows.cuh: what grids over matrices of rows share. A team of threads takes a row, vectors of E
 * elements of it per thread and turn; E is 8, or 4 of binary32, where 16-byte accesses reach every
 * vector, else 1, in the same code.
 */
#ifndef HR_ROWS_CUH
#define HR_ROWS_CUH

#include "kernels/core/pack.cuh"
#include "kernels/core/reduce.cuh"

/* How many elements 16 bytes have. */
template <hr_dtype dtype> constexpr int vector_of = dtype == HR_F32 ? 4 : 8;

/* E consecutive elements, as they lie in memory. */
template <int E> struct few {
    pack<E> bits;
};
template <> struct few<1> {
    float x;
};

template <int E>
static __device__ __forceinline__ few<E> few_load(const void *row, int64_t j, hr_dtype dtype)
{
    if constexpr (E > 1)
        return {pack_load<E>(row, j, dtype)};
    else
        return {hr_load(row, j, dtype)};
}

template <int E>
static __device__ __forceinline__ float few_get(const few<E> &x, int e, hr_dtype dtype)
{
    if constexpr (E > 1)
        return pack_get(x.bits, e, dtype);
    else
        return x.x;
}

template <int E>
static __device__ __forceinline__ void few_store(void *row, int64_t j, const float (&x)[E],
                                                 hr_dtype dtype)
{
    if constexpr (E > 1)
        pack_store(row, j, pack_of(x, dtype), dtype);
    else
        hr_store(row, j, x[0], dtype);
}

/* All of them, as binary32. The type is looked at once. */
template <int E>
static __device__ __forceinline__ void few_floats(const few<E> &x, hr_dtype dtype, float (&out)[E])
{
    if constexpr (E > 1)
        pack_floats(x.bits, dtype, out);
    else
        out[0] = x.x;
}

/* Stores them, and returns what a load would read. */
template <int E>
static __device__ __forceinline__ few<E> few_rounded(void *row, int64_t j, const float (&x)[E],
                                                     hr_dtype dtype)
{
    if constexpr (E > 1) {
        const pack<E> bits = pack_of(x, dtype);
        pack_store(row, j, bits, dtype);
        return {bits};
    } else {
        hr_store(row, j, x[0], dtype);
        return {dtype == HR_F32 ? x[0] : hr_from_half(hr_to_half(x[0], dtype), dtype)};
    }
}

/* The sum over the threads of a row, in all of them: over the lanes of a warp, then over the warps
 * in their order. */
template <int WIDTH> static __device__ __forceinline__ double row_total(double x)
{
#pragma unroll
    for (int width = 16; width > 0; width /= 2)
        x += __shfl_xor_sync(0xFFFFFFFFu, x, width);
    if constexpr (WIDTH > 32) {
        __shared__ double warps[WIDTH / 32];
        __syncthreads(); /* the last total has been read */
        if (threadIdx.x % 32 == 0)
            warps[threadIdx.x / 32] = x;
        __syncthreads();
        x = 0.0;
#pragma unroll
        for (int w = 0; w < WIDTH / 32; w++)
            x += warps[w];
    }
    return x;
}

/* A thread block is cut into teams of equal width, each of which takes a row at a time and holds it
 * in registers: V vectors of E elements a thread, so that few threads wait for each other, with
 * several loads in flight each. Longer rows are read again, from the cache. */
#define TEAM_WIDEST 1024

struct row_team {
    int width, lane, index, count;
};

/* How many threads take a row of `cols` elements: a power of two, of which a block of `block` threads
 * has several, or the team has the block alone. */
static inline uint32_t team_width(int64_t cols, int elements, uint32_t block)
{
    const int64_t wanted = (cols + elements - 1) / elements;
    if (wanted >= TEAM_WIDEST)
        return TEAM_WIDEST;
    uint32_t width = 8;
    while (width < wanted)
        width = width < block ? 2 * width : width + 32;
    return width;
}

static __device__ __forceinline__ row_team team_of(int width)
{
    if ((int)blockDim.x == width)
        return {width, (int)threadIdx.x, 0, 1};
    const int shift = __popc((unsigned)width - 1u);
    return {width, (int)threadIdx.x & (width - 1), (int)threadIdx.x >> shift,
            (int)blockDim.x >> shift};
}

/* The sum over groups of `lanes` lanes of a warp, in all of them. */
static __device__ __forceinline__ float lane_total(float x, int lanes)
{
#pragma unroll
    for (int width = 16; width > 0; width /= 2)
        if (lanes > width)
            x += __shfl_xor_sync(0xFFFFFFFFu, x, width);
    return x;
}

static __device__ __forceinline__ float warp_total(float x)
{
    return lane_total(x, 32);
}

/* Sums over the threads of each team, in all of its threads: over the lanes of its warps, then over
 * its warps. The order depends on the width alone. All threads of the block make the same calls,
 * with the same N. `turn` is 0 and 1 in turns: two places, so that one barrier is enough. */
template <int N>
static __device__ __forceinline__ void team_totals(const row_team &team, int turn, float (&x)[N])
{
#pragma unroll
    for (int n = 0; n < N; n++)
        x[n] = lane_total(x[n], team.width);
    if (team.width <= 32)
        return;
    __shared__ float of_warps[2][N][TEAM_WIDEST / 32];
    const int lane = (int)threadIdx.x % 32, warps = team.width / 32;
#pragma unroll
    for (int n = 0; n < N; n++)
        if (lane == 0)
            of_warps[turn][n][threadIdx.x / 32] = x[n];
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; n++)
        x[n] = warp_total(lane < warps ? of_warps[turn][n][team.index * warps + lane] : 0.0f);
}

/* Calls visit(j) for each V vectors of a thread; j is the first column of the first, and the others
 * follow `width` vectors apart. The first call is for those that the thread has loaded, and before
 * each other load(j) is called. Every walk over a row goes the other way than the last, so that it
 * begins with what is in registers. `once`: no row has more than V vectors for a thread, which saves
 * the registers of a loop. */
struct row_walk {
    int j, step;
};

/* Calls visit(v, at) for those of the V vectors from column j on that the row has. */
template <int V, typename Visit>
static __device__ __forceinline__ void each_vector(int j, int apart, int cols, Visit visit)
{
#pragma unroll
    for (int v = 0; v < V; v++)
        if (j + v * apart < cols)
            visit(v, j + v * apart);
}

template <bool once = false, typename Load, typename Visit>
static __device__ __forceinline__ void row_visit(row_walk &walk, int cols, Load load, Visit visit)
{
    if (walk.j < cols)
        for (;;) {
            visit(walk.j);
            if constexpr (once)
                break;
            const int next = walk.j + walk.step;
            if ((uint32_t)next >= (uint32_t)cols)
                break;
            walk.j = next;
            load(next);
        }
    walk.step = -walk.step;
}

static __device__ __forceinline__ void *row_at(const hr_rows &rows, int64_t row, hr_dtype dtype)
{
    return (char *)rows.data + row * rows.stride * (dtype == HR_F32 ? 4 : 2);
}

#endif
