// Expectations about bugs planted in kernels.
#pragma once

#include "tests/c/emulator/emulator.h"
#include "tests/c/harness/matches.h"

// The emulator reports `pattern`, whichever the order of threads.
#define EXPECT_CAUGHT(statement, pattern)                                        \
    for (uint64_t seed = 1; seed <= 3; seed++) {                                 \
        hr_emu::set_seed(seed);                                                  \
        statement;                                                               \
        EXPECT_TRUE(matches(hr_emu::take_report(), pattern)) << "seed " << seed; \
        EXPECT_NE(cudaGetLastError(), cudaSuccess);                              \
    }

#define EXPECT_CLEAN(statement)                                  \
    for (uint64_t seed = 1; seed <= 3; seed++) {                 \
        hr_emu::set_seed(seed);                                  \
        statement;                                               \
        EXPECT_EQ(hr_emu::take_report(), "") << "seed " << seed; \
        EXPECT_EQ(cudaGetLastError(), cudaSuccess);              \
    }

// The host's view of an element of device memory.
template <class T> T on_host(const T *device)
{
    T value;
    EXPECT_EQ(cudaMemcpy(&value, device, sizeof value, cudaMemcpyDeviceToHost), cudaSuccess);
    return value;
}

// Device memory for a test, zeroed. An index gives the host's view of an element.
template <class T> class Device
{
  public:
    explicit Device(size_t count)
    {
        EXPECT_EQ(cudaMalloc(&data_, count * sizeof(T)), cudaSuccess);
        EXPECT_EQ(cudaMemset(data_, 0, count * sizeof(T)), cudaSuccess);
    }
    ~Device()
    {
        EXPECT_EQ(cudaFree(data_), cudaSuccess);
    }
    Device(const Device &) = delete;
    operator T *() const
    {
        return data_;
    }
    template <class Index> T operator[](Index i) const
    {
        return on_host(data_ + i);
    }

  private:
    T *data_;
};
