/*
 * cross_entropy_cuda.cu: the grids. A warp takes a row of up to SHORT classes, a thread block a
 * longer one, and reads it once: each thread keeps the largest of its logits and the sum of
 * exponentials relative to it, and the threads are combined in a fixed order.
 *
 * Where 16-byte accesses reach eight logits, they are used, also in rows that begin at an odd
 * address: a row has a head and a tail of single elements. The gradient may be written over the
 * logits, also in a narrower type: all threads have read a turn before one of them writes.
 */
#include "kernels/loss/cross_entropy_rows.cuh"

/* ---- Forward --------------------------------------------------------------------------------- */

static __device__ __forceinline__ void forward_row(const cross_entropy_args &a, int64_t row,
                                                   int lane, int width, hr_dtype dtype, bool plain)
{
    const void *const logits = row_at(a.logits, row, dtype);
    const row_cut cut = cut_row(logits, dtype, nullptr, HR_F32, a.classes);
    seen s = {-INFINITY, 0.0f, 0.0f};
    for_single(cut, a.classes, lane, width, [&](int64_t j) {
        float z[1] = {hr_load(logits, j, dtype)};
        take(s, z, j, a, plain);
    });
    const void *const body = (const char *)logits + cut.head * (dtype == HR_F32 ? 4 : 2);
    for (int64_t j = (int64_t)lane * 8; j < cut.end - cut.head; j += (int64_t)width * 8) {
        const pack<8> bits = pack_load<8>(body, j, dtype);
        float z[8];
        pack_floats(bits, dtype, z);
        take(s, z, cut.head + j, a, plain);
    }
    const float top = row_largest(s.top, width);
    const double sum = row_sum((double)(s.sum * ce_exp(s.top - ce_base(top))), width);
    const double lse = ce_lse(top, sum);
    double weighted = 0.0, weights = 0.0;
    if (a.config.label_smoothing > 0.0) {
        weighted = row_sum((double)s.weighted, width);
        weights = sum_of_weights(a, lane, width);
    }
    if (a.argmax) {
        const float cap = (float)a.config.softcap;
        double first = -INFINITY; /* minus the first class, so that the largest is wanted */
        for (int64_t j = lane; j < a.classes && first == -INFINITY; j += width)
            if (capped(hr_load(logits, j, dtype), cap) == top)
                first = -(double)j;
        first = row_largest(first, width);
        if (lane == 0)
            a.argmax[row] = first == -INFINITY ? 0 : (int64_t)-first;
    }
    if (lane != 0)
        return;
    const int64_t target = ce_target(&a, row);
    float z = NAN;
    if (ce_is_class(&a, target))
        z = capped(hr_load(logits, target, dtype), (float)a.config.softcap);
    a.loss[row] =
        ce_loss(&a.config, lse, (double)z, ce_weight(&a, target), weights, weighted, a.all);
    a.lse[row] = (float)lse;
    if (a.lse_low)
        a.lse_low[row] = isfinite((float)lse) ? (float)(lse - (double)(float)lse) : 0.0f;
}

static __global__ void __launch_bounds__(THREADS)
    cross_entropy_forward_kernel(const cross_entropy_args __grid_constant__ a, int width)
{
    const int lane = (int)threadIdx.x % width;
    const int64_t row = (int64_t)blockIdx.x * (THREADS / width) + (int)threadIdx.x / width;
    if (row >= a.rows)
        return; /* a whole warp or a whole block */
    if (ce_is_ignored(&a, ce_target(&a, row))) {
        if (lane == 0) {
            a.loss[row] = a.lse[row] = 0.0f;
            if (a.lse_low)
                a.lse_low[row] = 0.0f;
            if (a.argmax)
                a.argmax[row] = -1;
        }
        return;
    }
    const bool plain = !(a.config.softcap > 0.0) && !(a.config.label_smoothing > 0.0);
    FOR_DTYPE(a.config.dtype, D, FOR_FLAG(plain, P, forward_row(a, row, lane, width, D, P)))
}

