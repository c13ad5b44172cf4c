// hr_unscale_norm() repeats itself: the same bytes for any number of threads and any instruction
// set, on CUDA in any order of threads; and the gradients that it writes are the same everywhere.
#include <cmath>

#include "pool.h"
#include "unscale_norm_run.h"
#ifdef HR_EMULATE
#include "emulator.h"
#endif

namespace
{
struct Bytes {
    std::vector<uint8_t> results, gradients;
};

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

Bytes bytes_after(Backend &backend, const NormCase &c)
{
    const NormRun run(backend, c);
    EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
    EXPECT_TRUE(run.whole()) << c;
    return {run.results(), run.gradients()};
}

// On the plainest instruction set, without threads.
Bytes baseline(const NormCase &c)
{
    const CpuLevel level(HR_CPU_BASELINE);
    return bytes_after(cpu_backend(), c);
}
} // namespace

TEST(UnscaleNormBits, AreTheSameOnEveryInstructionSetAndThreadCount)
{
    for (const NormCase &c : cases(200003)) {
        const Bytes expected = baseline(c);
        for (const hr_cpu_level l : {HR_CPU_BASELINE, HR_CPU_AVX2, HR_CPU_AVX512}) {
            const CpuLevel level(l);
            if (!level.available)
                continue;
            for (const int threads : {1, 2, 3, 7}) {
                const LentPool pool(threads);
                const Bytes got = bytes_after(cpu_backend(), c);
                EXPECT_GT(Pool::calls, 0) << c;
                EXPECT_EQ(got.results, expected.results)
                    << c << ", level " << l << ", " << threads << " threads";
                EXPECT_EQ(got.gradients, expected.gradients)
                    << c << ", level " << l << ", " << threads << " threads";
            }
        }
    }
}

TEST(UnscaleNormBits, RepeatOnCudaAndWriteWhatTheCpuWrites)
{
    if (!cuda_backend())
        GTEST_SKIP() << "no CUDA device";
    for (const NormCase &c : cases(33003)) {
        const Bytes cpu = baseline(c);
        std::vector<uint8_t> first;
        for (uint64_t seed = 1; seed <= 3; seed++) {
#ifdef HR_EMULATE
            hr_emu::set_seed(seed);
#endif
            const Bytes got = bytes_after(*cuda_backend(), c);
            if (seed == 1)
                first = got.results;
            EXPECT_EQ(got.results, first) << c << ", seed " << seed;
            EXPECT_EQ(got.gradients, cpu.gradients) << c << ", seed " << seed;
        }
    }
}
