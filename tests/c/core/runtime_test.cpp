// Statuses, versions, the last error, lent threads, instruction sets.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/c/optim/adamw_run.h"
#include "tests/c/harness/pool.h"

TEST(Runtime, StatusesHaveNames)
{
    std::set<std::string> names;
    for (const hr_status status :
         {HR_OK, HR_INVALID_ARGUMENT, HR_UNSUPPORTED, HR_CUDA_ERROR, HR_NO_DEVICE, HR_INTERNAL})
        names.insert(hr_status_string(status));
    EXPECT_EQ(names.size(), 6u);
    EXPECT_EQ(names.count(hr_status_string(hr_status(5))), 0u) << "the number of no status";
    EXPECT_EQ(names.count(hr_status_string(hr_status(99))), 0u);
    EXPECT_STREQ(hr_status_string(HR_INVALID_ARGUMENT), "invalid argument");
}

TEST(Runtime, NumbersOfTheInterfaceStay)
{
    EXPECT_EQ(HR_INTERNAL, 6);
    EXPECT_EQ(HR_F64, 6);
    EXPECT_EQ(HR_CPU, -1);
    EXPECT_EQ(sizeof(hr_exec), 16u);
    EXPECT_EQ(sizeof(hr_weights), 48u);
    EXPECT_EQ(sizeof(hr_place), 24u);
    EXPECT_EQ(sizeof(hr_step_config), 88u);
    EXPECT_EQ(sizeof(hr_adamw_config), 136u);
    EXPECT_EQ(sizeof(hr_adamw8bit_config), 160u);
    EXPECT_EQ(sizeof(hr_adafactor_config), 168u);
}

TEST(Runtime, VersionAndBuildInfo)
{
    EXPECT_EQ(hr_version(), HR_VERSION);
    const std::string info = hr_build_info();
    const std::string version = std::to_string(HR_VERSION_MAJOR) + "." +
                                std::to_string(HR_VERSION_MINOR) + "." +
                                std::to_string(HR_VERSION_PATCH);
    EXPECT_EQ(info.find("version=" + version + "; compiler="), 0u) << info;
    for (const char *key : {"; cuda=", "; archs=", "; cpu="})
        EXPECT_NE(info.find(key), std::string::npos) << info;
}

TEST(Runtime, BuildInfoNamesTheInstructionSet)
{
    const CpuLevel level(HR_CPU_BASELINE);
    EXPECT_NE(std::string(hr_build_info()).find("cpu=baseline"), std::string::npos)
        << hr_build_info();
}

TEST(Runtime, TheLastErrorBelongsToItsThread)
{
    ASSERT_EQ(hr_set_cpu_level(hr_cpu_level(17)), HR_INVALID_ARGUMENT);
    const std::string mine = hr_last_error();
    EXPECT_NE(mine.find("17"), std::string::npos) << mine;
    std::thread([] {
        EXPECT_STREQ(hr_last_error(), "");
        ASSERT_EQ(hr_set_cpu_level(hr_cpu_level(18)), HR_INVALID_ARGUMENT);
        EXPECT_NE(std::string(hr_last_error()).find("18"), std::string::npos);
    }).join();
    EXPECT_EQ(hr_last_error(), mine);
    EXPECT_EQ(hr_set_cpu_level(hr_get_cpu_level()), HR_OK);
    EXPECT_EQ(hr_last_error(), mine) << "a success leaves it alone";
}

TEST(RuntimeBadInputs, CpuLevels)
{
    const hr_cpu_level before = hr_get_cpu_level();
    for (const int level : {-1, 4, 17}) {
        EXPECT_EQ(hr_set_cpu_level(hr_cpu_level(level)), HR_INVALID_ARGUMENT);
        EXPECT_EQ(hr_get_cpu_level(), before);
    }
}

TEST(Runtime, CpuLevels)
{
    const hr_cpu_level best = hr_get_cpu_level();
    for (int l = HR_CPU_BASELINE; l <= HR_CPU_AVX512_VBMI; l++) {
        const CpuLevel level{hr_cpu_level(l)};
        EXPECT_TRUE(level.available || l > best);
        EXPECT_EQ(hr_get_cpu_level(), level.available ? hr_cpu_level(l) : best);
    }
    EXPECT_EQ(hr_get_cpu_level(), best);
    EXPECT_EQ(hr_set_cpu_level(hr_cpu_level(-1)), HR_INVALID_ARGUMENT);
}

// In processes of their own, because the variable is read once.
TEST(RuntimeDeathTest, TheEnvironmentChoosesTheCpuLevel)
{
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    const char *const names[] = {"baseline", "avx2", "avx512", "avx512vbmi"};
    for (const char *value : {"baseline", "avx2", "avx512", "avx512vbmi", "", "AVX2", "avx", "2"}) {
        SCOPED_TRACE(value);
        setenv("HEADROOM_CPU_LEVEL", value, 1);
        // The level that is used, and the highest that this processor has.
        const auto print_levels = [&] {
            const hr_cpu_level used = hr_get_cpu_level();
            int highest = HR_CPU_AVX512_VBMI;
            while (hr_set_cpu_level(hr_cpu_level(highest)) != HR_OK)
                highest--;
            int wanted = highest; // where the value names no level, or one above it
            for (int level = HR_CPU_BASELINE; level < highest; level++)
                if (std::string(value) == names[level])
                    wanted = level;
            hr_set_cpu_level(used);
            fprintf(stderr, "%s; used %d, wanted %d\n", hr_build_info(), used, wanted);
            exit(used == wanted ? 0 : 1);
        };
        EXPECT_EXIT(print_levels(), testing::ExitedWithCode(0), "cpu=");
    }
    unsetenv("HEADROOM_CPU_LEVEL");
}

TEST(Runtime, LentThreadsDoTheWork)
{
    AdamwCase c;
    c.numel = {100003, 5, 0, 200001};
    for (const int threads : {1, 2, 3, 7}) {
        const LentPool pool(threads);
        const AdamwRun run(cpu_backend(), c);
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        EXPECT_EQ(Pool::calls, 1) << "one parallel region for the whole list";
        EXPECT_EQ(Pool::elements, 100003 + 5 + 200001);
        EXPECT_EQ(Pool::ranges, threads);
    }
}

TEST(Runtime, LentThreadsCanBeTakenBack)
{
    AdamwCase c;
    c.numel = {300000};
    const AdamwRun run(cpu_backend(), c);
    {
        const LentPool pool(2);
    }
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    EXPECT_EQ(Pool::calls, 0);
}

TEST(Runtime, CallsFromSeveralThreadsAtOnce)
{
    AdamwCase c;
    c.numel.assign(20, 1001);
    const AdamwRun alone(cpu_backend(), c);
    ASSERT_EQ(alone.call(), HR_OK) << hr_last_error();
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; i++)
        threads.emplace_back([&] {
            const AdamwRun run(cpu_backend(), c);
            EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
            EXPECT_EQ(run.image(), alone.image());
        });
    for (std::thread &thread : threads)
        thread.join();
}
