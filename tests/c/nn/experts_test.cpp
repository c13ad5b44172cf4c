// Routing against a stable sort, and experts against their formulas in binary64, with more and with
// less kept, and in tiles.
#include <algorithm>
#include <cmath>

#include "tests/c/harness/bits.h"
#include "tests/c/harness/refused.h"
#include "tests/c/nn/experts_run.h"

using Experts = OnBackend;
ON_EVERY_BACKEND(Experts);

namespace
{

using Vector = std::vector<double>;

double slope_and_value(double x, hr_activation activation, double alpha, double *value)
{
    const double a = activation == HR_SWIGLU_ALPHA ? alpha : 1, s = 1 / (1 + std::exp(-a * x));
    const double k = std::sqrt(2 / M_PI), t = std::tanh(k * (x + 0.044715 * x * x * x));
    switch (activation) {
    case HR_GELU_TANH:
        *value = x / 2 * (1 + t);
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 0.134145 * x * x);
    case HR_RELU_SQUARED:
        *value = x > 0 ? x * x : 0;
        return 2 * std::fmax(x, 0);
    default:
        *value = x * s;
        return s * (1 + a * x * (1 - s));
    }
}

// All of it in binary64, one row after the other.
struct Reference {
    Vector y, dx, dweight;
    Vector grads[8]; // as in ExpertsRun

