/*
 * adamw_cuda.cu: the grid. The list travels in the launch parameters; each thread block takes
 * CUDA_CHUNK consecutive elements of one tensor, in tiles of a warp where every address of the
 * tensor allows vector accesses, and the rest one by one.
 *
 * Dtypes and options are the same for the whole block. The mixes that people use have instances of
 * the loops with literals in their place, and one instance looks at them as it goes: a switch per
 * block, instead of a branch per element and array. All loads of a tile are issued before the first
 * use. Another kernel serves weights that are not plain, so that the first need not carry what that
 * takes.
 *
 * Where steps are counted in device memory, one thread of each block folds the constants in binary64.
 * That takes a few microseconds, of the forty that a block of f32 lives; meanwhile the two other
 * blocks of the multiprocessor keep its memory busy. A launch of its own that folds once per tensor
 * would need memory to leave its results in, and ops allocate none.
 */
#include "kernels/core/count.cuh"
#include "kernels/optim/adamw.h"
#include "kernels/weights/weights.cuh"

#define THREADS 256
#define WARP    32
#define WARPS   (THREADS / WARP)
#define TILE    256 /* elements of a warp at a time */

typedef struct adamw_record {
    static constexpr bool plain = true;
    void *param, *exp_avg, *exp_avg_sq, *max_exp_avg_sq, *step;
    const void *grad;
    int64_t numel;
    uint32_t first_block;
    uint8_t param_dtype, grad_dtype, state_dtype, step_dtype;
} adamw_record;

using adamw_mode_record = weights_mode_record<adamw_record>;

/* What all tensors of a launch share. */
typedef struct adamw_shared {
    hr_adamw_config config;
    adamw_constants constants; /* unless they depend on device memory */
    int32_t fold_on_device;
    hr_weights_mode mode;
    int64_t *stalled;
} adamw_shared;

template <typename Record, uint32_t number>
using adamw_launch = list_launch<adamw_shared, Record, number>;

/* What the elements of a block have in common. Where a call site gives literals, the tests of them
 * fold away. */
typedef struct adamw_kind {
    hr_dtype param, grad, state;
    hr_weights_mode mode;
    bool amsgrad, skip, counts_stalled;
    bool l2, slow; /* as in adamw_element_of() */
} adamw_kind;

/* A thread block's elements: where they begin in memory, so that offsets from there have 32 bits.
 */
typedef struct adamw_chunk {
    void *param, *exp_avg, *exp_avg_sq, *max_exp_avg_sq, *residual;
    const void *grad;
    int count;
} adamw_chunk;

struct adamw_thread : weights_thread {
    double step; /* for random numbers */
};

/* ---- A tile ---------------------------------------------------------------------------------- */

/* GROUPS * GROUP elements of a thread, in groups that lie a warp's access apart, so that every
 * access of a warp is one run of memory. All loads are in flight before the first use. */
template <bool plain, int GROUP, int GROUPS>
static __device__ __forceinline__ void update_tile(const adamw_chunk &chunk, const adamw_kind kind,
                                                   const adamw_constants &c, adamw_thread &thread,
                                                   int first)
{
    pack<GROUP> params[GROUPS], grads[GROUPS], exp_avgs[GROUPS], exp_avg_sqs[GROUPS],
        maxima[GROUPS];
    weights_pack<GROUP> weights[GROUPS];
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        const int i = first + j * WARP * GROUP;
        if constexpr (plain)
            params[j] = pack_load<GROUP>(chunk.param, i, kind.param);
        else
            weights[j] = weights_load<GROUP>(chunk.param, chunk.residual, i, kind.param, kind.mode,
                                             true, GROUP);
        grads[j] = pack_load<GROUP>(chunk.grad, i, kind.grad);
        exp_avgs[j] = pack_load<GROUP>(chunk.exp_avg, i, kind.state);
        exp_avg_sqs[j] = pack_load<GROUP>(chunk.exp_avg_sq, i, kind.state);
        if (kind.amsgrad)
            maxima[j] = pack_load<GROUP>(chunk.max_exp_avg_sq, i, kind.state);
    }
    pack_all_loaded();
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        const int i = first + j * WARP * GROUP;
        float param[GROUP], grad[GROUP], exp_avg[GROUP], exp_avg_sq[GROUP], maximum[GROUP];
        hr_random4 random = {{0, 0, 0, 0}};
        if constexpr (plain)
            pack_floats(params[j], kind.param, param);
        else
            weights_join_all(weights[j], kind.param, kind.mode, param);
        if (!plain && weights_are_random(kind.mode))
            random =
                weights_random_of<GROUP>(*thread.record, thread.start, thread.step, (uint32_t)i);
        pack_floats(grads[j], kind.grad, grad);
        pack_floats(exp_avgs[j], kind.state, exp_avg);
        pack_floats(exp_avg_sqs[j], kind.state, exp_avg_sq);
        if (kind.amsgrad)
            pack_floats(maxima[j], kind.state, maximum);
