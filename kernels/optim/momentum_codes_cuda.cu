/*
 * momentum_codes_cuda.cu: the grid of SGD and Lion with moments of a byte. A warp takes a tile of 256
 * elements at a time, in groups of 4 of a thread that lie 128 apart, or in one group of 8 where all
 * types have 16 bits; adamw8bit_tile.cuh says why.
 *
 * A block of codes is updated in two passes, because a code depends on the scale of the whole block;
 * the moments stay in registers in between. Its absmax comes from shuffles within the warp, or from
 * two warps if it has 512 elements.
 */
#include "kernels/optim/momentum.cuh"
#include "kernels/optim/momentum_codes.cuh"

/* What the elements of a block have in common. Where a call site gives literals, the tests of them
 * fold away. */
typedef struct codes_kind {
    hr_dtype param, grad;
    hr_weights_mode mode;
    int block_shift; /* log2 of the block size */
    bool skip, counts_stalled;
} codes_kind;

/* A thread block's elements: where they begin in memory, so that offsets from there have 32 bits.
 */
typedef struct codes_chunk {
    void *param, *residual;
    const void *grad;
    uint8_t *codes;
    float *absmax;
    int count;
    double step;
} codes_chunk;

/* Both passes over the tile of a warp; `first` is the thread's first element, and `whole` means one
 * access per group. */
template <int rule, bool plain, int GROUP, int GROUPS>
static __device__ __forceinline__ void
update_tile(const codes_chunk &c, const codes_kind kind, const momentum_kind &options,
            weights_thread &thread, const momentum_constants &constants, const quant_tables &tables,
            int first, bool whole)
{
    pack<GROUP> params[GROUPS], grads[GROUPS];
    weights_pack<GROUP> weights[GROUPS];
    uint32_t codes[GROUPS][GROUP / 4], largest[GROUPS];
    float absmaxs[GROUPS], moments[GROUPS][GROUP];
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        const int i = first + j * WARP * GROUP, left = c.count - i;
        if constexpr (plain)
            params[j] = pack_load<GROUP>(c.param, i, kind.param, whole, left);
        else
            weights[j] =
                weights_load<GROUP>(c.param, c.residual, i, kind.param, kind.mode, whole, left);
        grads[j] = pack_load<GROUP>(c.grad, i, kind.grad, whole, left);
        pack_load_bytes<GROUP>(c.codes, i, whole, left, dynamic_zero(1), codes[j]);
        absmaxs[j] = whole || left > 0 ? c.absmax[i >> kind.block_shift] : 0.0f;
    }
    pack_all_loaded();
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        const int i = first + j * WARP * GROUP, left = c.count - i;
        float param[GROUP], grad[GROUP];
        hr_random4 random = {{0, 0, 0, 0}};
        if constexpr (plain)
            pack_floats(params[j], kind.param, param);
        else
            weights_join_all(weights[j], kind.param, kind.mode, param);
        if (!plain && weights_are_random(kind.mode))
            random = weights_random_of<GROUP>(*thread.record, thread.start, c.step, (uint32_t)i);
        pack_floats(grads[j], kind.grad, grad);
        largest[j] = 0;
#pragma unroll
        for (int e = 0; e < GROUP; e++) {
            const float moment = tables.values[1][pack_byte(codes[j], e)] * absmaxs[j];
            const momentum_values x = momentum_element(constants, {param[e], grad[e], moment},
                                                       kind_of<rule>(options, kind.skip));
            param[e] = x.param;
            moments[j][e] = x.moment;
            largest[j] = quant_larger(largest[j], x.moment, 0);
        }
        if constexpr (plain) {
            pack_store<GROUP>(c.param, i, kind.param, whole, left, pack_of(param, kind.param));
        } else {
            const weights_pack<GROUP> after =
                weights_split_all(param, kind.param, kind.mode, random);
            weights_store<GROUP>(c.param, c.residual, i, kind.param, kind.mode, whole, left, after);
            if (kind.counts_stalled)
                thread.stalled += weights_stalled(weights[j], after, param, kind.param, kind.mode,
                                                  whole ? GROUP : left);
        }
    }
    codes_largest_of_blocks<WARPS, GROUP, GROUPS>(largest, kind.block_shift);
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        const int i = first + j * WARP * GROUP, left = c.count - i;
        uint32_t words[GROUP / 4];
        const float absmax = codes_encode<GROUP>(tables, moments[j], largest[j], words);
        if ((whole || left > 0) && (i & ((1 << kind.block_shift) - 1)) == 0)
            c.absmax[i >> kind.block_shift] = absmax;
        pack_store_bytes<GROUP>(c.codes, i, whole, left, words);
    }
}

