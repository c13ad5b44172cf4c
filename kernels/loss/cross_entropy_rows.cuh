/*
 * cross_entropy_rows.cuh: what grids over rows of logits share: which row and which of its elements a
 * thread takes, what it has seen of them, and what the threads of a row have seen together.
 *
 * A warp takes a row of up to SHORT classes, a thread block a longer one. Accesses are of 16 bytes,
 * and those of a warp lie side by side, also in rows that begin at an odd address: what lies before
 * the first multiple of 16 and after the last eight elements goes element by element.
 */
#ifndef HR_CROSS_ENTROPY_ROWS_CUH
#define HR_CROSS_ENTROPY_ROWS_CUH

#include "kernels/core/rows.cuh"
#include "kernels/loss/cross_entropy.h"

#define THREADS 256
#define SHORT   1024

/* ---- The elements of a row ------------------------------------------------------------------- */

/* The row that a thread takes with the others of its `width`, and which of them it is. The last
 * block may have threads without a row. */
struct row_place {
    int64_t row;
    int lane;
};

static __device__ __forceinline__ row_place place_of(int width)
{
    return {(int64_t)blockIdx.x * (THREADS / width) + (int)threadIdx.x / width,
            (int)threadIdx.x % width};
}

/* [0, head) and [end, cols) go element by element, what lies between in groups of eight; the thread's
 * first one begins at `own`. */
struct row_cut {
    int64_t head, end, cols, own;
    int lane, width;
};

/* Where the thread's groups begin. */
static __device__ __forceinline__ const void *body_of(const row_cut &cut, const void *row,
                                                      hr_dtype dtype)
{
    return (const char *)row + cut.own * hr_element_size(dtype);
}

static __device__ __forceinline__ void *body_of(const row_cut &cut, void *row, hr_dtype dtype)
{
    return (char *)row + cut.own * hr_element_size(dtype);
}

/* The cut of rows of `cols` elements: `in` is read and `out`, which may be NULL, is written.
 * `even`: whether the groups of other rows begin at multiples of 16 where those of `in` do. */
static __device__ __forceinline__ row_cut cut_row(const void *in, hr_dtype in_dtype,
                                                  const void *out, hr_dtype out_dtype, int64_t cols,
                                                  int lane, int width, bool even = true)
{
    const int64_t head = (int64_t)(-(uintptr_t)in % 16 / (uintptr_t)hr_element_size(in_dtype));
    even = even && head <= cols;
    if (out) {
        even = even && ((uintptr_t)out + (uintptr_t)head * hr_element_size(out_dtype)) % 16 == 0;
        /* What is written in the head may lie where the rest is read. */
        even = even && (in_dtype == out_dtype || head == 0);
    }
    if (!even)
        return {cols, cols, cols, cols, lane, width};
    const int64_t own = head + lane * (in_dtype == HR_F32 ? 4 : 8);
    return {head, head + (cols - head) / 8 * 8, cols, own, lane, width};
}

/* Where eight elements of a thread are: the second four begin `apart` after the first. */
struct eight_at {
    int64_t j;
    int apart;

    __device__ __forceinline__ int64_t operator[](int e) const
    {
        return e < 4 ? j + e : j + apart + (e - 4);
    }
};

/* Those of a turn, counted from the thread's first. Where eight take two accesses, the first four of
 * all threads come before their second. */
static __device__ __forceinline__ eight_at eight_of(const row_cut &cut, int64_t turn, bool is_whole,
                                                    hr_dtype dtype)
{
    if (dtype != HR_F32)
        return {turn, 4};
    const int64_t left = cut.end - cut.head - turn;
    const int half = cut.width * 4;
    return {turn, is_whole || left >= 2 * half ? half : (int)left / 2};
}

static __device__ __forceinline__ pack<8> load_eight(const void *body, eight_at at, hr_dtype dtype)
{
    if (dtype != HR_F32)
        return pack_load<8>(body, at.j, dtype);
    pack<8> p;
    p.low = *(const uint4 *)((const float *)body + at.j);
    p.high = *(const uint4 *)((const float *)body + at.j + at.apart);
    return p;
}

