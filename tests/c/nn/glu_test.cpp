// Gated units and activations against their formulas in binary64, and the same bits wherever they run.
#include <cmath>

#include "tests/c/harness/bits.h"
#include "tests/c/harness/refused.h"
#include "tests/c/nn/glu_run.h"

using Glu = OnBackend;
ON_EVERY_BACKEND(Glu);

namespace
{

constexpr hr_dtype kTypes[] = {HR_F32, HR_BF16, HR_F16};
constexpr int kActivations = HR_RELU_SQUARED + 1;

std::vector<GluCase> cases()
{
    std::vector<GluCase> all;
    const int64_t shapes[][2] = {{1, 1}, {5, 7}, {17, 64}, {2, 520}, {1, 2056}, {2, 2061}};
    int k = 0;
    for (const auto &[rows, cols] : shapes)
        for (const hr_dtype dtype : kTypes)
            for (int i = 0; i < 3; i++, k++)
                all.push_back({rows, cols, k % 2 * 8, hr_activation(k % kActivations), dtype,
                               k % 3 != 2, k % 4 != 1, size_t(k % 7 == 3)});
    all.push_back({.rows = 0, .cols = 9});
    return all;
}

// An activation and its slope; `size` of the slope is that of its terms before they cancel.
struct Exact {
    double value, slope, size, units = 16; // of error, in roundings of binary32
};

Exact exactly(double x, hr_activation activation)
{
    switch (activation) {
    case HR_GELU: {
        const double below = std::erfc(-x / std::sqrt(2)) / 2;
        const double density = std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
        return {x * below, below + x * density, below + std::fabs(x) * density};
    }
    case HR_GELU_TANH: {
        const double factor = 2 * std::sqrt(2 / M_PI), inner = factor * (x + 0.044715 * x * x * x);
        const double s = 1 / (1 + std::exp(-inner));
        const double turn = x * s * (1 - s) * factor * (1 + 3 * 0.044715 * x * x);
        return {x * s, s + turn, s + std::fabs(turn), 16 + 4 * std::fabs(inner)};
    }
    case HR_RELU:
        return {std::max(x, 0.0), double(x > 0), 1};
    case HR_RELU_SQUARED:
        return {std::max(x, 0.0) * std::max(x, 0.0), 2 * std::max(x, 0.0), 2 * std::max(x, 0.0)};
    default: {
        const double s = 1 / (1 + std::exp(-x)), turn = x * s * (1 - s);
        return {x * s, s + turn, s + std::fabs(turn)};
    }
    }
}

} // namespace

TEST_P(Glu, ForwardAndBackwardFollowTheFormulas)
{
    for (const GluCase &c : cases()) {
        const GluRun run(*backend, c);
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        EXPECT_TRUE(run.whole()) << c;
        const double unit = epsilon_of(c.dtype) / 2;         // of a stored value
        const double tiny = c.dtype == HR_F16 ? 0x1p-24 : 0; // the distance of its denormals
        const std::vector<double> gate = run.gate.values(0), up = run.up.values(0);
        const std::vector<double> dh = run.dh.values(0), h = run.h.values(0);
        const std::vector<double> dgate = run.dgate.values(0), dup = run.dup.values(0);
        for (size_t i = 0; i < gate.size(); i++) {
            if (int64_t(i) % (c.cols + c.gap) >= c.cols) {
                ASSERT_EQ(h[i], 77) << c;
                continue;
            }
            const Exact exact = exactly(gate[i], c.activation);
            const auto near = [&](double got, double wanted, double size) {
                return std::fabs(got - wanted) <=
                       std::fabs(wanted) * unit + tiny + std::fabs(size) * exact.units * 0x1p-24;
            };
            const double u = c.up ? up[i] : 1, reached = dh[i] * u;
            ASSERT_TRUE(near(h[i], exact.value * u, exact.value * u)) << c << ", element " << i;
            ASSERT_TRUE(near(dgate[i], reached * exact.slope, reached * exact.size))
                << c << ", element " << i << ": " << dgate[i] << ", wanted "
                << reached * exact.slope;
            if (c.up) {
                ASSERT_TRUE(near(dup[i], dh[i] * exact.value, dh[i] * exact.value))
                    << c << ", element " << i;
            }
        }
        if (c.again) {
            EXPECT_EQ(run.again.values(0), h) << c;
        }
    }
}