#pragma unroll
        for (int e = 0; e < GROUP; e++) {
            adamw_values x;
            x.param = param[e];
            x.grad = grad[e];
            x.exp_avg = exp_avg[e];
            x.exp_avg_sq = exp_avg_sq[e];
            x.max_exp_avg_sq = kind.amsgrad ? maximum[e] : 0.0f;
            x = adamw_element_of(c, x, kind.amsgrad, kind.l2, kind.slow);
            param[e] = x.param;
            exp_avg[e] = x.exp_avg;
            exp_avg_sq[e] = x.exp_avg_sq;
            maximum[e] = x.max_exp_avg_sq;
        }
        if constexpr (plain) {
            pack_store(chunk.param, i, pack_of(param, kind.param), kind.param);
        } else {
            const weights_pack<GROUP> after =
                weights_split_all(param, kind.param, kind.mode, random);
            weights_store<GROUP>(chunk.param, chunk.residual, i, kind.param, kind.mode, true, GROUP,
                                 after);
            if (kind.counts_stalled)
                thread.stalled +=
                    weights_stalled(weights[j], after, param, kind.param, kind.mode, GROUP);
        }
        pack_store(chunk.exp_avg, i, pack_of(exp_avg, kind.state), kind.state);
        pack_store(chunk.exp_avg_sq, i, pack_of(exp_avg_sq, kind.state), kind.state);
        if (kind.amsgrad)
            pack_store(chunk.max_exp_avg_sq, i, pack_of(maximum, kind.state), kind.state);
    }
}

/* ---- Element by element ---------------------------------------------------------------------- */

template <bool plain>
static __device__ __forceinline__ void update_one(const adamw_chunk &chunk, const adamw_kind kind,
                                                  const adamw_constants &c, adamw_thread &thread,
                                                  int i)
{
    adamw_values x;
    x.grad = hr_load(chunk.grad, i, kind.grad);
    x.exp_avg = hr_load(chunk.exp_avg, i, kind.state);
    x.exp_avg_sq = hr_load(chunk.exp_avg_sq, i, kind.state);
    x.max_exp_avg_sq = kind.amsgrad ? hr_load(chunk.max_exp_avg_sq, i, kind.state) : 0.0f;
    if constexpr (plain) {
        x.param = hr_load(chunk.param, i, kind.param);
        x = adamw_update_of(c, x, kind.amsgrad, kind.skip, kind.l2, kind.slow);
        hr_store(chunk.param, i, x.param, kind.param);
    } else {
        const weights_bits before =
            weights_bits_at(chunk.param, chunk.residual, i, kind.param, kind.mode);
        const float was = weights_join(before, kind.param, kind.mode);
        x.param = was;
        x = adamw_update_of(c, x, kind.amsgrad, kind.skip, kind.l2, kind.slow);
        const uint32_t random =
            weights_are_random(kind.mode)
                ? weights_random_at(*thread.record, thread.start, thread.step, (uint32_t)i)
                : 0;
        const weights_bits after = weights_split(x.param, kind.param, kind.mode, random);
        weights_put_bits(chunk.param, chunk.residual, i, after, kind.param, kind.mode);
        thread.stalled += weights_stall(before, after, was, x.param);
    }
    hr_store(chunk.exp_avg, i, x.exp_avg, kind.state);
    hr_store(chunk.exp_avg_sq, i, x.exp_avg_sq, kind.state);
    if (kind.amsgrad)
        hr_store(chunk.max_exp_avg_sq, i, x.max_exp_avg_sq, kind.state);
}

/* ---- A chunk --------------------------------------------------------------------------------- */

/* The first `whole` elements in tiles, and the rest one by one. */
template <bool plain, int GROUP, int GROUPS>
static __device__ __forceinline__ void update_chunk(const adamw_chunk &chunk, const adamw_kind kind,
                                                    const adamw_constants &c, adamw_thread &thread,
                                                    int whole)
{
    constexpr int tile = WARP * GROUP * GROUPS;
    static_assert(TILE % tile == 0, "whole tiles of 256 are whole tiles of this size");
#pragma unroll 1
    for (int first = (int)threadIdx.x / WARP * tile; first < whole; first += WARPS * tile)
        update_tile<plain, GROUP, GROUPS>(chunk, kind, c, thread,
                                          pack_opaque(first + (int)threadIdx.x % WARP * GROUP));
#pragma unroll 1
    for (int i = whole + (int)threadIdx.x; i < chunk.count; i += THREADS)
        update_one<plain>(chunk, kind, c, thread, pack_opaque(i));
}

