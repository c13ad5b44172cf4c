// A longjmp() to another stack is what the check of fortified builds would refuse.
#undef _FORTIFY_SOURCE

#include "tests/c/emulator/asan.h"
#include "tests/c/emulator/fiber.h"

#include <sys/mman.h>

#include <new>

namespace hr_emu
{
namespace
{
constexpr size_t kGuard = 64 << 10, kStack = 256 << 10; // below a stack lies memory that faults

Fiber *running;

// The stack that resume() was called on, for AddressSanitizer.
[[maybe_unused]] const void *caller_bottom;
[[maybe_unused]] size_t caller_bytes;
} // namespace

Fiber::Fiber(void (*body)()) : body_(body)
{
    void *memory = mmap(nullptr, kGuard + kStack, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kGuard, PROT_NONE) != 0)
        throw std::bad_alloc();
    stack_ = static_cast<char *>(memory) + kGuard;
    restart();
}

Fiber::~Fiber()
{
    munmap(stack_ - kGuard, kGuard + kStack);
}

void Fiber::restart()
{
#ifdef HR_EMU_ASAN
    __asan_unpoison_memory_region(stack_, kStack);
#endif
    getcontext(&here_);
    here_.uc_stack.ss_sp = stack_;
    here_.uc_stack.ss_size = kStack;
    here_.uc_link = nullptr;
    started_ = false;
    makecontext(&here_, &Fiber::enter, 0);
}

void Fiber::enter()
{
#ifdef HR_EMU_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &caller_bottom, &caller_bytes);
#endif
    running->body_();
}

void Fiber::resume()
{
    running = this;
#ifdef HR_EMU_ASAN
    switch_from(&caller_, &here_, stack_, kStack);
#else
    // swapcontext() asks the kernel for the signal mask each time, which takes longer than a thread runs.
    if (_setjmp(return_) == 0) {
        if (started_)
            _longjmp(go_on_, 1);
        started_ = true;
        setcontext(&here_);
    }
#endif
    running = nullptr;
}

void Fiber::suspend()
{
    Fiber *self = running;
#ifdef HR_EMU_ASAN
    self->switch_from(&self->here_, &self->caller_, caller_bottom, caller_bytes);
#else
    if (_setjmp(self->go_on_) == 0)
        _longjmp(self->return_, 1);
#endif
}

#ifdef HR_EMU_ASAN
void Fiber::switch_from(ucontext_t *from, ucontext_t *to, const void *bottom, size_t bytes)
{
    void *fake_stack;
    __sanitizer_start_switch_fiber(&fake_stack, bottom, bytes);
    swapcontext(from, to);
    const bool entered_fiber = from == &here_;
    __sanitizer_finish_switch_fiber(fake_stack, entered_fiber ? &caller_bottom : nullptr,
                                    entered_fiber ? &caller_bytes : nullptr);
}
#endif

bool Fiber::owns(const void *address) const
{
    return address >= stack_ && address < stack_ + kStack;
}
} // namespace hr_emu
