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

/* `entropy`: whether e is part of them. */
template <bool entropy, int E>
static __device__ __forceinline__ void gradients(float (&x)[E], eight_at at, const ce_row &r,
                                                 ce_entropy e_of_row, const cross_entropy_args &a,
                                                 bool plain)
{
    const auto gradient = [&](float z) {
        return entropy ? ce_gradient_with_entropy(z, r.high, r.low, r.p, e_of_row)
                       : r.p * ce_probability(z, r.high, r.low);
    };
    const float cap = (float)a.config.softcap;
#pragma unroll
    for (int e = 0; e < E; e++) {
        if (plain) {
            x[e] = gradient(x[e]);
            continue;
        }
        const float tanh = cap > 0.0f ? hr_tanh(x[e] / cap) : 0.0f;
        float out = gradient(cap > 0.0f ? cap * tanh : x[e]);
        out -= a.weight ? r.w * a.weight[a.first + at[e]] : r.w;
        x[e] = cap > 0.0f ? out * ce_slope(tanh) : out;
    }
}

template <bool entropy>
static __device__ __forceinline__ void backward_row(const cross_entropy_args &a, int64_t row,
                                                    int lane, int width, hr_dtype dtype,
                                                    hr_dtype grad_dtype, bool plain)
{
    const void *const logits = row_at(a.logits, row, dtype);
    void *const grad = row_at(a.grad, row, grad_dtype);
    const double weights = plain ? 0.0 : sum_of_weights(a, lane, width);
    const ce_row r = ce_row_of(&a, row, ce_weight(&a, ce_target(&a, row)), weights);
    const ce_entropy none = {0.0f, 0.0f}, e = entropy ? ce_entropy_of(&a, row) : none;
    float z = 0.0f;
    if (lane == 0 && ce_has_column(&a, ce_target(&a, row)))
        z = hr_load(logits, ce_target(&a, row) - a.first, dtype);
    meet(width); /* it has been read before the row is written */
    const row_cut cut = cut_row(logits, dtype, grad, grad_dtype, a.classes, lane, width);
    const void *const body = body_of(cut, logits, dtype);
    void *const out = body_of(cut, grad, grad_dtype);
    const bool meets = dtype != grad_dtype;
    for_elements(
        cut, dtype, meets,
        [&](eight_at at, bool present) {
            pack<8> bits = {};
            if (present)
                bits = load_eight(body, at, dtype);
            if (meets)
                meet(width);
            if (!present)
                return;
            float x[8];
            pack_floats(bits, dtype, x);
            gradients<entropy>(x, {cut.own + at.j, at.apart}, r, e, a, plain);
            store_eight(out, at, grad_dtype, pack_of(x, grad_dtype), dtype);
        },
        [&](int64_t j, bool present) {
            float x[1] = {present ? hr_load(logits, j, dtype) : 0.0f};
            if (meets)
                meet(width);
            if (!present)
                return;
            gradients<entropy>(x, {j, 4}, r, e, a, plain);
            hr_store(grad, j, x[0], grad_dtype);
        });
    meet(width); /* the target is written last, by one thread */
    /* Once more, because what the target alone needs would take registers of the loops. */
    const int64_t target = ce_target(&a, row);
    if (lane != 0 || !ce_has_column(&a, target))
        return;
    const double weight = ce_weight(&a, target);
    const ce_row last = ce_row_of(&a, row, weight, weights);
    const ce_entropy again = entropy ? ce_entropy_of(&a, row) : none;
    const float cap = (float)a.config.softcap;
    double slope = 1.0;
    if (cap > 0.0f) {
        const float tanh = hr_tanh(z / cap);
        slope = (double)ce_slope(tanh);
        z = cap * tanh;
    }
    hr_store(grad, target - a.first, ce_target_gradient(&last, again, z, weight, slope),
             grad_dtype);
}

/* Fills a row that has no gradient, or NaN for one, and returns whether it has. */
static __device__ __forceinline__ bool filled_row(const cross_entropy_args &a, int64_t row,
                                                  int lane, int width)
{
    const int64_t target = ce_target(&a, row);
    if (!ce_is_ignored(&a, target) && ce_is_class(&a, target))
        return false;
    const hr_dtype dtype = a.config.grad_dtype;
    const float value = ce_is_ignored(&a, target) ? 0.0f : NAN;
    fill_row(row_at(a.grad, row, dtype), a.classes, lane, width, value, dtype);
    return true;
}

static __global__ void __launch_bounds__(THREADS)
    cross_entropy_backward_kernel(const cross_entropy_args __grid_constant__ a, int width)
{
    const auto [row, lane] = place_of(width);
    if (row >= a.rows || filled_row(a, row, lane, width))
        return; /* a whole warp or a whole block */
    const hr_dtype dtype = a.config.dtype, to = a.config.grad_dtype;
    const bool plain = !(a.config.softcap > 0.0) && !(a.config.label_smoothing > 0.0);
    FOR_FLAG(plain, P,
             if (dtype == HR_BF16) backward_row<false>(a, row, lane, width, HR_BF16, HR_BF16, P);
             else if (dtype == HR_F16) backward_row<false>(a, row, lane, width, HR_F16, HR_F16, P);
             else if (to == HR_F32) backward_row<false>(a, row, lane, width, HR_F32, HR_F32, P);
             else if (to == HR_BF16) backward_row<false>(a, row, lane, width, HR_F32, HR_BF16, P);
             else backward_row<false>(a, row, lane, width, HR_F32, HR_F16, P);)
}