/* A kind as a number, to switch on. */
static constexpr __device__ int kind_number(hr_dtype param, hr_dtype grad, hr_dtype state)
{
    return param * 256 + grad * 16 + state;
}

static __device__ __forceinline__ bool is_common(const adamw_kind kind)
{
    return !kind.amsgrad && !kind.skip && !kind.counts_stalled && !kind.l2 && kind.slow;
}

/* The kinds that people use have instances of their own; one more serves all others. */
static __device__ __forceinline__ void update_plain(const adamw_chunk &chunk, const adamw_kind kind,
                                                    const adamw_constants &c, adamw_thread &thread,
                                                    int whole)
{
#define KIND(group, param, grad, state)                                                           \
    case kind_number(param, grad, state):                                                         \
        return update_chunk<true, group, 8 / group>(                                              \
            chunk, {param, grad, state, HR_WEIGHTS_NEAREST, false, false, false, false, true}, c, \
            thread, whole)
    if (is_common(kind))
        switch (kind_number(kind.param, kind.grad, kind.state)) {
            KIND(4, HR_F32, HR_F32, HR_F32);
            KIND(8, HR_BF16, HR_BF16, HR_BF16);
            KIND(4, HR_BF16, HR_BF16, HR_F32);
            KIND(8, HR_F16, HR_F16, HR_F16);
            KIND(4, HR_F16, HR_F16, HR_F32);
            KIND(4, HR_F32, HR_F32, HR_BF16);
        default:
            break;
        }
    update_chunk<true, 4, 1>(chunk, kind, c, thread, whole);
#undef KIND
}

static __device__ __forceinline__ void update_mode(const adamw_chunk &chunk, const adamw_kind kind,
                                                   const adamw_constants &c, adamw_thread &thread,
                                                   int whole)
{
#define KIND(group, mode, state)                                                                 \
    case mode * 16 + state:                                                                      \
        return update_chunk<false, group, 8 / group>(                                            \
            chunk, {HR_BF16, HR_BF16, state, mode, false, false, false, false, true}, c, thread, \
            whole)
    if (is_common(kind) && kind.param == HR_BF16 && kind.grad == HR_BF16)
        switch (kind.mode * 16 + kind.state) {
            KIND(4, HR_WEIGHTS_REMAINDER16, HR_F32);
            KIND(8, HR_WEIGHTS_REMAINDER16, HR_BF16);
            KIND(4, HR_WEIGHTS_STOCHASTIC, HR_F32);
            KIND(8, HR_WEIGHTS_STOCHASTIC, HR_BF16);
        default:
            break;
        }
    update_chunk<false, 4, 1>(chunk, kind, c, thread, whole);
#undef KIND
}

/* ---- The kernels ----------------------------------------------------------------------------- */

static __device__ __forceinline__ adamw_chunk chunk_of(const adamw_record &t)
{
    const int64_t begin = list_begin(t);
    adamw_chunk chunk;
    chunk.param = list_address(t.param, begin, (hr_dtype)t.param_dtype);
    chunk.grad = list_address(t.grad, begin, (hr_dtype)t.grad_dtype);
    chunk.exp_avg = list_address(t.exp_avg, begin, (hr_dtype)t.state_dtype);
    chunk.exp_avg_sq = list_address(t.exp_avg_sq, begin, (hr_dtype)t.state_dtype);
    chunk.max_exp_avg_sq = list_address(t.max_exp_avg_sq, begin, (hr_dtype)t.state_dtype);
    chunk.residual = nullptr;
    chunk.count = (int)(list_end(t, begin) - begin);
    return chunk;
}

