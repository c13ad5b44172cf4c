// hr_adafactor() against the rule in long double: both semantics, every option, every shape.
#include <algorithm>
#include <cmath>

#include "tests/c/optim/adafactor_run.h"
#include "tests/c/harness/pool.h"

using AdafactorValues = OnBackend;
ON_EVERY_BACKEND(AdafactorValues);

namespace
{
// Whole blocks and not, fewer columns than a vector has lanes, one row, one column, one element,
// matrices in a batch, tiny ones, and what is not factored.
const std::vector<hr_adafactor_shape> kShapes = {
    matrix(5, 7),    matrix(300, 40), matrix(1, 700),   matrix(700, 1), matrix(1, 1),
    matrix(70, 513), matrix(9, 8, 3), matrix(3, 3, 50), matrix(8, 8),   matrix(2100, 3),
    matrix(64, 256), vector(1),       vector(37),       vector(20000),  matrix(0, 5),
    matrix(3, 3, 0), vector(0),       matrix(13, 5, 2), matrix(1, 64),  matrix(65, 1),
};

AdafactorCase of(hr_adafactor_semantics semantics, const std::vector<hr_adafactor_shape> &shapes)
{
    AdafactorCase c;
    const hr_adafactor_config torch = HR_ADAFACTOR_TORCH_INIT;
    c.shapes = shapes;
    c.semantics = semantics;
    if (semantics == HR_ADAFACTOR_TORCH)
        c.config = torch;
    return c;
}
} // namespace

TEST_P(AdafactorValues, Defaults)
{
    for (const auto semantics : {HR_ADAFACTOR_HF, HR_ADAFACTOR_TORCH})
        for (const size_t shift : {0, 1}) {
            AdafactorCase c = of(semantics, kShapes);
            c.shift = shift;
            expect_exact(*backend, c);
        }
}

// Matrices of blocks that CUDA takes whole, by instances for params and grads of one type, beside
// blocks that end early.
TEST_P(AdafactorValues, WholeBlocks)
{
    for (const hr_dtype type : float_types())
        for (const bool momentum : {false, true}) {
            AdafactorCase c = of(momentum ? HR_ADAFACTOR_HF : HR_ADAFACTOR_TORCH,
                                 {matrix(128, 512), matrix(64, 256, 2), matrix(70, 264)});
            c.params = c.grads = {type};
            c.momentum = momentum;
            c.config.beta1 = 0.9;
            c.config.step.lr = 1e-2;
            c.config.scale_parameter = type != HR_F32;
            c.config.relative_step = type != HR_F32;
            expect_exact(*backend, c);
        }
}

// By 4 or 8 bytes of f32 and 2 or 8 of the others.
TEST_P(AdafactorValues, EveryListAloneAtAnOddAddress)
{
    for (const hr_dtype type : {HR_F32, HR_BF16})
        for (const size_t shift : {1, type == HR_F32 ? 2 : 4})
            for (int list = 0; list < 8; list++) {
                AdafactorCase c =
                    of(HR_ADAFACTOR_HF, {matrix(33, 64), matrix(20, 72, 2), matrix(3, 3, 20),
                                         vector(500), matrix(9, 7)});
                c.params = c.grads = {type};
                c.momentum = true;
                c.config.beta1 = 0.9;
                c.shift = shift;
                c.shifted = 1u << list;
                expect_exact(*backend, c);
            }
    for (int mode = HR_WEIGHTS_KAHAN; mode <= HR_WEIGHTS_REMAINDER8; mode++)
        for (const size_t shift : {1, 2, 4}) {
            AdafactorCase c = of(HR_ADAFACTOR_HF, {matrix(33, 64), matrix(3, 3, 20), vector(500)});
            c.params = c.grads = {HR_BF16};
            c.weights = {hr_weights_mode(mode), false, false, shift};
            expect_exact(*backend, c);
        }
}

TEST_P(AdafactorValues, Types)
{
    for (const auto semantics : {HR_ADAFACTOR_HF, HR_ADAFACTOR_TORCH})
        for (const hr_dtype param : float_types()) {
            AdafactorCase c = of(semantics, kShapes);
            c.params = {param};
            c.grads = float_types();
            c.momentum = param == HR_F16;
            c.config.beta1 = 0.9;
            c.shift = param == HR_BF16;
            expect_exact(*backend, c);
        }
}

