/*
 * adamw8bit_cuda.cu: the grid. The list travels in the launch parameters; each thread block takes
 * CUDA_CHUNK consecutive elements of one tensor, and a warp tiles of 256 of them. A thread has 8
 * elements of a tile, in 2 groups of 4 that lie 128 apart: so every access of a warp is one run of
 * memory, 16 bytes per thread of f32, 8 of a 16-bit type and 4 of codes. Runs of 16 elements per
 * thread would have 16-byte accesses of codes, but spread those of parameters over four times the
 * cache lines, half a sector each. A block's absmax comes from shuffles within the warp, or from
 * two warps if it has 512 elements. The moments stay in registers between the two passes over a
 * block, and each byte moves once.
 *
 * Decoding reads a table in shared memory: with random codes the lanes of a warp wait for each
 * other about 3.5 turns, in which the multiprocessor issues 14 instructions. A code's decade, slope
 * and correction, from which arithmetic would have the same bits, take three tables and ten
 * instructions. Encoding is that arithmetic, with tables so small that no lane waits.
 *
 * All of one kernel, whose parts share its registers: so it is longer than a file should be.
 */
#include "kernels/optim/adamw8bit.h"
#include "kernels/core/reduce.cuh"
#include "kernels/quant/quantize_blocks.cuh"
#include "kernels/weights/weights.cuh"

#define THREADS    256
#define WARP       32
#define WARPS      (THREADS / WARP)
#define GROUP      4
#define GROUPS     2
#define GROUP_STEP (WARP * GROUP)        /* elements from a thread's group to its next */
#define TILE       (GROUPS * GROUP_STEP) /* elements of a warp at a time */

static_assert(2 * TILE == ADAMW8BIT_MAX_BLOCK && CUDA_CHUNK % ADAMW8BIT_MAX_BLOCK == 0,
              "a block is in one tile or two, of one thread block");

/* Which variant of the kernel. */
enum { NEAREST, STOCHASTIC, BNB };

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

/* A tensor whose weights are not plain. */
struct adamw8bit_mode_record : adamw8bit_record {
    static constexpr bool plain = false;
    weights_record weights;
};

/* The constants of a step, by the one rule or the other. */
typedef struct step_constants {
    adamw_constants adamw;
    adamw8bit_bnb_constants bnb;
} step_constants;

/* What all tensors of a launch share. */
typedef struct adamw8bit_shared {
    hr_adamw_config config;
    step_constants constants; /* unless they depend on device memory */
    int32_t fold_on_device;
    int32_t block_shift; /* log2 of the block size */
    hr_weights_mode mode;
    int64_t *stalled;
} adamw8bit_shared;

template <typename Record> using adamw8bit_launch = list_launch<adamw8bit_shared, Record>;

/* ---- A tile ---------------------------------------------------------------------------------- */

/* Moments come in pairs from here on: [0] is exp_avg_sq, [1] is exp_avg, by is_signed. */

/* A thread block's elements: where they begin in memory, so that offsets from there have 32 bits.
 */
typedef struct chunk {
    void *param;
    const void *grad;
    uint8_t *codes[2];
    float *absmax[2];
    int64_t begin; /* in the tensor */
    int count;
    hr_dtype param_dtype, grad_dtype;
    bool aligned; /* addresses allow one access per group */
    int block_shift;
    int skip_nonfinite;
    uint64_t seed;
    double step;
} chunk;

/* What a thread needs for weights that are not plain. */
typedef struct weights_thread {
    void *residual; /* of the thread block's elements */
    const weights_record *record;
    weights_start start;
    hr_weights_mode mode;
    uint32_t stalled; /* weights so far */
} weights_thread;

/* From the largest of each group to the largest of its block, in every lane. A block of 512 is two
 * tiles, of neighbouring warps. */
static __device__ __forceinline__ void largest_of_blocks(uint32_t (&largest)[GROUPS][2],
                                                         int block_shift)
{
    if (1 << block_shift < TILE) {
#pragma unroll
        for (int j = 0; j < GROUPS; j++)
            reduce_lanes_max(largest[j], (1 << block_shift) / GROUP);
        return;
    }
#pragma unroll
    for (int s = 0; s < 2; s++)
        largest[0][s] = max(largest[0][s], largest[1][s]);
    reduce_lanes_max(largest[0], WARP);
    if (1 << block_shift > TILE) {
        __shared__ uint32_t tiles[WARPS][2];
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        if (lane < 2)
            tiles[warp][lane] = lane == 0 ? largest[0][0] : largest[0][1];
        __syncthreads();
#pragma unroll
        for (int s = 0; s < 2; s++)
            largest[0][s] = max(largest[0][s], tiles[warp ^ 1][s]);
        __syncthreads(); /* before the next tile's */
    }
#pragma unroll
    for (int s = 0; s < 2; s++)
        largest[1][s] = largest[0][s];
}

