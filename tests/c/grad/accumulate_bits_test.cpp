// hr_accumulate() gives the same bytes wherever it runs: on any instruction set, with any number of
// threads, on CUDA in any order of threads. The guards around every buffer stay whole.
#include "tests/c/grad/accumulate_run.h"
#include "tests/c/harness/bits.h"

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
    // Every list alone at an odd address, by 4 or 8 bytes of f32 and 2, 4 or 8 of the others.
    for (const int list : {0, 1, 2})
        for (const size_t shift : {1, 2, 4})
            for (const bool f32 : {false, true}) {
                AccumulateCase c;
                c.numel = {257, 64, 40001};
                c.types = {f32 ? HR_F32 : HR_BF16};
                c.compensated = true;
                c.zero_grads = shift == 2;
                c.shift = f32 && shift == 4 ? 3 : shift;
                c.shifted = 1u << list;
                all.push_back(c);
            }
    return all;
}
} // namespace

TEST(AccumulateBits, AreTheSameOnEveryInstructionSetAndThreadCount)
{
    expect_bits_on_the_cpu<AccumulateRun>(cases());
}

TEST(AccumulateBits, AreTheSameOnCuda)
{
    expect_bits_of_the_cpu<AccumulateRun>(cases());
}
