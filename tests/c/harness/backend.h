// Where a test runs: on the CPU, or on a CUDA device (real, or emulated in the emulated programs).
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "capi/headroom.h"

class Backend
{
  public:
    virtual ~Backend() = default;
    virtual hr_exec exec() const = 0;
    virtual void *allocate(size_t bytes) = 0;
    virtual void release(void *memory) = 0;
    virtual void upload(void *to, const void *from, size_t bytes) = 0;
    virtual void download(void *to, const void *from,
                          size_t bytes) = 0; // waits for the device first
    // Whether a read or write just past an allocation is noticed by itself.
    virtual bool sees_overruns() const = 0;

    // Whether it computes so slowly that a test should ask for little.
    virtual bool is_emulated() const
    {
        return false;
    }

    // Of an emulated device: the order in which its threads run, and what it has noticed since it
    // was last asked, with file and line. Here and not in the test cases, because these are
    // compiled once for all programs.
    virtual void set_seed(uint64_t) {}
    virtual void set_default_seed() {}
    virtual std::string take_report()
    {
        return {};
    }
    // Pretends that the stream is being captured into a CUDA graph, or no more. Returns whether it
    // can: then what a capture refuses fails.
    virtual bool pretend_capture(bool)
    {
        return false;
    }
};

Backend &cpu_backend();
Backend *cuda_backend(); // nullptr where no driver answers or the library has no CUDA part

// Memory of a backend. The data begins `shift` bytes past a multiple of 256, between guards.
class Buffer
{
  public:
    Buffer(Backend &backend, const std::vector<uint8_t> &content, size_t shift = 0);
    ~Buffer();
    Buffer(Buffer &&other);

    void *data() const;
    std::vector<uint8_t> content() const;
    void put(const std::vector<uint8_t> &content) const; // in place of what is there
    void take(const Buffer &other) const;                // its content, from whatever backend
    bool intact() const;                                 // the guards

  private:
    std::vector<uint8_t> all() const;

    Backend *backend_;
    char *memory_;
    size_t before_, bytes_, after_;
};

// A suite that runs on every backend; the tests of one that is not there are skipped, not passed.
class OnBackend : public testing::TestWithParam<const char *>
{
  protected:
    void SetUp() override;
    Backend *backend = nullptr;
};

#define ON_EVERY_BACKEND(suite)                                         \
    INSTANTIATE_TEST_SUITE_P(On, suite, testing::Values("Cpu", "Cuda"), \
                             [](const auto &info) { return std::string(info.param); })
