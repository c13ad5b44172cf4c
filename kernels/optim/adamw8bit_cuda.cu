/*
 * adamw8bit_cuda.cu: the grid. The list travels in the launch parameters; each thread block takes
 * CUDA_CHUNK consecutive elements of one tensor, and its warps a tile each at a time.
 *
 * Decoding reads a table in shared memory: with random codes the lanes of a warp wait for each
 * other about 3.5 turns. A code's decade, slope and correction, from which arithmetic would have
 * the same bits, take three tables and ten instructions. Encoding takes two more tables, of a byte
 * per cell and of thresholds: see quantize_blocks.cuh.
 *
 * Dtypes and options are the same for the whole block: the mixes that people use, in blocks of 256,
 * have instances of the loop with literals in their place, and one instance looks at them as it
 * goes, which also serves what is left of a tensor after its last whole tile.
 *
 * One thread of each block folds the constants in binary64 if steps are counted in device memory,
 * while the others copy the tables; adamw_cuda.cu says why it is not done once per call.
 */
#include "kernels/core/count.cuh"
#include "kernels/optim/adamw8bit_tile.cuh"

static_assert(2 * TILE == ADAMW8BIT_MAX_BLOCK && CUDA_CHUNK % ADAMW8BIT_MAX_BLOCK == 0,
              "a block is in one tile or two, of one thread block");

typedef struct adamw8bit_record {
    static constexpr bool plain = true;
    void *param, *step;
    uint8_t *exp_avg, *exp_avg_sq;
    float *exp_avg_absmax, *exp_avg_sq_absmax;
    const void *grad;
    int64_t numel;
    uint64_t seed;
    uint32_t first_block;
    uint8_t param_dtype, grad_dtype, step_dtype;
} adamw8bit_record;

using adamw8bit_mode_record = weights_mode_record<adamw8bit_record>;

/* What all tensors of a launch share. */
typedef struct adamw8bit_shared {
    hr_adamw_config config;
    step_constants constants; /* unless they depend on device memory */
    int32_t fold_on_device;
    int32_t block_shift; /* log2 of the block size */
    hr_weights_mode mode;
    int64_t *stalled;
} adamw8bit_shared;

template <typename Record, uint32_t number>
using adamw8bit_launch = list_launch<adamw8bit_shared, Record, number>;

/* ---- A chunk --------------------------------------------------------------------------------- */

/* Whole tiles in blocks of 256, from the first to element `end`. */
template <int rule, bool plain, int GROUP>
static __device__ __forceinline__ void
update_tiles(const adamw8bit_chunk &c, const adamw8bit_kind kind, weights_thread &thread,
             const step_constants &constants, const quant_tables &tables, int end)
{
#pragma unroll 1
    for (int tile = (int)threadIdx.x / WARP * TILE; tile < end; tile += WARPS * TILE)
        update_tile<rule, plain, GROUP, TILE / WARP / GROUP>(
            c, kind, thread, constants, tables, pack_opaque(tile + (int)threadIdx.x % WARP * GROUP),
            true);
}

/* Updates the first `end` elements, which are whole tiles, if there is an instance for their kind.
 * Else returns false. */
template <int rule, bool plain>
static __device__ __forceinline__ bool
update_with_literals(const adamw8bit_chunk &c, const adamw8bit_kind kind, weights_thread &thread,
                     const step_constants &constants, const quant_tables &tables, int end)
{
    if (rule != NEAREST || kind.block_shift != 8 || kind.skip || kind.counts_stalled || kind.l2 ||
        !kind.slow || kind.param != kind.grad)
        return false;
    if constexpr (plain) {
        constexpr hr_weights_mode mode = HR_WEIGHTS_NEAREST;
        if (kind.param == HR_F32)
            update_tiles<rule, plain, 4>(c, {HR_F32, HR_F32, mode, 8, false, false, false, true},
                                         thread, constants, tables, end);
        else if (kind.param == HR_BF16)
            update_tiles<rule, plain, 8>(c, {HR_BF16, HR_BF16, mode, 8, false, false, false, true},
                                         thread, constants, tables, end);
        else
            update_tiles<rule, plain, 8>(c, {HR_F16, HR_F16, mode, 8, false, false, false, true},
                                         thread, constants, tables, end);
        return true;
    } else {
        constexpr hr_weights_mode mode = HR_WEIGHTS_REMAINDER16;
        if (kind.mode != mode) /* which only takes bf16 */
            return false;
        update_tiles<rule, plain, 8>(c, {HR_BF16, HR_BF16, mode, 8, false, false, false, true},
                                     thread, constants, tables, end);
        return true;
    }
}