    explicit Reference(const ExpertsRun &run)
    {
        const ExpertsCase &c = run.shape;
        const size_t n = size_t(c.tokens), h = size_t(c.hidden), f = size_t(c.features);
        const size_t w = size_t(run.width), k = size_t(c.slots), row = h + size_t(c.gap);
        const Vector x = run.x.values(0), dy = run.dy.values(0), weight = run.weight.values(0);
        Vector gate_up = run.matrices(0), down = run.matrices(1);
        const Vector gate_up_bias = run.stacks.values(2), down_bias = run.stacks.values(3);
        const auto limit = c.limit > 0 ? c.limit : INFINITY;
        Vector &dgate_up = grads[0], &ddown = grads[1];
        Vector &dgate_up_bias = grads[2], &ddown_bias = grads[3];
        y = dx = Vector(n * h), dweight = Vector(n * k);
        dgate_up = Vector(size_t(c.experts) * w * h), ddown = Vector(size_t(c.experts) * h * f);
        dgate_up_bias = Vector(size_t(c.experts) * w), ddown_bias = Vector(size_t(c.experts) * h);
        // The place of an element of a matrix [outputs, inputs] of expert e.
        const auto place = [&](size_t e, size_t out, size_t in, size_t outputs, size_t inputs,
                               size_t gap) {
            const size_t rows = c.transposed ? inputs : outputs;
            const size_t cols = c.transposed ? outputs : inputs;
            const size_t at = c.transposed ? in * (cols + gap) + out : out * (cols + gap) + in;
            return e * (rows * (cols + gap) + gap) + at;
        };
        const size_t gap = size_t(c.gap), experts = size_t(c.experts);
        // Adapters: calls visit(e, r, place in A, out, place in B, in) for all that are multiplied.
        const auto pairs = [&](size_t rank, size_t outputs, size_t inputs, const auto &visit) {
            for (size_t e = 0; e < experts; e++)
                for (size_t r = 0; r < rank; r++)
                    for (size_t out = 0; out < outputs; out++)
                        for (size_t in = 0; in < inputs; in++)
                            visit(e, out, in, (e * rank + r) * inputs + in,
                                  (e * outputs + out) * rank + r);
        };
        const auto add_adapter = [&](size_t which, Vector &matrices, size_t rank, size_t outputs,
                                     size_t inputs) {
            const Vector a = run.stacks.values(4 + 2 * which), b = run.stacks.values(5 + 2 * which);
            pairs(rank, outputs, inputs,
                  [&](size_t e, size_t out, size_t in, size_t at_a, size_t at_b) {
                      matrices[place(e, out, in, outputs, inputs, gap)] +=
                          kAdapterScales[which] * b[at_b] * a[at_a];
                  });
        };
        add_adapter(0, gate_up, size_t(c.gate_up_rank), w, h);
        add_adapter(1, down, size_t(c.down_rank), h, f);
        for (size_t s = 0; s < n * k; s++) {
            if (run.experts_of[s] < 0 || run.experts_of[s] >= c.experts)
                continue;
            const size_t e = size_t(run.experts_of[s]), t = s / k;
            Vector z(w), dz(w), inner(f), q(f);
            for (size_t o = 0; o < w; o++) {
                z[o] = c.biases ? gate_up_bias[e * w + o] : 0;
                for (size_t j = 0; j < h; j++)
                    z[o] += x[t * row + j] * gate_up[place(e, o, j, w, h, gap)];
            }
            for (size_t i = 0; i < f; i++) {
                const size_t at_gate = c.interleaved ? 2 * i : i;
                const size_t at_up = c.interleaved ? 2 * i + 1 : f + i;
                const double gate = z[at_gate], up = c.gated ? z[at_up] : 0;
                const double bounded = std::fmin(std::fmax(up, -limit), limit);
                const double factor =
                    !c.gated ? 1 : bounded + (c.activation == HR_SWIGLU_ALPHA ? 1 : 0);
                double value;
                const double slope =
                    slope_and_value(std::fmin(gate, limit), c.activation, run.config.alpha, &value);
                inner[i] = value * factor;
                for (size_t j = 0; j < h; j++)
                    q[i] += dy[t * row + j] * down[place(e, j, i, h, f, gap)];
                dz[at_gate] = gate < limit ? weight[s] * q[i] * slope * factor : 0;
                if (c.gated)
                    dz[at_up] = std::fabs(up) < limit ? weight[s] * q[i] * value : 0;
                dweight[s] += inner[i] * q[i];
            }
            for (size_t j = 0; j < h; j++) {
                double out = c.biases ? down_bias[e * h + j] : 0;
                const double d = dy[t * row + j];
                for (size_t i = 0; i < f; i++) {
                    out += inner[i] * down[place(e, j, i, h, f, gap)];
                    ddown[place(e, j, i, h, f, 0)] += weight[s] * d * inner[i];
                }
                y[t * h + j] += weight[s] * out;
                ddown_bias[e * h + j] += weight[s] * d;
                dweight[s] += c.biases ? d * down_bias[e * h + j] : 0;
                for (size_t o = 0; o < w; o++) {
                    dx[t * h + j] += dz[o] * gate_up[place(e, o, j, w, h, gap)];
                    dgate_up[place(e, o, j, w, h, 0)] += dz[o] * x[t * row + j];
                }
            }
            for (size_t o = 0; o < w; o++)
                dgate_up_bias[e * w + o] += dz[o];
        }
        const auto to_adapter = [&](size_t which, size_t rank, size_t outputs, size_t inputs) {
            const Vector a = run.stacks.values(4 + 2 * which), b = run.stacks.values(5 + 2 * which);
            Vector &da = grads[4 + 2 * which], &db = grads[5 + 2 * which];
            da = Vector(a.size()), db = Vector(b.size());
            pairs(rank, outputs, inputs,
                  [&](size_t e, size_t out, size_t in, size_t at_a, size_t at_b) {
                      const double grad = kAdapterScales[which] *
                                          grads[which][place(e, out, in, outputs, inputs, 0)];
                      da[at_a] += grad * b[at_b];
                      db[at_b] += grad * a[at_a];
                  });
        };
        to_adapter(0, size_t(c.gate_up_rank), w, h);
        to_adapter(1, size_t(c.down_rank), h, f);
    }
};

