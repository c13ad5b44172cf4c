// Bugs planted in the use of barriers and warp operations, each beside its corrected twin.
#include "tests/c/emulator/caught.h"

constexpr unsigned kAll = 0xFFFFFFFFu;

// ---- A barrier that only some threads reach -----------------------------------------------------

__global__ void barrier_in_branch(int *out, unsigned threads)
{
    if (threadIdx.x < threads)
        __syncthreads();
    out[threadIdx.x] = 1;
}

TEST(Barriers, DivergentBarrierIsCaught)
{
    Device<int> out(64);
    EXPECT_CAUGHT(
        HR_LAUNCH(barrier_in_branch, 1, 64, 0, nullptr, out, 40u),
        "divergent barrier:\n.*40 at __syncthreads, .*emulator_barriers_test.cpp:.*\n.*24 exited");
    EXPECT_CLEAN(HR_LAUNCH(barrier_in_branch, 1, 64, 0, nullptr, out, 64u));
    EXPECT_CLEAN(HR_LAUNCH(barrier_in_branch, 1, 64, 0, nullptr, out, 0u));
}

__global__ void two_barriers(unsigned threads)
{
    if (threadIdx.x < threads)
        __syncthreads();
    else
        __syncthreads();
}

TEST(Barriers, DifferentBarriersAreCaught)
{
    EXPECT_CAUGHT(HR_LAUNCH(two_barriers, 2, 96, 0, nullptr, 32u),
                  "divergent barrier:\n.*32 at .*:[0-9]+: .*\n.*64 at .*:[0-9]+: ");
    EXPECT_CLEAN(HR_LAUNCH(two_barriers, 2, 96, 0, nullptr, 96u));
}

__global__ void early_return(int *out, unsigned n)
{
    if (threadIdx.x >= n)
        return;
    __syncthreads();
    out[threadIdx.x] = 1;
}

TEST(Barriers, ReturnBeforeABarrierIsCaught)
{
    Device<int> out(64);
    EXPECT_CAUGHT(HR_LAUNCH(early_return, 1, 64, 0, nullptr, out, 63u),
                  "divergent barrier:\n.*63 at .*\n.*1 exited");
}

__global__ void vote_meets_barrier()
{
    if (threadIdx.x % 32 == 5)
        __syncthreads();
    else
        __any_sync(kAll, 1);
}

TEST(Barriers, DeadlockIsCaught)
{
    EXPECT_CAUGHT(HR_LAUNCH(vote_meets_barrier, 1, 64, 0, nullptr),
                  "deadlock:\n.*62 at __any_sync, .*mask 0xffffffff.*\n.*2 at __syncthreads");
}

// ---- Warp masks ---------------------------------------------------------------------------------

__global__ void masked_vote(unsigned *out, unsigned mask)
{
    if (threadIdx.x < 16)
        out[threadIdx.x] = __ballot_sync(mask, threadIdx.x % 2);
}

TEST(WarpMasks, CallerOutsideTheMaskIsCaught)
{
    Device<unsigned> out(16);
    EXPECT_CAUGHT(HR_LAUNCH(masked_vote, 1, 32, 0, nullptr, out, 0xFFFEu),
                  "bad warp mask: lane 0 calls __ballot_sync .* not in its mask");
    EXPECT_CLEAN(HR_LAUNCH(masked_vote, 1, 32, 0, nullptr, out, 0xFFFFu));
    EXPECT_EQ(out[3], 0xAAAAu);
}

__global__ void disagreeing_masks()
{
    __syncwarp(threadIdx.x < 16 ? 0xFFFFFFu : kAll);
}

TEST(WarpMasks, DisagreementIsCaught)
{
    EXPECT_CAUGHT(HR_LAUNCH(disagreeing_masks, 1, 32, 0, nullptr),
                  "deadlock:\n.*16 at __syncwarp, .*\n.*16 at __syncwarp");
}

