/*
 * adamw_cuda.cu: the grid. The list travels in the launch parameters; each block takes CUDA_CHUNK
 * consecutive elements of one tensor. Eight elements per thread and turn, in 16-byte accesses where
 * every address of the tensor allows them, else one by one.
 *
 * Dtypes are looked at once per eight elements and are the same for the whole block, so one kernel
 * serves every mix of them; the floor is the memory's bandwidth, not the instructions.
 */
#include "adamw.h"
#include "cuda.cuh"

#define THREADS 256

typedef struct tensor_record {
    void *param, *exp_avg, *exp_avg_sq, *max_exp_avg_sq, *step;
    const void *grad;
    int64_t numel;
    uint32_t first_block;
    uint8_t param_dtype, grad_dtype, state_dtype, step_dtype;
} tensor_record;

#define MAX_TENSORS                                                                    \
    ((CUDA_PARAMETER_BYTES - sizeof(hr_adamw_config) - sizeof(adamw_constants) - 16) / \
     sizeof(tensor_record))

typedef struct adamw_launch {
    hr_adamw_config config;
    adamw_constants constants; /* unless they depend on device memory */
    int32_t fold_on_device;
    uint32_t count;
    tensor_record tensors[MAX_TENSORS];
} adamw_launch;

static_assert(sizeof(adamw_launch) <= CUDA_PARAMETER_BYTES, "adamw_launch must fit in a launch");

static __device__ __forceinline__ void update_one(const tensor_record &t, adamw_constants c,
                                                  int skip, int64_t i)
{
    const hr_dtype state = (hr_dtype)t.state_dtype, param = (hr_dtype)t.param_dtype;
    const int amsgrad = t.max_exp_avg_sq != nullptr;
    adamw_values x;
    x.param = hr_load(t.param, i, param);
    x.grad = hr_load(t.grad, i, (hr_dtype)t.grad_dtype);
    x.exp_avg = hr_load(t.exp_avg, i, state);
    x.exp_avg_sq = hr_load(t.exp_avg_sq, i, state);
    x.max_exp_avg_sq = amsgrad ? hr_load(t.max_exp_avg_sq, i, state) : 0.0f;
    x = adamw_update(c, x, amsgrad, skip);
    hr_store(t.param, i, x.param, param);
    hr_store(t.exp_avg, i, x.exp_avg, state);
    hr_store(t.exp_avg_sq, i, x.exp_avg_sq, state);
    if (amsgrad)
        hr_store(t.max_exp_avg_sq, i, x.max_exp_avg_sq, state);
}

static __device__ __forceinline__ void update_eight(const tensor_record &t, adamw_constants c,
                                                    int64_t i)
{
    const hr_dtype state = (hr_dtype)t.state_dtype, param = (hr_dtype)t.param_dtype;
    const hr_dtype grad = (hr_dtype)t.grad_dtype;
    const int amsgrad = t.max_exp_avg_sq != nullptr;
    const cuda_pack params = cuda_load8(t.param, i, param);
    const cuda_pack grads = cuda_load8(t.grad, i, grad);
    const cuda_pack exp_avgs = cuda_load8(t.exp_avg, i, state);
    const cuda_pack exp_avg_sqs = cuda_load8(t.exp_avg_sq, i, state);
    const cuda_pack maxima = amsgrad ? cuda_load8(t.max_exp_avg_sq, i, state) : exp_avg_sqs;
    float new_param[8], new_exp_avg[8], new_exp_avg_sq[8], new_max[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        adamw_values x;
        x.param = cuda_unpack(params, j, param);
        x.grad = cuda_unpack(grads, j, grad);
        x.exp_avg = cuda_unpack(exp_avgs, j, state);
        x.exp_avg_sq = cuda_unpack(exp_avg_sqs, j, state);
        x.max_exp_avg_sq = cuda_unpack(maxima, j, state);
        x = adamw_element(c, x, amsgrad);
        new_param[j] = x.param;
        new_exp_avg[j] = x.exp_avg;
        new_exp_avg_sq[j] = x.exp_avg_sq;
        new_max[j] = x.max_exp_avg_sq;
    }
    cuda_store8(t.param, i, cuda_repack(new_param, param), param);
    cuda_store8(t.exp_avg, i, cuda_repack(new_exp_avg, state), state);
    cuda_store8(t.exp_avg_sq, i, cuda_repack(new_exp_avg_sq, state), state);
    if (amsgrad)
        cuda_store8(t.max_exp_avg_sq, i, cuda_repack(new_max, state), state);
}