// Where an activation has reached its limit it stays there, up to the infinities.
TEST_P(Glu, LimitsAreReached)
{
    for (int k = 0; k < kActivations; k++) {
        SCOPED_TRACE(k);
        const GluCase c = {
            .rows = 1, .cols = 8, .activation = hr_activation(k), .up = false, .again = false};
        const float in[] = {-INFINITY, -3e38f, -200, -0.0f, 200, 3e38f, INFINITY, NAN};
        const GluRun run(*backend, c);
        backend->upload(run.gate.data[0], in, sizeof in);
        const std::vector<float> ones(8, 1.0f);
        backend->upload(run.dh.data[0], ones.data(), sizeof in);
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        const std::vector<double> h = run.h.values(0), slope = run.dgate.values(0);
        const bool squared = k == HR_RELU_SQUARED;
        for (size_t i = 0; i < 4; i++) {
            EXPECT_EQ(h[i], 0) << i;
            EXPECT_NEAR(slope[i], i == 3 && k < HR_RELU ? 0.5 : 0, i == 3 ? 1e-7 : 0) << i;
        }
        for (size_t i = 4; i < 7; i++) {
            EXPECT_EQ(h[i], squared ? float(in[i] * in[i]) : in[i]) << i;
            EXPECT_EQ(slope[i], squared ? 2.0f * in[i] : 1) << i;
        }
        EXPECT_TRUE(std::isnan(h[7]));
        EXPECT_TRUE(std::isnan(slope[7]) || k == HR_RELU);
    }
}

// An output may be any input of the same place, and gate and up may lie side by side.
TEST_P(Glu, OutputsMayTakeThePlaceOfInputs)
{
    for (const hr_dtype dtype : kTypes)
        for (const int64_t cols : {36, 1040}) {
            const GluCase c = {.rows = 3, .cols = cols, .dtype = dtype};
            const GluRun apart(*backend, c);
            ASSERT_EQ(apart.call(), HR_OK);
            const auto expect_in_place = [&](const hr_rows GluRun::*dgate,
                                             const hr_rows GluRun::*dup, hr_rows GluRun::*again) {
                const GluRun run(*backend, c);
                ASSERT_EQ(hr_glu_backward(&(run.*dgate), &(run.*dup), &(run.*again), &run.dh_rows,
                                          &run.gate_rows, &run.up_rows, 3, cols, &run.config,
                                          &run.exec),
                          HR_OK);
                EXPECT_TRUE(run.whole());
                const auto of = [&](const hr_rows &rows) {
                    for (const Tensors *tensor : {&run.gate, &run.up, &run.dh})
                        if (tensor->data[0] == rows.data)
                            return tensor->values(0);
                    return std::vector<double>();
                };
                EXPECT_EQ(of(run.*dgate), apart.dgate.values(0));
                EXPECT_EQ(of(run.*dup), apart.dup.values(0));
                EXPECT_EQ(of(run.*again), apart.again.values(0));
            };
            expect_in_place(&GluRun::gate_rows, &GluRun::up_rows, &GluRun::dh_rows);
            expect_in_place(&GluRun::up_rows, &GluRun::dh_rows, &GluRun::gate_rows);
            expect_in_place(&GluRun::dh_rows, &GluRun::gate_rows, &GluRun::up_rows);
            for (const bool over_gate : {true, false}) {
                GluRun run(*backend, c);
                run.h_rows = over_gate ? run.gate_rows : run.up_rows;
                ASSERT_EQ(run.forward(), HR_OK);
                EXPECT_EQ((over_gate ? run.gate : run.up).values(0), apart.h.values(0));
            }
        }
}

TEST_P(Glu, GateAndUpMayLieSideBySide)
{
    for (const int64_t cols : {7, 64}) {
        const GluCase c = {.rows = 3, .cols = cols, .dtype = HR_BF16};
        const GluRun apart(*backend, c);
        ASSERT_EQ(apart.call(), HR_OK);
        const GluCase wide = {.rows = 3, .cols = 2 * cols, .dtype = HR_BF16};
        const GluRun packed(*backend, wide);
        std::vector<double> rows;
        for (int64_t row = 0; row < 3; row++)
            for (const std::vector<double> &half : {apart.gate.values(0), apart.up.values(0)})
                rows.insert(rows.end(), half.begin() + row * cols, half.begin() + (row + 1) * cols);
        packed.gate.put(0, rows);
        const auto part = [&](const Tensors &tensor, int64_t k) {
            return hr_rows{moved(tensor.data[0], size_t(k * cols * 2)), 2 * cols};
        };
        const hr_rows gate = part(packed.gate, 0), up = part(packed.gate, 1);
        const hr_rows dgate = part(packed.dgate, 0), dup = part(packed.dgate, 1);
        ASSERT_EQ(
            hr_glu_forward(&apart.again_rows, &gate, &up, 3, cols, &apart.config, &apart.exec),
            HR_OK);
        EXPECT_EQ(apart.again.values(0), apart.h.values(0));
        ASSERT_EQ(hr_glu_backward(&dgate, &dup, nullptr, &apart.dh_rows, &gate, &up, 3, cols,
                                  &apart.config, &apart.exec),
                  HR_OK);
        const std::vector<double> both = packed.dgate.values(0);
        for (size_t i = 0; i < size_t(3 * cols); i++) {
            const size_t at = i + i / size_t(cols) * size_t(cols);
            ASSERT_EQ(both[at], apart.dgate.values(0)[i]);
            ASSERT_EQ(both[at + size_t(cols)], apart.dup.values(0)[i]);
        }
    }
}

