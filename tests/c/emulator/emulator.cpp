// Launches, and the order of blocks and threads.
#include "tests/c/emulator/machine.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <numeric>

namespace hr_emu
{
Here here;
Machine machine;

namespace
{
std::mutex one_launch;     // the emulator is one device
std::vector<Fiber *> idle; // fibers that run no thread

bool invalid(const Launch &l)
{
    const auto product = [](dim3 d) { return uint64_t(d.x) * d.y * d.z; };
    const bool grid_fits = l.grid.x <= 0x7FFFFFFFu && l.grid.y <= 65535 && l.grid.z <= 65535;
    const bool block_fits = l.block.x <= 1024 && l.block.y <= 1024 && l.block.z <= 64;
    // Each factor fits now, so the products do too.
    return !grid_fits || !block_fits || product(l.grid) == 0 || product(l.block) == 0 ||
           product(l.block) > 1024 || product(l.grid) > UINT32_MAX || l.shared_bytes > (48 << 10);
}

void start(Thread &t, Fiber *fiber)
{
    t.fiber = fiber;
    machine.current = &t;
    here.thread = t.index;
}

// Runs threads for as long as they end without waiting, so that a kernel with no barrier needs one
// fiber.
void fiber_body()
{
    for (;;) {
        machine.current->in_kernel = true;
        machine.launch->thread(machine.launch->call);
        machine.current->in_kernel = false;
        machine.current->done = true;
        if (!machine.fresh.empty()) {
            Fiber *const fiber = machine.current->fiber;
            start(*machine.fresh.back(), fiber);
            machine.fresh.pop_back();
        } else {
            idle.push_back(machine.current->fiber);
            Fiber::suspend();
        }
    }
}

bool run_one()
{
    const size_t choices = machine.fresh.size() + machine.ready.size();
    if (choices == 0)
        return false;
    if (machine.random() % choices < machine.fresh.size()) {
        if (idle.empty()) {
            machine.fibers.push_back(std::make_unique<Fiber>(fiber_body));
            idle.push_back(machine.fibers.back().get());
        }
        Fiber *const fiber = idle.back();
        idle.pop_back();
        start(*machine.fresh.back(), fiber);
        machine.fresh.pop_back();
    } else {
        start(*machine.ready.back(), machine.ready.back()->fiber);
        machine.ready.pop_back();
    }
    machine.current->fiber->resume();
    machine.current = nullptr;
    return true;
}

void run_block(uint32_t rank)
{
    const Launch &launch = *machine.launch;
    machine.block = rank;
    here.block = position(rank, launch.grid);
    begin_shared(launch.shared_bytes);
    machine.fresh.clear();
    machine.ready.clear();
    for (uint32_t i = 0; i < machine.threads.size(); i++) {
        machine.threads[i] = Thread{};
        machine.threads[i].index = position(i, launch.block);
        machine.threads[i].rank = i;
        machine.threads[i].clock = 1;
        machine.fresh.push_back(&machine.threads[i]);
    }
    std::shuffle(machine.fresh.begin(), machine.fresh.end(), machine.random);
    const auto all = [](auto condition) {
        return std::all_of(machine.threads.begin(), machine.threads.end(), condition);
    };
    for (;;) {
        while (!machine.failed && run_one()) {
        }
        if (machine.failed || all([](const Thread &t) { return t.done; }))
            break;
        if (release_waiting())
            std::shuffle(machine.ready.begin(), machine.ready.end(), machine.random);
        else if (all([](const Thread &t) { return t.done || t.mask == 0; }))
            report("divergent barrier:" + who_waits());
        else
            report("deadlock:" + who_waits());
    }
    if (!machine.failed)
        check_shared_guards();
}
} // namespace

void run(const Launch &launch)
{
    const std::lock_guard<std::mutex> lock(one_launch);
    if (invalid(launch)) {
        set_last_error(cudaErrorInvalidConfiguration);
        return;
    }
    machine.launch = &launch;
    machine.failed = false;
    machine.launches++;
    machine.random.seed(machine.seed * 0x9E3779B97F4A7C15u + machine.launches_since_seed++);
    here.block_size = launch.block;
    here.grid_size = launch.grid;
    machine.threads.resize(launch.block.x * launch.block.y * launch.block.z);
    std::vector<uint32_t> blocks(launch.grid.x * launch.grid.y * launch.grid.z);
    std::iota(blocks.begin(), blocks.end(), 0u);
    std::shuffle(blocks.begin(), blocks.end(), machine.random);
    {
        const DeviceMemoryOpen open;
        enter_shared();
        for (size_t i = 0; i < blocks.size() && !machine.failed; i++)
            run_block(blocks[i]);
        leave_shared();
    }
    if (!machine.failed)
        check_device_guards();
    if (machine.failed) { // some fibers stopped in the middle of a thread
        idle.clear();
        for (const auto &fiber : machine.fibers) {
            fiber->restart();
            idle.push_back(fiber.get());
        }
    }
}

uint64_t default_seed()
{
    const char *const text = std::getenv("HEADROOM_EMULATOR_SEED");
    return text ? std::strtoull(text, nullptr, 0) : 1;
}

void set_seed(uint64_t seed)
{
    machine.seed = seed;
    machine.launches_since_seed = 0;
}
} // namespace hr_emu
