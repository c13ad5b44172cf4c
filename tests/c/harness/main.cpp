// Runs the tests, each in the order of threads that the environment asks for, and fails every test
// that leaves a report of the emulator unread.
#include "tests/c/harness/backend.h"

namespace
{
class UnreadReports : public testing::EmptyTestEventListener
{
    void OnTestStart(const testing::TestInfo &) override
    {
        if (cuda_backend())
            cuda_backend()->set_default_seed();
    }

    void OnTestEnd(const testing::TestInfo &) override
    {
        const std::string report = cuda_backend() ? cuda_backend()->take_report() : "";
        if (!report.empty())
            ADD_FAILURE() << "the emulator reported:\n" << report;
    }
};
} // namespace

int main(int argc, char **argv)
{
    testing::InitGoogleTest(&argc, argv);
    testing::UnitTest::GetInstance()->listeners().Append(new UnreadReports);
    return RUN_ALL_TESTS();
}
