// hr_adamw() on lists of every shape, and what it reads from the device: found_inf, counters, and the
// other scalars.
#include "tests/c/optim/adamw_run.h"
#include "tests/c/optim/step_suites.h"

namespace
{
struct Adamw {
    using Case = AdamwCase;
    using Run = AdamwRun;
    static constexpr int kSteps = 200;

    static void expect(Backend &backend, const Case &c)
    {
        expect_independent<Adamw>(backend, c);
    }
    static void narrow(Run &run, size_t k)
    {
        narrow_lists(run, k);
    }
    static std::vector<Case> list_cases()
    {
        Case counted;
        counted.steps = HR_F64;
        return {Case(), counted};
    }
    static std::vector<int64_t> many()
    {
        return {1, 2, 600, 2000};
    }

    static hr_step_config &step(Run &run)
    {
        return run.config.step;
    }
    static const Tensors &steps(const Run &run)
    {
        return run.tensors[STEPS];
    }
    static Case all_scalars()
    {
        Case c;
        c.numel = {5, 300, 0, 17};
        c.steps = HR_F64;
        c.amsgrad = true;
        c.lr_on_device = HR_F32;
        c.grad_scale = 2.0f;
        c.clip_coef = 0.5f;
        return c;
    }
    static std::vector<Case> skipped()
    {
        return {all_scalars()};
    }
    static std::vector<Case> counted()
    {
        return {Case()};
    }
};
} // namespace

LISTS_SUITE(Adamw);
SCALARS_SUITE(Adamw);
