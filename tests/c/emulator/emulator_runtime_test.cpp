// The emulator's stand-in for the CUDA runtime.
#include "tests/c/emulator/caught.h"

#include <set>
#include <vector>

namespace
{
void nothing(int) {}
cudaError_t launch(dim3 grid, dim3 block, size_t shared = 0)
{
    HR_LAUNCH(nothing, grid, block, shared, nullptr, 1);
    return cudaGetLastError();
}
} // namespace

TEST(EmulatedRuntime, LaunchConfigurationsAreChecked)
{
    EXPECT_EQ(launch(1, 1), cudaSuccess);
    EXPECT_EQ(launch(2, 1024), cudaSuccess);
    EXPECT_EQ(launch({2, 3, 4}, {4, 8, 2}), cudaSuccess);
    for (const dim3 grid :
         {dim3(0), dim3(1, 0), dim3(1, 65536), dim3(1, 1, 65536), dim3(0x80000000u)})
        EXPECT_EQ(launch(grid, 1), cudaErrorInvalidConfiguration);
    for (const dim3 block : {dim3(0), dim3(1025), dim3(1, 1, 65), dim3(32, 33), dim3(1, 1, 0)})
        EXPECT_EQ(launch(1, block), cudaErrorInvalidConfiguration);
    EXPECT_EQ(launch(1, 1, 48 << 10), cudaSuccess);
    EXPECT_EQ(launch(1, 1, (48 << 10) + 1), cudaErrorInvalidConfiguration);
}

namespace
{
__global__ void note_order(unsigned *order, unsigned *next)
{
    order[atomicAdd(next, 1)] = blockIdx.x * blockDim.x + threadIdx.x;
}

std::vector<unsigned> order_of(uint64_t seed)
{
    Device<unsigned> order(192), next(1);
    hr_emu::set_seed(seed);
    HR_LAUNCH(note_order, 3, 64, 0, nullptr, order, next);
    std::vector<unsigned> all;
    for (int i = 0; i < 192; i++)
        all.push_back(order[i]);
    return all;
}
} // namespace

TEST(EmulatedRuntime, TheOrderFollowsFromTheSeed)
{
    const std::vector<unsigned> first = order_of(1), second = order_of(2);
    EXPECT_NE(first, second);
    EXPECT_EQ(first, order_of(1));
    EXPECT_EQ(std::set<unsigned>(first.begin(), first.end()).size(), 192u);
}

TEST(EmulatedRuntime, ThreadLocalsOfTheHostSurviveALaunch)
{
    thread_local int mine = 5;
    HR_LAUNCH(nothing, 1, 1, 0, nullptr, 1);
    EXPECT_EQ(mine, 5);
}

TEST(EmulatedRuntime, ErrorsStayUntilAsked)
{
    HR_LAUNCH(nothing, 0, 1, 0, nullptr, 1);
    EXPECT_EQ(cudaPeekAtLastError(), cudaErrorInvalidConfiguration);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    EXPECT_STREQ(cudaGetErrorName(cudaErrorInvalidConfiguration), "cudaErrorInvalidConfiguration");
}

TEST(EmulatedRuntime, MemoryStartsAsNaNAndIsAligned)
{
    float *data = nullptr;
    ASSERT_EQ(cudaMalloc(&data, 12), cudaSuccess);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 256, 0u);
    for (int i = 0; i < 3; i++)
        EXPECT_TRUE(std::isnan(on_host(data + i)));
    EXPECT_EQ(cudaFree(data), cudaSuccess);
    EXPECT_EQ(cudaFree(data), cudaErrorInvalidValue);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
    EXPECT_EQ(cudaFree(nullptr), cudaSuccess);
}

TEST(EmulatedRuntime, CopiesStayWithinAllocations)
{
    Device<char> device(16);
    std::vector<char> host(32, 7);
    EXPECT_EQ(cudaMemcpy(device, host.data(), 16, cudaMemcpyHostToDevice), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(device, host.data(), 17, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    EXPECT_EQ(cudaMemcpy(host.data(), device + 1, 16, cudaMemcpyDeviceToHost),
              cudaErrorInvalidValue);
    EXPECT_EQ(cudaMemcpy(host.data(), host.data() + 16, 4, cudaMemcpyDeviceToHost),
              cudaErrorInvalidValue);
    EXPECT_EQ(cudaMemset(device, 0, 17), cudaErrorInvalidValue);
    EXPECT_EQ(device[15], 7);
    cudaGetLastError();
}

TEST(EmulatedRuntime, ACaptureRefusesToWaitAndToAllocate)
{
    Device<char> device(16);
    std::vector<char> host(16, 7);
    void *memory = nullptr;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusInvalidated;
    EXPECT_EQ(cudaStreamIsCapturing(nullptr, &status), cudaSuccess);
    EXPECT_EQ(status, cudaStreamCaptureStatusNone);
    hr_emu::pretend_capture(true);
    EXPECT_EQ(cudaStreamIsCapturing(nullptr, &status), cudaSuccess);
    EXPECT_EQ(status, cudaStreamCaptureStatusActive);
    EXPECT_EQ(launch(1, 1), cudaSuccess);
    EXPECT_EQ(cudaMemcpyAsync(device, host.data(), 16, cudaMemcpyHostToDevice), cudaSuccess);
    EXPECT_EQ(cudaMemsetAsync(device, 1, 8), cudaSuccess);
    EXPECT_EQ(hr_emu::take_report(), "");
    const cudaError_t refused[] = {
        cudaStreamSynchronize(nullptr),
        cudaDeviceSynchronize(),
        cudaMalloc(&memory, 4),
        cudaFree(device),
        cudaMemcpy(device, host.data(), 1, cudaMemcpyHostToDevice),
        cudaMemset(device, 0, 1),
    };
    hr_emu::pretend_capture(false);
    for (const cudaError_t error : refused)
        EXPECT_EQ(error, cudaErrorStreamCaptureUnsupported);
    EXPECT_EQ(hr_emu::take_report(), "not in a capture: cudaStreamSynchronize\n"
                                     "not in a capture: cudaDeviceSynchronize\n"
                                     "not in a capture: cudaMalloc\n"
                                     "not in a capture: cudaFree\n"
                                     "not in a capture: cudaMemcpy\n"
                                     "not in a capture: cudaMemset\n");
    EXPECT_EQ(cudaGetLastError(), cudaErrorStreamCaptureUnsupported);
    EXPECT_EQ(device[0], 1);
    EXPECT_EQ(device[15], 7);
}

TEST(EmulatedRuntime, OneDevice)
{
    int value = -1;
    EXPECT_EQ(cudaGetDeviceCount(&value), cudaSuccess);
    EXPECT_EQ(value, 1);
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
    EXPECT_EQ(cudaSetDevice(1), cudaErrorInvalidDevice);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
    EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrWarpSize, 0), cudaSuccess);
    EXPECT_EQ(value, 32);
}
