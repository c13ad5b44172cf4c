// hr_adamw() gives the same bytes wherever it runs: on any instruction set, with any number of
// threads, on CUDA in any order of threads. The guards around every buffer stay whole.
#include "tests/c/optim/adamw_run.h"
#include "tests/c/harness/bits.h"

namespace
{
std::vector<AdamwCase> cases()
{
    std::vector<AdamwCase> all;
    const auto add = [&](auto change) {
        AdamwCase c;
        change(c);
        all.push_back(c);
    };
    const std::vector<int64_t> odd = {1, 3, 7, 255, 256, 257, 4097, 0, 64, 33};
    for (int flags = 0; flags < 16; flags++)
        add([&](AdamwCase &c) {
            c.all_types = c.special = true;
            c.numel.assign(27, 67);
            c.amsgrad = flags & 1;
            c.decoupled = flags & 2;
            c.maximize = flags & 4;
            c.skip_nonfinite = flags & 8;
        });
    for (const hr_dtype type : {HR_F32, HR_BF16, HR_F16})
        for (size_t shift = 0; shift < 8; shift++)
            add([&](AdamwCase &c) {
                c.numel = odd;
                c.param = c.grad = c.state = type;
                c.shift = shift;
                c.special = shift % 2;
            });
    for (const hr_dtype counter : {HR_F32, HR_F64})
        for (const hr_dtype lr : {HR_F32, HR_F64})
            add([&](AdamwCase &c) {
                c.numel = odd;
                c.steps = counter;
                c.lr_on_device = lr;
                c.grad_scale = 3.0f;
                c.clip_coef = 0.7f;
                c.found_inf = 0.0f;
                c.step = 12345;
            });
    for (int mode = HR_WEIGHTS_NEAREST; mode <= HR_WEIGHTS_REMAINDER8_STOCHASTIC; mode++)
        for (const hr_dtype type : {HR_BF16, HR_F16})
            for (int flags = 0; flags < (type == HR_BF16 ? 8 : 4); flags++) {
                if (type == HR_F16 && mode >= HR_WEIGHTS_REMAINDER16)
                    continue;
                add([&](AdamwCase &c) {
                    c.numel = odd;
                    c.param = c.grad = type;
                    c.special = flags & 2;
                    c.shift = flags & 4 ? 3 : 0;
                    c.weights = WeightsData::Ask{hr_weights_mode(mode), c.special, bool(flags & 1),
                                                 c.shift};
                    c.amsgrad = flags == 5;
                    c.skip_nonfinite = flags == 6;
                    c.state = flags == 4 ? HR_BF16 : HR_F32;
                });
            }
    add([&](AdamwCase &c) {
        c.numel = odd;
        c.weights = WeightsData::Ask{HR_WEIGHTS_NEAREST, false, true};
    });
    add([&](AdamwCase &c) {
        c.numel = {100003, 40000};
        c.param = HR_BF16;
        c.weights = WeightsData::Ask{HR_WEIGHTS_REMAINDER8_STOCHASTIC, false, true};
        c.steps = HR_F64;
    });
    // Larger than a chunk of any kernel, and than the least that is worth a second thread.
    add([](AdamwCase &c) { c.numel = {100003}; });
    add([](AdamwCase &c) {
        c.numel = {100003, 1, 70001};
        c.param = c.state = HR_BF16;
        c.steps = HR_F64;
        c.shift = 1;
    });
    return all;
}
} // namespace

TEST(AdamwBits, AreTheSameOnEveryInstructionSetAndThreadCount)
{
    expect_bits_on_the_cpu<AdamwRun>(cases());
}

TEST(AdamwBits, AreTheSameOnCuda)
{
    expect_bits_of_the_cpu<AdamwRun>(cases());
}
