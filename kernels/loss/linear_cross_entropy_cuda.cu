/*
 * linear_cross_entropy_cuda.cu: the grids between the products: see linear_cross_entropy.h. Blocks
 * count the rows of their parts, and then list them; a block sees the logits of a row, and what it saw
 * before is combined with it by one thread, so that the order is fixed; moves and additions are element
 * by element.
 */
#include "kernels/loss/cross_entropy_rows.cuh"
#include "kernels/loss/linear_cross_entropy.h"

/* ---- The list -------------------------------------------------------------------------------- */

/* How many of the threads before this one, and in `*all` of the block, count. */
static __device__ __forceinline__ int counted_before(bool counts, int *all)
{
    __shared__ int warps[ADDING / 32];
    const unsigned votes = __ballot_sync(0xFFFFFFFFu, counts);
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    __syncthreads(); /* the last counts have been read */
    if (lane == 0)
        warps[warp] = __popc(votes);
    __syncthreads();
    int before = __popc(votes & ((1u << lane) - 1u)), total = 0;
#pragma unroll 1
    for (int w = 0; w < ADDING / 32; w++) {
        before += w < warp ? warps[w] : 0;
        total += warps[w];
    }
    *all = total;
    return before;
}

/* Whether the weights of the classes are added up. */
static __device__ __forceinline__ bool sums_weights(const lce_listing &l)
{
    return l.ce.weight && l.ce.config.label_smoothing > 0.0;
}

/* What lce_list_kernel() has to know of all parts before it. */
static __global__ void __launch_bounds__(ADDING)
    lce_count_kernel(const lce_listing __grid_constant__ l, int64_t share, int64_t class_share)
{
    const row_range part = rows_of_part(l.ce.rows, share);
    const row_range classes = rows_of_part(l.ce.all, class_share);
    double weights = 0.0, tokens = 0.0, weight_sum = 0.0, rows = 0.0;
    for (int64_t first = part.begin + threadIdx.x; first < part.end; first += AHEAD * ADDING) {
        int64_t target[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const int64_t row = first + k * ADDING;
            target[k] = row < part.end ? lce_target(&l, row) : l.ce.config.ignore_index;
        }
        pack_all_loaded();
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (ce_is_ignored(&l.ce, target[k]))
                continue;
            const double scale = (double)lce_token_weight(&l, first + k * ADDING);
            weights += scale * ce_weight(&l.ce, target[k]);
            tokens += scale;
            rows += 1.0;
        }
    }
    if (sums_weights(l))
        for (int64_t j = classes.begin + threadIdx.x; j < classes.end; j += ADDING)
            weight_sum += (double)l.ce.weight[j];
    weights = row_total<ADDING>(weights);
    tokens = row_total<ADDING>(tokens);
    weight_sum = row_total<ADDING>(weight_sum);
    rows = row_total<ADDING>(rows);
    if (threadIdx.x == 0)
        l.counts[blockIdx.x] = {weights, tokens, weight_sum, (int64_t)rows};
}

static __global__ void __launch_bounds__(ADDING)
    lce_list_kernel(const lce_listing __grid_constant__ l, int64_t share)
{
    const row_range part = rows_of_part(l.ce.rows, share);
    lce_counts sums = {};
    if (threadIdx.x < gridDim.x)
        sums = l.counts[threadIdx.x];
    const double of_part = (double)sums.rows;
    int64_t place = (int64_t)row_total<ADDING>(threadIdx.x < blockIdx.x ? of_part : 0.0);
    const int64_t count = (int64_t)row_total<ADDING>(of_part);
    for (int64_t first = part.begin; first < part.end; first += ADDING) {
        const int64_t row = first + threadIdx.x;
        const bool is_row = row < part.end;
        const int64_t target = is_row ? lce_target(&l, row) : 0;
        const bool counts = is_row && !ce_is_ignored(&l.ce, target);
        if (is_row && !counts)
            lce_clear(&l, row);
        int all = 0;
        const int64_t own = place + counted_before(counts, &all);
        if (counts)
            lce_put(&l, own, row);
        place += all;
    }
    const int64_t threads = (int64_t)gridDim.x * ADDING;
    for (place = count + (int64_t)blockIdx.x * ADDING + threadIdx.x; place < l.list.capacity;
         place += threads)
        lce_put(&l, place, -1);
    if (blockIdx.x != 0)
        return;
    sums.weights = row_total<ADDING>(sums.weights);
    sums.tokens = row_total<ADDING>(sums.tokens);
    sums.weight_sum = row_total<ADDING>(sums.weight_sum);
    if (threadIdx.x == 0)
        lce_total(&l, count, sums.weights, sums.tokens,
                  sums_weights(l) ? sums.weight_sum : (double)l.ce.all);
}