static std::vector<GluCase> cases_for_bits()
{
    std::vector<GluCase> all;
    for (const hr_dtype dtype : kTypes)
        for (int k = 0; k < kActivations; k++)
            all.push_back({3, 171, k % 2, hr_activation(k), dtype, k != 2, true, 0, true});
    return all;
}

TEST(GluBits, AreTheSameOnEveryInstructionSetAndThreadCount)
{
    std::vector<GluCase> all = cases_for_bits();
    all.push_back({.rows = 7, .cols = 7001, .gap = 3, .special = true}); // several tasks
    expect_bits_on_the_cpu<GluRun>(all);
}

TEST(GluBits, AreThoseOfTheCpuOnCuda)
{
    expect_bits_of_the_cpu<GluRun>(cases_for_bits());
}

TEST_P(Glu, BadInputs)
{
    const BadInputs<GluRun> bad = {
        {"hr_glu_forward: rows is -1, wanted 0 or more", [](GluRun &r) { r.rows = -1; }},
        {"cols is 0, wanted 1 or more", [](GluRun &r) { r.cols = 0; }},
        {"config->activation is 5, wanted 0 to 4",
         [](GluRun &r) { r.config.activation = hr_activation(5); }},
        {"config->activation is -1", [](GluRun &r) { r.config.activation = hr_activation(-1); }},
        {"config->dtype is f64", [](GluRun &r) { r.config.dtype = HR_F64; }},
        {": h is NULL", [](GluRun &r) { r.h_argument = nullptr; }},
        {"gate is NULL", [](GluRun &r) { r.gate_argument = nullptr; }},
        {"h->stride is 6, wanted cols \\(7\\)", [](GluRun &r) { r.h_rows.stride = 6; }},
        {"gate->data is NULL", [](GluRun &r) { r.gate_rows.data = nullptr; }},
        {"up->data is at .* not a multiple of 4 bytes",
         [](GluRun &r) { r.up_rows.data = moved(r.up_rows.data, 2); }},
    };
    expect_all_refused(*backend, GluCase{}, joined({bad_config_or_exec<GluRun>(), bad}));
    GluRun run(*backend, GluCase{});
    expect_no_such_device(run);
}

TEST_P(Glu, BadInputsOfBackward)
{
    using Run = BackwardOf<GluRun>;
    const BadInputs<Run> bad = {
        {"hr_glu_backward: rows is -1", [](Run &r) { r.rows = -1; }},
        {"dgate is NULL", [](Run &r) { r.dgate_argument = nullptr; }},
        {"dh is NULL", [](Run &r) { r.dh_argument = nullptr; }},
        {"gate is NULL", [](Run &r) { r.gate_argument = nullptr; }},
        {"up is NULL, but dup is not", [](Run &r) { r.up_argument = nullptr; }},
        {"dup is NULL, but up is not", [](Run &r) { r.dup_argument = nullptr; }},
        {"dgate->stride is 6", [](Run &r) { r.dgate_rows.stride = 6; }},
        {"dup->stride is 6", [](Run &r) { r.dup_rows.stride = 6; }},
        {": h->stride is 6", [](Run &r) { r.again_rows.stride = 6; }},
        {"dh->stride is 6", [](Run &r) { r.dh_rows.stride = 6; }},
        {"gate->stride is 6", [](Run &r) { r.gate_rows.stride = 6; }},
        {"up->stride is 6", [](Run &r) { r.up_rows.stride = 6; }},
    };
    expect_all_refused(*backend, GluCase{}, joined({bad_config_or_exec<Run>(), bad}));
}
