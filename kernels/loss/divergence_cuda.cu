/*
 * divergence_cuda.cu: the grids. A row is read twice in the forward pass: for its log-sum-exps, and
 * for the sum over the classes.
 *
 * The gradient may be written over the student's logits, also in a narrower type: all threads have
 * read a turn before one of them writes.
 */
#include "kernels/loss/cross_entropy_rows.cuh"
#include "kernels/loss/divergence.h"

/* A row of each matrix, and which of its elements a thread takes. */
struct pair_rows {
    const void *student, *teacher;
    void *grad; /* NULL in the forward pass */
    row_cut cut;
};

static __device__ __forceinline__ pair_rows rows_of(const divergence_args &a, int64_t row, int lane,
                                                    int width, hr_dtype dtype, hr_dtype grad_dtype)
{
    pair_rows r = {row_at(a.student, row, dtype), row_at(a.teacher, row, dtype), nullptr, {}};
    if (a.grad.data)
        r.grad = row_at(a.grad, row, grad_dtype);
    const bool even = ((uintptr_t)r.teacher - (uintptr_t)r.student) % 16 == 0;
    r.cut = cut_row(r.student, dtype, r.grad, grad_dtype, a.classes, lane, width, even);
    return r;
}

/* From a difference of logits to the exponent of 2. */
static __device__ __forceinline__ float exponent_scale(const divergence_args &a)
{
    return (float)(1.4426950408889634 / a.config.temperature);
}

/* What there is one of in a row, with `greater` a literal, and the weights to be kept: from the config,
 * which is binary64, the compiler would compute both for each element again. */
static __device__ __forceinline__ dv_row kept(dv_row r, bool greater)
{
    r.student_is_greater = greater;
#if defined(__CUDA_ARCH__)
    asm("" : "+f"(r.lesser), "+f"(r.greater));
#endif
    return r;
}

/* The log-sum-exp of a row times the temperature, in all of its threads. */
static __device__ __forceinline__ double row_lse(const divergence_args &a, const row_cut &cut,
                                                 const void *row, hr_dtype dtype)
{
    const float scale = exponent_scale(a);
    const seen s = see_row<2>(cut, row, dtype, scale, [](auto &, eight_at) {});
    const float top = row_largest(s.top, cut.width);
    return dv_lse(&a, top, row_exponentials(s, top, cut.width, scale));
}

/* ---- Forward --------------------------------------------------------------------------------- */

/* What a pair adds, with an exponential of the quick kind. */
static __device__ __forceinline__ dv_terms terms_of(const dv_row &r, float s, float t, float scale,
                                                    int kind)
{
    const float d = dv_ratio(&r, s, t);
    return dv_terms_from(&r, d, power_of_2(dv_exponent(&r, s, t, d, kind) * scale), kind);
}

static __device__ __forceinline__ void add(dv_terms &sum, const dv_terms &terms)
{
    sum.under_student += terms.under_student;
    sum.under_teacher += terms.under_teacher;
    sum.p += terms.p;
    sum.q += terms.q;
}

template <int KIND, bool GREATER, hr_dtype DTYPE>
static __device__ __forceinline__ void forward_row(const divergence_args &a, int64_t row, int lane,
                                                   int width)
{
    const pair_rows r = rows_of(a, row, lane, width, DTYPE, DTYPE);
    const dv_scale scale = dv_scale_of(&a);
    double student = 0.0, teacher = 0.0; /* log-sum-exps, by the same code */
#pragma unroll 1
    for (int which = 0; which < 2; which++) {
        const double lse = row_lse(a, r.cut, which ? r.teacher : r.student, DTYPE);
        student = which ? student : lse;
        teacher = lse;
    }
    const dv_row of_row = kept(dv_row_of_lse(&a, scale, student, teacher), GREATER);
    const float exponent = exponent_scale(a);
    dv_terms sum = {0.0f, 0.0f, 0.0f, 0.0f};
    const void *const student_body = body_of(r.cut, r.student, DTYPE);
    const void *const teacher_body = body_of(r.cut, r.teacher, DTYPE);
    for_elements(
        r.cut, DTYPE, false,
        [&](eight_at at, bool) {
            const pack<8> of_s = load_eight(student_body, at, DTYPE);
            const pack<8> of_t = load_eight(teacher_body, at, DTYPE);
            pack_all_loaded();
            float s[8], t[8];
            pack_floats(of_s, DTYPE, s);
            pack_floats(of_t, DTYPE, t);
            dv_terms group = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int e = 0; e < 8; e++)
                add(group, terms_of(of_row, s[e], t[e], exponent, KIND));
            add(sum, group);
        },
        [&](int64_t j, bool) {
            add(sum, terms_of(of_row, hr_load(r.student, j, DTYPE), hr_load(r.teacher, j, DTYPE),
                              exponent, KIND));
        });
    dv_sums sums = {0.0, 0.0, 0.0, 0.0};
    if (KIND != DV_REVERSE) {
        sums.under_teacher = row_sum((double)sum.under_teacher, width);
        sums.q = row_sum((double)sum.q, width);
    }
    if (KIND != DV_FORWARD) {
        sums.under_student = row_sum((double)sum.under_student, width);
        sums.p = row_sum((double)sum.p, width);
    }
    if (lane == 0)
        dv_finish(&a, row, &of_row, &sums);
}

