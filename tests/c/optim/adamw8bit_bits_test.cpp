// hr_adamw8bit() gives the same bytes wherever it runs: on any instruction set, with any number of
// threads, on CUDA in any order of threads. The guards around every buffer stay whole.
#include "tests/c/optim/adamw8bit_run.h"
#include "tests/c/harness/suites.h"

namespace
{
std::vector<Adamw8bitCase> cases()
{
    std::vector<Adamw8bitCase> all;
    const auto add = [&](auto change) {
        Adamw8bitCase c;
        change(c);
        all.push_back(c);
    };
    const std::vector<int64_t> odd = {1, 3, 63, 255, 256, 257, 0, 1025, 513, 33};
    // Every rule, block size and kind of rounding, on tensors of every mix of types.
    for (const int32_t block_size : {64, 128, 256, 512})
        for (int flags = 0; flags < 16; flags++)
            add([&](Adamw8bitCase &c) {
                c.numel.assign(9, 71 + 2 * block_size);
                c.param = float_types();
                c.grad = {HR_F32,  HR_F32, HR_F32, HR_BF16, HR_BF16,
                          HR_BF16, HR_F16, HR_F16, HR_F16};
                c.block_size = block_size;
                c.decoupled = flags & 1;
                c.stochastic = flags & 2;
                c.skip_nonfinite = flags & 4;
                c.special = flags & 8;
                c.maximize = flags == 9;
            });
    for (const bool special : {false, true})
        add([&](Adamw8bitCase &c) {
            c.numel = odd;
            c.param = float_types();
            c.bnb_exact = true;
            c.special = special;
            c.steps = HR_F32;
        });
    // Every list alone at every address, and all of them.
    for (const hr_dtype type : float_types())
        for (size_t shift = 0; shift < 8; shift++)
            for (const uint32_t shifted : {~0u, 1u, 2u, 8u, 64u})
                if (shifted == ~0u || shift == 1 || shift == 2)
                    add([&](Adamw8bitCase &c) {
                        c.numel = odd;
                        c.param = c.grad = {type};
                        c.shift = shift;
                        c.shifted = shifted;
                        c.special = shift % 2;
                        c.stochastic = shift % 3 == 0;
                    });
    for (const hr_dtype counter : {HR_F32, HR_F64})
        for (const hr_dtype lr : {HR_F32, HR_F64})
            for (const bool bnb_exact : {false, true})
                add([&](Adamw8bitCase &c) {
                    c.numel = odd;
                    c.steps = counter;
                    c.lr_on_device = lr;
                    c.grad_scale = 3.0f;
                    c.clip_coef = 0.7f;
                    c.found_inf = 0.0f;
                    c.step = 12345;
                    c.bnb_exact = bnb_exact;
                    c.stochastic = !bnb_exact;
                });
    for (int mode = HR_WEIGHTS_NEAREST; mode <= HR_WEIGHTS_REMAINDER8_STOCHASTIC; mode++)
        for (int flags = 0; flags < 4; flags++)
            add([&](Adamw8bitCase &c) {
                c.numel = odd;
                c.numel.push_back(9001); // more than is unpacked at once
                c.param = {mode < HR_WEIGHTS_REMAINDER16 && flags == 1 ? HR_F16 : HR_BF16};
                c.grad = {flags == 2 ? HR_BF16 : HR_F32};
                c.special = flags == 1;
                c.stochastic = flags == 2;
                c.shift = flags == 3 ? 3 : 0;
                c.weights = WeightsData::Ask{hr_weights_mode(mode), c.special, true, c.shift};
            });
    // Residuals alone at an odd address, and the other lists alone beside them.
    for (const hr_weights_mode mode : {HR_WEIGHTS_STOCHASTIC, HR_WEIGHTS_KAHAN, HR_WEIGHTS_MASTER,
                                       HR_WEIGHTS_REMAINDER16, HR_WEIGHTS_REMAINDER8})
        for (const uint32_t shifted : {0u, 1u, 2u, 8u, 64u})
            for (const size_t shift : {1, 2})
                if (shifted == 0 || shift == 1)
                    add([&](Adamw8bitCase &c) {
                        c.numel = {600, 513};
                        c.param = c.grad = {HR_BF16};
                        c.shift = shift;
                        c.shifted = shifted;
                        c.weights = WeightsData::Ask{mode, false, false, shifted == 0 ? shift : 0};
                    });
    // Not counted, so that a loop of their own may take them.
    for (const hr_weights_mode mode :
         {HR_WEIGHTS_KAHAN, HR_WEIGHTS_MASTER, HR_WEIGHTS_REMAINDER16, HR_WEIGHTS_REMAINDER8})
        for (const bool special : {false, true})
            for (const int32_t block_size : {64, 256})
                add([&](Adamw8bitCase &c) {
                    c.numel = {9001, 1, 0, 70, 128, 513, 2000};
                    c.param = c.grad = {HR_BF16};
                    c.special = special;
                    c.block_size = block_size;
                    c.shift = special ? 3 : 0;
                    c.weights = WeightsData::Ask{mode, special, false, c.shift};
                });
    // Weights that are rounded at random beside small blocks, more than are unpacked at once.
    for (const hr_weights_mode mode : {HR_WEIGHTS_STOCHASTIC, HR_WEIGHTS_REMAINDER8_STOCHASTIC})
        for (const bool f16 : {false, true})
            if (!f16 || mode == HR_WEIGHTS_STOCHASTIC)
                add([&](Adamw8bitCase &c) {
                    c.numel = {9001, 70};
                    c.block_size = 64;
                    c.param = c.grad = {f16 ? HR_F16 : HR_BF16};
                    c.stochastic = f16;
                    c.weights = WeightsData::Ask{mode};
                });
    // Scales above 2^64 and below 2^-64, where they are divided by in two steps.
    for (const double size : {1e25, 1e-25})
        for (const bool stochastic : {false, true})
            add([&](Adamw8bitCase &c) {
                c.numel = {600, 33};
                c.stochastic = stochastic;
                c.exp_avg_absmaxs = c.exp_avg_sq_absmaxs = [=](size_t k, size_t i) {
                    return size * (2 + noise(k, i));
                };
                c.grads = [=](size_t k, size_t i) { return std::min(size, 1.0) * noise(k, i); };
            });
    // Larger than a chunk of any kernel, and than the least that is worth a second thread.
    add([](Adamw8bitCase &c) { c.numel = {100003}; });
    add([](Adamw8bitCase &c) {
        c.numel = {50003, 100003};
        c.stochastic = true;
    });
    add([](Adamw8bitCase &c) {
        c.numel = {100003, 1, 70001};
        c.param = {HR_BF16};
        c.steps = HR_F64;
        c.block_size = 64;
        c.shift = 1;
    });
    return all;
}
} // namespace

BITS_SUITE(Adamw8bit, Adamw8bitRun, cases());
