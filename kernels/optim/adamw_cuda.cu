/*
 * adamw_cuda.cu: the grid. The list travels in the launch parameters; each block takes CUDA_CHUNK
 * consecutive elements of one tensor. Eight elements per thread and turn, in 16-byte accesses where
 * every address of the tensor allows them, else one by one.
 *
 * Dtypes are looked at once per eight elements and are the same for the whole block, so one kernel
 * serves every mix of them; the floor is the memory's bandwidth, not the instructions. Another one
 * serves weights that are not plain, so that these need not carry what that takes.
 */
#include "kernels/optim/adamw.h"
#include "kernels/weights/weights.cuh"

#define THREADS 256

typedef struct adamw_record {
    static constexpr bool plain = true;
    static constexpr int blocks =
        0; /* at least, on a multiprocessor; 0: for the compiler to choose */
    void *param, *exp_avg, *exp_avg_sq, *max_exp_avg_sq, *step;
    const void *grad;
    int64_t numel;
    uint32_t first_block;
    uint8_t param_dtype, grad_dtype, state_dtype, step_dtype;
} adamw_record;

/* A tensor whose weights are not plain. */
struct adamw_mode_record : adamw_record {
    static constexpr bool plain = false;
    static constexpr int blocks = 3;
    weights_record weights;
};

/* What all tensors of a launch share. */
typedef struct adamw_shared {
    hr_adamw_config config;
    adamw_constants constants; /* unless they depend on device memory */
    int32_t fold_on_device;
    hr_weights_mode mode;
    int64_t *stalled;
} adamw_shared;

template <typename Record> using adamw_launch = list_launch<adamw_shared, Record>;

/* What a thread needs for weights that are not plain. */
typedef struct adamw_thread {
    hr_weights_mode mode;
    double step; /* for random numbers, and the block's first element */
    weights_start start;
    int64_t begin;
    uint32_t stalled; /* weights so far */
} adamw_thread;

template <typename Record>
static __device__ __forceinline__ void update_one(const Record &t, adamw_constants c, int skip,
                                                  adamw_thread &thread, int64_t i)
{
    const hr_dtype state = (hr_dtype)t.state_dtype, param = (hr_dtype)t.param_dtype;
    const int amsgrad = t.max_exp_avg_sq != nullptr;
    adamw_values x;
    x.grad = hr_load(t.grad, i, (hr_dtype)t.grad_dtype);
    x.exp_avg = hr_load(t.exp_avg, i, state);
    x.exp_avg_sq = hr_load(t.exp_avg_sq, i, state);
    x.max_exp_avg_sq = amsgrad ? hr_load(t.max_exp_avg_sq, i, state) : 0.0f;
    if constexpr (Record::plain) {
        x.param = hr_load(t.param, i, param);
        x = adamw_update(c, x, amsgrad, skip);
        hr_store(t.param, i, x.param, param);
    } else {
        void *const residual = t.weights.residual;
        const weights_bits before = weights_bits_at(t.param, residual, i, param, thread.mode);
        const float was = weights_join(before, param, thread.mode);
        x.param = was;
        x = adamw_update(c, x, amsgrad, skip);
        const uint32_t random = weights_are_random(thread.mode)
                                    ? weights_random_at(t.weights, thread.start, thread.step,
                                                        (uint32_t)(i - thread.begin))
                                    : 0;
        const weights_bits after = weights_split(x.param, param, thread.mode, random);
        weights_put_bits(t.param, residual, i, after, param, thread.mode);
        thread.stalled += weights_stall(before, after, was, x.param);
    }
    hr_store(t.exp_avg, i, x.exp_avg, state);
    hr_store(t.exp_avg_sq, i, x.exp_avg_sq, state);
    if (amsgrad)
        hr_store(t.max_exp_avg_sq, i, x.max_exp_avg_sq, state);
}