/* Whole tiles in blocks of 256 of types that are literals, from the first to element `end`. */
template <int rule, bool plain, int GROUP>
static __device__ __forceinline__ void
update_tiles(const codes_chunk &c, const codes_kind kind, const momentum_kind &options,
             weights_thread &thread, const momentum_constants &constants,
             const quant_tables &tables, int end)
{
#pragma unroll 1
    for (int tile = (int)threadIdx.x / WARP * TILE; tile < end; tile += WARPS * TILE)
        update_tile<rule, plain, GROUP, TILE / WARP / GROUP>(
            c, kind, options, thread, constants, tables,
            pack_opaque(tile + (int)threadIdx.x % WARP * GROUP), true);
}

/* Updates the first `end` elements, which are whole tiles, if there is an instance for their kind.
 * Else returns false. */
template <int rule, bool plain>
static __device__ __forceinline__ bool
update_with_literals(const codes_chunk &c, const codes_kind kind, const momentum_kind &options,
                     weights_thread &thread, const momentum_constants &constants,
                     const quant_tables &tables, int end)
{
    constexpr hr_weights_mode mode = plain ? HR_WEIGHTS_NEAREST : HR_WEIGHTS_REMAINDER16;
    if (kind.block_shift != 8 || kind.skip || kind.counts_stalled || kind.param != kind.grad ||
        kind.mode != mode || kind.param == HR_F16)
        return false;
    if (kind.param == HR_BF16)
        update_tiles<rule, plain, 8>(c, {HR_BF16, HR_BF16, mode, 8, false, false}, options, thread,
                                     constants, tables, end);
    else if constexpr (plain)
        update_tiles<rule, plain, 4>(c, {HR_F32, HR_F32, mode, 8, false, false}, options, thread,
                                     constants, tables, end);
    return true;
}

template <int rule, typename Record, uint32_t number>
static __global__ void __launch_bounds__(THREADS, 3)
    momentum_codes_kernel(const momentum_launch<Record, number> __grid_constant__ args)
{
    constexpr bool plain = Record::plain;
    __shared__ quant_tables tables;
    __shared__ momentum_step shared;
    if (step_is_skipped(&args.config.step))
        return;
    const Record &t = args.tensors[list_find(args.tensors, args.count, blockIdx.x)];
    momentum_begin(&shared, args, t);
    quant_copy_tables<THREADS, 0>(&tables);
    const momentum_constants constants = shared.constants;
    const codes_kind kind = {
        (hr_dtype)t.param_dtype, (hr_dtype)t.grad_dtype,        args.mode,
        args.block_shift,        args.kind.skip_nonfinite != 0, args.stalled != nullptr};
    const int64_t begin = list_begin(t);
    codes_chunk c;
    c.param = pack_opaque(list_address(t.param, begin, kind.param));
    c.grad = pack_opaque(list_address(t.grad, begin, kind.grad));
    c.residual = nullptr;
    c.codes = pack_opaque((uint8_t *)t.moment + begin);
    c.absmax = pack_opaque(t.absmax + (begin >> kind.block_shift));
    c.count = (int)(list_end(t, begin) - begin);
    c.step = shared.step;
    weights_thread thread = {};
    /* Groups of 8 are one access too where types have 16 bits. */
    uintptr_t addresses = (uintptr_t)t.param | (uintptr_t)t.grad | (uintptr_t)t.moment << 1;
    if constexpr (!plain) {
        const hr_dtype residual = weights_residual_dtype(kind.mode, kind.param);
        c.residual = list_address(t.weights.residual, begin, residual);
        addresses |= (uintptr_t)t.weights.residual << (residual == HR_I8 ? 1 : 0);
        thread.record = &t.weights;
        thread.start = shared.start;
    }
    const bool aligned = addresses % 16 == 0;
    int first = aligned ? c.count / TILE * TILE : 0;
    if (first > 0 &&
        !update_with_literals<rule, plain>(c, kind, args.kind, thread, constants, tables, first))
        first = 0;
        /* Both tiles of a block of 512 meet at its barrier, so warps whose tile is empty come too. */
#pragma unroll 1
    for (; first < c.count; first += WARPS * TILE) {
        const int tile = first + (int)threadIdx.x / WARP * TILE;
        if (tile < c.count || 1 << kind.block_shift > TILE)
            update_tile<rule, plain, 4, 2>(c, kind, args.kind, thread, constants, tables,
                                           pack_opaque(tile + (int)threadIdx.x % WARP * 4),
                                           aligned && tile + TILE <= c.count);
    }
    if constexpr (!plain)
        if (args.stalled)
            weights_add_stalled(args.stalled, thread.stalled);
}

template <int rule, typename Record, uint32_t number>
static hr_status launch_all(const momentum_args *args, const hr_exec *exec)
{
    return momentum_launch_all<Record, number>(
        args, exec, [=](uint32_t blocks, const momentum_launch<Record, number> &launch) {
            HR_LAUNCH((momentum_codes_kernel<rule, Record, number>), blocks, THREADS, 0,
                      exec->stream, launch);
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

hr_status momentum_codes_cuda(const momentum_args *args, const hr_exec *exec)
{
    return args->config->rule == HR_LION ? launch_rule<LION>(args, exec)
                                         : launch_rule<SGD>(args, exec);
}
