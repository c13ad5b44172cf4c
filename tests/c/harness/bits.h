// bits.h: the bytes that a run leaves, compared wherever it runs: on any instruction set, with any
// number of threads, on CUDA in any order of threads, and on another processor by tests/aarch64.sh.
// The guards around every buffer stay whole.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/c/harness/backend.h"
#include "tests/c/harness/pool.h"

// What a Run leaves behind, as `image` gives it.
constexpr auto everything = [](const auto &run) { return run.image(); };

template <typename Run, typename Case, typename Image>
auto bytes_after(Backend &backend, const Case &c, Image image)
{
    const Run run(backend, c);
    EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
    EXPECT_TRUE(run.whole()) << c;
    return image(run);
}

// Bytes that a test sees, as a number in its report. It does not depend on the levels that a processor
// has, if the test adds what the plainest leaves.
class Digest
{
  public:
    ~Digest()
    {
        testing::Test::RecordProperty("bits", std::to_string(hash_));
    }
    template <typename T> void add(const std::vector<T> &values)
    {
        const auto *const bytes = reinterpret_cast<const uint8_t *>(values.data());
        for (size_t i = 0; i < values.size() * sizeof(T); i++) // FNV-1a
            hash_ = (hash_ ^ bytes[i]) * 0x100000001B3;
    }
    template <typename A, typename B> void add(const std::pair<A, B> &both)
    {
        add(both.first);
        add(both.second);
    }

  private:
    uint64_t hash_ = 0xCBF29CE484222325;
};

// On the plainest instruction set, without threads.
template <typename Run, typename Case, typename Image> auto baseline(const Case &c, Image image)
{
    const CpuLevel level(HR_CPU_BASELINE);
    return bytes_after<Run>(cpu_backend(), c, image);
}

template <typename Run, typename Case, typename Image = decltype(everything)>
void expect_bits_on_the_cpu(const std::vector<Case> &cases, Image image = everything)
{
    bool lent = false; // by a case that is large enough
    Digest digest;
    for (const Case &c : cases) {
        const auto expected = baseline<Run>(c, image);
        digest.add(expected);
        for (const hr_cpu_level l :
             {HR_CPU_BASELINE, HR_CPU_AVX2, HR_CPU_AVX512, HR_CPU_AVX512_VBMI}) {
            const CpuLevel level(l);
            if (!level.available)
                continue;
            EXPECT_TRUE(bytes_after<Run>(cpu_backend(), c, image) == expected)
                << c << ", level " << l;
            for (const int threads : {2, 3, 7}) {
                const LentPool pool(threads);
                EXPECT_TRUE(bytes_after<Run>(cpu_backend(), c, image) == expected)
                    << c << ", level " << l << ", " << threads << " threads";
                lent = lent || Pool::ranges > 1;
            }
        }
    }
    EXPECT_TRUE(lent);
}

// `expected` gives what is wanted from a case and what came first.
template <typename Run, typename Case, typename Expected, typename Image = decltype(everything)>
void expect_bits_on_cuda(const std::vector<Case> &cases, Expected expected,
                         Image image = everything)
{
    if (!cuda_backend())
        GTEST_SKIP() << "no CUDA device";
    for (const Case &c : cases) {
        const auto first = bytes_after<Run>(*cuda_backend(), c, image);
        const auto wanted = expected(c, first);
        EXPECT_TRUE(first == wanted) << c;
        for (const uint64_t seed : {101, 102}) { // the first run had that of the environment
            cuda_backend()->set_seed(seed);
            EXPECT_TRUE(bytes_after<Run>(*cuda_backend(), c, image) == wanted)
                << c << ", seed " << seed;
        }
    }
}

// The bytes of the CPU.
template <typename Run, typename Case> void expect_bits_of_the_cpu(const std::vector<Case> &cases)
{
    const auto on_the_cpu = [](const Case &c, const auto &) {
        return baseline<Run>(c, everything);
    };
    expect_bits_on_cuda<Run>(cases, on_the_cpu);
}

// The same bytes each time.
template <typename Run, typename Case, typename Image = decltype(everything)>
void expect_repeats_on_cuda(const std::vector<Case> &cases, Image image = everything)
{
    expect_bits_on_cuda<Run>(
        cases, [](const Case &, const auto &first) { return first; }, image);
}

// A call that a CUDA graph can hold: it neither waits for the device nor allocates. A graph replays
// what it did, so it leaves the bytes of any other call.
template <typename Run, typename Case> void expect_capturable(const std::vector<Case> &cases)
{
    if (!cuda_backend() || !cuda_backend()->pretend_capture(false))
        GTEST_SKIP() << "only the emulator pretends";
    for (const Case &c : cases) {
        const auto expected = bytes_after<Run>(*cuda_backend(), c, everything);
        const Run run(*cuda_backend(), c);
        cuda_backend()->pretend_capture(true);
        const hr_status status = run.call();
        cuda_backend()->pretend_capture(false);
        EXPECT_EQ(status, HR_OK) << c << ": " << hr_last_error();
        EXPECT_TRUE(run.image() == expected) << c;
    }
}