/* In a type that may be narrower than `in_dtype`, of which the eight were. */
static __device__ __forceinline__ void store_eight(void *body, eight_at at, hr_dtype dtype,
                                                   const pack<8> &p, hr_dtype in_dtype)
{
    if (dtype == HR_F32) {
        __stcs((uint4 *)((float *)body + at.j), p.low);
        __stcs((uint4 *)((float *)body + at.j + at.apart), p.high);
    } else if (in_dtype == HR_F32) {
        __stcs((uint2 *)((uint16_t *)body + at.j), make_uint2(p.low.x, p.low.y));
        __stcs((uint2 *)((uint16_t *)body + at.j + at.apart), make_uint2(p.low.z, p.low.w));
    } else {
        pack_store(body, at.j, p, dtype);
    }
}

/* Calls eight(at) for each group of the thread's elements, counted from its first, and one(j) for each
 * single one. With `meets` every thread makes as many calls, some of them with `present` false. */
template <typename Eight, typename One>
static __device__ __forceinline__ void for_elements(const row_cut &cut, hr_dtype dtype, bool meets,
                                                    Eight eight, One one)
{
    const int64_t groups = cut.end - cut.head, singles = cut.head + (cut.cols - cut.end);
    const int first = cut.lane * 8;
    for (int64_t turn = 0; (meets ? turn : turn + first) < groups; turn += cut.width * 8)
        eight(eight_of(cut, turn, false, dtype), !meets || turn + first < groups);
    for (int64_t k = cut.lane; (meets ? k - cut.lane : k) < singles; k += cut.width)
        one(k < cut.head ? k : cut.end + (k - cut.head), !meets || k < singles);
}

/* The same number for all elements of a row. */
static __device__ __attribute__((noinline, unused)) void
fill_row(void *row, int64_t cols, int lane, int width, float value, hr_dtype dtype)
{
    const row_cut cut = cut_row(row, dtype, nullptr, HR_F32, cols, lane, width);
    const float values[8] = {value, value, value, value, value, value, value, value};
    const pack<8> bits = pack_of(values, dtype);
    void *const body = body_of(cut, row, dtype);
    for_elements(
        cut, dtype, false, [&](eight_at at, bool) { store_eight(body, at, dtype, bits, dtype); },
        [&](int64_t j, bool) { hr_store(row, j, value, dtype); });
}

/* ---- The threads of a row -------------------------------------------------------------------- */

/* They meet, and see what each has written. */
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
template <int WIDEST = THREADS, typename T>
static __device__ __forceinline__ T row_largest(T x, int width)
{
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        const T other = __shfl_xor_sync(0xFFFFFFFFu, x, lanes);
        x = other > x ? other : x;
    }
    if (width > 32) {
        __shared__ T warps[WIDEST / 32];
        __syncthreads(); /* the last result has been read */
        if (threadIdx.x % 32 == 0)
            warps[threadIdx.x / 32] = x;
        __syncthreads();
#pragma unroll
        for (int w = 0; w < WIDEST / 32; w++)
            x = warps[w] > x ? warps[w] : x;
    }
    return x;
}

/* ---- Exponentials ---------------------------------------------------------------------------- */

/* What a thread has seen of a row: the largest logit, and the sum of exponentials of the others less
 * that. A NaN is not the largest, but makes the sum one. */
struct seen {
    float top, sum;
};

/* The same, and the other sums of ce_seen. */
struct seen_more : seen {
    float mean, squares, total;
};

template <typename Seen> static __device__ __forceinline__ Seen nothing_seen()
{
    Seen s = {};
    s.top = -INFINITY;
    return s;
}

/* 2^x within 2^-22 of itself, in one instruction: sums are held to a tolerance and not to the CPU's
 * bits. What is less than the least normal number is 0; a NaN stays one. */
static __device__ __forceinline__ float power_of_2(float x)
{
#if defined(__CUDA_ARCH__)
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    const float y = exp2f(x);
    return y < 0x1p-126f ? 0.0f : y;
#endif
}

#define LOG2_E 0x1.715476p+0f

/* Their sum, as a tree: a power of two of them. */
template <int E> static __device__ __forceinline__ float sum_of(const float (&x)[E])
{
    if constexpr (E == 1) {
        return x[0];
    } else {
        float pairs[E / 2];
#pragma unroll
        for (int e = 0; e < E / 2; e++)
            pairs[e] = x[e] + x[e + E / 2];
        return sum_of(pairs);
    }
}

