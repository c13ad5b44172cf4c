// A longjmp() to another stack is what the check of fortified builds would refuse.
#undef _FORTIFY_SOURCE

#include "tests/c/emulator/fiber.h"

#include <sys/mman.h>

#include <new>

namespace hr_emu
{
namespace
{
constexpr size_t kGuard = 64 << 10, kStack = 256 << 10; // below a stack lies memory that faults

Fiber *running;
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
    getcontext(&here_);
    here_.uc_stack.ss_sp = stack_;
    here_.uc_stack.ss_size = kStack;
    here_.uc_link = nullptr;
    started_ = false;
    makecontext(&here_, &Fiber::enter, 0);
}

void Fiber::enter()
{
    running->body_();
}

void Fiber::resume()
{
    running = this;
    // swapcontext() asks the kernel for the signal mask each time, which takes longer than a thread runs.
    if (_setjmp(return_) == 0) {
        if (started_)
            _longjmp(go_on_, 1);
        started_ = true;
        setcontext(&here_);
    }
    running = nullptr;
}

void Fiber::suspend()
{
    Fiber *self = running;
    if (_setjmp(self->go_on_) == 0)
        _longjmp(self->return_, 1);
}

bool Fiber::owns(const void *address) const
{
    return address >= stack_ && address < stack_ + kStack;
}
} // namespace hr_emu