static __global__ void __launch_bounds__(THREADS)
    adamw_kernel(const adamw_launch __grid_constant__ args)
{
    __shared__ adamw_constants folded;
    if (args.config.found_inf && *args.config.found_inf != 0.0f)
        return;
    const tensor_record &t = args.tensors[cuda_find(args.tensors, args.count, blockIdx.x)];
    adamw_constants constants = args.constants;
    if (args.fold_on_device) {
        if (threadIdx.x == 0)
            folded = adamw_fold(&args.config,
                                t.step ? hr_load_scalar(t.step, (hr_dtype)t.step_dtype) + 1.0
                                       : (double)args.config.step);
        __syncthreads();
        constants = folded;
    }
    const uintptr_t addresses = (uintptr_t)t.param | (uintptr_t)t.grad | (uintptr_t)t.exp_avg |
                                (uintptr_t)t.exp_avg_sq | (uintptr_t)t.max_exp_avg_sq;
    const int64_t begin = (int64_t)(blockIdx.x - t.first_block) * CUDA_CHUNK;
    const int64_t end = t.numel - begin < CUDA_CHUNK ? t.numel : begin + CUDA_CHUNK;
    /* To keep the old values of eight elements as well takes more registers than there are. */
    const int vectors = addresses % 16 == 0 && !args.config.skip_nonfinite;
    const int64_t vector_end = vectors ? begin + (end - begin) / 8 * 8 : begin;
    for (int64_t i = begin + threadIdx.x * 8; i < vector_end; i += THREADS * 8)
        update_eight(t, constants, i);
    for (int64_t i = vector_end + threadIdx.x; i < end; i += THREADS)
        update_one(t, constants, args.config.skip_nonfinite, i);
}

/* A launch of its own, after the update: every block of a tensor reads its counter. */
static __global__ void __launch_bounds__(THREADS)
    adamw_count_kernel(const adamw_launch __grid_constant__ args)
{
    const uint32_t k = blockIdx.x * THREADS + threadIdx.x;
    if (k >= args.count || (args.config.found_inf && *args.config.found_inf != 0.0f))
        return;
    const hr_dtype dtype = (hr_dtype)args.tensors[k].step_dtype;
    hr_store_scalar(args.tensors[k].step, hr_load_scalar(args.tensors[k].step, dtype) + 1.0, dtype);
}

/* Appends tensor k and returns the number of blocks in the launch so far. */
static uint32_t add_tensor(adamw_launch *launch, const adamw_args *args, int64_t k, uint32_t blocks)
{
    tensor_record *const t = &launch->tensors[launch->count++];
    t->param = args->params->data[k];
    t->grad = args->grads->data[k];
    t->exp_avg = args->exp_avgs->data[k];
    t->exp_avg_sq = args->exp_avg_sqs->data[k];
    t->max_exp_avg_sq = args->max_exp_avg_sqs ? args->max_exp_avg_sqs->data[k] : nullptr;
    t->step = args->steps ? args->steps->data[k] : nullptr;
    t->numel = args->params->numel[k];
    t->first_block = blocks;
    t->param_dtype = (uint8_t)args->params->dtype[k];
    t->grad_dtype = (uint8_t)args->grads->dtype[k];
    t->state_dtype = (uint8_t)args->exp_avgs->dtype[k];
    t->step_dtype = (uint8_t)(args->steps ? args->steps->dtype[k] : HR_F64);
    return blocks + cuda_blocks(t->numel);
}

hr_status adamw_cuda(const adamw_args *args, const hr_exec *exec)
{
    const hr_adamw_config *const config = args->config;
    adamw_launch launch;
    launch.config = *config;
    launch.fold_on_device =
        args->steps || config->lr_ptr || config->grad_scale || config->clip_coef;
    if (!launch.fold_on_device)
        launch.constants = adamw_fold(config, (double)config->step);
    hr_status status = HR_OK;
    for (int64_t k = 0; k < args->params->count && status == HR_OK;) {
        uint32_t blocks = 0;
        launch.count = 0;
        for (; k < args->params->count && launch.count < MAX_TENSORS; k++)
            blocks = add_tensor(&launch, args, k, blocks);
        if (blocks > 0)
            HR_LAUNCH(adamw_kernel, blocks, THREADS, 0, exec->stream, launch);
        if (args->steps)
            HR_LAUNCH(adamw_count_kernel, (launch.count + THREADS - 1) / THREADS, THREADS, 0,
                      exec->stream, launch);
        status = cuda_launch_status("hr_adamw");
    }
    return status;
}