/* `scale` takes a difference of logits to the exponent of 2. The sum so far is scaled again each
 * time, which is cheaper than a branch that some lanes take. Leaves the exponentials in `p`, and returns
 * what the sum was scaled by. */
template <int E>
static __device__ __forceinline__ float see(seen &s, const float (&z)[E], float (&p)[E],
                                            float scale)
{
    float top = s.top;
#pragma unroll
    for (int e = 0; e < E; e++)
        top = fmaxf(top, z[e]); /* a NaN is not the larger */
    const float base = ce_base(top);
#pragma unroll
    for (int e = 0; e < E; e++)
        p[e] = power_of_2((z[e] - base) * scale);
    const float shrinks = power_of_2((s.top - base) * scale);
    s.sum = s.sum * shrinks + sum_of(p);
    s.top = top;
    return shrinks;
}

template <int E>
static __device__ __forceinline__ void see(seen &s, const float (&z)[E], float scale)
{
    float p[E];
    see(s, z, p, scale);
}

/* A difference of logits that exponentials of 0 are multiplied by. */
static __device__ __forceinline__ float finite_less(float z, float base)
{
    return fmaxf(z - base, -1e30f); /* what a NaN is multiplied by is one, too */
}

template <int E>
static __device__ __forceinline__ void see(seen_more &s, const float (&z)[E], float scale)
{
    const seen before = s;
    float p[E], terms[E];
    const float shrinks = see(static_cast<seen &>(s), z, p, scale), base = ce_base(s.top);
#pragma unroll
    for (int e = 0; e < E; e++)
        terms[e] = p[e] * finite_less(z[e], base);
    s.mean = (s.mean + finite_less(before.top, base) * before.sum) * shrinks + sum_of(terms);
#pragma unroll
    for (int e = 0; e < E; e++)
        terms[e] = p[e] * p[e];
    s.squares = s.squares * (shrinks * shrinks) + sum_of(terms);
    s.total += sum_of(z);
}

/* Sees GROUPS groups of eight of as many turns, which are all loaded before the first is used.
 * `is_whole`: all threads have theirs. */
template <int GROUPS, typename Seen, typename Prepare>
static __device__ __forceinline__ void see_groups(Seen &s, const row_cut &cut, const void *body,
                                                  int64_t turn, bool is_whole, hr_dtype dtype,
                                                  float scale, Prepare prepare)
{
    pack<8> bits[GROUPS];
    const eight_at at = eight_of(cut, turn, is_whole, dtype);
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
        bits[g] = load_eight(body, {at.j + g * cut.width * 8, at.apart}, dtype);
    pack_all_loaded();
    float z[8 * GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        float(&eight)[8] = reinterpret_cast<float(&)[8]>(z[8 * g]);
        pack_floats(bits[g], dtype, eight);
        prepare(eight, eight_at{cut.own + at.j + g * cut.width * 8, at.apart});
    }
    see(s, z, scale);
}

/* What a thread sees of a row, GROUPS groups at a time. prepare(z, at) may change the logits, eight or
 * one, of columns at[0], at[1], ... */
template <int GROUPS, typename Seen = seen, typename Prepare>
static __device__ __forceinline__ Seen see_row(const row_cut &cut, const void *row, hr_dtype dtype,
                                               float scale, Prepare prepare)
{
    const void *const body = body_of(cut, row, dtype);
    const int64_t groups = cut.end - cut.head, singles = cut.head + (cut.cols - cut.end);
    const int step = cut.width * 8;
    Seen s = nothing_seen<Seen>();
    int64_t turn = 0;
#pragma unroll 1
    for (; turn + GROUPS * step <= groups; turn += GROUPS * step)
        see_groups<GROUPS>(s, cut, body, turn, true, dtype, scale, prepare);
#pragma unroll 1
    for (; turn + cut.lane * 8 < groups; turn += step)
        see_groups<1>(s, cut, body, turn, false, dtype, scale, prepare);
#pragma unroll 1
    for (int64_t k = cut.lane; k < singles; k += cut.width) {
        const int64_t at = k < cut.head ? k : cut.end + (k - cut.head);
        float z[1] = {hr_load(row, at, dtype)};
        prepare(z, eight_at{at, 4});
        see(s, z, scale);
    }
    return s;
}

