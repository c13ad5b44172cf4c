/* reduce.cuh: sums over a thread block, in a fixed order, and the largest over lanes of a warp. */
#ifndef HR_REDUCE_CUH
#define HR_REDUCE_CUH

#include "kernels/core/cuda.cuh"

struct reduce_add {
    __device__ __forceinline__ double operator()(double a, double b) const
    {
        return a + b;
    }
};

/* The combination of x over the `threads` of the block, in thread 0; zero in the others. The order
 * is that of a tree, always the same. Between two uses the block must meet at a barrier. */
template <int threads, typename Combine>
static __device__ __forceinline__ double reduce_block(double x, Combine combine)
{
    __shared__ double values[threads];
    values[threadIdx.x] = x;
    for (int width = threads / 2; width > 0; width /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < width)
            values[threadIdx.x] = combine(values[threadIdx.x], values[threadIdx.x + width]);
    }
    __syncthreads(); // a compiler may let all threads read the first value
    return threadIdx.x == 0 ? values[0] : 0.0;
}

/* The larger of each pair over `lanes` neighboring lanes of a warp, in all of them. The upper half of the lanes
 * takes [1] and the lower [0], so that the pair costs as many shuffles as one number, and one. */
static __device__ __forceinline__ void reduce_lanes_max(uint32_t (&largest)[2], int lanes)
{
    const int half = lanes / 2;
    const bool upper = threadIdx.x & half;
    uint32_t mine = upper ? largest[1] : largest[0];
    uint32_t other = upper ? largest[0] : largest[1];
    mine = max(mine, __shfl_xor_sync(0xFFFFFFFFu, other, half));
#pragma unroll
    for (int width = 1; width < 16; width *= 2)
        if (width < half)
            mine = max(mine, __shfl_xor_sync(0xFFFFFFFFu, mine, width));
    other = __shfl_xor_sync(0xFFFFFFFFu, mine, half);
    largest[0] = upper ? other : mine;
    largest[1] = upper ? mine : other;
}

#endif