/* The first pass over a block: new parameters, moments, and the largest of these in each group. All
 * loads are in flight before the first use. */
template <int rule, bool plain>
static __device__ __forceinline__ void
update(const chunk &c, weights_thread &w, const step_constants &constants, const quant_maps &maps,
       uint32_t first, bool whole, float (&moments)[2][GROUPS][GROUP],
       uint32_t (&largest)[GROUPS][2])
{
    const hr_dtype residual = plain ? HR_F64 : weights_residual_dtype(w.mode, c.param_dtype);
    pack<GROUP> params[GROUPS], residuals[GROUPS], grads[GROUPS];
    uint32_t codes[2][GROUPS];
    float absmaxs[2][GROUPS];
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        const uint32_t i = first + j * GROUP_STEP;
        const int left = c.count - (int)i;
        params[j] = pack_load<GROUP>(c.param, i, c.param_dtype, whole, left);
        if (!plain)
            residuals[j] = weights_load_residuals(w.residual, i, residual, whole, left);
        grads[j] = pack_load<GROUP>(c.grad, i, c.grad_dtype, whole, left);
#pragma unroll
        for (int s = 0; s < 2; s++) {
            codes[s][j] = pack_load_bytes(c.codes[s], i, whole, left, dynamic_zero(s));
            absmaxs[s][j] = whole || left > 0 ? c.absmax[s][i >> c.block_shift] : 0.0f;
        }
    }
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        const uint32_t i = first + j * GROUP_STEP;
        const int left = c.count - (int)i;
        float param[GROUP];
        uint32_t new_params[GROUP] = {0}, new_residuals[GROUP] = {0};
        hr_random4 random = {{0, 0, 0, 0}};
        if (!plain && weights_are_random(w.mode))
            random = weights_random_of<GROUP>(*w.record, w.start, c.step, i);
        largest[j][0] = largest[j][1] = 0;
#pragma unroll
        for (int e = 0; e < GROUP; e++) {
            float moment[2];
#pragma unroll
            for (int s = 0; s < 2; s++)
                moment[s] =
                    quant_decode(&maps, (uint8_t)(codes[s][j] >> (8 * e)), absmaxs[s][j], s);
            adamw_values x;
            weights_bits before = {0, 0};
            if (plain) {
                x.param = pack_get(params[j], e, c.param_dtype);
            } else {
                before.param = pack_bits(params[j], e, c.param_dtype);
                before.residual = residual == HR_F64 ? 0 : pack_bits(residuals[j], e, residual);
                x.param = weights_join(before, c.param_dtype, w.mode);
            }
            const float was = x.param;
            x.grad = pack_get(grads[j], e, c.grad_dtype);
            x.exp_avg = moment[1];
            x.exp_avg_sq = moment[0];
            x.max_exp_avg_sq = 0.0f;
            if (rule == BNB)
                x = adamw8bit_bnb_element(constants.bnb, x, c.param_dtype);
            else
                x = adamw_update(constants.adamw, x, 0, c.skip_nonfinite);
            param[e] = x.param;
            if (!plain) {
                const weights_bits after =
                    weights_split(x.param, c.param_dtype, w.mode, weights_random(&random, e));
                pack_put_bits(new_params, e, c.param_dtype, after.param);
                pack_put_bits(new_residuals, e, residual, after.residual);
                if (whole || e < left)
                    w.stalled += weights_stall(before, after, was, x.param);
            }
            moment[1] = x.exp_avg;
            moment[0] = x.exp_avg_sq;
#pragma unroll
            for (int s = 0; s < 2; s++) {
                moments[s][j][e] = moment[s];
                largest[j][s] = max(largest[j][s], quant_magnitude(moment[s], rule == BNB));
            }
        }
        if (!plain)
            weights_store_residuals(w.residual, i, residual, whole, left, pack_from(new_residuals));
        pack_store<GROUP>(c.param, i, c.param_dtype, whole, left,
                          plain ? pack_of(param, c.param_dtype) : pack_from(new_params));
    }
}