/* ---- Logits ---------------------------------------------------------------------------------- */

/* The sums of all threads, relative to `top`, the largest logit of all. */
static __device__ __forceinline__ ce_sums sums_of(const seen &s, float top)
{
    return {row_exponentials(s, top, THREADS, LOG2_E), 0.0, 0.0};
}

static __device__ __forceinline__ ce_sums sums_of(const seen_more &s, float top)
{
    const float base = ce_base(top), scale = power_of_2((s.top - base) * LOG2_E);
    const float mean = (s.mean + finite_less(s.top, base) * s.sum) * scale;
    return {row_exponentials(s, top, THREADS, LOG2_E), row_total<THREADS>((double)mean),
            row_total<THREADS>((double)(s.squares * (scale * scale)))};
}

static __device__ __forceinline__ double total_of(const seen &)
{
    return 0.0;
}

static __device__ __forceinline__ double total_of(const seen_more &s)
{
    return row_total<THREADS>((double)s.total);
}

template <typename Seen>
static __device__ __forceinline__ void see_part(const lce_seeing &s, int64_t row, bool plain)
{
    const float *const logits = (const float *)row_at(s.ce.logits, row, HR_F32);
    const float cap = (float)s.ce.config.softcap;
    const int64_t target = ce_target(&s.ce, row);
    const row_cut cut =
        cut_row(logits, HR_F32, nullptr, HR_F32, s.ce.classes, (int)threadIdx.x, THREADS);
    float of_thread = 0.0f; /* the sum of weight * z */
    const Seen part = see_logits<Seen>(cut, logits, HR_F32, of_thread, s.ce, plain);
    const float top = row_largest(part.top, THREADS);
    ce_sums sums = sums_of(part, top);
    const double total = total_of(part);
    const double weighted =
        s.ce.config.label_smoothing > 0.0 ? row_total<THREADS>((double)of_thread) : 0.0;
    double rank = 0.0, first = -INFINITY;
    const bool has_column = ce_has_column(&s.ce, target);
    if (s.wants.rank && has_column) {
        const float z = logits[target - s.ce.first];
        for (int64_t j = threadIdx.x; j < s.ce.classes; j += THREADS)
            rank += logits[j] > z ? 1.0 : 0.0;
        rank = row_total<THREADS>(rank);
    }
    if (s.wants.argmax) {
        for (int64_t j = threadIdx.x; j < s.ce.classes && first == -INFINITY; j += THREADS)
            if (capped(logits[j], cap) == top)
                first = -(double)j;
        first = row_largest(first, THREADS);
    }
    if (threadIdx.x != 0)
        return;
    ce_seen now = s.is_first ? ce_nothing_seen(s.ce.first) : s.seen[row];
    const bool grows = top > now.top;
    if (grows)
        ce_rescale(&now.sums, now.top, top);
    else
        ce_rescale(&sums, top, now.top);
    now.sums.sum += sums.sum;
    now.sums.mean += sums.mean;
    now.sums.squares += sums.squares;
    now.weighted += weighted;
    now.total += total;
    if (grows)
        now.top = top;
    if (grows && first != -INFINITY)
        now.argmax = s.ce.first + (int64_t)-first;
    now.rank = (int64_t)rank;
    if (has_column)
        now.z = capped(logits[target - s.ce.first], cap);
    else if (!ce_is_class(&s.ce, target))
        now.z = NAN;
    s.seen[row] = now;
}

template <typename Seen> static __device__ __forceinline__ void see_rows(const lce_seeing &s)
{
    const int64_t row = blockIdx.x;
    if (ce_is_ignored(&s.ce, ce_target(&s.ce, row))) {
        if (threadIdx.x == 0 && s.is_first)
            s.seen[row] = ce_nothing_seen(s.ce.first);
        return;
    }
    const bool plain = !(s.ce.config.softcap > 0.0) && !(s.ce.config.label_smoothing > 0.0);
    FOR_FLAG(plain, P, see_part<Seen>(s, row, P))
}

/* Up to 64 registers, where the compiler's own choice is fewer and spills. */
static __global__ void __launch_bounds__(THREADS, 4)
    lce_see_kernel(const lce_seeing __grid_constant__ s)
{
    see_rows<seen>(s);
}

/* For the sums that entropies are made of, too, in the same pass. */
static __global__ void __launch_bounds__(THREADS, 4)
    lce_see_more_kernel(const lce_seeing __grid_constant__ s)
{
    see_rows<seen_more>(s);
}