static __device__ __forceinline__ void update_eight(const adamw_record &t, adamw_constants c,
                                                    adamw_thread &, int64_t i)
{
    const hr_dtype state = (hr_dtype)t.state_dtype, param = (hr_dtype)t.param_dtype;
    const hr_dtype grad = (hr_dtype)t.grad_dtype;
    const int amsgrad = t.max_exp_avg_sq != nullptr;
    const pack<8> params = pack_load<8>(t.param, i, param);
    const pack<8> grads = pack_load<8>(t.grad, i, grad);
    const pack<8> exp_avgs = pack_load<8>(t.exp_avg, i, state);
    const pack<8> exp_avg_sqs = pack_load<8>(t.exp_avg_sq, i, state);
    const pack<8> maxima = amsgrad ? pack_load<8>(t.max_exp_avg_sq, i, state) : exp_avg_sqs;
    float new_param[8], new_exp_avg[8], new_exp_avg_sq[8], new_max[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        adamw_values x;
        x.param = pack_get(params, j, param);
        x.grad = pack_get(grads, j, grad);
        x.exp_avg = pack_get(exp_avgs, j, state);
        x.exp_avg_sq = pack_get(exp_avg_sqs, j, state);
        x.max_exp_avg_sq = pack_get(maxima, j, state);
        x = adamw_element(c, x, amsgrad);
        new_param[j] = x.param;
        new_exp_avg[j] = x.exp_avg;
        new_exp_avg_sq[j] = x.exp_avg_sq;
        new_max[j] = x.max_exp_avg_sq;
    }
    pack_store(t.param, i, pack_of(new_param, param), param);
    pack_store(t.exp_avg, i, pack_of(new_exp_avg, state), state);
    pack_store(t.exp_avg_sq, i, pack_of(new_exp_avg_sq, state), state);
    if (amsgrad)
        pack_store(t.max_exp_avg_sq, i, pack_of(new_max, state), state);
}

/* For params of 16 bits, without amsgrad. */
static __device__ __forceinline__ void update_eight(const adamw_mode_record &t, adamw_constants c,
                                                    adamw_thread &thread, int64_t i)
{
    const hr_dtype state = (hr_dtype)t.state_dtype, param = (hr_dtype)t.param_dtype;
    const hr_dtype grad = (hr_dtype)t.grad_dtype;
    const hr_weights_mode mode = thread.mode;
    const hr_dtype residual = weights_residual_dtype(mode, param);
    hr_random4 random = {{0, 0, 0, 0}};
    if (weights_are_random(mode))
        random = weights_random_of<8>(t.weights, thread.start, thread.step,
                                      (uint32_t)(i - thread.begin));
    const weights_pack old = weights_load8(t.param, t.weights.residual, i, residual);
    const pack<8> grads = pack_load<8>(t.grad, i, grad);
    const pack<8> exp_avgs = pack_load<8>(t.exp_avg, i, state);
    const pack<8> exp_avg_sqs = pack_load<8>(t.exp_avg_sq, i, state);
    weights_pack fresh = {{0}, {0}};
    float new_exp_avg[8], new_exp_avg_sq[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const weights_bits before = weights_get8(old, j, residual);
        const float was = weights_join(before, param, mode);
        adamw_values x;
        x.param = was;
        x.grad = pack_get(grads, j, grad);
        x.exp_avg = pack_get(exp_avgs, j, state);
        x.exp_avg_sq = pack_get(exp_avg_sqs, j, state);
        x.max_exp_avg_sq = 0.0f;
        x = adamw_element(c, x, 0);
        new_exp_avg[j] = x.exp_avg;
        new_exp_avg_sq[j] = x.exp_avg_sq;
        const weights_bits after = weights_split(x.param, param, mode, weights_random(&random, j));
        weights_put8(fresh, j, after, residual);
        thread.stalled += weights_stall(before, after, was, x.param);
    }
    weights_store8(t.param, t.weights.residual, i, fresh, residual);
    pack_store(t.exp_avg, i, pack_of(new_exp_avg, state), state);
    pack_store(t.exp_avg_sq, i, pack_of(new_exp_avg_sq, state), state);
}

