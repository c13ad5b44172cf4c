// The MLP block against its formulas in binary64, with more and with less kept, and in tiles.
#include <cmath>

#include "tests/c/harness/bits.h"
#include "tests/c/harness/refused.h"
#include "tests/c/nn/mlp_run.h"

using Mlp = OnBackend;
ON_EVERY_BACKEND(Mlp);

namespace
{

using Matrix = std::vector<std::vector<double>>;
using Vector = std::vector<double>;

Matrix zeros(size_t rows, size_t cols)
{
    return Matrix(rows, Vector(cols));
}

// Rows of a tensor: of `cols` elements, `stride` apart.
Matrix matrix_of(const Vector &values, size_t rows, int64_t cols, int64_t stride)
{
    Matrix m = zeros(rows, size_t(cols));
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < size_t(cols); j++)
            m[i][j] = values[i * size_t(stride) + j];
    return m;
}

double slope_and_value(double x, hr_activation activation, double *value)
{
    const double s = 1 / (1 + std::exp(-x)), p = 0.5 * (1 + std::erf(x / std::sqrt(2)));
    const double k = std::sqrt(2 / M_PI), t = std::tanh(k * (x + 0.044715 * x * x * x));
    switch (activation) {
    case HR_SILU:
        *value = x * s;
        return s * (1 + x * (1 - s));
    case HR_GELU:
        *value = x * p;
        return p + x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
    case HR_GELU_TANH:
        *value = x / 2 * (1 + t);
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 0.134145 * x * x);
    case HR_RELU:
        *value = std::fmax(x, 0);
        return x > 0;
    default:
        *value = x > 0 ? x * x : 0;
        return 2 * std::fmax(x, 0);
    }
}

// All of it in binary64, one token after the other.
struct Reference {
    Matrix y, dx, dgate_up, ddown;
    Vector dnorm_weight, dnorm_bias, dgate_up_bias, ddown_bias;

    explicit Reference(const MlpRun &run)
    {
        const MlpCase &c = run.shape;
        const size_t h = size_t(c.hidden), f = size_t(c.features), width = c.gated ? 2 * f : f;
        const size_t n = size_t(c.tokens);
        const int64_t row = c.hidden + c.gap;
        const Matrix x = matrix_of(run.x.values(0), n, c.hidden, row);
        const Matrix dy = matrix_of(run.dy.values(0), n, c.hidden, row);
        Matrix gate_up = matrix_of(run.weights.values(2), c.apart ? f : width, c.hidden, row);
        Vector gate_up_bias = c.biases ? run.weights.values(5) : Vector(width);
        if (c.apart) {
            for (const Vector &one : matrix_of(run.weights.values(3), f, c.hidden, row))
                gate_up.push_back(one);
            const Vector more = c.biases ? run.weights.values(6) : Vector();
            gate_up_bias.insert(gate_up_bias.end(), more.begin(), more.end());
        }
        const Matrix down = matrix_of(run.weights.values(4), h, c.features, c.features + c.gap);
        const Vector down_bias = c.biases ? run.weights.values(7) : Vector(h);
        const bool layer = c.norm == HR_NORM_LAYER;
        const Vector norm_weight = run.weights.values(0);
        const Vector norm_bias = layer ? run.weights.values(1) : Vector(h);
        y = dx = zeros(n, h), dgate_up = zeros(width, h), ddown = zeros(h, f);
        dnorm_weight = dnorm_bias = ddown_bias = Vector(h), dgate_up_bias = Vector(width);
        for (size_t i = 0; i < n; i++) {
            double mean = 0, squares = 0;
            for (size_t j = 0; j < h; j++)
                mean += layer ? x[i][j] / double(h) : 0;
            for (size_t j = 0; j < h; j++)
                squares += (x[i][j] - mean) * (x[i][j] - mean) / double(h);
            const double rstd = 1 / std::sqrt(squares + run.config.eps);
            Vector hat(h), normed(h), z(width), inner(f), dinner(f), dz(width), dnormed(h);
            for (size_t j = 0; j < h; j++) {
                hat[j] = (x[i][j] - mean) * rstd;
                normed[j] = hat[j] * (norm_weight[j] + run.config.offset) + norm_bias[j];
            }
            for (size_t k = 0; k < width; k++) {
                z[k] = gate_up_bias[k];
                for (size_t j = 0; j < h; j++)
                    z[k] += normed[j] * gate_up[k][j];
            }
            for (size_t j = 0; j < h; j++)
                for (size_t k = 0; k < f; k++)
                    dinner[k] += dy[i][j] * down[j][k];
            for (size_t k = 0; k < f; k++) {
                double value, up = c.gated ? z[f + k] : 1;
                dz[k] = slope_and_value(z[k], c.activation, &value) * up * dinner[k];
                if (c.gated)
                    dz[f + k] = value * dinner[k];
                inner[k] = value * up;
            }
            double g_hat = 0, g_mean = 0;
            for (size_t j = 0; j < h; j++) {
                y[i][j] = (c.residual ? x[i][j] : 0) + down_bias[j];
                for (size_t k = 0; k < f; k++) {
                    y[i][j] += inner[k] * down[j][k];
                    ddown[j][k] += dy[i][j] * inner[k];
                }
                ddown_bias[j] += dy[i][j];
                for (size_t k = 0; k < width; k++) {
                    dgate_up[k][j] += dz[k] * normed[j];
                    dnormed[j] += dz[k] * gate_up[k][j];
                }
                dnorm_weight[j] += dnormed[j] * hat[j];
                dnorm_bias[j] += dnormed[j];
                const double g = dnormed[j] * (norm_weight[j] + run.config.offset);
                g_hat += g * hat[j] / double(h);
                g_mean += layer ? g / double(h) : 0;
            }
            for (size_t k = 0; k < width; k++)
                dgate_up_bias[k] += dz[k];
            for (size_t j = 0; j < h; j++)
                dx[i][j] = rstd * (dnormed[j] * (norm_weight[j] + run.config.offset) -
                                   hat[j] * g_hat - g_mean) +
                           (c.residual ? dy[i][j] : 0);
        }
    }
};

