/* reduce.cuh: sums over a thread block, in a fixed order. */
#ifndef HR_REDUCE_CUH
#define HR_REDUCE_CUH

#include "kernels/core/cuda.cuh"

struct reduce_add {
    __device__ __forceinline__ double operator()(double a, double b) const
    {
        return a + b;
    }
};

/* The combination of x over the `threads` of the block, in thread 0; zero in the others. The order is
 * that of a tree, always the same. Between two uses the block must meet at a barrier. */
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
    return threadIdx.x == 0 ? values[0] : 0.0;
}

#endif
