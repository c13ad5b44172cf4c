// Runs the tests, and fails every test that leaves a report of the emulator unread.
#include <gtest/gtest.h>

#ifdef HR_EMULATE
#include "tests/c/emulator/emulator.h"

namespace
{
class UnreadReports : public testing::EmptyTestEventListener
{
    void OnTestEnd(const testing::TestInfo &) override
    {
        const std::string report = hr_emu::take_report();
        if (!report.empty())
            ADD_FAILURE() << "the emulator reported:\n" << report;
    }
};
} // namespace
#endif

int main(int argc, char **argv)
{
    testing::InitGoogleTest(&argc, argv);
#ifdef HR_EMULATE
    auto &listeners = testing::UnitTest::GetInstance()->listeners();
    listeners.Append(new UnreadReports);
#endif
    return RUN_ALL_TESTS();
}