template <int KIND, bool GREATER>
static __global__ void __launch_bounds__(THREADS, 2)
    divergence_forward_kernel(const divergence_args __grid_constant__ a, int width)
{
    const auto [row, lane] = place_of(width);
    if (row >= a.rows)
        return; /* a whole warp or a whole block */
    if (dv_is_ignored(&a, row)) {
        if (lane == 0)
            dv_finish_ignored(&a, row);
        return;
    }
    if (a.config.dtype == HR_BF16)
        forward_row<KIND, GREATER, HR_BF16>(a, row, lane, width);
    else if (a.config.dtype == HR_F16)
        forward_row<KIND, GREATER, HR_F16>(a, row, lane, width);
    else
        forward_row<KIND, GREATER, HR_F32>(a, row, lane, width);
}

/* ---- Backward -------------------------------------------------------------------------------- */

template <int KIND, bool GREATER, hr_dtype DTYPE, hr_dtype GRAD>
static __device__ __forceinline__ void backward_row(const divergence_args &a, int64_t row, int lane,
                                                    int width)
{
    const pair_rows r = rows_of(a, row, lane, width, DTYPE, GRAD);
    const float factor = dv_factor(&a, row, KIND);
    const dv_row of_row = kept(
        dv_row_of(&a, dv_scale_of(&a), a.statistics + row * HR_DIVERGENCE_STATISTICS, 1), GREATER);
    const void *const student_body = body_of(r.cut, r.student, DTYPE);
    const void *const teacher_body = body_of(r.cut, r.teacher, DTYPE);
    void *const out = body_of(r.cut, r.grad, GRAD);
    constexpr bool meets = DTYPE != GRAD;
    for_elements(
        r.cut, DTYPE, meets,
        [&](eight_at at, bool present) {
            pack<8> student = {}, teacher = {};
            if (present) {
                student = load_eight(student_body, at, DTYPE);
                teacher = load_eight(teacher_body, at, DTYPE);
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
                s[e] = dv_gradient(&of_row, s[e], t[e], factor, KIND);
            store_eight(out, at, GRAD, pack_of(s, GRAD), DTYPE);
        },
        [&](int64_t j, bool present) {
            float gradient = 0.0f;
            if (present)
                gradient = dv_gradient(&of_row, hr_load(r.student, j, DTYPE),
                                       hr_load(r.teacher, j, DTYPE), factor, KIND);
            if (meets)
                meet(width);
            if (present)
                hr_store(r.grad, j, gradient, GRAD);
        });
}

template <int KIND, bool GREATER>
static __global__ void __launch_bounds__(THREADS, 2)
    divergence_backward_kernel(const divergence_args __grid_constant__ a, int width)
{
    const auto [row, lane] = place_of(width);
    if (row >= a.rows)
        return; /* a whole warp or a whole block */
    const hr_dtype dtype = a.config.dtype, grad_dtype = a.config.grad_dtype;
    if (dv_is_ignored(&a, row))
        fill_row(row_at(a.grad, row, grad_dtype), a.classes, lane, width, 0.0f, grad_dtype);
    else if (dtype == HR_BF16)
        backward_row<KIND, GREATER, HR_BF16, HR_BF16>(a, row, lane, width);
    else if (dtype == HR_F16)
        backward_row<KIND, GREATER, HR_F16, HR_F16>(a, row, lane, width);
    else if (grad_dtype == HR_F32)
        backward_row<KIND, GREATER, HR_F32, HR_F32>(a, row, lane, width);
    else if (grad_dtype == HR_BF16)
        backward_row<KIND, GREATER, HR_F32, HR_BF16>(a, row, lane, width);
    else
        backward_row<KIND, GREATER, HR_F32, HR_F16>(a, row, lane, width);
}

/* ---- Calls ----------------------------------------------------------------------------------- */

/* Chooses an instance of a kernel: GREATER is whether the weight of the student in a mixture is. */
#define OF_KIND(kernel, args)                                 \
    (dv_kind(args) == DV_FORWARD   ? kernel<DV_FORWARD, true> \
     : dv_kind(args) == DV_REVERSE ? kernel<DV_REVERSE, true> \
     : (args)->config.beta <= 0.5  ? kernel<DV_MIXED, true>   \
                                   : kernel<DV_MIXED, false>)

hr_status divergence_forward_cuda(const divergence_args *args, const hr_exec *exec)
{
    return launch_rows(OF_KIND(divergence_forward_kernel, args), "hr_divergence_forward", args,
                       exec);
}

hr_status divergence_backward_cuda(const divergence_args *args, const hr_exec *exec)
{
    return launch_rows(OF_KIND(divergence_backward_kernel, args), "hr_divergence_backward", args,
                       exec);
}