double largest(const Matrix &m)
{
    double most = 0;
    for (const Vector &row : m)
        for (const double value : row)
            most = std::fmax(most, std::fabs(value));
    return most;
}

// Each value within some roundings of the largest.
void expect_near(const Matrix &got, const Matrix &exact, double unit, const char *what)
{
    ASSERT_EQ(got.size(), exact.size());
    const double allowed = 16 * unit * largest(exact);
    for (size_t i = 0; i < got.size(); i++)
        for (size_t j = 0; j < got[i].size(); j++)
            ASSERT_NEAR(got[i][j], exact[i][j], allowed) << what << " " << i << ", " << j;
}

std::vector<MlpCase> cases()
{
    std::vector<MlpCase> all;
    for (const hr_dtype dtype : {HR_F32, HR_BF16, HR_F16})
        for (const int64_t tile : {0, 3}) {
            all.push_back({.dtype = dtype, .norm_dtype = dtype, .tile = tile});
            all.push_back({.tokens = 8,
                           .hidden = 17,
                           .features = 5,
                           .gap = 3,
                           .norm = HR_NORM_LAYER,
                           .activation = HR_GELU_TANH,
                           .dtype = dtype,
                           .gated = false,
                           .biases = true,
                           .tile = tile,
                           .save = HR_MLP_SAVE_ALL});
            all.push_back({.hidden = 8,
                           .features = 9,
                           .gap = 1,
                           .activation = HR_GELU,
                           .dtype = dtype,
                           .apart = true,
                           .biases = true,
                           .residual = false,
                           .tile = tile,
                           .save = HR_MLP_SAVE_INPUT});
        }
    const hr_format formats[] = {HR_NF4, HR_INT8_ROWS, HR_FP4};
    int turn = 0;
    for (const hr_format format : formats)
        for (const hr_dtype dtype : {HR_F32, HR_BF16, HR_F16}) {
            MlpCase c = {.tokens = 19, .hidden = 7, .features = 9, .gap = turn % 2, .dtype = dtype};
            c.norm_dtype = dtype, c.apart = turn % 2 == 0, c.biases = turn % 3 > 0;
            c.tile = turn % 4 == 3 ? 18 : 0; // of which the last has few tokens
            c.residual = turn % 4 != 2, c.save = hr_mlp_save(turn % 3);
            c.gated = turn % 4 != 1;
            c.format = format, c.nested = format != HR_INT8_ROWS && turn % 2 == 0;
            all.push_back(c);
            turn++;
        }
    all.push_back({.tokens = 0, .norm = HR_NORM_LAYER, .biases = true});
    all.push_back({.tokens = 0, .biases = true, .format = HR_NF4});
    all.push_back({.tokens = 3, .gap = 1, .apart = true, .format = HR_INT8_ROWS});
    all.push_back({.tokens = 1, .hidden = 1, .features = 1, .activation = HR_RELU_SQUARED});
    return all;
}