/* ---- Backward -------------------------------------------------------------------------------- */

template <int E>
static __device__ __forceinline__ void gradients(float (&x)[E], int64_t j, const ce_row &r,
                                                 const cross_entropy_args &a, bool plain)
{
    const float cap = (float)a.config.softcap;
#pragma unroll
    for (int e = 0; e < E; e++) {
        if (plain) {
            x[e] = r.p * ce_probability(x[e], r.high, r.low);
            continue;
        }
        const float tanh = cap > 0.0f ? hr_tanh(x[e] / cap) : 0.0f;
        float out = r.p * ce_probability(cap > 0.0f ? cap * tanh : x[e], r.high, r.low);
        out -= a.weight ? r.w * a.weight[a.first + j + e] : r.w;
        x[e] = cap > 0.0f ? out * ce_slope(tanh) : out;
    }
}

/* The same number for all classes of a row. */
static __device__ __attribute__((noinline)) void fill_row(void *grad, int64_t cols, int lane,
                                                          int width, float value, hr_dtype dtype)
{
    const row_cut cut = cut_row(grad, dtype, nullptr, HR_F32, cols);
    for_single(cut, cols, lane, width, [&](int64_t j) { hr_store(grad, j, value, dtype); });
    const float values[8] = {value, value, value, value, value, value, value, value};
    const pack<8> bits = pack_of(values, dtype);
    void *const body = (char *)grad + cut.head * (dtype == HR_F32 ? 4 : 2);
    for (int64_t j = (int64_t)lane * 8; j < cut.end - cut.head; j += (int64_t)width * 8)
        pack_store(body, j, bits, dtype);
}

static __device__ __forceinline__ void backward_row(const cross_entropy_args &a, int64_t row,
                                                    int lane, int width, hr_dtype dtype,
                                                    hr_dtype grad_dtype, bool plain)
{
    const void *const logits = row_at(a.logits, row, dtype);
    void *const grad = row_at(a.grad, row, grad_dtype);
    const int64_t target = ce_target(&a, row);
    const double weight = ce_weight(&a, target);
    const ce_row r = ce_row_of(&a, row, weight, plain ? 0.0 : sum_of_weights(a, lane, width));
    row_cut cut = cut_row(logits, dtype, grad, grad_dtype, a.classes);
    if (dtype != grad_dtype && cut.head > 0)
        cut = {a.classes,
               a.classes}; /* what is written in the head may lie where the body is read */
    float z = 0.0f;
    const bool has_column = ce_has_column(&a, target);
    const int64_t column = target - a.first;
    if (lane == 0 && has_column)
        z = hr_load(logits, column, dtype);
    meet(width); /* it has been read before the row is written */
    const void *const body = (const char *)logits + cut.head * (dtype == HR_F32 ? 4 : 2);
    void *const out = (char *)grad + cut.head * (grad_dtype == HR_F32 ? 4 : 2);
    const int64_t groups = cut.end - cut.head;
    for (int64_t k = 0; k < groups; k += (int64_t)width * 8) {
        const int64_t j = k + (int64_t)lane * 8;
        pack<8> bits = {};
        if (j < groups)
            bits = pack_load<8>(body, j, dtype);
        if (dtype != grad_dtype)
            meet(width);
        if (j < groups) {
            float x[8];
            pack_floats(bits, dtype, x);
            gradients(x, cut.head + j, r, a, plain);
            pack_store(out, j, pack_of(x, grad_dtype), grad_dtype);
        }
    }
    const int64_t singles = cut.head + (a.classes - cut.end);
    for (int64_t first = 0; first < singles; first += width) {
        const int64_t k = first + lane, j = k < cut.head ? k : cut.end + (k - cut.head);
        float x[1] = {0.0f};
        if (k < singles)
            x[0] = hr_load(logits, j, dtype);
        if (dtype != grad_dtype)
            meet(width);
        if (k < singles) {
            gradients(x, j, r, a, plain);
            hr_store(grad, j, x[0], grad_dtype);
        }
    }
    meet(width); /* the target is written last, by one thread */
    if (lane != 0 || !has_column)
        return;
    const float cap = (float)a.config.softcap;
    double slope = 1.0;
    if (cap > 0.0f) {
        const float tanh = hr_tanh(z / cap);
        slope = (double)ce_slope(tanh);
        z = cap * tanh;
    }
    hr_store(grad, column, ce_target_gradient(&r, z, weight, slope), grad_dtype);
}

