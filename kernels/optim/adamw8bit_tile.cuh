/*
 * adamw8bit_tile.cuh: the update of a tile, 256 elements of a warp. A thread has 8 of them, in groups
 * of 4 that lie 128 apart, or in one group of 8 where all types have 16 bits: so every access of a
 * warp is one run of memory, 16 bytes per thread of params and grads. Runs of 16 elements per thread
 * would have 16-byte accesses of codes, but spread those of parameters over four times the cache
 * lines, half a sector each.
 *
 * A block's absmax comes from shuffles within the warp, or from two warps if it has 512 elements.
 * The moments stay in registers between the two passes over a block, and each byte moves once.
 */
#ifndef HR_ADAMW8BIT_TILE_CUH
#define HR_ADAMW8BIT_TILE_CUH

#include "kernels/core/reduce.cuh"
#include "kernels/optim/adamw8bit.h"
#include "kernels/quant/quantize_blocks.cuh"
#include "kernels/weights/weights.cuh"

#define THREADS 256
#define WARP    32
#define WARPS   (THREADS / WARP)
#define TILE    256 /* elements of a warp at a time */

/* Which variant of the kernel. */
enum { NEAREST, STOCHASTIC, BNB };

/* The constants of a step, by the one rule or the other. */
typedef struct step_constants {
    adamw_constants adamw;
    adamw8bit_bnb_constants bnb;
} step_constants;

/* What the elements of a thread block have in common. Where a call site gives literals, the tests of
 * them fold away. */
typedef struct adamw8bit_kind {
    hr_dtype param, grad;
    hr_weights_mode mode;
    int block_shift; /* log2 of the block size */
    bool skip, counts_stalled;
    bool l2, slow; /* as in adamw_element_of() */
} adamw8bit_kind;

/* A thread block's elements: where they begin in memory, so that offsets from there have 32 bits.
 * Moments come in pairs: [0] is exp_avg_sq, [1] is exp_avg, by is_signed. */
typedef struct adamw8bit_chunk {
    void *param, *residual;
    const void *grad;
    uint8_t *codes[2];
    float *absmax[2];
    int64_t begin; /* in the tensor */
    int count;
    uint64_t seed;
    double step;
} adamw8bit_chunk;

/* The moments of a thread's elements between the two passes, and the largest of each group. */
template <int GROUP, int GROUPS> struct adamw8bit_moments {
    float values[2][GROUPS][GROUP];
    uint32_t largest[GROUPS][2];
};

/* From the largest of each group to the largest of its block, in every lane. A block of 512 is two
 * tiles, of neighboring warps. */
template <int GROUP, int GROUPS>
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
    for (int j = 1; j < GROUPS; j++)
#pragma unroll
        for (int s = 0; s < 2; s++)
            largest[0][s] = max(largest[0][s], largest[j][s]);
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
    for (int j = 1; j < GROUPS; j++)
#pragma unroll
        for (int s = 0; s < 2; s++)
            largest[j][s] = largest[0][s];
}

