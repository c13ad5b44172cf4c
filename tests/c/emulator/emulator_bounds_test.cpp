// Accesses to memory that a kernel must not touch, in kernels planted beside their corrected twins:
// out of bounds, misaligned, or never written.
#include <vector>

#include "tests/c/emulator/caught.h"

#define ASAN "AddressSanitizer"

// ---- Bounds -------------------------------------------------------------------------------------

__global__ void copy(const float *in, float *out, int n)
{
    const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n)
        out[i] = in[i];
}

TEST(Bounds, DeviceMemory)
{
    Device<float> small(100), large(200);
    EXPECT_ACCESS_CAUGHT(
        HR_LAUNCH(copy, 2, 64, 0, nullptr, small, large, 101),
        "out-of-bounds access to 4 bytes .*\n.*read by thread .*emulator_bounds_test", ASAN);
    EXPECT_ACCESS_CAUGHT(HR_LAUNCH(copy, 2, 64, 0, nullptr, large, small, 101),
                         "out-of-bounds access to 4 bytes .*\n.*write by thread", ASAN);
    EXPECT_CLEAN(HR_LAUNCH(copy, 2, 64, 0, nullptr, small, large, 100));
}

__global__ void count_calls(int *out)
{
    static int calls;
    *out = ++calls;
}

TEST(Bounds, AVariableOfTheHostIsNotWritable)
{
    Device<int> out(1);
    EXPECT_ACCESS_CAUGHT(HR_LAUNCH(count_calls, 1, 1, 0, nullptr, out),
                         "out-of-bounds access .* a variable of the host", "");
}

TEST(Bounds, HostMemoryIsNotDeviceMemory)
{
    std::vector<float> host(64);
    Device<float> device(64);
    EXPECT_ACCESS_CAUGHT(HR_LAUNCH(copy, 1, 64, 0, nullptr, host.data(), device, 64),
                         "out-of-bounds access .* not device memory", "");
}

TEST(Bounds, FreedMemory)
{
    float *gone;
    Device<float> device(64);
    cudaMalloc(&gone, 256);
    cudaFree(gone);
    EXPECT_ACCESS_CAUGHT(HR_LAUNCH(copy, 1, 64, 0, nullptr, gone, device, 64),
                         "out-of-bounds access", ASAN);
}

__global__ void stage(float *out, int index)
{
    HR_DYNAMIC_SHARED(float, tile);
    tile[threadIdx.x] = 1;
    if (threadIdx.x == 0)
        tile[index] = 2;
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x];
}

TEST(Bounds, DynamicSharedMemory)
{
    Device<float> out(64);
    EXPECT_ACCESS_CAUGHT(HR_LAUNCH(stage, 1, 64, 256, nullptr, out, 64), "out-of-bounds access",
                         ASAN);
    EXPECT_ACCESS_CAUGHT(HR_LAUNCH(stage, 1, 64, 256, nullptr, out, -1), "out-of-bounds access",
                         ASAN);
    EXPECT_CLEAN(HR_LAUNCH(stage, 1, 64, 256, nullptr, out, 0));
}

__global__ void stage_fixed(float *out, int index)
{
    __shared__ float tile[64];
    tile[threadIdx.x] = 1;
    if (threadIdx.x == 0)
        tile[index] = 2;
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x];
}

TEST(Bounds, StaticSharedMemory)
{
    Device<float> out(64);
    EXPECT_ACCESS_CAUGHT(HR_LAUNCH(stage_fixed, 1, 64, 0, nullptr, out, 64),
                         "out-of-bounds access: index 64 of 'float \\[64\\]'",
                         "index 64 out of bounds");
    EXPECT_CLEAN(HR_LAUNCH(stage_fixed, 1, 64, 0, nullptr, out, 0));
}

// The guards work where no access is seen: here in a function that the compiler leaves alone.
__global__ __attribute__((no_sanitize("thread"))) void write_unseen(unsigned *data, unsigned value)
{
    *data = value;
}

TEST(Bounds, GuardsAreChecked)
{
    Device<unsigned> device(64);
    if (!hr_emu::sees_accesses())
        GTEST_SKIP() << "AddressSanitizer would end the test";
    HR_LAUNCH(write_unseen, 1, 1, 0, nullptr, device + 64, 0u);
    EXPECT_TRUE(matches(hr_emu::take_report(), "the guard after an allocation"));
    HR_LAUNCH(write_unseen, 1, 1, 0, nullptr, device + 64, 0xC5C5C5C5u); // mended
    cudaGetLastError();
}

// ---- Alignment ----------------------------------------------------------------------------------

__global__ void copy_vectors(const float *in, float *out)
{
    reinterpret_cast<float4 *>(out)[threadIdx.x] =
        reinterpret_cast<const float4 *>(in)[threadIdx.x];
}

TEST(Alignment, MisalignedVectorAccessIsCaught)
{
    Device<float> in(68), out(68);
    EXPECT_ACCESS_CAUGHT(HR_LAUNCH(copy_vectors, 1, 16, 0, nullptr, in + 1, out),
                         "misaligned access: .*float4.* needs a multiple of 16 bytes",
                         "misaligned address");
    EXPECT_CLEAN(HR_LAUNCH(copy_vectors, 1, 16, 0, nullptr, in + 4, out));
}

// ---- Memory that nobody wrote -------------------------------------------------------------------

__global__ void sum_unwritten(float *out, unsigned written)
{
    __shared__ float tile[32];
    if (threadIdx.x < written)
        tile[threadIdx.x] = 1;
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < 32; i++)
        sum += tile[i];
    out[threadIdx.x] = sum;
}

TEST(Uninitialized, SharedMemory)
{
    Device<float> out(32);
    EXPECT_ACCESS_CAUGHT(HR_LAUNCH(sum_unwritten, 2, 32, 0, nullptr, out, 31u),
                         "uninitialized read of shared memory", "");
    if (!hr_emu::sees_accesses()) { // then it is seen in the result
        HR_LAUNCH(sum_unwritten, 1, 32, 0, nullptr, out, 31u);
        EXPECT_TRUE(std::isnan(out[0]));
    }
    EXPECT_CLEAN(HR_LAUNCH(sum_unwritten, 1, 32, 0, nullptr, out, 32u));
    EXPECT_EQ(out[0], 32);
}

TEST(Uninitialized, DeviceMemory)
{
    float *fresh;
    Device<float> out(64);
    cudaMalloc(&fresh, 256);
    EXPECT_TRUE(std::isnan(on_host(fresh)));
    EXPECT_ACCESS_CAUGHT(HR_LAUNCH(copy, 1, 64, 0, nullptr, fresh, out, 64),
                         "uninitialized read of device memory", "");
    cudaMemset(fresh, 0, 256);
    EXPECT_CLEAN(HR_LAUNCH(copy, 1, 64, 0, nullptr, fresh, out, 64));
    cudaFree(fresh);
}