/* The code of moment x, which is what quant_encode() and its variants give. */
template <int rule>
static __device__ __forceinline__ uint8_t code_of(const quant_maps &maps, float x, float absmax,
                                                  dynamic_scale scale, int is_signed,
                                                  uint32_t random)
{
    if (rule == BNB)
        return adamw8bit_bnb_encode(&maps, x, absmax, is_signed);
    if (rule == STOCHASTIC)
        return quant_encode_randomly(&maps, x, scale, is_signed, random);
    return quant_encode_cuda(maps.map[is_signed], x, scale, is_signed);
}

/* Both passes over the tile of a warp; `first` is the thread's first element, and `whole` means one
 * access per group. */
template <int rule, bool plain>
static __device__ __forceinline__ void
update_tile(const chunk &c, weights_thread &w, const step_constants &constants,
            const quant_maps &maps, uint32_t first, bool whole)
{
    float moments[2][GROUPS][GROUP];
    uint32_t largest[GROUPS][2];
    update<rule, plain>(c, w, constants, maps, first, whole, moments, largest);
    largest_of_blocks(largest, c.block_shift);
    float absmax[2] = {};
    dynamic_scale scale[2] = {};
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        const uint32_t i = first + j * GROUP_STEP;
        const int left = c.count - (int)i;
        const bool begins = (whole || left > 0) && (i & ((1u << c.block_shift) - 1)) == 0;
        hr_random4 random[GROUP / 2] = {};
        if (rule == STOCHASTIC)
#pragma unroll
            for (int e = 0; e < GROUP; e += 2)
                random[e / 2] = adamw8bit_random(c.seed, c.step, c.begin + i + e);
#pragma unroll
        for (int s = 0; s < 2; s++) {
            if (j == 0 || 1 << c.block_shift < TILE) {
                absmax[s] = quant_absmax(largest[j][s], rule == BNB);
                scale[s] = dynamic_scale_of(absmax[s]);
            }
            if (begins)
                c.absmax[s][i >> c.block_shift] = absmax[s];
            uint32_t codes = 0;
#pragma unroll
            for (int e = 0; e < GROUP; e++)
                codes |= (uint32_t)code_of<rule>(maps, moments[s][j][e], absmax[s], scale[s], s,
                                                 random[e / 2].word[e % 2 * 2 + (s == 0)])
                         << (8 * e);
            pack_store_bytes(c.codes[s], i, whole, left, codes);
        }
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

static __device__ __forceinline__ size_t size_of(hr_dtype dtype)
{
    return dtype == HR_F32 ? 4 : 2;
}

/* What of tensor t is this thread block's. */
static __device__ __forceinline__ chunk chunk_of(const adamw8bit_shared &args,
                                                 const adamw8bit_record &t)
{
    chunk c;
    c.begin = list_begin(t);
    c.count = (int)(list_end(t, c.begin) - c.begin);
    c.param_dtype = (hr_dtype)t.param_dtype;
    c.grad_dtype = (hr_dtype)t.grad_dtype;
    c.aligned = ((uintptr_t)t.param % (GROUP * size_of(c.param_dtype)) |
                 (uintptr_t)t.grad % (GROUP * size_of(c.grad_dtype)) |
                 (uintptr_t)t.exp_avg % GROUP | (uintptr_t)t.exp_avg_sq % GROUP) == 0;
    c.block_shift = args.block_shift;
    c.skip_nonfinite = args.config.step.skip_nonfinite;
    c.param = (char *)t.param + c.begin * size_of(c.param_dtype);
    c.grad = (const char *)t.grad + c.begin * size_of(c.grad_dtype);
    c.codes[1] = t.exp_avg + c.begin;
    c.codes[0] = t.exp_avg_sq + c.begin;
    c.absmax[1] = t.exp_avg_absmax + (c.begin >> c.block_shift);
    c.absmax[0] = t.exp_avg_sq_absmax + (c.begin >> c.block_shift);
    c.seed = t.seed;
    c.step = step_number(&args.config.step, t.step, (hr_dtype)t.step_dtype);
    return c;
}

/* As many blocks per multiprocessor as registers allow without a spill: the compiler finds room for
 * 4 of the longest variant, and for 3 of the others. */
template <int rule, typename Record>
static __global__ void __launch_bounds__(THREADS, rule == STOCHASTIC && Record::plain ? 4 : 3)
    adamw8bit_kernel(const adamw8bit_launch<Record> __grid_constant__ args)
{
    __shared__ quant_maps maps;
    __shared__ step_constants folded;
    if (step_is_skipped(&args.config.step))
        return;
    const Record &t = args.tensors[list_find(args.tensors, args.count, blockIdx.x)];
    chunk c = chunk_of(args, t);
    weights_thread w = {};
    if constexpr (!Record::plain) {
        const hr_dtype residual = weights_residual_dtype(args.mode, c.param_dtype);
        const size_t size = residual == HR_I8 ? 1 : size_of(residual);
        w.residual = (char *)t.weights.residual + c.begin * size;
        c.aligned = c.aligned && (uintptr_t)t.weights.residual % (GROUP * size) == 0;
        w.record = &t.weights;
        w.mode = args.mode;
        if (weights_are_random(w.mode))
            w.start = weights_start_of(t.weights.place, c.begin);
    }
    if (threadIdx.x == 0)
        folded = args.fold_on_device ? fold(&args.config, c.step, rule == BNB) : args.constants;
    quant_fill_maps<THREADS>(&maps, 0, 1, rule == BNB);
    for (uint32_t tiles = 0; tiles < (uint32_t)c.count; tiles += WARPS * TILE) {
        const uint32_t tile = tiles + threadIdx.x / WARP * TILE;
        if (tile < (uint32_t)c.count || 1 << c.block_shift > TILE)
            update_tile<rule, Record::plain>(c, w, folded, maps, tile + threadIdx.x % WARP * GROUP,
                                             c.aligned && tile + TILE <= (uint32_t)c.count);
    }
    if constexpr (!Record::plain)
        if (args.stalled)
            weights_add_stalled(args.stalled, w.stalled);
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

template <typename Record>
static void queue_update(const adamw8bit_launch<Record> &launch, const hr_adamw8bit_config *config,
                         uint32_t blocks, hr_stream stream)
{
    if (config->seeds)
        HR_LAUNCH((adamw8bit_kernel<STOCHASTIC, Record>), blocks, THREADS, 0, stream, launch);
    else if (Record::plain && config->bnb_exact)
        HR_LAUNCH((adamw8bit_kernel<(Record::plain ? BNB : NEAREST), Record>), blocks, THREADS, 0,
                  stream, launch);
    else
        HR_LAUNCH((adamw8bit_kernel<NEAREST, Record>), blocks, THREADS, 0, stream, launch);
}

template <typename Record>
static hr_status launch_all(const adamw8bit_args *args, const hr_exec *exec)
{
    const hr_adamw_config *const config = &args->config->adamw;
    adamw8bit_launch<Record> launch;
    launch.config = *config;
    launch.mode = config->step.weights ? config->step.weights->mode : HR_WEIGHTS_NEAREST;
    launch.stalled = config->step.weights ? config->step.weights->stalled : nullptr;
    launch.fold_on_device = step_is_on_device(&config->step, args->steps);
    if (!launch.fold_on_device)
        launch.constants = fold(config, (double)config->step.t, args->config->bnb_exact);
    for (launch.block_shift = 0; 1 << launch.block_shift < args->config->block_size;)
        launch.block_shift++;
    const auto fill_record = [=](Record &record, int64_t k) {
        fill(record, args, k);
        if constexpr (!Record::plain)
            record.weights = weights_record_of(config->step.weights, args->params, k);
    };
    const auto queue = [&](uint32_t blocks, int64_t) {
        if (blocks > 0)
            queue_update(launch, args->config, blocks, exec->stream);
        if (args->steps)
            HR_LAUNCH(list_count_kernel<adamw8bit_launch<Record>>,
                      (launch.count + THREADS - 1) / THREADS, THREADS, 0, exec->stream, launch);
    };
    return list_launch_all(&launch, args->params, "hr_adamw8bit", fill_record, queue);
}

hr_status adamw8bit_cuda(const adamw8bit_args *args, const hr_exec *exec)
{
    return args->config->adamw.step.weights ? launch_all<adamw8bit_mode_record>(args, exec)
                                            : launch_all<adamw8bit_record>(args, exec);
}
