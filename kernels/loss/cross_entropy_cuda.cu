/*
 * cross_entropy_cuda.cu: the grids. A row is read once: each thread keeps the largest of its logits
 * and the sum of exponentials relative to it, and the threads are combined in a fixed order.
 *
 * The gradient may be written over the logits, also in a narrower type: all threads have read a turn
 * before one of them writes.
 */
#include "kernels/loss/cross_entropy_rows.cuh"

/* ---- Forward --------------------------------------------------------------------------------- */

static __device__ __forceinline__ void forward_row(const cross_entropy_args &a, int64_t row,
                                                   int lane, int width, hr_dtype dtype, bool plain)
{
    const void *const logits = row_at(a.logits, row, dtype);
    const row_cut cut = cut_row(logits, dtype, nullptr, HR_F32, a.classes, lane, width);
    float of_thread = 0.0f; /* the sum of weight * z */
    const seen s = see_logits(cut, logits, dtype, of_thread, a, plain);
    const float top = row_largest(s.top, width);
    const double lse = ce_lse(top, row_exponentials(s, top, width, LOG2_E));
    double weighted = 0.0, weights = 0.0;
    if (a.config.label_smoothing > 0.0) {
        weighted = row_sum((double)of_thread, width);
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
    ce_finish_row(&a, row, lse, z, weights, weighted);
}

static __global__ void __launch_bounds__(THREADS)
    cross_entropy_forward_kernel(const cross_entropy_args __grid_constant__ a, int width)
{
    const auto [row, lane] = place_of(width);
    if (row >= a.rows)
        return; /* a whole warp or a whole block */
    if (ce_is_ignored(&a, ce_target(&a, row))) {
        if (lane == 0)
            ce_clear_row(&a, row);
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

static __device__ __forceinline__ void backward_row(const cross_entropy_args &a, int64_t row,
                                                    int lane, int width, hr_dtype dtype,
                                                    hr_dtype grad_dtype, bool plain)
{
    const void *const logits = row_at(a.logits, row, dtype);
    void *const grad = row_at(a.grad, row, grad_dtype);
    const int64_t target = ce_target(&a, row);
    const double weight = ce_weight(&a, target);
    const ce_row r = ce_row_of(&a, row, weight, plain ? 0.0 : sum_of_weights(a, lane, width));
    float z = 0.0f;
    const bool has_column = ce_has_column(&a, target);
    const int64_t column = target - a.first;
    if (lane == 0 && has_column)
        z = hr_load(logits, column, dtype);
    meet(width); /* it has been read before the row is written */
    const row_cut cut = cut_row(logits, dtype, grad, grad_dtype, a.classes, lane, width);
    const void *const body = body_of(cut, logits, dtype);
    void *const out = body_of(cut, grad, grad_dtype);
    const bool meets = dtype != grad_dtype;
    for_elements(
        cut, meets,
        [&](int64_t j, bool present) {
            pack<8> bits = {};
            if (present)
                bits = pack_load<8>(body, j, dtype);
            if (meets)
                meet(width);
            if (!present)
                return;
            float x[8];
            pack_floats(bits, dtype, x);
            gradients(x, cut.head + j, r, a, plain);
            pack_store(out, j, pack_of(x, grad_dtype), grad_dtype);
        },
        [&](int64_t j, bool present) {
            float x[1] = {present ? hr_load(logits, j, dtype) : 0.0f};
            if (meets)
                meet(width);
            if (!present)
                return;
            gradients(x, j, r, a, plain);
            hr_store(grad, j, x[0], grad_dtype);
        });
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
    const auto [row, lane] = place_of(width);
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

/* One block, because there is no memory for sums of several: wide, and with the loads of AHEAD rows of
 * a thread in flight. Thread t counts rows t, t + REDUCING, ..., and the threads are added in order. */
#define REDUCING 1024
#define AHEAD    4

static __global__ void __launch_bounds__(REDUCING)
    cross_entropy_reduce_kernel(const cross_entropy_args __grid_constant__ a)
{
    ce_totals totals = {};
    for (int64_t first = threadIdx.x; first < a.rows; first += AHEAD * REDUCING) {
        int64_t target[AHEAD];
        float loss[AHEAD], lse[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const int64_t row = first + k * REDUCING;
            const bool there = row < a.rows;
            target[k] = there ? ce_target(&a, row) : a.config.ignore_index;
            loss[k] = there ? ce_given_loss(&a, row) : 0.0f;
            lse[k] = there ? ce_given_lse(&a, row) : 0.0f;
        }
        pack_all_loaded();
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            ce_count(&a, target[k], loss[k], lse[k], &totals);
    }
    totals.loss = row_total<REDUCING>(totals.loss);
    totals.z_loss = row_total<REDUCING>(totals.z_loss);
    totals.weight = row_total<REDUCING>(totals.weight);
    totals.count = row_total<REDUCING>(totals.count);
    if (threadIdx.x == 0)
        ce_finish(&a, &totals);
}

/* ---- Targets ---------------------------------------------------------------------------------- */

/* The same for the first stray target of all threads. */
static __global__ void __launch_bounds__(REDUCING)
    cross_entropy_stray_kernel(ce_stray *stray, const cross_entropy_args __grid_constant__ a)
{
    double found = -INFINITY; /* minus the row, so that the largest is wanted */
    for (int64_t first = threadIdx.x; first < a.rows && found == -INFINITY;
         first += AHEAD * REDUCING) {
        int64_t target[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            target[k] = first + k * REDUCING < a.rows ? ce_target(&a, first + k * REDUCING)
                                                      : a.config.ignore_index;
        pack_all_loaded();
#pragma unroll
        for (int k = AHEAD - 1; k >= 0; k--)
            if (ce_is_stray(&a, target[k]))
                found = -(double)(first + k * REDUCING);
    }
    found = row_largest<REDUCING>(found, REDUCING);
    if (threadIdx.x != 0)
        return;
    const int64_t row = found == -INFINITY ? -1 : (int64_t)-found;
    *stray = {row, row < 0 ? 0 : ce_target(&a, row)};
}

/* ---- Calls ----------------------------------------------------------------------------------- */

hr_status cross_entropy_forward_cuda(const cross_entropy_args *args, const hr_exec *exec)
{
    return launch_rows(cross_entropy_forward_kernel, "hr_cross_entropy_forward", args, exec);
}

hr_status cross_entropy_backward_cuda(const cross_entropy_args *args, const hr_exec *exec)
{
    return launch_rows(cross_entropy_backward_kernel, "hr_cross_entropy_backward", args, exec);
}

hr_status cross_entropy_reduce_cuda(const cross_entropy_args *args, const hr_exec *exec)
{
    HR_LAUNCH(cross_entropy_reduce_kernel, 1, REDUCING, 0, exec->stream, *args);
    return cuda_launch_status("hr_cross_entropy_reduce");
}

hr_status cross_entropy_stray_cuda(ce_stray *stray, ce_stray *there, const cross_entropy_args *args,
                                   const char *function, const hr_exec *exec)
{
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cudaError_t error = cudaStreamIsCapturing(exec->stream, &capture);
    if (error == cudaSuccess && capture != cudaStreamCaptureStatusNone)
        return hr_fail(
            HR_INVALID_ARGUMENT,
            "%s: config->check_target is 1, but the stream is being captured into a CUDA "
            "graph, which cannot wait for the targets; wanted 0 in a capture",
            function);
    if (error == cudaSuccess) {
        HR_LAUNCH(cross_entropy_stray_kernel, 1, REDUCING, 0, exec->stream, there, *args);
        error = cudaGetLastError();
    }
    if (error == cudaSuccess)
        error = cudaMemcpyAsync(stray, there, sizeof *stray, cudaMemcpyDeviceToHost, exec->stream);
    if (error == cudaSuccess)
        error = cudaStreamSynchronize(exec->stream);
    if (error == cudaSuccess)
        return HR_OK;
    (void)cudaGetLastError(); /* or the next launch would report it again */
    return hr_fail(HR_CUDA_ERROR, "%s: the targets could not be checked: %s", function,
                   cudaGetErrorString(error));
}