/* Of losses and entropies: of logits in binary32, as products make them. */
static __global__ void __launch_bounds__(THREADS, 3)
    cross_entropy_entropy_kernel(const cross_entropy_args __grid_constant__ a, int width)
{
    const auto [row, lane] = place_of(width);
    if (row >= a.rows || filled_row(a, row, lane, width))
        return; /* a whole warp or a whole block */
    const bool plain = !(a.config.softcap > 0.0) && !(a.config.label_smoothing > 0.0);
    FOR_FLAG(
        plain, P,
        FOR_DTYPE(a.config.grad_dtype, D, backward_row<true>(a, row, lane, width, HR_F32, D, P)))
}

/* ---- The reduction --------------------------------------------------------------------------- */

static_assert(sizeof(ce_totals) * CE_PARTS == HR_CROSS_ENTROPY_WORKSPACE, "as headroom.h says");

/* Thread t of a block counts rows t, t + ADDING, ... of its part. */
static __global__ void __launch_bounds__(ADDING)
    cross_entropy_reduce_kernel(const cross_entropy_args __grid_constant__ a, int64_t share)
{
    const row_range part = rows_of_part(a.rows, share);
    ce_totals totals = {};
    for (int64_t first = part.begin + threadIdx.x; first < part.end; first += AHEAD * ADDING) {
        int64_t target[AHEAD];
        float loss[AHEAD], lse[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const int64_t row = first + k * ADDING;
            const bool there = row < part.end;
            target[k] = there ? ce_target(&a, row) : a.config.ignore_index;
            loss[k] = there ? ce_given_loss(&a, row) : 0.0f;
            lse[k] = there ? ce_given_lse(&a, row) : 0.0f;
        }
        pack_all_loaded();
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            ce_count(&a, target[k], loss[k], lse[k], &totals);
    }
    add_threads(totals);
    if (threadIdx.x != 0)
        return;
    if (gridDim.x > 1)
        a.parts[blockIdx.x] = totals;
    else
        ce_finish(&a, &totals);
}

static __global__ void __launch_bounds__(ADDING)
    cross_entropy_parts_kernel(const cross_entropy_args __grid_constant__ a, int parts)
{
    const ce_totals totals = sum_of_parts(a.parts, parts);
    if (threadIdx.x == 0)
        ce_finish(&a, &totals);
}

/* ---- Targets ---------------------------------------------------------------------------------- */

/* The first stray target of each part. */
static __global__ void __launch_bounds__(ADDING)
    cross_entropy_stray_kernel(ce_stray *strays, const cross_entropy_args __grid_constant__ a,
                               int64_t share)
{
    const row_range part = rows_of_part(a.rows, share);
    double found = -INFINITY; /* minus the row, so that the largest is wanted */
    for (int64_t first = part.begin + threadIdx.x; first < part.end && found == -INFINITY;
         first += AHEAD * ADDING) {
        int64_t target[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            target[k] = first + k * ADDING < part.end ? ce_target(&a, first + k * ADDING)
                                                      : a.config.ignore_index;
        pack_all_loaded();
#pragma unroll
        for (int k = AHEAD - 1; k >= 0; k--)
            if (ce_is_stray(&a, target[k]))
                found = -(double)(first + k * ADDING);
    }
    found = row_largest<ADDING>(found, ADDING);
    if (threadIdx.x != 0)
        return;
    const int64_t row = found == -INFINITY ? -1 : (int64_t)-found;
    strays[blockIdx.x] = {row, row < 0 ? 0 : ce_target(&a, row)};
}

/* ---- Calls ----------------------------------------------------------------------------------- */

hr_status cross_entropy_forward_cuda(const cross_entropy_args *args, const hr_exec *exec)
{
    return launch_rows(cross_entropy_forward_kernel, "hr_cross_entropy_forward", args, exec);
}

hr_status cross_entropy_backward_cuda(const cross_entropy_args *args, const hr_exec *exec)
{
    return launch_rows(args->dentropy ? cross_entropy_entropy_kernel
                                      : cross_entropy_backward_kernel,
                       "hr_cross_entropy_backward", args, exec);
}

hr_status cross_entropy_reduce_cuda(const cross_entropy_args *args, const hr_exec *exec)
{
    const int64_t parts = args->parts ? ce_parts(args->rows) : 1;
    HR_LAUNCH(cross_entropy_reduce_kernel, (uint32_t)parts, ADDING, 0, exec->stream, *args,
              share_of(args->rows, parts));
    if (parts > 1)
        HR_LAUNCH(cross_entropy_parts_kernel, 1, ADDING, 0, exec->stream, *args, (int)parts);
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
    const int64_t parts = ce_parts(args->rows);
    ce_stray strays[CE_PARTS];
    if (error == cudaSuccess) {
        HR_LAUNCH(cross_entropy_stray_kernel, (uint32_t)parts, ADDING, 0, exec->stream, there,
                  *args, share_of(args->rows, parts));
        error = cudaGetLastError();
    }
    if (error == cudaSuccess)
        error = cudaMemcpyAsync(strays, there, (size_t)parts * sizeof *strays,
                                cudaMemcpyDeviceToHost, exec->stream);
    if (error == cudaSuccess)
        error = cudaStreamSynchronize(exec->stream);
    if (error == cudaSuccess) {
        int64_t first = 0;
        while (first < parts - 1 && strays[first].row < 0)
            first++;
        *stray = strays[first];
        return HR_OK;
    }
    (void)cudaGetLastError(); /* or the next launch would report it again */
    return hr_fail(HR_CUDA_ERROR, "%s: the targets could not be checked: %s", function,
                   cudaGetErrorString(error));
}
