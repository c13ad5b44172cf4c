// hr_accumulate() gives the same bytes wherever it runs: on any instruction set, with any number of
// threads, on CUDA in any order of threads. The guards around every buffer stay whole.
#include "accumulate_run.h"
#include "pool.h"
#ifdef HR_EMULATE
#include "emulator.h"
#endif

namespace
{
std::vector<AccumulateCase> cases()
{
    std::vector<AccumulateCase> all;
    for (int flags = 0; flags < 16; flags++) {
        AccumulateCase c;
        c.numel = {1, 3, 7, 255, 256, 257, 4097, 0, 64, 40001};
        c.types = flags & 1 ? float_types() : std::vector<hr_dtype>{HR_BF16};
        c.compensated = flags & 2;
        c.zero_grads = flags & 4;
        c.special = flags & 8;
        c.shift = size_t(flags) % 3;
        c.factor = 0.3;
        all.push_back(c);
    }
    return all;
}

std::vector<uint8_t> bytes_after(Backend &backend, const AccumulateCase &c)
{
    const AccumulateRun run(backend, c);
    EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
    EXPECT_TRUE(run.whole()) << c;
    return run.image();
}

// On the plainest instruction set, without threads.
std::vector<uint8_t> baseline(const AccumulateCase &c)
{
    const CpuLevel level(HR_CPU_BASELINE);
    return bytes_after(cpu_backend(), c);
}
} // namespace

TEST(AccumulateBits, AreTheSameOnEveryInstructionSetAndThreadCount)
{
    for (const AccumulateCase &c : cases()) {
        const std::vector<uint8_t> expected = baseline(c);
        for (const hr_cpu_level l : {HR_CPU_BASELINE, HR_CPU_AVX2, HR_CPU_AVX512}) {
            const CpuLevel level(l);
            if (!level.available)
                continue;
            for (const int threads : {1, 2, 3, 7}) {
                const LentPool pool(threads);
                EXPECT_EQ(bytes_after(cpu_backend(), c), expected)
                    << c << ", level " << l << ", " << threads << " threads";
                EXPECT_GT(Pool::calls, 0) << c;
            }
        }
    }
}

TEST(AccumulateBits, AreTheSameOnCuda)
{
    if (!cuda_backend())
        GTEST_SKIP() << "no CUDA device";
    for (const AccumulateCase &c : cases()) {
        const std::vector<uint8_t> expected = baseline(c);
        for (uint64_t seed = 1; seed <= 3; seed++) {
#ifdef HR_EMULATE
            hr_emu::set_seed(seed);
#endif
            EXPECT_EQ(bytes_after(*cuda_backend(), c), expected) << c << ", seed " << seed;
        }
    }
}
