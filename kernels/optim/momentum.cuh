/*
 * momentum.cuh: what the grids of SGD and Lion share: records of tensors, and the formula of a kernel.
 */
#ifndef HR_MOMENTUM_CUH
#define HR_MOMENTUM_CUH

#include "kernels/core/count.cuh"
#include "kernels/optim/momentum.h"
#include "kernels/weights/weights.cuh"

#define THREADS 256
#define WARP    32
#define WARPS   (THREADS / WARP)
#define TILE    256 /* elements of a warp at a time */

/* Which formula a kernel has. */
enum { LION, SGD, PLAIN_SGD };

typedef struct momentum_record {
    static constexpr bool plain = true;
    void *param, *moment, *step;
    const void *grad;
    float *absmax; /* NULL: the moment is not in codes */
    int64_t numel;
    uint32_t first_block;
    uint8_t param_dtype, grad_dtype, moment_dtype, step_dtype;
} momentum_record;

using momentum_mode_record = weights_mode_record<momentum_record>;

/* What all tensors of a launch share. */
typedef struct momentum_shared {
    hr_momentum_config config;
    momentum_constants constants; /* unless they depend on device memory */
    momentum_kind kind;
    int32_t fold_on_device;
    int32_t block_shift; /* log2 of the block size of codes */
    hr_weights_mode mode;
    int64_t *stalled;
} momentum_shared;

template <typename Record, uint32_t number>
using momentum_launch = list_launch<momentum_shared, Record, number>;

/* The kind of a kernel, whose formula is a literal. */
template <int rule>
static __device__ __forceinline__ momentum_kind kind_of(const momentum_kind &kind, bool skip)
{
    return {rule == LION, rule == PLAIN_SGD, rule == SGD && kind.nesterov, rule != LION && kind.l2,
            skip && kind.skip_nonfinite};
}

/* What each block of a kernel does first: the constants of its step, and with weights of a mode where
 * its random numbers begin. */
struct momentum_step {
    momentum_constants constants;
    weights_start start;
    double step;
};

template <typename Launch, typename Record>
static __device__ __forceinline__ void momentum_begin(momentum_step *shared, const Launch &args,
                                                      const Record &t)
{
    if (threadIdx.x == 0) {
        shared->step = step_number(&args.config.step, t.step, (hr_dtype)t.step_dtype);
        shared->constants =
            args.fold_on_device ? momentum_fold(&args.config, shared->step) : args.constants;
        if constexpr (!Record::plain)
            shared->start = weights_start_of(t.weights.place, list_begin(t));
    }
}

/* Queues launches of a kernel over the list: launch(blocks, arguments). */
template <typename Record, uint32_t number, typename Kernel>
static hr_status momentum_launch_all(const momentum_args *args, const hr_exec *exec,
                                     Kernel launch_one)
{
    const hr_momentum_config *const config = args->config;
    momentum_launch<Record, number> launch;
    launch.config = *config;
    launch.kind = momentum_kind_of(config);
    launch.fold_on_device = step_is_on_device(&config->step, args->steps);
    launch.mode = weights_mode_of(config->step.weights);
    launch.stalled = weights_stalled_of(config->step.weights);
    for (launch.block_shift = 0; 1 << launch.block_shift < config->block_size;)
        launch.block_shift++;
    if (!launch.fold_on_device)
        launch.constants = momentum_fold(config, (double)config->step.t);
    const auto fill = [=](Record &t, int64_t k) {
        t.param = args->params->data[k];
        t.grad = args->grads->data[k];
        t.moment = args->moments ? args->moments->data[k] : nullptr;
        t.absmax = args->absmaxs ? (float *)args->absmaxs->data[k] : nullptr;
        t.step = step_counter(args->steps, k);
        t.param_dtype = (uint8_t)args->params->dtype[k];
        t.grad_dtype = (uint8_t)args->grads->dtype[k];
        t.moment_dtype = (uint8_t)(args->moments ? args->moments->dtype[k] : HR_F32);
        t.step_dtype = (uint8_t)step_counter_dtype(args->steps, k);
        if constexpr (!Record::plain)
            t.weights = weights_record_of(config->step.weights, args->params, k);
    };
    const auto queue = [&](uint32_t blocks, int64_t first) {
        if (blocks > 0)
            launch_one(blocks, launch);
        list_count(&config->step, args->steps, first, first + launch.count, exec->stream);
    };
    return list_launch_all(&launch, args->params, "hr_momentum", fill, queue);
}

hr_status momentum_codes_cuda(const momentum_args *args, const hr_exec *exec);

#endif
