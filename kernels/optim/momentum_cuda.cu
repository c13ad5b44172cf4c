/*
 * momentum_cuda.cu: the grid. The list travels in the launch parameters; each thread block takes
 * CUDA_CHUNK consecutive elements of one tensor, in tiles of a warp where every address of the
 * tensor allows vector accesses, and the rest one by one.
 *
 * There is a kernel for each formula, and in it an instance of the loop for each mix of types that
 * people use, with literals in place of dtypes; one more looks at them as it goes. All loads of a
 * tile are issued before the first use.
 */
#include "kernels/optim/momentum.cuh"

/* What the elements of a block have in common. Where a call site gives literals, the tests of them
 * fold away. */
typedef struct momentum_types {
    hr_dtype param, grad, moment;
    hr_weights_mode mode;
    bool counts_stalled;
} momentum_types;

/* A thread block's elements: where they begin in memory, so that offsets from there have 32 bits.
 */
typedef struct momentum_chunk {
    void *param, *moment, *residual;
    const void *grad;
    int count;
} momentum_chunk;

struct momentum_thread : weights_thread {
    double step; /* for random numbers */
};

/* ---- A tile ---------------------------------------------------------------------------------- */

/* GROUPS * GROUP elements of a thread, in groups that lie a warp's access apart, so that every
 * access of a warp is one run of memory. */
template <int rule, bool plain, int GROUP, int GROUPS>
static __device__ __forceinline__ void
update_tile(const momentum_chunk &chunk, const momentum_types types, const momentum_kind kind,
            const momentum_constants &c, momentum_thread &thread, int first)
{
    pack<GROUP> params[GROUPS], grads[GROUPS], moments[GROUPS];
    weights_pack<GROUP> weights[GROUPS];
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        const int i = first + j * WARP * GROUP;
        if constexpr (plain)
            params[j] = pack_load<GROUP>(chunk.param, i, types.param);
        else
            weights[j] = weights_load<GROUP>(chunk.param, chunk.residual, i, types.param,
                                             types.mode, true, GROUP);
        grads[j] = pack_load<GROUP>(chunk.grad, i, types.grad);
        if (rule != PLAIN_SGD)
            moments[j] = pack_load<GROUP>(chunk.moment, i, types.moment);
    }
    pack_all_loaded();
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        const int i = first + j * WARP * GROUP;
        float param[GROUP], grad[GROUP], moment[GROUP] = {};
        hr_random4 random = {{0, 0, 0, 0}};
        if constexpr (plain)
            pack_floats(params[j], types.param, param);
        else
            weights_join_all(weights[j], types.param, types.mode, param);
        if (!plain && weights_are_random(types.mode))
            random =
                weights_random_of<GROUP>(*thread.record, thread.start, thread.step, (uint32_t)i);
        pack_floats(grads[j], types.grad, grad);
        if (rule != PLAIN_SGD)
            pack_floats(moments[j], types.moment, moment);
#pragma unroll
        for (int e = 0; e < GROUP; e++) {
            const momentum_values x =
                momentum_element(c, {param[e], grad[e], moment[e]}, kind_of<rule>(kind, false));
            param[e] = x.param;
            moment[e] = x.moment;
        }
        if constexpr (plain) {
            pack_store(chunk.param, i, pack_of(param, types.param), types.param);
        } else {
            const weights_pack<GROUP> after =
                weights_split_all(param, types.param, types.mode, random);
            weights_store<GROUP>(chunk.param, chunk.residual, i, types.param, types.mode, true,
                                 GROUP, after);
            if (types.counts_stalled)
                thread.stalled +=
                    weights_stalled(weights[j], after, param, types.param, types.mode, GROUP);
        }
        if (rule != PLAIN_SGD)
            pack_store(chunk.moment, i, pack_of(moment, types.moment), types.moment);
    }
}

/* ---- Element by element ---------------------------------------------------------------------- */

template <int rule, bool plain>
static __device__ __forceinline__ void
update_one(const momentum_chunk &chunk, const momentum_types types, const momentum_kind kind,
           const momentum_constants &c, momentum_thread &thread, int i)
{
    momentum_values x;
    x.grad = hr_load(chunk.grad, i, types.grad);
    x.moment = rule != PLAIN_SGD ? hr_load(chunk.moment, i, types.moment) : 0.0f;
    if constexpr (plain) {
        x.param = hr_load(chunk.param, i, types.param);
        x = momentum_element(c, x, kind_of<rule>(kind, true));
        hr_store(chunk.param, i, x.param, types.param);
    } else {
        const weights_bits before =
            weights_bits_at(chunk.param, chunk.residual, i, types.param, types.mode);
        const float was = weights_join(before, types.param, types.mode);
        x.param = was;
        x = momentum_element(c, x, kind_of<rule>(kind, true));
        const uint32_t random =
            weights_are_random(types.mode)
                ? weights_random_at(*thread.record, thread.start, thread.step, (uint32_t)i)
                : 0;
        const weights_bits after = weights_split(x.param, types.param, types.mode, random);
        weights_put_bits(chunk.param, chunk.residual, i, after, types.param, types.mode);
        thread.stalled += weights_stall(before, after, was, x.param);
    }
    if (rule != PLAIN_SGD)
        hr_store(chunk.moment, i, x.moment, types.moment);
}

/* ---- A chunk --------------------------------------------------------------------------------- */