// Fewer where an emulator runs them.
std::vector<MlpCase> cases_for(Backend &backend)
{
    std::vector<MlpCase> some;
    for (size_t k = 0; k < cases().size(); k++)
        if (!backend.is_emulated() || k % 4 == 3 || k >= 18)
            some.push_back(cases()[k]);
    return some;
}

Matrix one_row(const Vector &values)
{
    return {values};
}

} // namespace

TEST_P(Mlp, ForwardAndBackwardFollowTheFormulas)
{
    for (const MlpCase &c : cases()) {
        SCOPED_TRACE(testing::PrintToString(c));
        const MlpRun run(*backend, c);
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        EXPECT_TRUE(run.whole());
        const Reference exact(run);
        const size_t n = size_t(c.tokens), f = size_t(c.features);
        const int64_t row = c.hidden + c.gap;
        const double unit = epsilon_of(c.dtype) / 2;
        expect_near(matrix_of(run.y.values(0), n, c.hidden, row), exact.y, unit, "y");
        expect_near(matrix_of(run.dx.values(0), n, c.hidden, row), exact.dx, unit, "dx");
        Matrix gate_up = matrix_of(run.grads.values(2), exact.dgate_up.size() / (c.apart ? 2 : 1),
                                   c.hidden, row);
        Vector bias = run.grads.values(5);
        if (c.apart) {
            for (const Vector &one : matrix_of(run.grads.values(3), f, c.hidden, row))
                gate_up.push_back(one);
            const Vector more = run.grads.values(6);
            bias.insert(bias.end(), more.begin(), more.end());
        }
        if (c.format == HR_DENSE) {
            expect_near(gate_up, exact.dgate_up, unit, "dgate_up");
            expect_near(
                matrix_of(run.grads.values(4), size_t(c.hidden), c.features, c.features + c.gap),
                exact.ddown, unit, "ddown");
        }
        expect_near(one_row(run.grads.values(0)), one_row(exact.dnorm_weight), unit,
                    "dnorm_weight");
        if (c.norm == HR_NORM_LAYER)
            expect_near(one_row(run.grads.values(1)), one_row(exact.dnorm_bias), unit,
                        "dnorm_bias");
        if (c.biases) {
            expect_near(one_row(bias), one_row(exact.dgate_up_bias), unit, "dgate_up_bias");
            expect_near(one_row(run.grads.values(7)), one_row(exact.ddown_bias), unit,
                        "ddown_bias");
        }
    }
}

TEST_P(Mlp, AConfigOfAnOlderHeaderHasNoMatrices)
{
    const MlpRun now(*backend, {});
    ASSERT_EQ(now.call(), HR_OK) << hr_last_error();
    for (const size_t more : {0, 4, 12}) {
        MlpRun older(*backend, {});
        older.config.gate_up = older.config.up = reinterpret_cast<const hr_matrix *>(8);
        cut(older.config, offsetof(hr_mlp_config, gate_up) + more);
        ASSERT_EQ(older.call(), HR_OK) << hr_last_error();
        EXPECT_EQ(older.image(), now.image());
    }
}

// With codes, and in config, too; with parts of few columns as well.
TEST_P(Mlp, OfFewBitsHasTheBitsOfTheDecodedMatrices)
{
    std::vector<MlpCase> some = cases_for(*backend);
    if (backend == &cpu_backend()) { // whose own loop takes a part of 64 rows or columns in 4 MiB
        MlpCase c = {.tokens = 17, .hidden = 130, .features = 16500, .dtype = HR_BF16};
        c.format = HR_NF4, c.save = HR_MLP_SAVE_INPUT;
        some.push_back(c);
    }
    for (const MlpCase &c : some) {
        if (c.format == HR_DENSE || c.tokens < 17 || c.tile)
            continue;
        SCOPED_TRACE(testing::PrintToString(c));
        const MlpRun run(*backend, c);
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        MlpRun decoded(*backend, c);
        hr_matrix dense[3];
        const hr_matrix **given[] = {&decoded.config.gate_up, &decoded.config.up,
                                     &decoded.config.down};
        hr_rows *const params[] = {&decoded.params.gate_up, &decoded.params.up,
                                   &decoded.params.down};
        for (const bool in_config : {true, false}) {
            for (size_t k = 0; k < 3; k++) {
                if (!decoded.few_bits[k])
                    continue;
                const hr_matrix &own = decoded.few_bits[k]->matrix;
                dense[k] = HR_MATRIX_INIT;
                dense[k].dtype = own.dtype, dense[k].rows = own.rows, dense[k].cols = own.cols;
                dense[k].stride = own.cols + c.gap, dense[k].data = decoded.weights.data[2 + k];
                *given[k] = in_config ? &dense[k] : nullptr;
                *params[k] = {in_config ? nullptr : dense[k].data, dense[k].stride};
            }
            ASSERT_EQ(decoded.call(), HR_OK) << hr_last_error();
            EXPECT_TRUE(decoded.gradients() == run.gradients());
        }
    }
}

