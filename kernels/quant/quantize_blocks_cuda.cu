/*
 * quantize_blocks_cuda.cu: the grid. A warp takes a block at a time, in two passes over its
 * elements, of which the second finds them in the cache. States are converted when they are loaded,
 * not in every step, so elements go one by one.
 */
#include "kernels/core/list.cuh"
#include "kernels/quant/quantize_blocks.cuh"

#define THREADS 256
#define WARP    32
#define WARPS   (THREADS / WARP)

static_assert(CUDA_CHUNK % QUANT_MAX_BLOCK == 0, "a block is in one chunk");

typedef struct quantize_record {
    uint8_t *codes;
    float *absmax;
    void *values;
    int64_t numel;
    uint32_t first_block;
    uint32_t dtype; /* of the values */
} quantize_record;

typedef struct quantize_shared {
    int32_t is_signed, block_size;
} quantize_shared;

typedef list_launch<quantize_shared, quantize_record> quantize_launch;

template <int is_signed>
static __global__ void __launch_bounds__(THREADS, 4)
    quantize_blocks_kernel(const quantize_launch __grid_constant__ args)
{
    __shared__ quant_tables tables;
    quant_copy_tables<THREADS, 0>(&tables);
    const quantize_record &t = args.tensors[list_find(args.tensors, args.count, blockIdx.x)];
    const hr_dtype dtype = (hr_dtype)t.dtype;
    const int64_t begin = list_begin(t), end = list_end(t, begin);
    const int lane = (int)threadIdx.x % WARP;
    for (int64_t first = begin + (int64_t)(threadIdx.x / WARP) * args.block_size; first < end;
         first += WARPS * args.block_size) {
        const int64_t last = end - first < args.block_size ? end : first + args.block_size;
        uint32_t largest = 0;
        for (int64_t i = first + lane; i < last; i += WARP)
            largest = max(largest, quant_magnitude(hr_load(t.values, i, dtype), 0));
#pragma unroll
        for (int width = WARP / 2; width > 0; width /= 2)
            largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, width));
        const float absmax = quant_absmax(largest, 0);
        const dynamic_scale scale = dynamic_scale_of(absmax);
        if (lane == 0)
            t.absmax[first / args.block_size] = absmax;
#pragma unroll 1
        for (int64_t i = first + lane; i < last; i += WARP) {
            const float y = quant_quotient<is_signed>(hr_load(t.values, i, dtype), scale);
            t.codes[i] = (uint8_t)quant_code<is_signed>(tables, y);
        }
    }
}

static __global__ void __launch_bounds__(THREADS)
    dequantize_blocks_kernel(const quantize_launch __grid_constant__ args)
{
    __shared__ float values[256];
    for (int code = (int)threadIdx.x; code < 256; code += THREADS)
        values[code] = quant_nearest_tables.values[args.is_signed][code];
    __syncthreads();
    const quantize_record &t = args.tensors[list_find(args.tensors, args.count, blockIdx.x)];
    const int64_t begin = list_begin(t), end = list_end(t, begin);
    for (int64_t i = begin + threadIdx.x; i < end; i += THREADS)
        hr_store(t.values, i, values[t.codes[i]] * t.absmax[i / args.block_size],
                 (hr_dtype)t.dtype);
}

hr_status quantize_blocks_cuda(const quantize_args *args, const hr_exec *exec)
{
    quantize_launch launch;
    launch.is_signed = args->config->is_signed != 0;
    launch.block_size = args->config->block_size;
    const auto fill = [=](quantize_record &t, int64_t k) {
        t.codes = (uint8_t *)args->codes->data[k];
        t.absmax = (float *)args->absmaxs->data[k];
        t.values = args->values->data[k];
        t.dtype = (uint32_t)args->values->dtype[k];
    };
    const auto queue = [&](uint32_t blocks, int64_t) {
        if (blocks > 0 && args->decode)
            HR_LAUNCH(dequantize_blocks_kernel, blocks, THREADS, 0, exec->stream, launch);
        else if (blocks > 0 && launch.is_signed)
            HR_LAUNCH(quantize_blocks_kernel<1>, blocks, THREADS, 0, exec->stream, launch);
        else if (blocks > 0)
            HR_LAUNCH(quantize_blocks_kernel<0>, blocks, THREADS, 0, exec->stream, launch);
    };
    return list_launch_all(&launch, args->values,
                           args->decode ? "hr_dequantize_blocks" : "hr_quantize_blocks", fill,
                           queue);
}
