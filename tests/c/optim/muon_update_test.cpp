// hr_muon_update(): params to the bit against a second statement of the rule, rows that are normalized
// against binary64, modes of weights against binary32, and equal bits wherever it runs.
#include "tests/c/harness/bits.h"
#include "tests/c/optim/muon_run.h"
#include "tests/c/optim/step_suites.h"

namespace
{
using Call = MuonUpdateRun;

// The factors of the rows of an update, and their new variances.
std::vector<double> normalized(const std::vector<double> &update, int64_t cols,
                               std::vector<double> &row_vars, double beta2)
{
    std::vector<double> factors;
    double before = 0, after = 0;
    for (size_t r = 0; r < row_vars.size(); r++) {
        double sum = 0;
        for (int64_t j = 0; j < cols; j++)
            sum += std::pow(update[r * size_t(cols) + size_t(j)], 2);
        row_vars[r] = beta2 * row_vars[r] + (1 - beta2) * sum / double(cols);
        factors.push_back(1 / (std::sqrt(row_vars[r]) + 1e-10));
        before += sum;
        after += sum * factors[r] * factors[r];
    }
    for (double &factor : factors)
        factor *= std::sqrt(before) / (std::sqrt(after) + 1e-10);
    return factors;
}

void expect_rule(Backend &backend, const MuonCase &c)
{
    SCOPED_TRACE(testing::PrintToString(c));
    const Call fresh(backend, c), run(backend, c);
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    EXPECT_TRUE(run.whole());
    for (size_t k = 0; k < c.shapes.size(); k++) {
        const auto ps = fresh.values(Call::PARAMS, k), us = fresh.update(k);
        const auto got = run.values(Call::PARAMS, k);
        EXPECT_EQ(run.values(Call::UPDATES, k), fresh.values(Call::UPDATES, k));
        const double rate = 0.25 * fresh.scales[k];
        const float keep = float(1 - 0.25 * fresh.config.weight_decay);
        std::vector<double> wanted;
        if (!c.row_vars) {
            for (size_t i = 0; i < ps.size(); i++) {
                const float kept = float(double(keep) * ps[i]);
                uint8_t bytes[8];
                encode(double(fused(float(-rate), float(us[i]), kept)), bytes, c.param);
                wanted.push_back(decode(bytes, c.param));
            }
            EXPECT_EQ(got, wanted);
            continue;
        }
        std::vector<double> row_vars = fresh.values(Call::ROW_VARS, k);
        const int64_t cols = c.shapes[k][1];
        if (ps.empty()) {
            EXPECT_EQ(run.values(Call::ROW_VARS, k), row_vars);
            continue;
        }
        const std::vector<double> factors = normalized(us, cols, row_vars, fresh.config.beta2);
        for (size_t r = 0; r < row_vars.size(); r++)
            EXPECT_NEAR(run.values(Call::ROW_VARS, k)[r], row_vars[r], row_vars[r] * 0x1p-20);
        for (size_t i = 0; i < ps.size(); i++) {
            const double change = rate * us[i] * factors[i / size_t(cols)];
            const double exact = double(keep) * ps[i] - change;
            EXPECT_NEAR(got[i], exact,
                        (std::fabs(ps[i]) + std::fabs(change)) *
                            (0x1p-18 + epsilon_of(c.param) / 2));
        }
    }
}

using MuonUpdateValues = OnBackend;
ON_EVERY_BACKEND(MuonUpdateValues);

TEST_P(MuonUpdateValues, EveryShapeTypeAndLayout)
{
    for (const MuonCase &c : muon_cases())
        expect_rule(*backend, c);
}

TEST_P(MuonUpdateValues, NormalizedRows)
{
    for (MuonCase c : muon_cases()) {
        c.row_vars = true;
        expect_rule(*backend, c);
    }
}

TEST_P(MuonUpdateValues, ManyChunksAndMatrices)
{
    MuonCase c;
    c.turned = true;
    c.shapes = {{260, 256}, {70, 600}, {1200, 30}};
    c.update = HR_BF16;
    expect_rule(*backend, c);
    c.shapes.assign(700, {3, 2});
    c.gap = 1;
    c.row_vars = true;
    expect_rule(*backend, c);
}

TEST_P(MuonUpdateValues, ScalarsOfTheStep)
{
    for (const std::optional<hr_dtype> lr : {std::optional<hr_dtype>(), {HR_F32}, {HR_F64}})
        for (const std::optional<hr_dtype> steps :
             {std::optional<hr_dtype>(), {HR_F32}, {HR_F64}}) {
            MuonCase c;
            c.shapes = {{5, 7}, {9, 2}, {0, 3}};
            c.lr_on_device = lr;
            c.steps = steps;
            c.found_inf = 0.0f;
            expect_rule(*backend, c);
            const Call run(*backend, c);
            ASSERT_EQ(run.call(), HR_OK);
            for (size_t k = 0; k < 3; k++)
                EXPECT_EQ(run.values(Call::STEPS, k)[0], double(k) + 2 + bool(steps));
        }
    MuonCase c;
    c.turned = c.row_vars = true;
    c.shapes = {{5, 7}, {40, 3}};
    c.steps = HR_F32;
    c.found_inf = 1.0f;
    const Call run(*backend, c);
    const std::vector<uint8_t> before = run.image();
    EXPECT_EQ(run.call(), HR_OK);
    EXPECT_EQ(run.image(), before);
}

TEST_P(MuonUpdateValues, WithoutScalesTheyAreOne)
{
    Call one(*backend, {}), none(*backend, {});
    one.scales.assign(1, 1.0);
    none.scales_argument = nullptr;
    ASSERT_EQ(one.call(), HR_OK);
    ASSERT_EQ(none.call(), HR_OK);
    EXPECT_EQ(one.image(), none.image());
}

// The weights of a mode that keeps all bits take the steps of binary32.
TEST_P(MuonUpdateValues, RemaindersTakeTheStepsOfBinary32)
{
    for (const bool turned : {false, true}) {
        MuonCase half, whole;
        half.shapes = whole.shapes = {{40, 33}, {70, 256}};
        half.turned = whole.turned = turned;
        half.update = whole.update = HR_BF16;
        half.param = HR_BF16;
        half.weights = WeightsData::Ask{HR_WEIGHTS_REMAINDER16, false, true, 0, true};
        const Call a(*backend, half), b(*backend, whole);
        for (size_t k = 0; k < 2; k++)
            b.tensors[Call::PARAMS].put(k, a.values(Call::PARAMS, k));
        ASSERT_EQ(a.call(), HR_OK) << hr_last_error();
        ASSERT_EQ(b.call(), HR_OK) << hr_last_error();
        for (size_t k = 0; k < 2; k++) {
            const auto rounded = encode(b.values(Call::PARAMS, k), HR_BF16);
            EXPECT_EQ(encode(a.values(Call::PARAMS, k), HR_BF16), rounded);
        }
    }
}

std::vector<MuonCase> weight_cases()
{
    std::vector<MuonCase> all;
    for (int mode = HR_WEIGHTS_STOCHASTIC; mode <= HR_WEIGHTS_REMAINDER8_STOCHASTIC; mode++)
        for (const bool turned : {false, true}) {
            MuonCase c;
            c.shapes = {{7, 300}, {70, 33}, {0, 4}, {40, 256}};
            c.turned = turned;
            c.gap = mode % 2;
            c.param = mode < HR_WEIGHTS_REMAINDER16 && turned ? HR_F16 : HR_BF16;
            c.update = HR_BF16;
            c.steps = HR_F32;
            c.weights = WeightsData::Ask{hr_weights_mode(mode), mode % 2 != 0, turned,
                                         size_t(mode % 3 == 2), false};
            all.push_back(c);
        }
    return all;
}

std::vector<MuonCase> bit_cases()
{
    std::vector<MuonCase> all = muon_cases();
    for (const MuonCase &c : weight_cases())
        all.push_back(c);
    for (size_t i = 0; i < all.size(); i++)
        all[i].special = i % 2;
    all[0].shapes.push_back({300, 300}); // for several threads
    return all;
}

TEST(MuonUpdateOnTheCpu, SameBitsOnEveryInstructionSet)
{
    std::vector<MuonCase> all = bit_cases();
    for (MuonCase c : muon_cases()) {
        c.row_vars = true;
        all.push_back(c);
    }
    expect_bits_on_the_cpu<Call>(all);
}

TEST(MuonUpdateOnCuda, SameBitsAsOnTheCpu)
{
    expect_bits_of_the_cpu<Call>(bit_cases());
}

TEST(MuonUpdateOnCuda, RepeatsItselfAndCanBeCaptured)
{
    std::vector<MuonCase> some(2);
    some[0].shapes = {{300, 120}, {40, 900}};
    some[0].turned = some[1].turned = true;
    some[0].row_vars = true;
    some[1].shapes = {{70, 256}};
    some[1].steps = HR_F32;
    expect_repeats_on_cuda<Call>(some);
    expect_capturable<Call>(some);
}

using MuonUpdateBadInputs = OnBackend;
ON_EVERY_BACKEND(MuonUpdateBadInputs);

TEST_P(MuonUpdateBadInputs, AreRefused)
{
    MuonCase good;
    good.shapes = {{1, 5}, {0, 3}, {60, 5}};
    good.turned = good.row_vars = true;
    good.steps = HR_F64;
    good.found_inf = 0.0f;
    using R = Call;
    const auto tensors = [](R::List l) { return [=](R &r) -> Tensors & { return r.tensors[l]; }; };
    using Rule = ListRule<R>;
    BadInputs<R> all = joined<R>(
        {bad_config_or_exec<R>(),
         bad_lists<R>({{"params", tensors(R::PARAMS), float_types(), Rule::LEADS},
                       {"updates", tensors(R::UPDATES), float_types()},
                       {"steps", tensors(R::STEPS), {HR_F32, HR_F64}, Rule::MEASURED, true, 1}}),
         bad_numbers<R>("lr is .*, wanted a finite",
                        [](R &r) -> double & { return r.config.step.lr; }, {-1, NAN, INFINITY}),
         bad_numbers<R>("weight_decay is .*, wanted a finite",
                        [](R &r) -> double & { return r.config.weight_decay; },
                        {-1, NAN, INFINITY}),
         bad_numbers<R>("beta2 is .*, wanted \\[0, 1\\)",
                        [](R &r) -> double & { return r.config.beta2; }, {-0.1, 1, NAN}),
         bad_numbers<R>("scales\\[2\\] is .*, wanted a finite",
                        [](R &r) -> double & { return r.scales[2]; }, {-1, NAN, INFINITY})});
    const BadInputs<R> others = {
        {"matrices is NULL", [](R &r) { r.matrices_argument = nullptr; }},
        {"matrices\\[2\\] is \\[59, 5\\], but", [](R &r) { r.matrices[2].rows = 59; }},
        {"skip_nonfinite is 1, wanted 0", [](R &r) { r.config.step.skip_nonfinite = 1; }},
        {"row_vars\\[2\\] has dtype", [](R &r) { r.tensors[R::ROW_VARS].dtype[2] = HR_BF16; }},
        {"row_vars\\[2\\] has numel 59, wanted 60",
         [](R &r) { r.tensors[R::ROW_VARS].numel[2] = 59; }},
        {"workspace_bytes is .*, wanted", [](R &r) { r.workspace_bytes -= 8; }},
        {"workspace is at", [](R &r) { r.workspace = nullptr; }},
    };
    all.insert(all.end(), others.begin(), others.end());
    if (backend == &cpu_backend())
        all.push_back({"steps\\[0\\] holds -1", [](R &r) { r.tensors[R::STEPS].put(0, {-1}); }});
    for (BadInput<R> &bad : all)
        if (bad.message.find("holds") == std::string::npos) {
            R run(*backend, good);
            expect_refused(run, bad);
        } else {
            R run(*backend, good);
            bad.spoil(run);
            EXPECT_EQ(run.call(), HR_INVALID_ARGUMENT);
        }
    MuonCase weighted = good;
    weighted.param = HR_BF16;
    weighted.weights = WeightsData::Ask{HR_WEIGHTS_REMAINDER16};
    const BadInputs<R> of_weights = {
        {"weights->size", [](R &r) { r.weights->weights.size = 1; }},
        {"weights->mode is 7", [](R &r) { r.weights->weights.mode = hr_weights_mode(7); }},
    };
    expect_all_refused(*backend, weighted, of_weights);
    R run(*backend, good);
    expect_no_such_device(run);
}
} // namespace
