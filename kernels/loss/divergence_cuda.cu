/*
 * divergence_cuda.cu: the grids: a warp takes a row of up to SHORT classes, a block a longer one. A
 * row is read twice in the forward pass: for its log-sum-exps, and for the sum over the classes.
 *
 * Accesses are of 16 bytes, eight elements of a thread, also in rows that begin at an odd address:
 * what lies before the first multiple of 16 and after the last group goes element by element. The
 * gradient may be written over the student's logits, also in a narrower type: all threads have read
 * a turn before one of them writes.
 */
#include "kernels/core/rows.cuh"
#include "kernels/loss/divergence.h"

#define THREADS 256
#define SHORT   1024

/* A row of each matrix, and which of its elements a thread of `width` takes. */
struct pair_rows {
    const void *student, *teacher;
    void *grad; /* NULL in the forward pass */
    int64_t head, end, cols;
    int lane, width;
};

static __device__ __forceinline__ int bytes_of(hr_dtype dtype)
{
    return dtype == HR_F32 ? 4 : 2;
}

static __device__ __forceinline__ pair_rows rows_of(const divergence_args &a, int64_t row, int lane,
                                                    int width, hr_dtype dtype, hr_dtype grad_dtype)
{
    pair_rows r = {row_at(a.student, row, dtype),
                   row_at(a.teacher, row, dtype),
                   nullptr,
                   0,
                   0,
                   a.classes,
                   lane,
                   width};
    const int64_t head = (int64_t)(-(uintptr_t)r.student % 16 / (uintptr_t)bytes_of(dtype));
    bool even = ((uintptr_t)r.teacher - (uintptr_t)r.student) % 16 == 0 && head <= a.classes;
    if (a.grad.data) {
        r.grad = row_at(a.grad, row, grad_dtype);
        even = even && ((uintptr_t)r.grad + (uintptr_t)head * bytes_of(grad_dtype)) % 16 == 0;
        /* What is written in the head may lie where the rest is read. */
        even = even && (dtype == grad_dtype || head == 0);
    }
    r.head = even ? head : a.classes;
    r.end = even ? head + (a.classes - head) / 8 * 8 : a.classes;
    return r;
}

/* Calls eight(j) for each group of the thread's elements, j counted from `head`, and one(j) for each
 * single one. With `meets` every thread makes as many calls, some of them with `present` false. */
template <typename Eight, typename One>
static __device__ __forceinline__ void for_elements(const pair_rows &r, bool meets, Eight eight,
                                                    One one)
{
    const int64_t groups = r.end - r.head, singles = r.head + (r.cols - r.end);
    for (int64_t k = 0; k < groups; k += (int64_t)r.width * 8) {
        const int64_t j = k + (int64_t)r.lane * 8;
        if (j < groups || meets)
            eight(j, j < groups);
    }
    for (int64_t first = 0; first < singles; first += r.width) {
        const int64_t k = first + r.lane, j = k < r.head ? k : r.end + (k - r.head);
        if (k < singles || meets)
            one(j, k < singles);
    }
}

/* Threads of a row meet, and see what each has written. */
static __device__ __forceinline__ void meet(int width)
{
    if (width == 32)
        __syncwarp();
    else
        __syncthreads();
}

static __device__ __forceinline__ double total_of(double x, int width)
{
    return width == 32 ? row_total<32>(x) : row_total<THREADS>(x);
}

/* ---- Log-sum-exps ---------------------------------------------------------------------------- */

/* The largest of some logits, and the sum of exp(z - top). A NaN is not the largest, but makes the
 * sum one. */
struct seen {
    float top, sum;
};

static __device__ __forceinline__ seen joined(const seen &x, const seen &y)
{
    const float top = y.top > x.top ? y.top : x.top, base = ce_base(top);
    return {top, x.sum * ce_exp(x.top - base) + y.sum * ce_exp(y.top - base)};
}