/* The first `whole` elements in tiles, and the rest one by one. */
template <int rule, bool plain, int GROUP, int GROUPS>
static __device__ __forceinline__ void
update_chunk(const momentum_chunk &chunk, const momentum_types types, const momentum_kind kind,
             const momentum_constants &c, momentum_thread &thread, int whole)
{
    constexpr int tile = WARP * GROUP * GROUPS;
    static_assert(TILE % tile == 0, "whole tiles of 256 are whole tiles of this size");
#pragma unroll 1
    for (int first = (int)threadIdx.x / WARP * tile; first < whole; first += WARPS * tile)
        update_tile<rule, plain, GROUP, GROUPS>(
            chunk, types, kind, c, thread, pack_opaque(first + (int)threadIdx.x % WARP * GROUP));
#pragma unroll 1
    for (int i = whole + (int)threadIdx.x; i < chunk.count; i += THREADS)
        update_one<rule, plain>(chunk, types, kind, c, thread, pack_opaque(i));
}

/* The types that people use have instances of their own; one more serves all others. */
template <int rule, bool plain>
static __device__ __forceinline__ void
update(const momentum_chunk &chunk, const momentum_types types, const momentum_kind kind,
       const momentum_constants &c, momentum_thread &thread, int whole)
{
#define TYPES(group, param_, grad_, moment_, mode_)                            \
    if (types.param == param_ && types.grad == grad_ &&                        \
        (rule == PLAIN_SGD || types.moment == moment_) && types.mode == mode_) \
    return update_chunk<rule, plain, group, 8 / group>(                        \
        chunk, {param_, grad_, moment_, mode_, false}, kind, c, thread, whole)
    if (!types.counts_stalled) {
        if constexpr (plain) {
            TYPES(4, HR_F32, HR_F32, HR_F32, HR_WEIGHTS_NEAREST);
            TYPES(8, HR_BF16, HR_BF16, HR_BF16, HR_WEIGHTS_NEAREST);
        } else {
            TYPES(8, HR_BF16, HR_BF16, HR_BF16, HR_WEIGHTS_REMAINDER16);
            if constexpr (rule != PLAIN_SGD)
                TYPES(4, HR_BF16, HR_BF16, HR_F32, HR_WEIGHTS_REMAINDER16);
        }
    }
#undef TYPES
    update_chunk<rule, plain, 4, 1>(chunk, types, kind, c, thread, whole);
}

/* ---- The kernels ----------------------------------------------------------------------------- */

template <int rule, typename Record, uint32_t number>
static __global__ void __launch_bounds__(THREADS, 3)
    momentum_kernel(const momentum_launch<Record, number> __grid_constant__ args)
{
    constexpr bool plain = Record::plain;
    __shared__ momentum_step shared;
    if (step_is_skipped(&args.config.step))
        return;
    const Record &t = args.tensors[list_find(args.tensors, args.count, blockIdx.x)];
    momentum_constants constants = args.constants;
    if (args.fold_on_device || !plain) {
        momentum_begin(&shared, args, t);
        __syncthreads();
        constants = shared.constants;
    }
    const momentum_types types = {(hr_dtype)t.param_dtype, (hr_dtype)t.grad_dtype,
                                  (hr_dtype)t.moment_dtype, args.mode, args.stalled != nullptr};
    const int64_t begin = list_begin(t);
    momentum_chunk chunk;
    chunk.param = list_address(t.param, begin, types.param);
    chunk.grad = list_address(t.grad, begin, types.grad);
    chunk.moment = list_address(t.moment, begin, types.moment);
    chunk.residual = nullptr;
    chunk.count = (int)(list_end(t, begin) - begin);
    momentum_thread thread = {};
    uintptr_t addresses = (uintptr_t)t.param | (uintptr_t)t.grad | (uintptr_t)t.moment;
    /* To keep the old values of a tile as well takes more registers than there are. */
    bool vectors = !args.kind.skip_nonfinite;
    if constexpr (!plain) {
        const hr_dtype residual = weights_residual_dtype(types.mode, types.param);
        chunk.residual = list_address(t.weights.residual, begin, residual);
        thread.record = &t.weights;
        thread.start = shared.start;
        thread.step = shared.step;
        addresses |= (uintptr_t)t.weights.residual << (residual == HR_I8 ? 1 : 0);
        vectors = vectors && types.param != HR_F32;
    }
    const int whole = vectors && addresses % 16 == 0 ? chunk.count / TILE * TILE : 0;
    update<rule, plain>(chunk, types, args.kind, constants, thread, whole);
    if constexpr (!plain)
        if (args.stalled)
            weights_add_stalled(args.stalled, thread.stalled);
}

template <int rule, typename Record, uint32_t number>
static hr_status launch_all(const momentum_args *args, const hr_exec *exec)
{
    return momentum_launch_all<Record, number>(
        args, exec, [=](uint32_t blocks, const momentum_launch<Record, number> &launch) {
            HR_LAUNCH((momentum_kernel<rule, Record, number>), blocks, THREADS, 0, exec->stream,
                      launch);
        });
}

template <int rule> static hr_status launch_rule(const momentum_args *args, const hr_exec *exec)
{
    if (args->config->step.weights)
        return launch_all<rule, momentum_mode_record, LIST_MOST>(args, exec);
    return args->params->count <= LIST_FEW
               ? launch_all<rule, momentum_record, LIST_FEW>(args, exec)
               : launch_all<rule, momentum_record, LIST_MOST>(args, exec);
}

hr_status momentum_cuda(const momentum_args *args, const hr_exec *exec)
{
    const momentum_kind kind = momentum_kind_of(args->config);
    if (args->absmaxs)
        return momentum_codes_cuda(args, exec);
    return kind.lion    ? launch_rule<LION>(args, exec)
           : kind.plain ? launch_rule<PLAIN_SGD>(args, exec)
                        : launch_rule<SGD>(args, exec);
}