TEST_P(AdafactorValues, Options)
{
    const std::vector<hr_adafactor_shape> shapes = {matrix(33, 70), matrix(4, 4, 20), vector(77)};
    const std::vector<std::function<void(AdafactorCase &)>> options = {
        [](AdafactorCase &c) { c.config.weight_decay = 0.1; },
        [](AdafactorCase &c) { c.config.step.maximize = 1, c.config.weight_decay = 0.1; },
        [](AdafactorCase &c) { c.config.clip_threshold = 1e-3; },
        [](AdafactorCase &c) { c.config.clip_threshold = INFINITY; },
        [](AdafactorCase &c) { c.config.beta2_decay = 0; },
        [](AdafactorCase &c) { c.config.beta2_decay = -0.3, c.config.eps2 = 10; },
        [](AdafactorCase &c) { c.config.eps1 = 0.5, c.config.eps2 = 0; },
        [](AdafactorCase &c) { c.config.relative_step = 0, c.config.step.lr = 1e-3; },
        [](AdafactorCase &c) {
            c.config.relative_step = c.config.scale_parameter = 0, c.config.step.lr = 1e-3;
        },
        [](AdafactorCase &c) { c.config.warmup_init = 1; },
        [](AdafactorCase &c) { c.momentum = true, c.config.beta1 = 0.9; },
        [](AdafactorCase &c) {
            c.momentum = true, c.config.beta1 = 0.2, c.config.step.maximize = 1;
        },
        [](AdafactorCase &c) { c.steps = c.rms_values = false, c.config.step.t = 17; },
        // Past the 10,000 steps after which relative steps are shorter than 1 / 100.
        [](AdafactorCase &c) { c.counted = 12345; },
        [](AdafactorCase &c) { c.counted = 1e6, c.config.step.lr = 0.5; },
        [](AdafactorCase &c) { c.counted = 54321, c.config.warmup_init = 1; },
        [](AdafactorCase &c) { c.steps = false, c.config.step.t = 20000; },
        [](AdafactorCase &c) {
            c.counted = 54321, c.config.relative_step = 0, c.config.step.lr = 0.05;
        },
        [](AdafactorCase &c) { c.grad_scale = 65536.0f, c.clip_coef = 0.3f; },
        [](AdafactorCase &c) { c.grad_scale = 3.0f, c.config.step.maximize = 1; },
        [](AdafactorCase &c) { c.lr_on_device = HR_F64, c.config.relative_step = 0; },
        [](AdafactorCase &c) {
            c.lr_on_device = HR_F32, c.config.step.lr = 0.125, c.config.relative_step = 0;
        },
    };
    for (const auto semantics : {HR_ADAFACTOR_HF, HR_ADAFACTOR_TORCH})
        for (const auto &option : options) {
            AdafactorCase c = of(semantics, shapes);
            option(c);
            expect_exact(*backend, c);
        }
}

TEST_P(AdafactorValues, WeightsOf16Bits)
{
    for (int mode = HR_WEIGHTS_STOCHASTIC; mode <= HR_WEIGHTS_REMAINDER8_STOCHASTIC; mode++) {
        AdafactorCase c = of(mode % 2 ? HR_ADAFACTOR_TORCH : HR_ADAFACTOR_HF, kShapes);
        c.params = {HR_BF16};
        c.grads = {HR_BF16, HR_F32};
        c.weights = {hr_weights_mode(mode), mode > 3, mode > 2, size_t(mode % 3)};
        c.momentum = mode == HR_WEIGHTS_MASTER;
        c.config.beta1 = 0.9;
        expect_exact(*backend, c);
    }
}

TEST_P(AdafactorValues, GradientsOfEverySize)
{
    const std::vector<hr_adafactor_shape> shapes = {matrix(20, 90), matrix(3, 3, 20), vector(99)};
    for (const auto semantics : {HR_ADAFACTOR_HF, HR_ADAFACTOR_TORCH})
        for (const double size : {0.0, 1e-12, 1e-6, 1e6, 1e15}) {
            AdafactorCase c = of(semantics, shapes);
            c.grad = [=](size_t k, size_t i) { return i % 5 ? size * noise(k, i) : 0; };
            expect_exact(*backend, c);
        }
}

TEST_P(AdafactorValues, ZeroGradientsOf16BitWeights)
{
    for (const auto semantics : {HR_ADAFACTOR_HF, HR_ADAFACTOR_TORCH})
        for (int mode = HR_WEIGHTS_NEAREST; mode <= HR_WEIGHTS_REMAINDER8; mode++) {
            AdafactorCase c = of(semantics, {matrix(20, 90), matrix(3, 3, 20), vector(99)});
            c.params = c.grads = {HR_BF16};
            c.grad = [](size_t, size_t) { return 0; };
            c.weights = {hr_weights_mode(mode), false, false, 0};
            c.config.weight_decay = 0.1;
            expect_exact(*backend, c);
        }
}

TEST_P(AdafactorValues, NothingChangesOnFoundInf)
{
    AdafactorCase c = of(HR_ADAFACTOR_HF, kShapes);
    c.found_inf = 1.0f;
    const AdafactorRun run(*backend, c);
    const std::vector<uint8_t> before = run.results();
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    EXPECT_EQ(run.results(), before);
    c.found_inf = 0.0f;
    expect_exact(*backend, c);
}

TEST_P(AdafactorValues, ANonfiniteGradientReachesItsTensorAlone)
{
    for (const auto semantics : {HR_ADAFACTOR_HF, HR_ADAFACTOR_TORCH})
        for (const double bad : {double(INFINITY), -double(INFINITY), double(NAN)})
            for (const auto &shape : {matrix(30, 20), matrix(3, 3, 4), vector(40)}) {
                AdafactorCase c = of(semantics, {shape, shape});
                c.grad = [=](size_t k, size_t i) { return k == 0 && i == 7 ? bad : noise(k, i); };
                AdafactorRun run(*backend, c);
                ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
                EXPECT_TRUE(std::isnan(run.params.values(0)[7])) << testing::PrintToString(c);
                for (const double x : run.params.values(1))
                    EXPECT_TRUE(std::isfinite(x));
            }
}

