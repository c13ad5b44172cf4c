// hr_adamw8bit() on lists of every shape and in short blocks, and what it reads from the device:
// found_inf, counters, and the other scalars.
#include "tests/c/optim/adamw8bit_run.h"
#include "tests/c/optim/step_suites.h"

namespace
{
struct Adamw8bit {
    using Case = Adamw8bitCase;
    using Run = Adamw8bitRun;
    static constexpr int kSteps = 100;

    static void expect(Backend &backend, const Case &c)
    {
        expect_independent<Adamw8bit>(backend, c);
    }
    static void narrow(Run &run, size_t k)
    {
        narrow_lists(run, k);
        if (run.config.seeds)
            run.config.seeds = &run.seeds[k];
    }
    static std::vector<Case> list_cases()
    {
        Case plain, counted;
        plain.block_size = 64;
        counted.block_size = 512;
        counted.steps = HR_F64;
        counted.stochastic = true;
        return {plain, counted};
    }
    static std::vector<int64_t> many()
    {
        return {1, 2, 500, 1300};
    }

    static hr_step_config &step(Run &run)
    {
        return run.config.adamw.step;
    }
    static const Tensors &steps(const Run &run)
    {
        return run.steps;
    }
    static Case all_scalars()
    {
        Case c;
        c.numel = {5, 300, 0, 17};
        c.steps = HR_F64;
        c.lr_on_device = HR_F32;
        c.grad_scale = 2.0f;
        c.clip_coef = 0.5f;
        return c;
    }
    static std::vector<Case> skipped()
    {
        Case c = all_scalars(), exact = c;
        c.special = exact.special = exact.bnb_exact = true;
        return {all_scalars(), c, exact};
    }
    static std::vector<Case> counted()
    {
        Case stochastic;
        stochastic.stochastic = true;
        return {Case(), stochastic};
    }
};
} // namespace

LISTS_SUITE(Adamw8bit);
SCALARS_SUITE(Adamw8bit);