static __global__ void __launch_bounds__(THREADS)
    lce_end_kernel(const lce_ending __grid_constant__ e)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < e.rows)
        lce_end(&e, i);
}

/* Rows of the list that are none have a loss and a scale of 0. */
static __global__ void __launch_bounds__(ADDING)
    lce_reduce_kernel(const lce_reduction __grid_constant__ r, int64_t share)
{
    const row_range part = rows_of_part(r.list.capacity, share);
    ce_totals totals = {};
#pragma unroll 4
    for (int64_t i = part.begin + threadIdx.x; i < part.end; i += ADDING) {
        totals.loss += (double)r.list.loss[i];
        totals.z_loss += (double)r.list.scale[i] * ce_z_loss(r.z_loss, (double)r.list.lse[i]);
    }
    add_threads(totals);
    if (threadIdx.x != 0)
        return;
    if (gridDim.x > 1)
        r.parts[blockIdx.x] = totals;
    else
        lce_finish(&r, totals.loss, totals.z_loss);
}

static __global__ void __launch_bounds__(ADDING)
    lce_parts_kernel(const lce_reduction __grid_constant__ r, int parts)
{
    const ce_totals totals = sum_of_parts(r.parts, parts);
    if (threadIdx.x == 0)
        lce_finish(&r, totals.loss, totals.z_loss);
}

/* ---- Rows of matrices ------------------------------------------------------------------------ */

/* A block moves a row. */
template <bool GATHER>
static __global__ void __launch_bounds__(THREADS)
    lce_move_kernel(const lce_move __grid_constant__ m)
{
    const int64_t row = blockIdx.x, other = m.index ? m.index[row] : row;
    if (!GATHER && other < 0)
        return;
    void *const to = row_at(m.to, GATHER ? row : other, m.to_dtype);
    const void *const from = row_at(m.from, GATHER ? (other < 0 ? 0 : other) : row, m.from_dtype);
    for (int64_t j = threadIdx.x; j < m.cols; j += THREADS)
        hr_store(to, j, other < 0 ? 0.0f : hr_load(from, j, m.from_dtype), m.to_dtype);
}

/* A block clears a row of `count` halves; `pitch` bytes lead to the next. */
static __global__ void __launch_bounds__(THREADS)
    lce_zero_kernel(void *to, int64_t count, int64_t pitch)
{
    uint16_t *const row = (uint16_t *)((char *)to + (int64_t)blockIdx.x * pitch);
    for (int64_t j = threadIdx.x; j < count; j += THREADS)
        row[j] = 0;
}

static __global__ void __launch_bounds__(THREADS)
    lce_scale_kernel(float *to, const void *vector, double factor, int64_t count, hr_dtype dtype)
{
    const int64_t j = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (j < count)
        to[j] = lce_scaled(vector, factor, j, dtype);
}

/* A thread adds E neighbors: 8 where 16-byte accesses reach them all, else 1. */
template <int E>
static __global__ void __launch_bounds__(THREADS)
    lce_add_kernel(const lce_addition __grid_constant__ a)
{
    const int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    const int64_t j = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * E;
    if (row >= a.rows || j >= a.cols)
        return;
    uint16_t *const high = (uint16_t *)row_at(a.high, row, HR_BF16);
    uint16_t *const low = a.low + row * a.cols;
    const float *const addend = (const float *)row_at(a.addend, row, HR_F32);
    if constexpr (E == 1) {
        lce_add(&a, high, low, addend[j], j);
    } else {
        const pack<8> added = pack_load<8>(addend, j, HR_F32);
        pack<8> upper = {}, lower = {};
        if (!a.overwrites)
            upper = pack_load<8>(high, j, HR_BF16);
        if (!a.is_first)
            lower = pack_load<8>(low, j, HR_BF16);
        pack_all_loaded();
        float sums[8];
        uint32_t highs[8] = {0}, lows[8] = {0};
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const float sum = lce_joined((uint16_t)pack_bits(upper, e, HR_BF16),
                                         (uint16_t)pack_bits(lower, e, HR_BF16));
            sums[e] = pack_get(added, e, HR_F32);
            if (!a.overwrites)
                sums[e] += sum;
            pack_put_bits(highs, e, HR_BF16, hr_bits(sums[e]) >> 16);
            pack_put_bits(lows, e, HR_BF16, hr_bits(sums[e]) & 0xFFFFu);
        }
        pack_store(high, j, a.is_last ? pack_of(sums, HR_BF16) : pack_from(highs), HR_BF16);
        pack_store(low, j, pack_from(lows), HR_BF16);
    }
}

