// Every check of the C interface is needed: with any one of them taken away, a test of bad inputs
// fails. The list of checks comes from the sources themselves (check_sites.h), so a new check without
// a bad input fails here. Each is taken away in a process of its own, which may also crash.
#include <gtest/gtest.h>

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "tests/c/harness/check_sites.h"

extern "C" hr_check_site *const __start_hr_checks[];
extern "C" hr_check_site *const __stop_hr_checks[];

namespace
{
constexpr char kVariable[] = "HEADROOM_TESTS_WITHOUT_CHECK";
constexpr char kBadInputs[] = "*BadInputs*:*ADeviceThatDoesNotExist:*NeedsSomewhereToWrite";
constexpr char kSeconds[] = "HEADROOM_TESTS_SECONDS"; // for a process that no longer ends

size_t sites()
{
    return size_t(__stop_hr_checks - __start_hr_checks);
}

std::string file_of(size_t site)
{
    const std::string path = __start_hr_checks[site]->file;
    return path.substr(path.rfind('/') + 1);
}

// In the process that the test starts: before main().
const bool switched_off = [] {
    const char *const site = std::getenv(kVariable);
    if (!site)
        return false;
    const size_t number = std::strtoul(site, nullptr, 10);
    if (number < sites()) // else none
        __start_hr_checks[number]->off = 1;
    const char *const seconds = std::getenv(kSeconds);
    alarm(seconds ? unsigned(std::strtoul(seconds, nullptr, 10)) : 0);
    return true;
}();

bool passes_without(size_t site, const std::string &tests, unsigned seconds)
{
    std::string filter = "--gtest_filter=" + tests, variable = kVariable;
    variable += "=" + std::to_string(site);
    std::string limit = kSeconds;
    limit += "=" + std::to_string(seconds);
    std::string program = "headroom_tests", fast = "--gtest_fail_fast";
    char *arguments[] = {program.data(), filter.data(), fast.data(), nullptr};
    std::vector<char *> environment;
    for (char **entry = environ; *entry; entry++)
        environment.push_back(*entry);
    environment.push_back(variable.data());
    environment.push_back(limit.data());
    environment.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    for (const int file : {STDOUT_FILENO, STDERR_FILENO})
        posix_spawn_file_actions_addopen(&actions, file, "/dev/null", O_WRONLY, 0);
    pid_t child = 0;
    const int error =
        posix_spawn(&child, "/proc/self/exe", &actions, nullptr, arguments, environment.data());
    posix_spawn_file_actions_destroy(&actions);
    int status = -1;
    EXPECT_EQ(error, 0);
    EXPECT_EQ(waitpid(child, &status, 0), child);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// How long the tests may take, by how long they take when nothing is missing: some checks keep a
// loop from running for years.
unsigned seconds_allowed()
{
    constexpr unsigned kLongest = 120;
    const auto start = std::chrono::steady_clock::now();
    EXPECT_TRUE(passes_without(sites(), kBadInputs, kLongest)) << "with every check in place";
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    return 2 + unsigned(3 * took.count());
}

// The tests that run first: those of the op that a file is named after, and those of ops that have the
// first word of its name in theirs.
std::vector<std::string> likely_to_notice(const std::string &file)
{
    std::string op;
    bool begins_a_word = true;
    for (const char c : file.substr(0, file.find('.'))) {
        if (c != '_')
            op += begins_a_word ? char(std::toupper(c)) : c;
        begins_a_word = c == '_';
    }
    const size_t word = file.find_first_of("_.");
    return {"*" + op + "Refused.*BadInputs*", "*" + op.substr(0, word) + "*BadInputs*", kBadInputs};
}

std::vector<std::string> files()
{
    std::set<std::string> all;
    for (size_t i = 0; i < sites(); i++)
        all.insert(file_of(i));
    return {all.begin(), all.end()};
}

class MissingChecks : public testing::TestWithParam<std::string>
{
};
} // namespace

TEST_P(MissingChecks, AreNoticed)
{
    size_t last = sites();
    const unsigned seconds = seconds_allowed();
    const std::vector<std::string> likely = likely_to_notice(GetParam());
    for (size_t i = 0; i < sites(); i++) {
        if (file_of(i) != GetParam())
            continue;
        last = i;
        const auto all_pass = [&](const std::string &tests) {
            return passes_without(i, tests, seconds);
        };
        EXPECT_FALSE(std::all_of(likely.begin(), likely.end(), all_pass))
            << "no test notices when the check in " << __start_hr_checks[i]->file << ":"
            << __start_hr_checks[i]->line << " is taken away";
    }
    ASSERT_LT(last, sites());
}

INSTANTIATE_TEST_SUITE_P(Files, MissingChecks, testing::ValuesIn(files()), [](const auto &info) {
    return info.param.substr(0, info.param.rfind('.'));
});

// The tests pass with every check in place, so that a failure above is the missing check's.
TEST(MissingChecksAlone, NoneIsMissingOtherwise)
{
    EXPECT_GT(sites(), 100u);
    EXPECT_FALSE(switched_off);
    seconds_allowed(); // expects that they pass
}