__global__ void shuffle_from(int *out, int source)
{
    if (threadIdx.x < 16)
        out[threadIdx.x] = __shfl_sync(0xFFFFu, int(threadIdx.x), source);
}

TEST(WarpMasks, ShuffleFromAnAbsentLaneIsCaught)
{
    Device<int> out(16);
    EXPECT_CAUGHT(HR_LAUNCH(shuffle_from, 1, 32, 0, nullptr, out, 20),
                  "bad warp mask: __shfl_sync .* reads lane 20, which takes no part");
    EXPECT_CLEAN(HR_LAUNCH(shuffle_from, 1, 32, 0, nullptr, out, 7));
    EXPECT_EQ(out[3], 7);
}

// ---- The operations themselves ------------------------------------------------------------------

__global__ void shuffles(int4 *out)
{
    const int lane = int(threadIdx.x);
    out[lane] = make_int4(__shfl_sync(kAll, lane, 3, 8), __shfl_xor_sync(kAll, lane, 5),
                          __shfl_down_sync(kAll, lane, 3, 16), __shfl_up_sync(kAll, lane, 3, 16));
}

TEST(WarpOperations, ShufflesFollowTheirDefinition)
{
    Device<int4> out(32);
    EXPECT_CLEAN(HR_LAUNCH(shuffles, 1, 32, 0, nullptr, out));
    for (int lane = 0; lane < 32; lane++) {
        EXPECT_EQ(out[lane].x, lane / 8 * 8 + 3);
        EXPECT_EQ(out[lane].y, lane ^ 5);
        EXPECT_EQ(out[lane].z, lane % 16 < 13 ? lane + 3 : lane);
        EXPECT_EQ(out[lane].w, lane % 16 >= 3 ? lane - 3 : lane);
    }
}

__global__ void votes(int *out)
{
    const int i = int(threadIdx.x);
    const int any = __any_sync(kAll, i == 40), all = __all_sync(kAll, i < 40);
    const int count = __syncthreads_count(i % 3 == 0);
    const int both = __syncthreads_and(i < 100), either = __syncthreads_or(i == 99);
    out[i] = any | all << 1 | both << 2 | either << 3 | count << 4;
}

TEST(WarpOperations, VotesFollowTheirDefinition)
{
    Device<int> out(80); // two whole warps and half of one
    EXPECT_CLEAN(HR_LAUNCH(votes, 1, 80, 0, nullptr, out));
    for (int i = 0; i < 80; i++)
        EXPECT_EQ(out[i], (i / 32 == 1) | (i < 32) << 1 | 1 << 2 | 0 << 3 | 27 << 4) << i;
}

__global__ void sum_rows(const float *in, float *out, int columns)
{
    __shared__ float partial[32];
    float sum = 0;
    for (int i = int(threadIdx.x); i < columns; i += int(blockDim.x))
        sum += in[blockIdx.x * columns + i];
    for (int bits = 16; bits > 0; bits /= 2)
        sum += __shfl_xor_sync(kAll, sum, bits);
    if (threadIdx.x % 32 == 0)
        partial[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = threadIdx.x < blockDim.x / 32 ? partial[threadIdx.x] : 0;
    for (int bits = 16; threadIdx.x < 32 && bits > 0; bits /= 2)
        sum += __shfl_xor_sync(kAll, sum, bits);
    if (threadIdx.x == 0)
        out[blockIdx.x] = sum;
}

TEST(WarpOperations, ABlockReductionIsClean)
{
    constexpr int kRows = 5, kColumns = 1000;
    Device<float> in(kRows * kColumns), out(kRows);
    for (int i = 0; i < kRows * kColumns; i++)
        cudaMemcpy(in + i, std::vector<float>{float(i / kColumns + 1)}.data(), 4,
                   cudaMemcpyHostToDevice);
    EXPECT_CLEAN(HR_LAUNCH(sum_rows, kRows, 256, 0, nullptr, in, out, kColumns));
    for (int row = 0; row < kRows; row++)
        EXPECT_EQ(out[row], float(kColumns * (row + 1)));
}