void expect_near(const Vector &got, const Vector &exact, double unit, const char *what)
{
    ASSERT_EQ(got.size(), exact.size()) << what;
    double largest = 0;
    for (const double value : exact)
        largest = std::fmax(largest, std::fabs(value));
    for (size_t i = 0; i < got.size(); i++)
        ASSERT_NEAR(got[i], exact[i], 16 * unit * largest) << what << " " << i;
}

std::vector<ExpertsCase> cases()
{
    std::vector<ExpertsCase> all;
    for (const hr_dtype dtype : {HR_F32, HR_BF16, HR_F16})
        for (const int64_t tile : {0, 2}) {
            all.push_back({.dtype = dtype, .matrix_dtype = dtype, .tile = tile});
            ExpertsCase oss = {.tokens = 9, .slots = 3, .hidden = 9, .features = 6, .gap = 3};
            oss.activation = HR_SWIGLU_ALPHA, oss.dtype = oss.weight_dtype = dtype;
            oss.matrix_dtype = dtype, oss.transposed = oss.interleaved = oss.biases = true;
            oss.tile = tile, oss.index_bytes = 4;
            oss.limit = dtype == HR_F32 ? 1 : 90; // rounding lets 16 bits cross it
            all.push_back(oss);
            ExpertsCase plain = {.tokens = 12, .slots = 1, .experts = 3, .hidden = 16};
            plain.features = 16, plain.activation = HR_RELU_SQUARED, plain.dtype = dtype;
            plain.gated = false, plain.biases = true, plain.tile = tile; // of f32 matrices
            plain.index_bytes = 2, plain.save = HR_EXPERTS_SAVE_ALL;
            all.push_back(plain);
            ExpertsCase gelu = {.tokens = 5, .slots = 4, .hidden = 40, .features = 24};
            gelu.activation = HR_GELU_TANH, gelu.dtype = dtype, gelu.tile = tile;
            gelu.interleaved = true, gelu.save = HR_EXPERTS_SAVE_INPUT;
            all.push_back(gelu);
        }
    all.push_back({.tokens = 0, .biases = true});
    all.push_back({.tokens = 1, .slots = 1, .experts = 1, .hidden = 1, .features = 1});
    ExpertsCase one = {.tokens = 40, .slots = 2, .experts = 1, .biases = true}; // each token twice
    one.tile = 7;
    all.push_back(one);
    for (const hr_dtype dtype : {HR_F32, HR_BF16, HR_F16}) {
        ExpertsCase qlora = {.tokens = 9, .slots = 3, .hidden = 32, .features = 24};
        qlora.size = 0.1; // scales of few bits are up to 9
        qlora.dtype = dtype, qlora.biases = true, qlora.tile = 2;
        qlora.gate_up_format = qlora.down_format = HR_NF4, qlora.nested = true;
        qlora.gate_up_rank = 3, qlora.down_rank = 2;
        all.push_back(qlora);
        ExpertsCase odd = {.tokens = 12, .slots = 2, .experts = 5, .hidden = 7, .features = 5};
        odd.size = 0.1, odd.dtype = odd.matrix_dtype = dtype,
        odd.transposed = odd.interleaved = true;
        odd.gate_up_format = HR_INT8_ROWS, odd.down_format = HR_FP4;
        odd.down_rank = 1, odd.adapter_dtype = dtype, odd.save = HR_EXPERTS_SAVE_INPUT;
        all.push_back(odd);
        ExpertsCase lora = {.tokens = 9, .slots = 2, .hidden = 8, .features = 12};
        lora.dtype = lora.matrix_dtype = lora.adapter_dtype = dtype, lora.tile = 3;
        lora.activation = HR_RELU_SQUARED, lora.gated = false, lora.save = HR_EXPERTS_SAVE_ALL;
        lora.size = 0.5, lora.down_format = HR_NF4, lora.gate_up_rank = 4;
        all.push_back(lora);
    }
    return all;
}

