/*
 * quantize_blocks_cpu.c: the CPU loops of hr_quantize_blocks and hr_dequantize_blocks. One parallel
 * region covers the blocks of the whole list. Blocks of the signed map, which activations are kept in,
 * go through the vector code that optimizers have for their moments.
 */
#include <pthread.h>

#include "kernels/core/cpu.h"
#include "kernels/quant/quantize_blocks.h"
#include "kernels/quant/quantize_blocks_cpu_signed.h"

/* Filled once. The maps are static, so that no call can run out of memory. */
static quant_maps kept_maps;

static void fill_maps(void)
{
    quant_maps_fill(&kept_maps, 0);
}

HR_INLINE void load_few(const void *restrict x, int64_t i, int count, float *restrict tile,
                        hr_dtype dtype)
{
    for (int lane = 0; lane < count; lane++)
        tile[lane] = hr_load(x, i + lane, dtype);
}

HR_INLINE void store_few(void *restrict x, int64_t i, int count, const float *restrict tile,
                         hr_dtype dtype)
{
    for (int lane = 0; lane < count; lane++)
        hr_store(x, i + lane, tile[lane], dtype);
}

/* Quantizes the elements [i, i + count) of tensor k, which are one block. */
HR_INLINE void quantize_block(const quantize_args *a, int64_t k, int64_t i, int count)
{
    const int is_signed = a->config->is_signed != 0;
    uint8_t *const codes = (uint8_t *)a->codes->data[k] + i;
    float *const absmax = (float *)a->absmaxs->data[k] + i / a->config->block_size;
    float tile[QUANT_MAX_BLOCK];
    FOR_DTYPE(a->values->dtype[k], V, load_few(a->values->data[k], i, count, tile, V))
    if (is_signed) {
        *absmax = quant_encode_signed(tile, count, codes);
        return;
    }
    uint32_t largest = 0;
    for (int lane = 0; lane < count; lane++) {
        const uint32_t magnitude = quant_magnitude(tile[lane], 0);
        largest = magnitude > largest ? magnitude : largest;
    }
    *absmax = quant_absmax(largest, 0);
    const dynamic_scale scale = dynamic_scale_of(*absmax);
    for (int lane = 0; lane < count; lane++)
        codes[lane] = quant_encode(&kept_maps, tile[lane], scale, 0);
}

HR_INLINE void dequantize_block(const quantize_args *a, int64_t k, int64_t i, int count)
{
    const int is_signed = a->config->is_signed != 0;
    const uint8_t *const codes = (const uint8_t *)a->codes->data[k] + i;
    const float absmax = ((const float *)a->absmaxs->data[k])[i / a->config->block_size];
    float tile[QUANT_MAX_BLOCK];
    if (is_signed)
        quant_decode_signed(codes, count, absmax, tile);
    for (int lane = 0; lane < count && !is_signed; lane++)
        tile[lane] = quant_decode(&kept_maps, codes[lane], absmax, 0);
    FOR_DTYPE(a->values->dtype[k], V, store_few(a->values->data[k], i, count, tile, V))
}

HR_INLINE void quantize_range(void *context, int64_t begin, int64_t end)
{
    const quantize_args *const a = (const quantize_args *)context;
    const int block_size = a->config->block_size;
    CPU_FOR_EACH_TENSOR_IN_BLOCKS(a->values, begin, end, block_size, k, from, to)
    {
        for (int64_t i = from; i < to; i += block_size) {
            const int count = to - i < block_size ? (int)(to - i) : block_size;
            if (a->decode)
                dequantize_block(a, k, i, count);
            else
                quantize_block(a, k, i, count);
        }
    }
}

CPU_VARIANTS(quantize_range)

hr_status quantize_blocks_cpu(const quantize_args *args)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, fill_maps);
    hr_parallel_for(0, cpu_total(args->values), CPU_GRAIN, CPU_BEST(quantize_range), (void *)args);
    return HR_OK;
}
