// Faults planted in the library's PTX, one at a time, each in a process of its own: the tests of the C
// interface must notice. So much is sure of what these tests say about code that has no fault.
#include <cstdlib>
#include <ostream>
#include <string>

#include <sys/wait.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "tests/ptx/registration.h"

namespace
{
struct Fault {
    const char *what, *fault, *tests;
};

void PrintTo(const Fault &fault, std::ostream *out)
{
    *out << fault.fault;
}

const Fault faults[] = {
    {"a sum rounded toward zero", "accumulate_kernel|add.rn.f32|add.rz.f32",
     "*AccumulateValues.EveryType*"},
    {"a product rounded up", "adamw_kernel|mul.rn.f32|mul.rp.f32", "*AdamwAccuracy*"},
    {"a square root rounded down", "adamw_kernel|sqrt.rn.f32|sqrt.rm.f32",
     "*AdamwSpecial*:*Resume*:*RandomAnswers*"},
    {"a quotient rounded toward zero", "adamw_kernel|div.rn.f32|div.rz.f32",
     "*AdamwSpecial*:*Resume*:*RandomAnswers*"},
    {"subnormal numbers flushed", "accumulate_kernel|mul.rn.f32|mul.rn.ftz.f32",
     "*AccumulateValues*"},
    {"a predicate negated", "accumulate_kernel|@%p1 bra|@!%p1 bra", "*AccumulateLists.LargeAnd*"},
    {"a comparison that includes its end", "accumulate_kernel|setp.lt.s32|setp.le.s32",
     "*AccumulateValues.EveryAddress*"},
    {"a barrier removed", "norm_kernel|bar.sync 0;|", "*UnscaleNormLists.MeasureThenClip*"},
    {"a barrier under a condition", "norm_kernel|bar.sync 0;|@%p1 bar.sync 0;",
     "*UnscaleNormLists.MeasureThenClip*"},
    {"an offset off by 4", "glu_kernel|+8]|+12]", "*Glu.*"},
    {"a parameter read 4 bytes on", "accumulate_kernel|+40]|+44]", "*AccumulateValues.EveryType*"},
    {"a shuffle to other lanes", "norm_forward|shfl.sync.bfly|shfl.sync.down", "*RowNorm.Forward*"},
    {"a lane left out of a mask", "norm_forward|, -1;|, 2147483647;", "*RowNorm.Forward*"},
    {"the lesser in place of the greater", "cross_entropy_forward|setp.gt.f32|setp.lt.f32",
     "*CrossEntropy.Follows*"},
    {"a NaN taken for a number", "accumulate_kernel|setp.nan.f32|setp.num.f32",
     "*AccumulateValues.EveryType*"},
    {"a shift to the other side", "accumulate_kernel|shl.b32|shr.u32",
     "*AccumulateValues.EveryType*"},
    {"a store left out", "accumulate_kernel|st.global.f32|// ", "*AccumulateValues.EveryType*"},
    {"a sign dropped", "glu_|neg.f32|abs.f32", "*Glu.*"},
    {"the other format of 16 bits", "adamw|cvt.rn.bf16x2.f32|cvt.rn.f16x2.f32",
     "*AdamwAccuracy*:*Adamw8bitValues*"},
    {"an atomic that keeps the greater", "norm_kernel|atom.shared.min.s64|atom.shared.max.s64",
     "*UnscaleNormSpecial.TheSmallest*"},
    {"the wrong half of a product", "accumulate_kernel|mul.wide.u32|mul.hi.u32",
     "*AccumulateLists.LargeAnd*"},
    {"bytes picked by other nibbles", "adamw8bit_kernel|prmt.b32|bfe.u32", "*Adamw8bitValues*"},
};

class Planted : public testing::TestWithParam<Fault>
{
};
} // namespace

TEST_P(Planted, IsNoticed)
{
    if (ptx_registration::arch() != 90)
        GTEST_SKIP() << "the faults are places in the PTX for 9.0";
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
        setenv("HEADROOM_PTX_FAULT", GetParam().fault, 1);
        setenv("GTEST_FAIL_FAST", "1", 1);
        unsetenv("HEADROOM_PTX_WHOLE");
        unsetenv("HEADROOM_PTX_REPORT");
        const std::string filter = std::string("--gtest_filter=") + GetParam().tests;
        if (!freopen("/dev/null", "w", stdout))
            _exit(0);
        execl("/proc/self/exe", "planted", filter.c_str(), nullptr);
        _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status));
    EXPECT_NE(WEXITSTATUS(status), 0) << "nothing noticed " << GetParam().what;
    EXPECT_EQ(WEXITSTATUS(status), 1) << "no kernel that ran has " << GetParam().fault;
}

INSTANTIATE_TEST_SUITE_P(Ptx, Planted, testing::ValuesIn(faults), [](const auto &info) {
    std::string name = info.param.what;
    for (char &c : name)
        c = c == ' ' ? '_' : c;
    return name;
});