TEST_P(Mlp, WhatIsKeptChangesNoBitAndBackwardCanRunAgain)
{
    for (MlpCase c : cases_for(*backend)) {
        SCOPED_TRACE(testing::PrintToString(c));
        std::vector<uint8_t> first;
        for (const hr_mlp_save save : {HR_MLP_SAVE_ALL, HR_MLP_SAVE_GATE_UP, HR_MLP_SAVE_INPUT}) {
            c.save = save;
            const MlpRun run(*backend, c);
            ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
            const std::vector<uint8_t> all = run.image();
            first = first.empty() ? run.gradients() : first;
            EXPECT_TRUE(run.gradients() == first) << "save " << save;
            if (save != HR_MLP_SAVE_INPUT) {
                ASSERT_EQ(run.backward(), HR_OK);
                EXPECT_TRUE(run.image() == all) << "save " << save;
            }
        }
    }
}

namespace
{
// Each gradient alone has the bits that it has among all; the others are not written.
void expect_each_alone(Backend &backend, MlpCase c)
{
    const MlpRun all(backend, c);
    ASSERT_EQ(all.call(), HR_OK) << hr_last_error();
    for (uint32_t bit = 1; bit < 128; bit *= 2) {
        c.wanted = bit;
        const MlpRun run(backend, c);
        SCOPED_TRACE(testing::PrintToString(c));
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        EXPECT_TRUE(run.whole());
        EXPECT_EQ(run.y.values(0), all.y.values(0));
        const Vector dx = run.dx.values(0);
        const uint32_t through_dx = HR_MLP_X | HR_MLP_NORM_WEIGHT | HR_MLP_NORM_BIAS;
        EXPECT_EQ(dx, bit & through_dx ? all.dx.values(0) : Vector(dx.size(), 77));
        const uint32_t bits[] = {HR_MLP_NORM_WEIGHT,  HR_MLP_NORM_BIAS, HR_MLP_GATE_UP,
                                 HR_MLP_GATE_UP,      HR_MLP_DOWN,      HR_MLP_GATE_UP_BIAS,
                                 HR_MLP_GATE_UP_BIAS, HR_MLP_DOWN_BIAS};
        for (size_t k = 0; k < 8; k++) {
            const Vector got = run.grads.values(k);
            EXPECT_EQ(got, bits[k] == bit ? all.grads.values(k) : Vector(got.size(), 77)) << k;
        }
    }
}
} // namespace

TEST_P(Mlp, OnlyWantedGradientsAreComputed)
{
    for (const hr_mlp_save save : {HR_MLP_SAVE_ALL, HR_MLP_SAVE_GATE_UP, HR_MLP_SAVE_INPUT})
        for (const bool apart : {false, true})
            for (const int64_t tile : {0, 3})
                if (!backend->is_emulated() || (apart == (save != HR_MLP_SAVE_ALL) &&
                                                (tile == 3) == (save != HR_MLP_SAVE_GATE_UP)))
                    expect_each_alone(*backend, {.norm = HR_NORM_LAYER,
                                                 .dtype = HR_BF16,
                                                 .apart = apart,
                                                 .biases = true,
                                                 .tile = tile,
                                                 .save = save});
}

// The gradient of gate alone, or of up alone, with those of both biases.
TEST_P(Mlp, OneOfTwoMatricesMayHaveNoGradient)
{
    for (const int64_t tile : {0, 3}) {
        const MlpCase c = {.dtype = HR_BF16, .apart = true, .biases = true, .tile = tile};
        const MlpRun all(*backend, c);
        ASSERT_EQ(all.call(), HR_OK) << hr_last_error();
        for (const size_t left_out : {2, 3}) { // gate_up, up
            MlpRun run(*backend, c);
            (left_out == 2 ? run.gradient.gate_up : run.gradient.up).data = nullptr;
            ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
            EXPECT_TRUE(run.whole());
            for (size_t k = 0; k < 8; k++) {
                if (k != left_out) {
                    EXPECT_EQ(run.grads.values(k), all.grads.values(k)) << k;
                }
            }
        }
    }
}

