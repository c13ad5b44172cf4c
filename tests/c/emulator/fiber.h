// A stack and a place to go on from. Cooperative: resume() runs the fiber until it calls suspend().
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>

namespace hr_emu
{
class Fiber
{
  public:
    // `body` must not return: it suspends for good when it is done.
    explicit Fiber(void (*body)());
    ~Fiber();
    Fiber(const Fiber &) = delete;

    void resume();
    static void suspend();

    // Forgets what the fiber was doing; the next resume() starts the body again.
    void restart();

    bool owns(const void *address) const;

  private:
    static void enter();

    void (*body_)();
    char *stack_;
    ucontext_t here_;
    jmp_buf go_on_, return_; // once the fiber has started
    bool started_;
};
} // namespace hr_emu