/* The first pass over a block: new parameters, moments, and the largest of these in each group. */
template <int rule, bool plain, int GROUP, int GROUPS>
static __device__ __forceinline__ void
update(const adamw8bit_chunk &c, const adamw8bit_kind kind, weights_thread &thread,
       const step_constants &constants, const quant_tables &tables, int first, bool whole,
       adamw8bit_moments<GROUP, GROUPS> &moments)
{
    pack<GROUP> params[GROUPS], grads[GROUPS];
    weights_pack<GROUP> weights[GROUPS];
    uint32_t codes[2][GROUPS][GROUP / 4];
    float absmaxs[2][GROUPS];
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        const int i = first + j * WARP * GROUP, left = c.count - i;
        if constexpr (plain)
            params[j] = pack_load<GROUP>(c.param, i, kind.param, whole, left);
        else
            weights[j] =
                weights_load<GROUP>(c.param, c.residual, i, kind.param, kind.mode, whole, left);
        grads[j] = pack_load<GROUP>(c.grad, i, kind.grad, whole, left);
#pragma unroll
        for (int s = 0; s < 2; s++) {
            pack_load_bytes<GROUP>(c.codes[s], i, whole, left, dynamic_zero(s), codes[s][j]);
            if (whole && 1 << kind.block_shift >= TILE && j > 0)
                absmaxs[s][j] = absmaxs[s][0];
            else
                absmaxs[s][j] = whole || left > 0 ? c.absmax[s][i >> kind.block_shift] : 0.0f;
        }
    }
    pack_all_loaded();
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        const int i = first + j * WARP * GROUP, left = c.count - i;
        float param[GROUP], grad[GROUP];
        hr_random4 random = {{0, 0, 0, 0}};
        if constexpr (plain)
            pack_floats(params[j], kind.param, param);
        else
            weights_join_all(weights[j], kind.param, kind.mode, param);
        if (!plain && weights_are_random(kind.mode))
            random = weights_random_of<GROUP>(*thread.record, thread.start, c.step, (uint32_t)i);
        pack_floats(grads[j], kind.grad, grad);
        moments.largest[j][0] = moments.largest[j][1] = 0;
#pragma unroll
        for (int e = 0; e < GROUP; e++) {
            float moment[2];
#pragma unroll
            for (int s = 0; s < 2; s++)
                moment[s] = tables.values[s][pack_byte(codes[s][j], e)] * absmaxs[s][j];
            adamw_values x;
            x.param = param[e];
            x.grad = grad[e];
            x.exp_avg = moment[1];
            x.exp_avg_sq = moment[0];
            x.max_exp_avg_sq = 0.0f;
            if (rule == BNB)
                x = adamw8bit_bnb_element(constants.bnb, x, kind.param);
            else
                x = adamw_update_of(constants.adamw, x, 0, kind.skip, kind.l2, kind.slow);
            param[e] = x.param;
            moment[1] = x.exp_avg;
            moment[0] = x.exp_avg_sq;
#pragma unroll
            for (int s = 0; s < 2; s++) {
                moments.values[s][j][e] = moment[s];
                moments.largest[j][s] = quant_larger(moments.largest[j][s], moment[s], rule == BNB);
            }
        }
        if constexpr (plain) {
            pack_store<GROUP>(c.param, i, kind.param, whole, left, pack_of(param, kind.param));
        } else {
            const weights_pack<GROUP> after =
                weights_split_all(param, kind.param, kind.mode, random);
            weights_store<GROUP>(c.param, c.residual, i, kind.param, kind.mode, whole, left, after);
            if (kind.counts_stalled)
                thread.stalled += weights_stalled(weights[j], after, param, kind.param, kind.mode,
                                                  whole ? GROUP : left);
        }
    }
}

/* The reciprocals of both absmaxs. A warp that is in one block divides once per lane: half of the
 * lanes for one map and half for the other. */
static __device__ __forceinline__ void reciprocals(const float (&absmax)[2], bool one_block,
                                                   float (&second)[2])
{
    if (one_block) {
        const bool upper = threadIdx.x & WARP / 2;
        const float mine = dynamic_scale_of(upper ? absmax[1] : absmax[0]).second;
        const float other = __shfl_xor_sync(0xFFFFFFFFu, mine, WARP / 2);
        second[0] = upper ? other : mine;
        second[1] = upper ? mine : other;
    } else {
#pragma unroll
        for (int s = 0; s < 2; s++)
            second[s] = dynamic_scale_of(absmax[s]).second;
    }
}

