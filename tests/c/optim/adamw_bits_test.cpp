// hr_adamw() gives the same bytes wherever it runs: on any instruction set, with any number of
// threads, on CUDA in any order of threads. The guards around every buffer stay whole.
#include "tests/c/optim/adamw_run.h"
#include "tests/c/harness/suites.h"

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
    // Every list alone at an odd address, by 4 or 8 bytes of f32 and 2 or 8 of the others.
    for (const AdamwList list : {PARAMS, EXP_AVGS, EXP_AVG_SQS, MAX_EXP_AVG_SQS, GRADS})
        for (const hr_dtype type : {HR_F32, HR_BF16})
            for (const size_t shift : {1, type == HR_F32 ? 2 : 4})
                add([&](AdamwCase &c) {
                    c.numel = {257, 64};
                    c.param = c.grad = c.state = type;
                    c.shift = shift;
                    c.shifted = 1u << list;
                    c.amsgrad = list == MAX_EXP_AVG_SQS || shift == 1;
                });
    // The same of 16-bit weights, and of their residuals.
    const auto add_shifted = [&](hr_weights_mode mode, uint32_t shifted, size_t shift) {
        add([&](AdamwCase &c) {
            c.numel = {257, 64};
            c.param = c.grad = HR_BF16;
            c.shift = shift;
            c.shifted = shifted;
            c.weights = WeightsData::Ask{mode, false, false, shifted == 0 ? shift : 0};
        });
    };
    for (const AdamwList list : {PARAMS, EXP_AVGS, EXP_AVG_SQS, GRADS})
        for (const hr_weights_mode mode : {HR_WEIGHTS_STOCHASTIC, HR_WEIGHTS_REMAINDER16})
            for (const size_t shift : {1, 4})
                add_shifted(mode, 1u << list, shift);
    for (int mode = HR_WEIGHTS_KAHAN; mode <= HR_WEIGHTS_REMAINDER8; mode++)
        for (const size_t shift : {1, 2, 4})
            add_shifted(hr_weights_mode(mode), 0, shift);
    // States of every type and amsgrad beside 16-bit weights, in the loops that are not counted.
    for (int mode = HR_WEIGHTS_NEAREST; mode <= HR_WEIGHTS_REMAINDER8_STOCHASTIC; mode++)
        for (const hr_dtype type : {HR_BF16, HR_F16})
            for (int flags = 0; flags < 3; flags++)
                if (type == HR_BF16 || mode < HR_WEIGHTS_REMAINDER16)
                    add([&](AdamwCase &c) {
                        c.numel = {257, 64};
                        c.param = c.grad = type;
                        c.state = flags == 0 ? HR_F16 : flags == 1 ? HR_BF16 : HR_F32;
                        c.amsgrad = flags != 0;
                        c.special = flags == 2;
                        c.weights = WeightsData::Ask{hr_weights_mode(mode)};
                    });
    // Counters of either type beside each other, and past 2^32.
    for (const int64_t step : {int64_t(7), (int64_t(1) << 32) + 5})
        add([&](AdamwCase &c) {
            c.numel = {257, 64, 33};
            c.param = HR_BF16;
            c.mixed_counters = true;
            c.steps = HR_F64;
            c.step = step;
            c.weights = WeightsData::Ask{HR_WEIGHTS_STOCHASTIC};
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

BITS_SUITE(Adamw, AdamwRun, cases());