template <typename Record>
static __global__ void __launch_bounds__(THREADS, Record::blocks)
    adamw_kernel(const adamw_launch<Record> __grid_constant__ args)
{
    __shared__ adamw_constants folded;
    __shared__ weights_start start; /* of the block's elements, and the step: for random numbers */
    __shared__ double step;
    if (step_is_skipped(&args.config.step))
        return;
    const Record &t = args.tensors[list_find(args.tensors, args.count, blockIdx.x)];
    adamw_constants constants = args.constants;
    if (args.fold_on_device || !Record::plain) {
        if (threadIdx.x == 0) {
            const double t_step = step_number(&args.config.step, t.step, (hr_dtype)t.step_dtype);
            folded = Record::plain || args.fold_on_device ? adamw_fold(&args.config, t_step)
                                                          : args.constants;
            if constexpr (!Record::plain) {
                step = t_step;
                start = weights_start_of(t.weights.place, list_begin(t));
            }
        }
        __syncthreads();
        constants = folded;
    }
    uintptr_t addresses = (uintptr_t)t.param | (uintptr_t)t.grad | (uintptr_t)t.exp_avg |
                          (uintptr_t)t.exp_avg_sq | (uintptr_t)t.max_exp_avg_sq;
    if constexpr (!Record::plain) /* eight of an i8 residual are 8 bytes */
        addresses |= (uintptr_t)t.weights.residual << (args.mode >= HR_WEIGHTS_REMAINDER8);
    const int64_t begin = list_begin(t), end = list_end(t, begin);
    adamw_thread thread = {};
    if constexpr (!Record::plain) {
        thread.mode = args.mode;
        thread.step = step;
        thread.start = start;
        thread.begin = begin;
    }
    /* To keep the old values of eight elements as well takes more registers than there are. */
    int vectors = addresses % 16 == 0 && !args.config.step.skip_nonfinite;
    if constexpr (!Record::plain)
        vectors = vectors && t.param_dtype != HR_F32 && !t.max_exp_avg_sq;
    const int64_t vector_end = vectors ? begin + (end - begin) / 8 * 8 : begin;
    for (int64_t i = begin + threadIdx.x * 8; i < vector_end; i += THREADS * 8)
        update_eight(t, constants, thread, i);
    for (int64_t i = vector_end + threadIdx.x; i < end; i += THREADS)
        update_one(t, constants, args.config.step.skip_nonfinite, thread, i);
    if constexpr (!Record::plain)
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

template <typename Record> static hr_status launch_all(const adamw_args *args, const hr_exec *exec)
{
    const hr_adamw_config *const config = args->config;
    adamw_launch<Record> launch;
    launch.config = *config;
    launch.fold_on_device = step_is_on_device(&config->step, args->steps);
    launch.mode = config->step.weights ? config->step.weights->mode : HR_WEIGHTS_NEAREST;
    launch.stalled = config->step.weights ? config->step.weights->stalled : nullptr;
    if (!launch.fold_on_device)
        launch.constants = adamw_fold(config, (double)config->step.t);
    const auto fill_record = [=](Record &record, int64_t k) {
        fill(record, args, k);
        if constexpr (!Record::plain)
            record.weights = weights_record_of(config->step.weights, args->params, k);
    };
    const auto queue = [&](uint32_t blocks, int64_t) {
        if (blocks > 0)
            HR_LAUNCH(adamw_kernel<Record>, blocks, THREADS, 0, exec->stream, launch);
        if (args->steps)
            HR_LAUNCH(list_count_kernel<adamw_launch<Record>>,
                      (launch.count + THREADS - 1) / THREADS, THREADS, 0, exec->stream, launch);
    };
    return list_launch_all(&launch, args->params, "hr_adamw", fill_record, queue);
}

hr_status adamw_cuda(const adamw_args *args, const hr_exec *exec)
{
    return args->config->step.weights ? launch_all<adamw_mode_record>(args, exec)
                                      : launch_all<adamw_record>(args, exec);
}
