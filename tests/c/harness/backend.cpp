#include "tests/c/harness/backend.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace
{
constexpr size_t kGuard = 256; // where torch puts a tensor
constexpr uint8_t kGuardByte = 0xC5;

class Cpu : public Backend
{
  public:
    hr_exec exec() const override
    {
        return {HR_CPU, nullptr};
    }
    void *allocate(size_t bytes) override
    {
        void *memory = nullptr;
        EXPECT_EQ(posix_memalign(&memory, kGuard, bytes), 0);
        return memory;
    }
    void release(void *memory) override
    {
        std::free(memory);
    }
    void upload(void *to, const void *from, size_t bytes) override
    {
        if (bytes > 0) // then a pointer may be null
            std::memcpy(to, from, bytes);
    }
    void download(void *to, const void *from, size_t bytes) override
    {
        if (bytes > 0) // then a pointer may be null
            std::memcpy(to, from, bytes);
    }
    bool sees_overruns() const override
    {
#if defined(__SANITIZE_ADDRESS__)
        return true;
#else
        return false;
#endif
    }
};
} // namespace

Backend &cpu_backend()
{
    static Cpu cpu;
    return cpu;
}

Buffer::Buffer(Backend &backend, const std::vector<uint8_t> &content, size_t shift)
    : backend_(&backend), before_(kGuard + shift), bytes_(content.size()),
      after_(backend.sees_overruns() ? 0 : kGuard)
{
    std::vector<uint8_t> all(before_ + bytes_ + after_, kGuardByte);
    std::copy(content.begin(), content.end(), all.begin() + before_);
    memory_ = static_cast<char *>(backend.allocate(all.size()));
    backend.upload(memory_, all.data(), all.size());
}

Buffer::~Buffer()
{
    if (memory_)
        backend_->release(memory_);
}

Buffer::Buffer(Buffer &&other)
    : backend_(other.backend_), memory_(other.memory_), before_(other.before_),
      bytes_(other.bytes_), after_(other.after_)
{
    other.memory_ = nullptr;
}

void *Buffer::data() const
{
    return memory_ + before_;
}

std::vector<uint8_t> Buffer::all() const
{
    std::vector<uint8_t> bytes(before_ + bytes_ + after_);
    backend_->download(bytes.data(), memory_, bytes.size());
    return bytes;
}

std::vector<uint8_t> Buffer::content() const
{
    const std::vector<uint8_t> bytes = all();
    return {bytes.begin() + before_, bytes.end() - after_};
}

void Buffer::put(const std::vector<uint8_t> &content) const
{
    ASSERT_EQ(content.size(), bytes_);
    if (bytes_ > 0)
        backend_->upload(data(), content.data(), bytes_);
}

void Buffer::take(const Buffer &other) const
{
    put(other.content());
}

bool Buffer::intact() const
{
    std::vector<uint8_t> bytes = all();
    bytes.erase(bytes.begin() + before_, bytes.end() - after_);
    return bytes == std::vector<uint8_t>(before_ + after_, kGuardByte);
}

void OnBackend::SetUp()
{
    backend = GetParam() == std::string("Cpu") ? &cpu_backend() : cuda_backend();
    if (!backend)
        GTEST_SKIP() << "no CUDA device";
}