/* The sum of all threads of a row, relative to `top`, the largest logit of all. */
static __device__ __forceinline__ double row_exponentials(const seen &s, float top, int width,
                                                          float scale)
{
    return row_sum((double)(s.sum * power_of_2((s.top - ce_base(top)) * scale)), width);
}

/* ---- Logits of a cross entropy --------------------------------------------------------------- */

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

/* Puts logits through the softcap, and adds weight * z to `weighted`. */
template <int E>
static __device__ __forceinline__ void prepare_logits(float (&z)[E], float &weighted, eight_at at,
                                                      const cross_entropy_args &a)
{
    const float cap = (float)a.config.softcap;
    if (cap > 0.0f) {
#pragma unroll
        for (int e = 0; e < E; e++)
            z[e] = cap * hr_tanh(z[e] / cap);
    }
    if (a.config.label_smoothing > 0.0) {
#pragma unroll
        for (int e = 0; e < E; e++)
            weighted += a.weight ? a.weight[a.first + at[e]] * z[e] : z[e];
    }
}

/* What a thread sees of a row of logits, and the sum of weight * z; `plain`: no softcap and no label
 * smoothing. */
template <typename Seen = seen>
static __device__ __forceinline__ Seen see_logits(const row_cut &cut, const void *row,
                                                  hr_dtype dtype, float &weighted,
                                                  const cross_entropy_args &a, bool plain)
{
    if (plain)
        return see_row<2, Seen>(cut, row, dtype, LOG2_E, [](auto &, eight_at) {});
    return see_row<1, Seen>(cut, row, dtype, LOG2_E,
                            [&](auto &z, eight_at at) { prepare_logits(z, weighted, at, a); });
}

/* ---- Sums over rows -------------------------------------------------------------------------- */

#define ADDING 512 /* threads of a block that adds rows, or parts of them, up */
#define AHEAD  4   /* rows of a thread whose loads are in flight */

static_assert(CE_PARTS <= ADDING, "a thread has a part");

/* The rows of a block: those of its part, `share` of all. */
struct row_range {
    int64_t begin, end;
};

static __device__ __forceinline__ row_range rows_of_part(int64_t rows, int64_t share)
{
    const int64_t begin = blockIdx.x * share;
    return {begin, rows - begin < share ? rows : begin + share};
}

static inline int64_t share_of(int64_t rows, int64_t parts)
{
    return (rows + parts - 1) / parts;
}

/* The sums over the threads of the block, in all of them. */
static __device__ __forceinline__ void add_threads(ce_totals &totals)
{
    totals.loss = row_total<ADDING>(totals.loss);
    totals.z_loss = row_total<ADDING>(totals.z_loss);
    totals.weight = row_total<ADDING>(totals.weight);
    totals.count = row_total<ADDING>(totals.count);
}

/* The sums over what the blocks have left, in all threads of one. */
static __device__ __forceinline__ ce_totals sum_of_parts(const ce_totals *parts, int count)
{
    ce_totals totals = {};
    if ((int)threadIdx.x < count)
        totals = parts[threadIdx.x];
    add_threads(totals);
    return totals;
}

/* ---- Calls ----------------------------------------------------------------------------------- */

/* Launches kernel(*args, width) with as many threads as the rows take. */
template <typename Kernel, typename Args>
static inline hr_status launch_rows(Kernel kernel, const char *function, const Args *args,
                                    const hr_exec *exec)
{
    const int width = args->classes <= SHORT ? 32 : THREADS, per_block = THREADS / width;
    const int64_t blocks = (args->rows + per_block - 1) / per_block;
    if (blocks > INT32_MAX)
        return hr_fail(HR_UNSUPPORTED, "%s: rows is more than a grid of CUDA can take", function);
    if (blocks > 0)
        HR_LAUNCH(kernel, (uint32_t)blocks, THREADS, 0, exec->stream, *args, width);
    return cuda_launch_status(function);
}

#endif