template <int E> static __device__ __forceinline__ void see(seen &s, const float (&z)[E])
{
    seen group = {z[0], 0.0f};
#pragma unroll
    for (int e = 1; e < E; e++)
        group.top = z[e] > group.top ? z[e] : group.top;
    if (!(group.top <= s.top)) { /* larger, or a NaN in the first place, which does not count */
        const float top = group.top > s.top ? group.top : s.top;
        s.sum *= ce_exp(s.top - ce_base(top));
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

/* Over the threads of a row, in all of them and in a fixed order. */
static __device__ __forceinline__ double lse_of(seen s, int width)
{
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2)
        s = joined(s, {__shfl_xor_sync(0xFFFFFFFFu, s.top, lanes),
                       __shfl_xor_sync(0xFFFFFFFFu, s.sum, lanes)});
    if (width > 32) {
        __shared__ seen warps[THREADS / 32];
        __syncthreads(); /* the last result has been read */
        if (threadIdx.x % 32 == 0)
            warps[threadIdx.x / 32] = s;
        __syncthreads();
        s = warps[0];
#pragma unroll
        for (int w = 1; w < THREADS / 32; w++)
            s = joined(s, warps[w]);
    }
    return ce_lse(s.top, (double)s.sum);
}

static __device__ __forceinline__ double row_lse(const pair_rows &r, const void *row,
                                                 dv_scale scale, hr_dtype dtype)
{
    seen s = {-INFINITY, 0.0f};
    const void *const body = (const char *)row + r.head * bytes_of(dtype);
    for_elements(
        r, false,
        [&](int64_t j, bool) {
            float z[8];
            pack_floats(pack_load<8>(body, j, dtype), dtype, z);
#pragma unroll
            for (int e = 0; e < 8; e++)
                z[e] = dv_scaled(z[e], scale);
            see(s, z);
        },
        [&](int64_t j, bool) {
            const float z[1] = {dv_scaled(hr_load(row, j, dtype), scale)};
            see(s, z);
        });
    return lse_of(s, r.width);
}

/* ---- Forward --------------------------------------------------------------------------------- */

static __device__ __forceinline__ void add(dv_terms &sum, const dv_terms &terms)
{
    sum.under_student += terms.under_student;
    sum.under_teacher += terms.under_teacher;
    sum.p += terms.p;
    sum.q += terms.q;
}

template <int KIND, hr_dtype DTYPE>
static __device__ __forceinline__ void forward_row(const divergence_args &a, int64_t row, int lane,
                                                   int width)
{
    const pair_rows r = rows_of(a, row, lane, width, DTYPE, DTYPE);
    const dv_scale scale = dv_scale_of(&a);
    double student = 0.0, teacher = 0.0; /* log-sum-exps, by the same code */
#pragma unroll 1
    for (int which = 0; which < 2; which++) {
        const double lse = row_lse(r, which ? r.teacher : r.student, scale, DTYPE);
        student = which ? student : lse;
        teacher = lse;
    }
    const dv_row of_row = dv_row_of_lse(&a, student, teacher);
    dv_terms sum = {0.0f, 0.0f, 0.0f, 0.0f};
    const int64_t skipped = r.head * bytes_of(DTYPE);
    for_elements(
        r, false,
        [&](int64_t j, bool) {
            const pack<8> of_s = pack_load<8>((const char *)r.student + skipped, j, DTYPE);
            const pack<8> of_t = pack_load<8>((const char *)r.teacher + skipped, j, DTYPE);
            pack_all_loaded();
            float s[8], t[8];
            pack_floats(of_s, DTYPE, s);
            pack_floats(of_t, DTYPE, t);
            dv_terms group = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int e = 0; e < 8; e++)
                add(group,
                    dv_terms_of(&of_row, dv_scaled(s[e], scale), dv_scaled(t[e], scale), KIND));
            add(sum, group);
        },
        [&](int64_t j, bool) {
            add(sum, dv_terms_of(&of_row, dv_scaled(hr_load(r.student, j, DTYPE), scale),
                                 dv_scaled(hr_load(r.teacher, j, DTYPE), scale), KIND));
        });
    dv_sums sums = {0.0, 0.0, 0.0, 0.0};
    if (KIND != DV_REVERSE) {
        sums.under_teacher = total_of((double)sum.under_teacher, width);
        sums.q = total_of((double)sum.q, width);
    }
    if (KIND != DV_FORWARD) {
        sums.under_student = total_of((double)sum.under_student, width);
        sums.p = total_of((double)sum.p, width);
    }
    if (lane == 0)
        dv_finish(&a, row, &of_row, &sums);
}

template <int KIND>
static __global__ void __launch_bounds__(THREADS, 2)
    divergence_forward_kernel(const divergence_args __grid_constant__ a, int width)
{
    const int lane = (int)threadIdx.x % width;
    const int64_t row = (int64_t)blockIdx.x * (THREADS / width) + (int)threadIdx.x / width;
    if (row >= a.rows)
        return; /* a whole warp or a whole block */
    if (dv_is_ignored(&a, row)) {
        if (lane == 0)
            dv_finish_ignored(&a, row);
        return;
    }
    if (a.config.dtype == HR_BF16)
        forward_row<KIND, HR_BF16>(a, row, lane, width);
    else if (a.config.dtype == HR_F16)
        forward_row<KIND, HR_F16>(a, row, lane, width);
    else
        forward_row<KIND, HR_F32>(a, row, lane, width);
}

/* ---- Backward -------------------------------------------------------------------------------- */