/* ---- The kernels ----------------------------------------------------------------------------- */

static __device__ __host__ __forceinline__ step_constants fold(const hr_adamw_config *config,
                                                               double step, bool bnb)
{
    step_constants c = {};
    if (bnb)
        c.bnb = adamw8bit_bnb_fold(config, step);
    else
        c.adamw = adamw_fold(config, step);
    return c;
}

/* What of tensor t is this thread block's. */
static __device__ __forceinline__ adamw8bit_chunk chunk_of(const adamw8bit_shared &args,
                                                           const adamw8bit_record &t)
{
    const int64_t begin = list_begin(t);
    adamw8bit_chunk c;
    c.begin = begin;
    c.count = (int)(list_end(t, begin) - begin);
    c.param = pack_opaque(list_address(t.param, begin, (hr_dtype)t.param_dtype));
    c.grad = pack_opaque(list_address(t.grad, begin, (hr_dtype)t.grad_dtype));
    c.residual = nullptr;
    c.codes[1] = pack_opaque(t.exp_avg + begin);
    c.codes[0] = pack_opaque(t.exp_avg_sq + begin);
    c.absmax[1] = pack_opaque(t.exp_avg_absmax + (begin >> args.block_shift));
    c.absmax[0] = pack_opaque(t.exp_avg_sq_absmax + (begin >> args.block_shift));
    c.seed = t.seed;
    c.step = step_number(&args.config.step, t.step, (hr_dtype)t.step_dtype);
    return c;
}

template <int rule, typename Record, uint32_t number>
static __global__ void __launch_bounds__(THREADS, 3)
    adamw8bit_kernel(const adamw8bit_launch<Record, number> __grid_constant__ args)
{
    constexpr bool plain = Record::plain;
    __shared__ quant_tables tables;
    __shared__ step_constants folded;
    if (step_is_skipped(&args.config.step))
        return;
    const Record &t = args.tensors[list_find(args.tensors, args.count, blockIdx.x)];
    adamw8bit_chunk c = chunk_of(args, t);
    if (threadIdx.x == 0)
        folded = args.fold_on_device ? fold(&args.config, c.step, rule == BNB) : args.constants;
    quant_copy_tables<THREADS, rule == BNB>(&tables);
    const step_constants constants = folded;
    adamw8bit_kind kind;
    kind.param = (hr_dtype)t.param_dtype;
    kind.grad = (hr_dtype)t.grad_dtype;
    kind.mode = args.mode;
    kind.block_shift = args.block_shift;
    kind.skip = args.config.step.skip_nonfinite;
    kind.counts_stalled = args.stalled != nullptr;
    kind.l2 = rule != BNB && adamw_has_l2(constants.adamw);
    kind.slow = rule != BNB && adamw_is_slow(constants.adamw);
    weights_thread thread = {};
    /* Groups of 8 are one access too where types have 16 bits. */
    uintptr_t addresses = (uintptr_t)t.param | (uintptr_t)t.grad |
                          ((uintptr_t)t.exp_avg | (uintptr_t)t.exp_avg_sq) << 1;
    if constexpr (!plain) {
        const hr_dtype residual = weights_residual_dtype(kind.mode, kind.param);
        c.residual = list_address(t.weights.residual, c.begin, residual);
        addresses |= (uintptr_t)t.weights.residual << (residual == HR_I8 ? 1 : 0);
        thread.record = &t.weights;
        if (weights_are_random(kind.mode))
            thread.start = weights_start_of(t.weights.place, c.begin);
    }
    const bool aligned = addresses % 16 == 0;
    int first = aligned ? c.count / TILE * TILE : 0;
    if (first > 0 && !update_with_literals<rule, plain>(c, kind, thread, constants, tables, first))
        first = 0;
        /* Both tiles of a block of 512 meet at its barrier, so warps whose tile is empty come too. */
#pragma unroll 1
    for (; first < c.count; first += WARPS * TILE) {
        const int tile = first + (int)threadIdx.x / WARP * TILE;
        if (tile < c.count || 1 << kind.block_shift > TILE)
            update_tile<rule, plain, 4, 2>(c, kind, thread, constants, tables,
                                           pack_opaque(tile + (int)threadIdx.x % WARP * 4),
                                           aligned && tile + TILE <= c.count);
    }
    if constexpr (!plain)
        if (args.stalled)
            weights_add_stalled(args.stalled, thread.stalled);
}

