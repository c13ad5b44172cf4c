// Accesses to memory that a kernel must not touch, in kernels planted beside their corrected twins:
// out of bounds, misaligned, or never written.
#include <vector>

#include "tests/c/emulator/caught.h"

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
    EXPECT_CAUGHT(HR_LAUNCH(copy, 2, 64, 0, nullptr, small, large, 101),
                  "out-of-bounds access to 4 bytes .*\n.*read by thread .*emulator_bounds_test");
    EXPECT_CAUGHT(HR_LAUNCH(copy, 2, 64, 0, nullptr, large, small, 101),
                  "out-of-bounds access to 4 bytes .*\n.*write by thread");
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
    EXPECT_CAUGHT(HR_LAUNCH(count_calls, 1, 1, 0, nullptr, out),
                  "out-of-bounds access .* a variable of the host");
}

TEST(Bounds, HostMemoryIsNotDeviceMemory)
{
    std::vector<float> host(64);
    Device<float> device(64);
    EXPECT_CAUGHT(HR_LAUNCH(copy, 1, 64, 0, nullptr, host.data(), device, 64),
                  "out-of-bounds access .* not device memory");
}

TEST(Bounds, FreedMemory)
{
    float *gone;
    Device<float> device(64);
    cudaMalloc(&gone, 256);
    cudaFree(gone);
    EXPECT_CAUGHT(HR_LAUNCH(copy, 1, 64, 0, nullptr, gone, device, 64), "out-of-bounds access");
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
    EXPECT_CAUGHT(HR_LAUNCH(stage, 1, 64, 256, nullptr, out, 64), "out-of-bounds access");
    EXPECT_CAUGHT(HR_LAUNCH(stage, 1, 64, 256, nullptr, out, -1), "out-of-bounds access");
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
    EXPECT_CAUGHT(HR_LAUNCH(stage_fixed, 1, 64, 0, nullptr, out, 64),
                  "out-of-bounds access: index 64 of 'float \\[64\\]'");
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
    EXPECT_CAUGHT(HR_LAUNCH(copy_vectors, 1, 16, 0, nullptr, in + 1, out),
                  "misaligned access: .*float4.* needs a multiple of 16 bytes");
    EXPECT_CLEAN(HR_LAUNCH(copy_vectors, 1, 16, 0, nullptr, in + 4, out));
}

// ---- Arithmetic that C leaves undefined ----------------------------------------------------------

__global__ void add_ints(int *sum, int a, int b)
{
    *sum = a + b;
}
__global__ void scale_by_power(int *product, int a, int power)
{
    *product = a << power;
}
__global__ void divide(int *quotient, int a, int b)
{
    *quotient = a / b;
}
__global__ void choose(int *chosen, const bool *flag)
{
    *chosen = *flag ? 1 : 2;
}

TEST(Arithmetic, WhatIsUndefinedIsCaught)
{
    Device<int> out(1);
    EXPECT_CAUGHT(HR_LAUNCH(add_ints, 1, 1, 0, nullptr, out, 0x7FFFFFFF, 1),
                  "undefined arithmetic: overflow of 'int' at .*emulator_bounds_test");
    EXPECT_CAUGHT(HR_LAUNCH(scale_by_power, 1, 1, 0, nullptr, out, 1, 32),
                  "undefined arithmetic: shift of 'int' by 'int'");
    EXPECT_CAUGHT(HR_LAUNCH(divide, 1, 1, 0, nullptr, out, -0x7FFFFFFF - 1, -1),
                  "undefined arithmetic: overflow of 'int'");
    Device<unsigned char> flag(1);
    cudaMemset(flag, 3, 1);
    EXPECT_CAUGHT(HR_LAUNCH(choose, 1, 1, 0, nullptr, out, reinterpret_cast<const bool *>(+flag)),
                  "undefined arithmetic: 3 is no value of 'bool'");
    EXPECT_CLEAN(HR_LAUNCH(add_ints, 1, 1, 0, nullptr, out, 0x7FFFFFFE, 1));
    EXPECT_CLEAN(HR_LAUNCH(scale_by_power, 1, 1, 0, nullptr, out, 1, 30));
    EXPECT_EQ(out[0], 1 << 30);
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
    EXPECT_CAUGHT(HR_LAUNCH(sum_unwritten, 2, 32, 0, nullptr, out, 31u),
                  "uninitialized read of shared memory");
    EXPECT_CLEAN(HR_LAUNCH(sum_unwritten, 1, 32, 0, nullptr, out, 32u));
    EXPECT_EQ(out[0], 32);
}

TEST(Uninitialized, DeviceMemory)
{
    float *fresh;
    Device<float> out(64);
    cudaMalloc(&fresh, 256);
    EXPECT_TRUE(std::isnan(on_host(fresh)));
    EXPECT_CAUGHT(HR_LAUNCH(copy, 1, 64, 0, nullptr, fresh, out, 64),
                  "uninitialized read of device memory");
    cudaMemset(fresh, 0, 256);
    EXPECT_CLEAN(HR_LAUNCH(copy, 1, 64, 0, nullptr, fresh, out, 64));
    cudaFree(fresh);
}
