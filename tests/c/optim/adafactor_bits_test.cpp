// hr_adafactor() repeats itself: the same bytes for any number of threads and any instruction set,
// and on CUDA in any order of threads.
#include "tests/c/optim/adafactor_run.h"
#include "tests/c/harness/bits.h"

namespace
{
// With a tensor that threads share.
std::vector<AdafactorCase> cases(int64_t large)
{
    std::vector<AdafactorCase> all;
    const hr_adafactor_config torch = HR_ADAFACTOR_TORCH_INIT;
    for (int flags = 0; flags < 4; flags++) {
        AdafactorCase c;
        c.shapes = {matrix(37, 50),   vector(40001), matrix(large, 300), matrix(3, 3, 700),
                    matrix(1, large), vector(5),     matrix(6, 11, 9)};
        if (flags & 1) {
            c.semantics = HR_ADAFACTOR_TORCH;
            c.config = torch;
        }
        if (flags & 2) {
            c.params = float_types();
            c.grads = {HR_BF16, HR_F32};
            c.shift = 1;
        }
        c.momentum = flags == 2;
        c.config.beta1 = 0.9;
        all.push_back(c);
    }
    return all;
}

const auto results = [](const AdafactorRun &run) { return run.results(); };
} // namespace

TEST(AdafactorBits, AreTheSameOnEveryInstructionSetAndThreadCount)
{
    expect_bits_on_the_cpu<AdafactorRun>(cases(500), results);
}

TEST(AdafactorBits, RepeatOnCuda)
{
    expect_repeats_on_cuda<AdafactorRun>(cases(70), results);
}

// Of tiny matrices, whose sums are the same expressions in the same order.
TEST(AdafactorBits, StatesOfTinyMatricesAreTheSameOnCuda)
{
    if (!cuda_backend())
        GTEST_SKIP() << "no CUDA device";
    AdafactorCase c;
    c.shapes = {matrix(3, 3, 100), matrix(1, 1, 33), matrix(8, 8, 17), matrix(5, 2)};
    const AdafactorRun cpu(cpu_backend(), c), cuda(*cuda_backend(), c);
    ASSERT_EQ(cpu.call(), HR_OK);
    ASSERT_EQ(cuda.call(), HR_OK);
    EXPECT_EQ(image_of({&cpu.row_vars.buffers}), image_of({&cuda.row_vars.buffers}));
    EXPECT_EQ(image_of({&cpu.col_vars.buffers}), image_of({&cuda.col_vars.buffers}));
}