static void fill(adamw8bit_record &t, const adamw8bit_args *args, int64_t k)
{
    t.param = args->params->data[k];
    t.step = step_counter(args->steps, k);
    t.exp_avg = (uint8_t *)args->exp_avgs->data[k];
    t.exp_avg_sq = (uint8_t *)args->exp_avg_sqs->data[k];
    t.exp_avg_absmax = (float *)args->exp_avg_absmaxs->data[k];
    t.exp_avg_sq_absmax = (float *)args->exp_avg_sq_absmaxs->data[k];
    t.grad = args->grads->data[k];
    t.seed = args->config->seeds ? args->config->seeds[k] : 0;
    t.param_dtype = (uint8_t)args->params->dtype[k];
    t.grad_dtype = (uint8_t)args->grads->dtype[k];
    t.step_dtype = (uint8_t)step_counter_dtype(args->steps, k);
}

template <int rule, typename Record, uint32_t number>
static hr_status launch_all(const adamw8bit_args *args, const hr_exec *exec)
{
    const hr_adamw_config *const config = &args->config->adamw;
    adamw8bit_launch<Record, number> launch;
    launch.config = *config;
    launch.mode = weights_mode_of(config->step.weights);
    launch.stalled = weights_stalled_of(config->step.weights);
    launch.fold_on_device = step_is_on_device(&config->step, args->steps);
    if (!launch.fold_on_device)
        launch.constants = fold(config, (double)config->step.t, rule == BNB);
    for (launch.block_shift = 0; 1 << launch.block_shift < args->config->block_size;)
        launch.block_shift++;
    const auto fill_record = [=](Record &record, int64_t k) {
        fill(record, args, k);
        if constexpr (!Record::plain)
            record.weights = weights_record_of(config->step.weights, args->params, k);
    };
    const auto queue = [&](uint32_t blocks, int64_t first) {
        if (blocks > 0)
            HR_LAUNCH((adamw8bit_kernel<rule, Record, number>), blocks, THREADS, 0, exec->stream,
                      launch);
        list_count(&config->step, args->steps, first, first + launch.count, exec->stream);
    };
    return list_launch_all(&launch, args->params, "hr_adamw8bit", fill_record, queue);
}

hr_status adamw8bit_cuda(const adamw8bit_args *args, const hr_exec *exec)
{
    const bool stochastic = args->config->seeds;
    if (args->config->adamw.step.weights)
        return stochastic ? launch_all<STOCHASTIC, adamw8bit_mode_record, LIST_MOST>(args, exec)
                          : launch_all<NEAREST, adamw8bit_mode_record, LIST_MOST>(args, exec);
    if (stochastic)
        return launch_all<STOCHASTIC, adamw8bit_record, LIST_MOST>(args, exec);
    if (args->config->bnb_exact)
        return launch_all<BNB, adamw8bit_record, LIST_MOST>(args, exec);
    return args->params->count <= LIST_FEW
               ? launch_all<NEAREST, adamw8bit_record, LIST_FEW>(args, exec)
               : launch_all<NEAREST, adamw8bit_record, LIST_MOST>(args, exec);
}
