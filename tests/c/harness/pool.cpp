#include "tests/c/harness/pool.h"

#include <algorithm>
#include <thread>
#include <vector>

void Pool::parallel_for(int64_t begin, int64_t end, int64_t grain, hr_range_fn range, void *context)
{
    calls++;
    const int64_t share = std::max(grain, (end - begin + threads - 1) / threads);
    std::vector<std::thread> running;
    for (int64_t from = begin; from < end; from += share) {
        const int64_t to = std::min(end, from + share);
        ranges++;
        elements += to - from;
        running.emplace_back(range, context, from, to);
    }
    for (std::thread &thread : running)
        thread.join();
}

LentPool::LentPool(int threads)
{
    Pool::threads = threads;
    Pool::calls = Pool::ranges = Pool::elements = 0;
    hr_set_parallel_for(Pool::parallel_for);
}

LentPool::~LentPool()
{
    hr_set_parallel_for(nullptr);
}

CpuLevel::CpuLevel(hr_cpu_level level) : previous_(hr_get_cpu_level())
{
    available = hr_set_cpu_level(level) == HR_OK;
}

CpuLevel::~CpuLevel()
{
    hr_set_cpu_level(previous_);
}
