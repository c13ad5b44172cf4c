/*
 * weights_cuda.cu: the grid. Weights are converted when a model is saved or loaded, not in
 * every step, so elements go one by one.
 */
#include "kernels/weights/weights.cuh"

#define THREADS 256

typedef struct weight_record {
    void *param;
    float *values;
    int64_t numel;
    void *residual;
    uint32_t first_block;
    uint8_t dtype;
} weight_record;

typedef struct weights_shared {
    hr_weights_mode mode;
    int32_t split;
} weights_shared;

typedef list_launch<weights_shared, weight_record> weights_launch;

static __global__ void __launch_bounds__(THREADS)
    weights_kernel(const weights_launch __grid_constant__ args)
{
    const weight_record &t = args.tensors[list_find(args.tensors, args.count, blockIdx.x)];
    const hr_dtype dtype = (hr_dtype)t.dtype;
    const int64_t begin = list_begin(t), end = list_end(t, begin);
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
    const auto fill = [=](weight_record &t, int64_t k) {
        t.param = args->params->data[k];
        t.values = (float *)args->values->data[k];
        t.residual = weights_record_of(args->weights, args->params, k).residual;
        t.dtype = (uint8_t)args->params->dtype[k];
    };
    const auto queue = [&](uint32_t blocks, int64_t) {
        if (blocks > 0)
            HR_LAUNCH(weights_kernel, blocks, THREADS, 0, exec->stream, launch);
    };
    return list_launch_all(&launch, args->params,
                           args->split ? "hr_split_weights" : "hr_join_weights", fill, queue);
}