TEST_P(Mlp, InferenceMayWriteItsResultOverItsInput)
{
    for (const bool residual : {false, true}) {
        const MlpCase c = {.biases = true, .residual = residual, .tile = 2, .wanted = 0};
        const MlpRun apart(*backend, c);
        MlpRun inside(*backend, c);
        ASSERT_EQ(apart.forward(), HR_OK) << hr_last_error();
        inside.y_rows = inside.x_rows;
        ASSERT_EQ(inside.forward(), HR_OK) << hr_last_error();
        EXPECT_EQ(inside.x.values(0), apart.y.values(0));
        EXPECT_TRUE(inside.whole());
    }
}

TEST_P(Mlp, WorkspaceDoesNotGrowWithTheTokens)
{
    hr_mlp_config config = HR_MLP_CONFIG_INIT;
    config.dtype = HR_BF16;
    const hr_exec exec = backend->exec();
    const auto query = [&](int64_t tokens, hr_mlp_save save) {
        hr_mlp_needs needs;
        EXPECT_EQ(hr_mlp_query(&needs, tokens, 4096, 14336, save, 127 & ~HR_MLP_NORM_BIAS, &config,
                               &exec),
                  HR_OK)
            << hr_last_error();
        return needs;
    };
    for (const hr_mlp_save save : {HR_MLP_SAVE_ALL, HR_MLP_SAVE_GATE_UP, HR_MLP_SAVE_INPUT}) {
        const size_t n = 1 << 17, element = 2;
        const hr_mlp_needs short_run = query(int64_t(n), save),
                           long_run = query(int64_t(16 * n), save);
        EXPECT_EQ(short_run.tile_tokens, 4096);
        EXPECT_EQ(long_run.forward_workspace, short_run.forward_workspace);
        EXPECT_EQ(long_run.backward_workspace, short_run.backward_workspace);
        const bool all = save == HR_MLP_SAVE_ALL, input = save == HR_MLP_SAVE_INPUT;
        EXPECT_EQ(short_run.mean, 0u);
        EXPECT_EQ(short_run.rstd, n * 4);
        EXPECT_EQ(short_run.normed, all ? n * 4096 * element : 0);
        EXPECT_EQ(short_run.gate_up, input ? 0 : n * 2 * 14336 * element);
        EXPECT_EQ(short_run.activated, all ? n * 14336 * element : 0);
        EXPECT_EQ(short_run.reads_x, 1);
    }
    /* As long as one tile of all takes no more than tiles and the sums of their gradients. */
    EXPECT_EQ(query(9000, HR_MLP_SAVE_INPUT).tile_tokens, 9000);
    EXPECT_EQ(query(20000, HR_MLP_SAVE_INPUT).tile_tokens, 4096);
    EXPECT_EQ(query(4096 * 5 + 1, HR_MLP_SAVE_INPUT).tile_tokens, 3456);
    config.tile_tokens = 1000;
    EXPECT_EQ(query(9000, HR_MLP_SAVE_INPUT).tile_tokens, 1000);
    EXPECT_EQ(query(900, HR_MLP_SAVE_INPUT).tile_tokens, 900);
}

TEST_P(Mlp, GradientWithoutAGateTakesThePlaceOfWhatItIsMadeOf)
{
    hr_mlp_config config = HR_MLP_CONFIG_INIT;
    config.gated = 0;
    const hr_exec exec = backend->exec();
    const auto workspace = [&](hr_mlp_save save) {
        hr_mlp_needs needs;
        EXPECT_EQ(
            hr_mlp_query(&needs, 512, 256, 1024, save, 127 & ~HR_MLP_NORM_BIAS, &config, &exec),
            HR_OK)
            << hr_last_error();
        return needs.backward_workspace;
    };
    const size_t features = size_t{512} * 1024 * 4, normed = size_t{512} * 256 * 4;
    EXPECT_EQ(workspace(HR_MLP_SAVE_GATE_UP) - workspace(HR_MLP_SAVE_ALL), normed + features);
}

TEST(MlpBits, AreTheSameOnEveryInstructionSetAndThreadCount)
{
    std::vector<MlpCase> all = cases();
    all.push_back({.tokens = 300, .hidden = 70, .features = 130, .dtype = HR_BF16, .tile = 170});
    expect_bits_on_the_cpu<MlpRun>(all);
}

TEST(MlpBits, RepeatOnCuda)
{
    expect_repeats_on_cuda<MlpRun>(std::vector<MlpCase>{
        {.dtype = HR_BF16, .tile = 3}, {.norm = HR_NORM_LAYER, .gated = false, .biases = true}});
}
