// library.cpp: lends torch's threads to the C kernels when the library is loaded, so that a process
// has one pool of threads.
#include "torch_ext/core/tensor.h"

namespace
{

struct Range {
    hr_range_fn run;
    void *context;
};

void run_range(int64_t begin, int64_t end, void *range)
{
    const auto *r = static_cast<const Range *>(range);
    r->run(r->context, begin, end);
}

void torch_threads(int64_t begin, int64_t end, int64_t grain, hr_range_fn run, void *context)
{
    Range range{run, context};
    torch_parallel_for(begin, end, grain, run_range, &range);
}

[[maybe_unused]] const hr_status lent = hr_set_parallel_for(torch_threads);

} // namespace