template <typename Record, uint32_t number>
static __global__ void __launch_bounds__(THREADS, 3)
    adamw_kernel(const adamw_launch<Record, number> __grid_constant__ args)
{
    constexpr bool plain = Record::plain;
    __shared__ adamw_constants folded;
    __shared__ weights_start start; /* of the block's elements, and the step: for random numbers */
    __shared__ double step;
    if (step_is_skipped(&args.config.step))
        return;
    const Record &t = args.tensors[list_find(args.tensors, args.count, blockIdx.x)];
    adamw_constants constants = args.constants;
    if (args.fold_on_device || !plain) {
        if (threadIdx.x == 0) {
            const double t_step = step_number(&args.config.step, t.step, (hr_dtype)t.step_dtype);
            folded =
                plain || args.fold_on_device ? adamw_fold(&args.config, t_step) : args.constants;
            if constexpr (!plain) {
                step = t_step;
                start = weights_start_of(t.weights.place, list_begin(t));
            }
        }
        __syncthreads();
        constants = folded;
    }
    adamw_kind kind;
    kind.param = (hr_dtype)t.param_dtype;
    kind.grad = (hr_dtype)t.grad_dtype;
    kind.state = (hr_dtype)t.state_dtype;
    kind.mode = args.mode;
    kind.amsgrad = t.max_exp_avg_sq != nullptr;
    kind.skip = args.config.step.skip_nonfinite;
    kind.counts_stalled = args.stalled != nullptr;
    kind.l2 = adamw_has_l2(constants);
    kind.slow = adamw_is_slow(constants);
    adamw_chunk chunk = chunk_of(t);
    adamw_thread thread = {};
    uintptr_t addresses = (uintptr_t)t.param | (uintptr_t)t.grad | (uintptr_t)t.exp_avg |
                          (uintptr_t)t.exp_avg_sq | (uintptr_t)t.max_exp_avg_sq;
    /* To keep the old values of a tile as well takes more registers than there are. */
    bool vectors = !kind.skip;
    if constexpr (!plain) {
        const hr_dtype residual = weights_residual_dtype(kind.mode, kind.param);
        chunk.residual = list_address(t.weights.residual, list_begin(t), residual);
        thread.record = &t.weights;
        thread.start = start;
        thread.step = step;
        addresses |= (uintptr_t)t.weights.residual << (residual == HR_I8 ? 1 : 0);
        vectors = vectors && kind.param != HR_F32 && !kind.amsgrad;
    }
    const int whole = vectors && addresses % 16 == 0 ? chunk.count / TILE * TILE : 0;
    if constexpr (plain)
        update_plain(chunk, kind, constants, thread, whole);
    else
        update_mode(chunk, kind, constants, thread, whole);
    if constexpr (!plain)
        if (args.stalled)
            weights_add_stalled(args.stalled, thread.stalled);
}

static void fill(adamw_record &t, const adamw_args *args, int64_t k)
{
    t.param = args->params->data[k];
    t.grad = args->grads->data[k];
    t.exp_avg = args->exp_avgs->data[k];
    t.exp_avg_sq = args->exp_avg_sqs->data[k];
    t.max_exp_avg_sq = args->max_exp_avg_sqs ? args->max_exp_avg_sqs->data[k] : nullptr;
    t.step = step_counter(args->steps, k);
    t.param_dtype = (uint8_t)args->params->dtype[k];
    t.grad_dtype = (uint8_t)args->grads->dtype[k];
    t.state_dtype = (uint8_t)args->exp_avgs->dtype[k];
    t.step_dtype = (uint8_t)step_counter_dtype(args->steps, k);
}

template <typename Record, uint32_t number>
static hr_status launch_all(const adamw_args *args, const hr_exec *exec)
{
    const hr_adamw_config *const config = args->config;
    adamw_launch<Record, number> launch;
    launch.config = *config;
    launch.fold_on_device = step_is_on_device(&config->step, args->steps);
    launch.mode = weights_mode_of(config->step.weights);
    launch.stalled = weights_stalled_of(config->step.weights);
    if (!launch.fold_on_device)
        launch.constants = adamw_fold(config, (double)config->step.t);
    const auto fill_record = [=](Record &record, int64_t k) {
        fill(record, args, k);
        if constexpr (!Record::plain)
            record.weights = weights_record_of(config->step.weights, args->params, k);
    };
    const auto queue = [&](uint32_t blocks, int64_t first) {
        if (blocks > 0)
            HR_LAUNCH((adamw_kernel<Record, number>), blocks, THREADS, 0, exec->stream, launch);
        list_count(&config->step, args->steps, first, first + launch.count, exec->stream);
    };
    return list_launch_all(&launch, args->params, "hr_adamw", fill_record, queue);
}

hr_status adamw_cuda(const adamw_args *args, const hr_exec *exec)
{
    if (args->config->step.weights)
        return launch_all<adamw_mode_record, LIST_MOST>(args, exec);
    return args->params->count <= LIST_FEW ? launch_all<adamw_record, LIST_FEW>(args, exec)
                                           : launch_all<adamw_record, LIST_MOST>(args, exec);
}
