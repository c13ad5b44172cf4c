/*
 * weights_cuda.cu: the grid. Weights are converted when a model is saved or loaded, not in
 * every step, so elements go one by one.
 */
#include "kernels/weights/weights.cuh"

#define THREADS 256

typedef struct tensor_record {
    void *param;
    float *values;
    int64_t numel;
    void *residual;
    uint32_t first_block;
    uint8_t dtype;
} tensor_record;

#define MAX_TENSORS ((CUDA_PARAMETER_BYTES - 16) / sizeof(tensor_record))

typedef struct weights_launch {
    hr_weights_mode mode;
    int32_t split;
    uint32_t count;
    tensor_record tensors[MAX_TENSORS];
} weights_launch;

static_assert(sizeof(weights_launch) <= CUDA_PARAMETER_BYTES, "must fit in a launch");

static __global__ void __launch_bounds__(THREADS)
    weights_kernel(const weights_launch __grid_constant__ args)
{
    const tensor_record &t = args.tensors[cuda_find(args.tensors, args.count, blockIdx.x)];
    const hr_dtype dtype = (hr_dtype)t.dtype;
    const int64_t begin = (int64_t)(blockIdx.x - t.first_block) * CUDA_CHUNK;
    const int64_t end = t.numel - begin < CUDA_CHUNK ? t.numel : begin + CUDA_CHUNK;
    for (int64_t i = begin + threadIdx.x; i < end; i += THREADS) {
        if (args.split) {
            const weights_bits bits = weights_split(t.values[i], dtype, args.mode, 0);
            weights_put_bits(t.param, t.residual, i, bits, dtype, args.mode);
        } else {
            const weights_bits bits = weights_bits_at(t.param, t.residual, i, dtype, args.mode);
            hr_store(t.values, i, weights_join(bits, dtype, args.mode), HR_F32);
        }
    }
}

hr_status weights_cuda(const weights_args *args, const hr_exec *exec)
{
    weights_launch launch;
    launch.mode = args->weights->mode;
    launch.split = args->split;
    hr_status status = HR_OK;
    for (int64_t k = 0; k < args->params->count && status == HR_OK;) {
        uint32_t blocks = 0;
        launch.count = 0;
        for (; k < args->params->count && launch.count < MAX_TENSORS; k++) {
            tensor_record *const t = &launch.tensors[launch.count++];
            t->param = args->params->data[k];
            t->values = (float *)args->values->data[k];
            t->numel = args->params->numel[k];
            t->residual = weights_record_of(args->weights, args->params, k).residual;
            t->first_block = blocks;
            t->dtype = (uint8_t)args->params->dtype[k];
            blocks += cuda_blocks(t->numel);
        }
        if (blocks > 0)
            HR_LAUNCH(weights_kernel, blocks, THREADS, 0, exec->stream, launch);
        status = cuda_launch_status(args->split ? "hr_split_weights" : "hr_join_weights");
    }
    return status;
}
