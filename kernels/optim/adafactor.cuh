/*
 * adafactor.cuh: what the kernels of Adafactor share: the launch, sums over a block, eight
 * elements, and the constants of a block.
 */
#ifndef HR_ADAFACTOR_CUH
#define HR_ADAFACTOR_CUH

#include "kernels/core/reduce.cuh"
#include "kernels/optim/adafactor_plan.h"
#include "kernels/weights/weights.cuh"

#define THREADS 256
#define ROWS    8 /* of a thread, in a block of a matrix */

typedef struct adafactor_record {
    adafactor_tensor t;
    weights_record weights; /* if config.step.weights */
    int64_t numel;
    uint32_t first_block; /* in one launch after another */
} adafactor_record;

typedef struct adafactor_shared {
    hr_adafactor_config config; /* its `weights` only says whether there are any */
    hr_weights_mode mode;
    int64_t *stalled;
} adafactor_shared;

typedef list_launch<adafactor_shared, adafactor_record> adafactor_launch;

static __device__ __forceinline__ bool is_skipped(const adafactor_launch &args)
{
    return step_is_skipped(&args.config.step);
}

/* ---- Sums within a block --------------------------------------------------------------------- */

static __device__ __forceinline__ double sum_of_block(double sum)
{
    return reduce_block<THREADS>(sum, reduce_add());
}

static __device__ __forceinline__ float sum_of_eight(const float (&x)[8])
{
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

/* Where a block of a matrix lies. A launch has fewer than 2^32 blocks, and division of 64 bits takes
 * a hundred instructions. */
static __device__ __forceinline__ adafactor_place place_of_block(const adafactor_tensor &t,
                                                                 uint32_t block)
{
    const uint32_t col_blocks = (uint32_t)t.cut.col_blocks, row_blocks = (uint32_t)t.cut.row_blocks;
    const uint32_t row_block = block / col_blocks, matrix = row_block / row_blocks;
    return adafactor_place_at(&t.shape, &t.cut, matrix, row_block - matrix * row_blocks,
                              block - row_block * col_blocks);
}

/* ---- Eight elements -------------------------------------------------------------------------- */

/* Elements [i, i + count), count at most 8; zeros in the place of those that are not there. */
static __device__ __forceinline__ void load_eight(float (&x)[8], const void *base, int64_t i,
                                                  int count, bool vector, hr_dtype dtype)
{
    if (vector && count == 8) {
        const pack<8> all = pack_load<8>(base, i, dtype);
#pragma unroll
        for (int j = 0; j < 8; j++)
            x[j] = pack_get(all, j, dtype);
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++)
            x[j] = j < count ? hr_load(base, i + j, dtype) : 0.0f;
    }
}

static __device__ __forceinline__ void store_eight(void *base, int64_t i, const float (&x)[8],
                                                   int count, bool vector, hr_dtype dtype)
{
    if (vector && count == 8) {
        pack_store(base, i, pack_of(x, dtype), dtype);
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (j < count)
                hr_store(base, i + j, x[j], dtype);
    }
}

/* ---- The constants of a block ---------------------------------------------------------------- */

/* What the elements of a block have in common. */
typedef struct block_constants {
    adafactor_step step;
    double mean;
    float bound, grad_factor;
    float weight, keep, added; /* of the variances of a vector */
} block_constants;

/* By one thread, which hands them to the others. */
static __device__ __forceinline__ block_constants constants_of(const hr_adafactor_config &config,
                                                               const adafactor_tensor &t,
                                                               int64_t matrix, bool is_norm)
{
    const double eps1 = adafactor_eps1(&config, t.param_dtype);
    const double time = adafactor_time(&t, &config);
    block_constants c;
    c.bound = adafactor_bound(&config, eps1);
    c.grad_factor = step_grad_factor(&config.step);
    c.mean = t.kind == ADAFACTOR_MATRIX ? adafactor_mean_of(&t, &config, eps1, matrix)
                                        : adafactor_least_mean(&config, eps1);
    c.added = (float)adafactor_added(&config, eps1);
    c.weight = c.keep = 0.0f;
    if (!is_norm) {
        c.step = adafactor_step_of(&config, adafactor_fold(&config, time), *t.squared_param,
                                   *t.squared_update, (double)t.shape.whole_numel);
    } else if (t.kind == ADAFACTOR_VECTOR) {
        const double weight = adafactor_weight(&config, time);
        c.weight = (float)weight;
        c.keep = (float)(1.0 - weight);
    }
    return c;
}

#endif
