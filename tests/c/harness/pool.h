// A parallel_for on `threads` new std::threads, that counts what it was asked to do.
#pragma once

#include <atomic>
#include <cstdint>

#include "capi/headroom.h"

struct Pool {
    static inline int threads;
    static inline std::atomic<int64_t> calls, ranges, elements;

    static void parallel_for(int64_t begin, int64_t end, int64_t grain, hr_range_fn range,
                             void *context);
};

// Lends a pool for as long as it lives.
class LentPool
{
  public:
    explicit LentPool(int threads);
    ~LentPool();
    LentPool(const LentPool &) = delete;
};

// The instruction set of the CPU kernels, for as long as it lives.
class CpuLevel
{
  public:
    explicit CpuLevel(hr_cpu_level level);
    ~CpuLevel();
    CpuLevel(const CpuLevel &) = delete;
    bool available;

  private:
    hr_cpu_level previous_;
};