/* ---- Calls ----------------------------------------------------------------------------------- */

static hr_status too_large(const char *what)
{
    return hr_fail(HR_UNSUPPORTED, "%s: rows or classes is more than a grid of CUDA can take",
                   what);
}

template <typename Kernel, typename... Args>
static hr_status launch(Kernel kernel, const char *what, int64_t blocks, uint32_t threads,
                        const hr_exec *exec, const Args &...args)
{
    if (blocks > INT32_MAX)
        return too_large(what);
    if (blocks > 0)
        HR_LAUNCH(kernel, (uint32_t)blocks, threads, 0, exec->stream, args...);
    return cuda_launch_status(what);
}

static int64_t blocks_for(int64_t threads)
{
    return (threads + THREADS - 1) / THREADS;
}

static const char kName[] = "hr_linear_cross_entropy";

hr_status lce_list_rows_cuda(const lce_listing *listing, const hr_exec *exec)
{
    const int64_t parts = ce_parts(listing->ce.rows), share = share_of(listing->ce.rows, parts);
    const hr_status status = launch(lce_count_kernel, kName, parts, ADDING, exec, *listing, share,
                                    share_of(listing->ce.all, parts));
    return status != HR_OK ? status
                           : launch(lce_list_kernel, kName, parts, ADDING, exec, *listing, share);
}

hr_status lce_see_cuda(const lce_seeing *seeing, const hr_exec *exec)
{
    const bool wants_more = seeing->wants.moments || seeing->wants.total;
    return launch(wants_more ? lce_see_more_kernel : lce_see_kernel, kName, seeing->ce.rows,
                  THREADS, exec, *seeing);
}

hr_status lce_end_cuda(const lce_ending *ending, const hr_exec *exec)
{
    return launch(lce_end_kernel, kName, blocks_for(ending->rows), THREADS, exec, *ending);
}

hr_status lce_gather_cuda(const lce_move *move, const hr_exec *exec)
{
    return launch(lce_move_kernel<true>, kName, move->rows, THREADS, exec, *move);
}

hr_status lce_scatter_cuda(const lce_move *move, const hr_exec *exec)
{
    return launch(lce_move_kernel<false>, kName, move->rows, THREADS, exec, *move);
}

template <int E> static hr_status add(const lce_addition *a, const hr_exec *exec)
{
    const int64_t groups = a->cols / E;
    uint32_t across = 32; /* threads of a block along a row */
    while (across < THREADS && across < groups)
        across *= 2;
    const uint32_t down = THREADS / across;
    const int64_t parts = (groups + across - 1) / across, blocks = (a->rows + down - 1) / down;
    if (blocks > INT32_MAX || parts > 65535)
        return too_large(kName);
    if (blocks > 0)
        HR_LAUNCH(lce_add_kernel<E>, dim3((uint32_t)blocks, (uint32_t)parts), dim3(across, down), 0,
                  exec->stream, *a);
    return cuda_launch_status(kName);
}

/* Where there are halves: other sums are made by the products themselves. */
hr_status lce_add_cuda(const lce_addition *addition, const hr_exec *exec)
{
    const hr_rows *const high = &addition->high;
    const bool in_vectors = (uintptr_t)high->data % 16 == 0 && addition->cols % 8 == 0 &&
                            (high->stride % 8 == 0 || addition->rows == 1);
    return in_vectors ? add<8>(addition, exec) : add<1>(addition, exec);
}

hr_status lce_scale_cuda(float *to, const void *vector, double factor, int64_t count,
                         hr_dtype dtype, const hr_exec *exec)
{
    return launch(lce_scale_kernel, kName, blocks_for(count), THREADS, exec, to, vector, factor,
                  count, dtype);
}

hr_status lce_reduce_cuda(const lce_reduction *reduction, const hr_exec *exec)
{
    const int64_t rows = reduction->list.capacity, parts = ce_parts(rows);
    const hr_status status =
        launch(lce_reduce_kernel, kName, parts, ADDING, exec, *reduction, share_of(rows, parts));
    if (status != HR_OK || parts == 1)
        return status;
    return launch(lce_parts_kernel, kName, 1, ADDING, exec, *reduction, (int)parts);
}

hr_status lce_zero_cuda(const hr_rows *to, int64_t rows, int64_t bytes, int64_t pitch,
                        const hr_exec *exec)
{
    return launch(lce_zero_kernel, kName, rows, THREADS, exec, to->data, bytes / 2, pitch);
}