static __global__ void __launch_bounds__(THREADS)
    cross_entropy_backward_kernel(const cross_entropy_args __grid_constant__ a, int width)
{
    const int lane = (int)threadIdx.x % width;
    const int64_t row = (int64_t)blockIdx.x * (THREADS / width) + (int)threadIdx.x / width;
    if (row >= a.rows)
        return; /* a whole warp or a whole block */
    const hr_dtype dtype = a.config.dtype, grad_dtype = a.config.grad_dtype;
    const int64_t target = ce_target(&a, row);
    if (ce_is_ignored(&a, target) || !ce_is_class(&a, target)) {
        const float value = ce_is_ignored(&a, target) ? 0.0f : NAN;
        fill_row(row_at(a.grad, row, grad_dtype), a.classes, lane, width, value, grad_dtype);
        return;
    }
    const bool plain = !(a.config.softcap > 0.0) && !(a.config.label_smoothing > 0.0);
    FOR_FLAG(plain, P, if (dtype == HR_BF16) backward_row(a, row, lane, width, HR_BF16, HR_BF16, P);
             else if (dtype == HR_F16) backward_row(a, row, lane, width, HR_F16, HR_F16, P);
             else if (grad_dtype == HR_F32) backward_row(a, row, lane, width, HR_F32, HR_F32, P);
             else if (grad_dtype == HR_BF16) backward_row(a, row, lane, width, HR_F32, HR_BF16, P);
             else backward_row(a, row, lane, width, HR_F32, HR_F16, P);)
}

/* ---- The reduction --------------------------------------------------------------------------- */

/* One block: thread t counts rows t, t + THREADS, ..., and the threads are added as a tree. */
static __global__ void __launch_bounds__(THREADS)
    cross_entropy_reduce_kernel(const cross_entropy_args __grid_constant__ a)
{
    ce_totals totals = {};
    for (int64_t row = threadIdx.x; row < a.rows; row += THREADS)
        ce_count(&a, row, &totals);
    totals.loss = row_total<THREADS>(totals.loss);
    totals.z_loss = row_total<THREADS>(totals.z_loss);
    totals.weight = row_total<THREADS>(totals.weight);
    totals.count = row_total<THREADS>(totals.count);
    if (threadIdx.x == 0)
        ce_finish(&a, &totals);
}

/* ---- Calls ----------------------------------------------------------------------------------- */

template <typename Kernel>
static hr_status launch(Kernel kernel, const char *function, const cross_entropy_args *a,
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

hr_status cross_entropy_forward_cuda(const cross_entropy_args *args, const hr_exec *exec)
{
    return launch(cross_entropy_forward_kernel, "hr_cross_entropy_forward", args, exec);
}

hr_status cross_entropy_backward_cuda(const cross_entropy_args *args, const hr_exec *exec)
{
    return launch(cross_entropy_backward_kernel, "hr_cross_entropy_backward", args, exec);
}

hr_status cross_entropy_reduce_cuda(const cross_entropy_args *args, const hr_exec *exec)
{
    HR_LAUNCH(cross_entropy_reduce_kernel, 1, THREADS, 0, exec->stream, *args);
    return cuda_launch_status("hr_cross_entropy_reduce");
}
