// Races planted in kernels, each beside its corrected twin.
#include "tests/c/emulator/caught.h"

// ---- Races on shared memory ---------------------------------------------------------------------

template <bool kBarrier> __global__ void reverse(int *data)
{
    __shared__ int tile[64];
    tile[threadIdx.x] = data[threadIdx.x];
    if (kBarrier)
        __syncthreads();
    data[63 - threadIdx.x] = tile[threadIdx.x ^ 1];
}

TEST(Races, MissingBarrierIsCaught)
{
    Device<int> data(64);
    // With some orders a thread meets a value that is not there yet, with others one that may
    // change.
    EXPECT_CAUGHT(HR_LAUNCH(reverse<false>, 1, 64, 0, nullptr, data),
                  "race on |uninitialized read of shared memory");
}

template <bool kSecondBarrier> __global__ void shift(float *data)
{
    __shared__ float tile[64];
    tile[threadIdx.x] = data[threadIdx.x];
    __syncthreads();
    for (int turn = 0; turn < 3; turn++) {
        const float next = tile[(threadIdx.x + 1) % 64];
        if (kSecondBarrier)
            __syncthreads();
        tile[threadIdx.x] = next;
        __syncthreads();
    }
    data[threadIdx.x] = tile[threadIdx.x];
}

TEST(Races, ReadAgainstWriteOnSharedMemoryIsCaught)
{
    Device<float> data(64);
    EXPECT_CAUGHT(HR_LAUNCH(shift<false>, 1, 64, 0, nullptr, data),
                  "race on shared memory, no barrier between\n.*emulator_races_test.cpp:.*\n.*"
                  "emulator_races_test.cpp:");
    EXPECT_CLEAN(HR_LAUNCH(shift<true>, 1, 64, 0, nullptr, data));
}

__global__ void same_slot(int *data)
{
    __shared__ int sum;
    sum = int(threadIdx.x);
    __syncthreads();
    data[threadIdx.x] = sum;
}

TEST(Races, WriteAgainstWriteOnSharedMemoryIsCaught)
{
    Device<int> data(64);
    EXPECT_CAUGHT(HR_LAUNCH(same_slot, 1, 64, 0, nullptr, data),
                  "race on shared memory.*\n.*write by thread .*\n.*write by thread");
}

template <bool kSync> __global__ void within_warp(int *data)
{
    __shared__ int tile[64];
    tile[threadIdx.x] = 1;
    if (kSync)
        __syncwarp();
    data[threadIdx.x] = tile[threadIdx.x ^ 16];
}

TEST(Races, SyncwarpOrdersAWarpAndNoMore)
{
    Device<int> data(64);
    EXPECT_CAUGHT(HR_LAUNCH(within_warp<false>, 1, 64, 0, nullptr, data), "race|uninitialized");
    EXPECT_CLEAN(HR_LAUNCH(within_warp<true>, 1, 64, 0, nullptr, data));
}

// ---- Races on device memory ---------------------------------------------------------------------

__global__ void overlapping_blocks(char *data, unsigned stride)
{
    data[blockIdx.x * stride + threadIdx.x] = 1;
}

TEST(Races, TwoBlocksOnOneByteAreCaught)
{
    Device<char> data(128);
    EXPECT_CAUGHT(HR_LAUNCH(overlapping_blocks, 2, 64, 0, nullptr, data, 63u),
                  "race on device memory.*\n.*write by thread .* of block .*\n.*write by");
    EXPECT_CLEAN(HR_LAUNCH(overlapping_blocks, 2, 64, 0, nullptr, data, 64u));
}

template <bool kAtomic> __global__ void histogram(unsigned *bins)
{
    if (kAtomic)
        atomicAdd(&bins[threadIdx.x % 4], 1);
    else
        bins[threadIdx.x % 4]++;
}

TEST(Races, AtomicsDoNotRace)
{
    Device<unsigned> bins(4);
    EXPECT_CAUGHT(HR_LAUNCH(histogram<false>, 2, 64, 0, nullptr, bins), "race on device memory");
    cudaMemset(bins, 0, 16);
    EXPECT_CLEAN(HR_LAUNCH(histogram<true>, 2, 64, 0, nullptr, bins));
    EXPECT_EQ(bins[3], 3 * 2 * 16u);
}

// The block that finishes last adds up what the others left.
template <bool kFence> __global__ void last_block(int *partial, unsigned *ticket, int *out)
{
    partial[blockIdx.x] = int(blockIdx.x);
    if (kFence)
        __threadfence();
    if (atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1) {
        *out = 0;
        for (unsigned i = 0; i < gridDim.x; i++)
            *out += partial[i];
    }
}

TEST(Races, AFenceAndAnAtomicPublish)
{
    Device<int> partial(9), out(1);
    Device<unsigned> ticket(1);
    EXPECT_CAUGHT(
        {
            cudaMemset(ticket, 0, 4);
            HR_LAUNCH(last_block<false>, 9, 1, 0, nullptr, partial, ticket, out);
        },
        "race on device memory");
    cudaMemset(ticket, 0, 4);
    EXPECT_CLEAN(HR_LAUNCH(last_block<true>, 9, 1, 0, nullptr, partial, ticket, out));
    EXPECT_EQ(out[0], 36);
}