// torch's max(1.0, NaN) is 1, so that a NaN stops only what its variances reach: of a vector itself,
// of a matrix all, because the mean of the rows is among them. HF's clamp keeps a NaN.
TEST_P(AdafactorValues, WhereANaNEnds)
{
    const auto nans_of = [&](hr_adafactor_semantics semantics, const hr_adafactor_shape &shape) {
        AdafactorCase c = of(semantics, {shape});
        c.grad = [=](size_t k, size_t i) { return i == 7 ? NAN : noise(k, i); };
        const AdafactorRun run(*backend, c);
        EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
        const std::vector<double> values = run.params.values(0);
        return std::count_if(values.begin(), values.end(), [](double x) { return std::isnan(x); });
    };
    EXPECT_EQ(nans_of(HR_ADAFACTOR_TORCH, vector(40)), 1);
    EXPECT_EQ(nans_of(HR_ADAFACTOR_TORCH, matrix(30, 20)), 600);
    EXPECT_EQ(nans_of(HR_ADAFACTOR_TORCH, matrix(3, 3, 4)), 9);
    EXPECT_EQ(nans_of(HR_ADAFACTOR_HF, vector(40)), 40);
    EXPECT_EQ(nans_of(HR_ADAFACTOR_HF, matrix(3, 3, 4)), 36);
}

// Batches whose matrices are cut into several blocks of rows and of columns, and end inside the
// runs that sums are taken over; tiny ones that end inside a block.
TEST(AdafactorValuesOnTheCpu, LargeBatches)
{
    for (const auto semantics : {HR_ADAFACTOR_HF, HR_ADAFACTOR_TORCH})
        for (const int threads : {1, 3}) {
            const LentPool pool(threads);
            AdafactorCase c = of(semantics, {matrix(700, 100, 3), matrix(45, 1500, 2),
                                             matrix(13, 4099, 2), matrix(3, 3, 9001)});
            c.grads = {threads == 1 ? HR_F32 : HR_BF16};
            expect_exact(cpu_backend(), c);
        }
}

// More tensors than one launch holds.
TEST_P(AdafactorValues, ManyTensors)
{
    AdafactorCase c = of(HR_ADAFACTOR_TORCH, {});
    for (int64_t k = 0; k < 250; k++)
        c.shapes.push_back(k % 3 == 0   ? matrix(k % 7, 70)
                           : k % 3 == 1 ? vector(k % 50)
                                        : matrix(2, 3, k % 5));
    expect_exact(*backend, c);
}

// One after another, and where sums cross parts of a tensor, though there is one part.
TEST_P(AdafactorValues, PhasesOneByOne)
{
    AdafactorCase c = of(HR_ADAFACTOR_TORCH, kShapes);
    AdafactorRun all(*backend, c), apart(*backend, c);
    ASSERT_EQ(all.call(), HR_OK) << hr_last_error();
    for (int32_t phase = HR_ADAFACTOR_SUMS; phase <= HR_ADAFACTOR_APPLY; phase *= 2)
        ASSERT_EQ(apart.call(phase), HR_OK) << hr_last_error();
    EXPECT_EQ(apart.results(), all.results());
    for (hr_adafactor_shape &s : c.shapes)
        if (s.factored && s.rows > 0) {
            s.whole_rows = s.rows;
            s.whole_cols = s.cols;
            s.whole_numel = s.batch * s.rows * s.cols;
        }
    expect_exact(*backend, c);
}

// An empty part of a tensor has columns all the same, and their sums come from the others.
TEST_P(AdafactorValues, AnEmptyPart)
{
    AdafactorCase c = of(HR_ADAFACTOR_HF, {{1, 0, 40, 1, 30, 0, 1200}});
    AdafactorRun run(*backend, c);
    ASSERT_EQ(run.call(HR_ADAFACTOR_SUMS), HR_OK) << hr_last_error();
    std::vector<double> sums(2 + 1 + 40, 77.0);
    backend->download(sums.data(), run.workspace, sums.size() * sizeof sums[0]);
    EXPECT_EQ(sums[0], 0); // of param^2
    for (size_t i = 0; i < 40; i++) {
        EXPECT_EQ(sums[3 + i], 0) << i;
        sums[3 + i] = double(30 * i);
    }
    backend->upload(run.workspace, sums.data(), sums.size() * sizeof sums[0]);
    const std::vector<double> before = run.col_vars.values(0);
    ASSERT_EQ(run.call(HR_ADAFACTOR_STATES), HR_OK) << hr_last_error();
    const std::vector<double> after = run.col_vars.values(0);
    for (size_t i = 0; i < 40; i++) // the first step takes the new mean alone
        EXPECT_EQ(after[i], double(float(double(i) + 1e-30))) << i;
    EXPECT_TRUE(run.whole());
}