/* The quotients of a group's moments and of their absmax. */
template <int rule, int N>
static __device__ __forceinline__ void quotients(const float (&x0)[N], const float (&x1)[N],
                                                 const float (&absmax)[2], const float (&second)[2],
                                                 float (&y)[2][N])
{
    const bool simple = quant_is_simple<0>(absmax[0]) && quant_is_simple<1>(absmax[1]);
    if (rule != BNB && simple) {
#pragma unroll
        for (int e = 0; e < N; e++) {
            y[0][e] = x0[e] * second[0];
            y[1][e] = x1[e] * second[1];
        }
    } else {
        const dynamic_scale unsigned_scale = dynamic_scale_of(absmax[0]);
        const dynamic_scale signed_scale = dynamic_scale_of(absmax[1]);
#pragma unroll
        for (int e = 0; e < N; e++) {
            y[0][e] = rule == BNB ? x0[e] / absmax[0] : quant_quotient<0>(x0[e], unsigned_scale);
            y[1][e] = rule == BNB ? x1[e] / absmax[1] : quant_quotient<1>(x1[e], signed_scale);
        }
    }
}

/* The codes of a group's moments x, which are what quant_encode() and its variants give. */
template <int rule, int is_signed, int N>
static __device__ __forceinline__ void
codes_of(const quant_tables &tables, const float (&x)[N], const float (&y)[N],
         const hr_random4 (&random)[N / 2], uint32_t (&codes)[N / 4])
{
    if constexpr (rule == NEAREST) {
        quant_codes<is_signed>(tables, y, codes);
    } else {
#pragma unroll
        for (int w = 0; w < N / 4; w++)
            codes[w] = 0;
#pragma unroll
        for (int e = 0; e < N; e++) {
            const int nearest = quant_code<is_signed>(tables, y[e]);
            const uint32_t bits = random[e / 2].word[e % 2 * 2 + !is_signed];
            const int code = rule == BNB
                                 ? adamw8bit_bnb_code(nearest, x[e], y[e], is_signed)
                                 : quant_code_randomly<is_signed>(tables, nearest, y[e], bits);
            codes[e / 4] |= (uint32_t)code << (8 * (e % 4));
        }
    }
}

/* Both passes over the tile of a warp; `first` is the thread's first element, and `whole` means one
 * access per group. */
template <int rule, bool plain, int GROUP, int GROUPS>
static __device__ __forceinline__ void
update_tile(const adamw8bit_chunk &c, const adamw8bit_kind kind, weights_thread &thread,
            const step_constants &constants, const quant_tables &tables, int first, bool whole)
{
    adamw8bit_moments<GROUP, GROUPS> moments;
    update<rule, plain>(c, kind, thread, constants, tables, first, whole, moments);
    largest_of_blocks<GROUP, GROUPS>(moments.largest, kind.block_shift);
    float absmax[2] = {}, second[2] = {};
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        const int i = first + j * WARP * GROUP, left = c.count - i;
        const bool begins = (whole || left > 0) && (i & ((1 << kind.block_shift) - 1)) == 0;
        if (j == 0 || 1 << kind.block_shift < TILE) {
#pragma unroll
            for (int s = 0; s < 2; s++)
                absmax[s] = quant_absmax(moments.largest[j][s], rule == BNB);
            if (rule != BNB)
                reciprocals(absmax, 1 << kind.block_shift >= TILE, second);
        }
        hr_random4 random[GROUP / 2] = {};
        if (rule == STOCHASTIC)
#pragma unroll
            for (int e = 0; e < GROUP; e += 2)
                random[e / 2] = adamw8bit_random(c.seed, c.step, c.begin + i + e);
        float y[2][GROUP];
        quotients<rule>(moments.values[0][j], moments.values[1][j], absmax, second, y);
        uint32_t codes[2][GROUP / 4];
        codes_of<rule, 0>(tables, moments.values[0][j], y[0], random, codes[0]);
        codes_of<rule, 1>(tables, moments.values[1][j], y[1], random, codes[1]);
#pragma unroll
        for (int s = 0; s < 2; s++) {
            if (begins)
                c.absmax[s][i >> kind.block_shift] = absmax[s];
            pack_store_bytes<GROUP>(c.codes[s], i, whole, left, codes[s]);
        }
    }
}

#endif