// Fewer where an emulator runs them.
std::vector<ExpertsCase> cases_for(Backend &backend)
{
    std::vector<ExpertsCase> some;
    for (size_t k = 0; k < cases().size(); k++)
        if (!backend.is_emulated() || k % 5 == 1 || k >= 24)
            some.push_back(cases()[k]);
    return some;
}

} // namespace

TEST_P(Experts, RoutingIsAStableSort)
{
    for (const int32_t bytes : {2, 4, 8})
        for (const int64_t tokens : {0, 1, 90, 300}) {
            const ExpertsCase c = {
                .tokens = tokens, .slots = 3, .experts = 5, .index_bytes = bytes};
            const ExpertsRun run(*backend, c);
            EXPECT_TRUE(run.whole());
            std::vector<int32_t> rows(size_t(run.rows)), ends(1);
            for (size_t i = 0; i < rows.size(); i++)
                rows[i] = int32_t(i);
            const auto bucket = [&](int32_t row) {
                const int64_t e = run.experts_of[size_t(row)];
                return e < 0 || e >= c.experts ? c.experts : e;
            };
            std::stable_sort(rows.begin(), rows.end(),
                             [&](int32_t a, int32_t b) { return bucket(a) < bucket(b); });
            for (int64_t e = 0; e < c.experts; e++)
                ends.push_back(int32_t(std::count_if(rows.begin(), rows.end(),
                                                     [&](int32_t r) { return bucket(r) <= e; })));
            EXPECT_EQ(run.numbers(run.order), rows);
            EXPECT_EQ(run.numbers(run.offsets), ends);
        }
}

TEST_P(Experts, ForwardAndBackwardFollowTheFormulas)
{
    for (const ExpertsCase &c : cases()) {
        SCOPED_TRACE(testing::PrintToString(c));
        const ExpertsRun run(*backend, c);
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        EXPECT_TRUE(run.whole());
        const Reference exact(run);
        const double unit = epsilon_of(c.dtype) / 2;
        expect_near(run.y.values(0), exact.y, unit, "y");
        expect_near(run.dx.values(0), exact.dx, unit, "dx");
        expect_near(run.dweight.values(0), exact.dweight, unit, "dweight");
        const char *const names[] = {"dgate_up",   "ddown",         "dgate_up_bias",
                                     "ddown_bias", "dA of gate_up", "dB of gate_up",
                                     "dA of down", "dB of down"};
        for (size_t k = 0; k < 8; k++) {
            if (run.grads.numel[k] > 0)
                expect_near(run.grads.values(k), exact.grads[k], unit, names[k]);
        }
    }
}

TEST_P(Experts, WhatIsKeptChangesNoBitAndBackwardCanRunAgain)
{
    for (ExpertsCase c : cases_for(*backend)) {
        SCOPED_TRACE(testing::PrintToString(c));
        std::vector<uint8_t> first;
        for (const hr_experts_save save :
             {HR_EXPERTS_SAVE_ALL, HR_EXPERTS_SAVE_GATE_UP, HR_EXPERTS_SAVE_INPUT}) {
            c.save = save;
            const ExpertsRun run(*backend, c);
            ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
            const std::vector<uint8_t> all = run.image();
            first = first.empty() ? run.gradients() : first;
            EXPECT_TRUE(run.gradients() == first) << "save " << save;
            ASSERT_EQ(run.backward(), HR_OK);
            EXPECT_TRUE(run.image() == all) << "save " << save;
        }
    }
}