template <int KIND, hr_dtype DTYPE, hr_dtype GRAD>
static __device__ __forceinline__ void backward_row(const divergence_args &a, int64_t row, int lane,
                                                    int width)
{
    const pair_rows r = rows_of(a, row, lane, width, DTYPE, GRAD);
    const dv_scale scale = dv_scale_of(&a);
    const float factor = dv_factor(&a, row, KIND);
    const dv_row of_row = dv_row_of(&a, a.statistics + row * HR_DIVERGENCE_STATISTICS, 1);
    const int64_t skipped = r.head * bytes_of(DTYPE);
    void *const out = (char *)r.grad + r.head * bytes_of(GRAD);
    constexpr bool meets = DTYPE != GRAD;
    for_elements(
        r, meets,
        [&](int64_t j, bool present) {
            pack<8> student = {}, teacher = {};
            if (present) {
                student = pack_load<8>((const char *)r.student + skipped, j, DTYPE);
                teacher = pack_load<8>((const char *)r.teacher + skipped, j, DTYPE);
                pack_all_loaded();
            }
            if (meets)
                meet(width);
            if (!present)
                return;
            float s[8], t[8];
            pack_floats(student, DTYPE, s);
            pack_floats(teacher, DTYPE, t);
#pragma unroll
            for (int e = 0; e < 8; e++)
                s[e] = dv_gradient(&of_row, dv_scaled(s[e], scale), dv_scaled(t[e], scale), factor,
                                   KIND);
            pack_store(out, j, pack_of(s, GRAD), GRAD);
        },
        [&](int64_t j, bool present) {
            float gradient = 0.0f;
            if (present)
                gradient =
                    dv_gradient(&of_row, dv_scaled(hr_load(r.student, j, DTYPE), scale),
                                dv_scaled(hr_load(r.teacher, j, DTYPE), scale), factor, KIND);
            if (meets)
                meet(width);
            if (present)
                hr_store(r.grad, j, gradient, GRAD);
        });
}

/* Of a row that is ignored. */
static __device__ __attribute__((noinline)) void clear_row(void *grad, int64_t cols, int lane,
                                                           int width, hr_dtype dtype)
{
    for (int64_t j = lane; j < cols; j += width)
        hr_store(grad, j, 0.0f, dtype);
}

template <int KIND>
static __global__ void __launch_bounds__(THREADS, 2)
    divergence_backward_kernel(const divergence_args __grid_constant__ a, int width)
{
    const int lane = (int)threadIdx.x % width;
    const int64_t row = (int64_t)blockIdx.x * (THREADS / width) + (int)threadIdx.x / width;
    if (row >= a.rows)
        return; /* a whole warp or a whole block */
    const hr_dtype dtype = a.config.dtype, grad_dtype = a.config.grad_dtype;
    if (dv_is_ignored(&a, row))
        clear_row(row_at(a.grad, row, grad_dtype), a.classes, lane, width, grad_dtype);
    else if (dtype == HR_BF16)
        backward_row<KIND, HR_BF16, HR_BF16>(a, row, lane, width);
    else if (dtype == HR_F16)
        backward_row<KIND, HR_F16, HR_F16>(a, row, lane, width);
    else if (grad_dtype == HR_F32)
        backward_row<KIND, HR_F32, HR_F32>(a, row, lane, width);
    else if (grad_dtype == HR_BF16)
        backward_row<KIND, HR_F32, HR_BF16>(a, row, lane, width);
    else
        backward_row<KIND, HR_F32, HR_F16>(a, row, lane, width);
}

/* ---- Calls ----------------------------------------------------------------------------------- */

template <typename Kernel>
static hr_status launch(Kernel kernel, const char *function, const divergence_args *a,
                        const hr_exec *exec)
{
    const int width = a->classes <= SHORT ? 32 : THREADS, per_block = THREADS / width;
    const int64_t blocks = (a->rows + per_block - 1) / per_block;
    if (blocks > INT32_MAX)
        return hr_fail(HR_UNSUPPORTED, "%s: rows is more than a grid of CUDA can take", function);
    if (blocks > 0)
        HR_LAUNCH(kernel, (uint32_t)blocks, THREADS, 0, exec->stream, *a, width);
    return cuda_launch_status(function);
}

hr_status divergence_forward_cuda(const divergence_args *args, const hr_exec *exec)
{
    const int kind = dv_kind(args);
    return launch(kind == DV_FORWARD   ? divergence_forward_kernel<DV_FORWARD>
                  : kind == DV_REVERSE ? divergence_forward_kernel<DV_REVERSE>
                                       : divergence_forward_kernel<DV_MIXED>,
                  "hr_divergence_forward", args, exec);
}

hr_status divergence_backward_cuda(const divergence_args *args, const hr_exec *exec)
{
    const int kind = dv_kind(args);
    return launch(kind == DV_FORWARD   ? divergence_backward_kernel<DV_FORWARD>
                  : kind == DV_REVERSE ? divergence_backward_kernel<DV_REVERSE>
                                       : divergence_backward_kernel<DV_MIXED>,
                  "hr_divergence_backward", args, exec);
}
