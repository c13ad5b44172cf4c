// hr_unscale_norm() repeats itself: the same bytes for any number of threads and any instruction
// set, on CUDA in any order of threads; and the gradients that it writes are the same everywhere.
#include <cmath>

#include "tests/c/harness/bits.h"
#include "tests/c/grad/unscale_norm_run.h"

namespace
{
std::vector<NormCase> cases(int64_t large)
{
    std::vector<NormCase> all;
    for (const double p : {2., 3., double(INFINITY)})
        for (int flags = 0; flags < 4; flags++) {
            NormCase c;
            c.numel = {1, 3, large, 0, 255, 16390, 257, 64};
            if (flags & 1)
                c.types = float_types();
            c.shift = flags;
            c.p = p;
            c.write = true;
            c.grad_scale = 3.0f;
            c.clip_coef = 0.7f;
            if (flags & 2)
                c.value = [](size_t k, size_t i) {
                    // NaN of both signs, because processors differ in which of two they keep.
                    return k > 3 && i % 50 == 0 ? (i % 100 ? (i % 150 ? NAN : -NAN) : -INFINITY)
                                                : noise(k, i) * (i % 3 ? 1e-40 : 1e30);
                };
            all.push_back(c);
        }
    NormCase many;
    many.types = float_types();
    for (size_t k = 0; k < 1500; k++)
        many.numel.push_back(k % 9 ? 0 : int64_t(k % 500));
    many.write = true;
    many.clip_coef = 0.1f;
    all.push_back(many);
    return all;
}

const auto gradients = [](const NormRun &run) { return run.gradients(); };
const auto both = [](const NormRun &run) { return std::pair(run.results(), run.gradients()); };
} // namespace

TEST(UnscaleNormBits, AreTheSameOnEveryInstructionSetAndThreadCount)
{
    expect_bits_on_the_cpu<NormRun>(cases(200003), both);
}

TEST(UnscaleNormBits, RepeatOnCudaAndWriteWhatTheCpuWrites)
{
    const auto on_the_cpu = [](const NormCase &c, const auto &) {
        return baseline<NormRun>(c, gradients);
    };
    expect_bits_on_cuda<NormRun>(cases(33003), on_the_cpu, gradients);
    expect_repeats_on_cuda<NormRun>(cases(33003), both);
}