TEST_P(Experts, AGradientIsTheSameWithoutTheOthers)
{
    ExpertsCase c = cases()[1];
    c.gate_up_rank = 2, c.down_rank = 3;
    const ExpertsRun all(*backend, c);
    ASSERT_EQ(all.call(), HR_OK) << hr_last_error();
    const uint32_t bits[] = {HR_EXPERTS_GATE_UP,   HR_EXPERTS_DOWN,      HR_EXPERTS_GATE_UP_BIAS,
                             HR_EXPERTS_DOWN_BIAS, HR_EXPERTS_GATE_UP_A, HR_EXPERTS_GATE_UP_B,
                             HR_EXPERTS_DOWN_A,    HR_EXPERTS_DOWN_B};
    for (const hr_experts_save save : {HR_EXPERTS_SAVE_GATE_UP, HR_EXPERTS_SAVE_INPUT})
        for (c.wanted = 1, c.save = save; c.wanted < 1024; c.wanted *= 2) {
            SCOPED_TRACE(testing::PrintToString(c));
            const ExpertsRun run(*backend, c);
            ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
            EXPECT_TRUE(run.whole());
            if (c.wanted == HR_EXPERTS_X) {
                EXPECT_EQ(run.dx.values(0), all.dx.values(0));
            }
            if (c.wanted == HR_EXPERTS_WEIGHT) {
                EXPECT_EQ(run.dweight.values(0), all.dweight.values(0));
            }
            for (size_t k = 0; k < 8; k++)
                if (c.wanted == bits[k]) {
                    EXPECT_EQ(run.grads.values(k), all.grads.values(k));
                }
        }
}

TEST_P(Experts, WorkspaceDoesNotGrowWithTheRowsButForTheirSums)
{
    const auto needs = [&](int64_t tokens, hr_experts_save save) {
        hr_experts_config config = HR_EXPERTS_CONFIG_INIT;
        config.dtype = HR_BF16;
        static float unread = 0;
        hr_experts_params params = HR_EXPERTS_PARAMS_INIT;
        for (hr_matrix *m : {&params.gate_up, &params.down})
            m->dtype = HR_BF16, m->data = &unread;
        params.gate_up.rows = 1536, params.gate_up.cols = params.gate_up.stride = 2048;
        params.down.rows = 2048, params.down.cols = params.down.stride = 768;
        params.gate_up_pitch = 1536 * 2048, params.down_pitch = 2048 * 768;
        const hr_experts_sizes sizes = {tokens, 8, 128, 2048, 768};
        const hr_exec exec = backend->exec();
        hr_experts_needs found = {};
        EXPECT_EQ(hr_experts_query(&found, &sizes, save, 63, &params, &config, &exec), HR_OK)
            << hr_last_error();
        return found;
    };
    for (const hr_experts_save save :
         {HR_EXPERTS_SAVE_ALL, HR_EXPERTS_SAVE_GATE_UP, HR_EXPERTS_SAVE_INPUT}) {
        const hr_experts_needs few = needs(1024, save), many = needs(4096, save);
        const size_t sums = size_t{3072} * 2048 * 4;
        EXPECT_EQ(few.tile_rows, 512);
        EXPECT_EQ(many.forward_workspace - few.forward_workspace, sums);
        EXPECT_EQ(many.backward_workspace - few.backward_workspace, sums);
        EXPECT_EQ(few.gate_up, save == HR_EXPERTS_SAVE_INPUT ? 0 : size_t{8192} * 1536 * 2);
        EXPECT_EQ(few.activated, save == HR_EXPERTS_SAVE_ALL ? size_t{8192} * 768 * 2 : 0);
        EXPECT_EQ(few.reads_x, 1);
    }
}

TEST(ExpertsBits, AreTheSameOnEveryInstructionSetAndThreadCount)
{
    std::vector<ExpertsCase> all = cases();
    ExpertsCase large = {.tokens = 300, .slots = 2, .experts = 3, .hidden = 300, .features = 130};
    large.dtype = large.matrix_dtype = HR_BF16, large.biases = true;
    all.push_back(large);
    expect_bits_on_the_cpu<ExpertsRun>(all, [](const auto &run) { return run.gradients(); });
}

TEST(ExpertsBits, RepeatOnCuda)
{
    expect_repeats_on_cuda<ExpertsRun>(
        std::vector<ExpertsCase>{cases()[1], cases()[14], cases()[27]});
}
