// bnb_exact of hr_adamw8bit() against the rule as bitsandbytes publishes it
// (kOptimizerStatic8bit2StateBlockwise and quantize_2D in csrc/kernels.cu), step by step in
// binary32, with IEEE division in place of CUDA's fast one. Everything must be equal.
#include <algorithm>
#include <cmath>

#include "tests/c/optim/adamw8bit_run.h"

using Adamw8bitBnb = OnBackend;
ON_EVERY_BACKEND(Adamw8bitBnb);

namespace
{
float rounded(float x, hr_dtype dtype)
{
    uint8_t bytes[4];
    encode(x, bytes, dtype);
    return float(decode(bytes, dtype));
}

// A bisection that ends at an even code, and then its neighbor on the side of y.
int search(bool is_signed, float y)
{
    const auto value = [&](int code) { return float(dynamic_map(is_signed)[size_t(code)]); };
    int code = 127;
    for (int step = 64; step > 0; step /= 2)
        code += y > value(code) ? step : -step;
    if (y > value(code))
        return y > (value(code + 1) + value(code)) * 0.5f ? code + 1 : code;
    const int below = std::max(code - 1, 0);
    return y < (value(below) + value(code)) * 0.5f ? below : code;
}

struct Block {
    std::vector<float> params, m, v;
    std::vector<int> codes_m, codes_v;
    float absmax_m, absmax_v;
};

// Of the elements [begin, end) of tensor k, one block, in step t.
Block expected_block(const Adamw8bitRun &before, const Adamw8bitCase &c, size_t k, size_t begin,
                     size_t end, double t)
{
    const double c1 = 1 - std::pow(c.beta1, t), c2 = std::sqrt(1 - std::pow(c.beta2, t));
    const float beta1 = float(c.beta1), beta2 = float(c.beta2), eps = float(c2 * c.eps);
    const float step_size = float(-c.lr * c2 / c1);
    const float gnorm_scale =
        float(double(c.clip_coef.value_or(1)) / double(c.grad_scale.value_or(1)));
    const hr_dtype type = before.params.dtype[k];
    const std::vector<double> params = before.params.values(k), grads = before.grads.values(k),
                              codes_m = before.exp_avgs.values(k),
                              codes_v = before.exp_avg_sqs.values(k);
    const float old_m = float(before.exp_avg_absmaxs.values(k)[begin / 256]);
    const float old_v = float(before.exp_avg_sq_absmaxs.values(k)[begin / 256]);
    Block b = {};
    for (size_t i = begin; i < end; i++) {
        float p = float(params[i]), m = 0, v = 0;
        if (std::isfinite(grads[i])) {
            const float g = float(grads[i]) * gnorm_scale;
            v = float(dynamic_map(false)[size_t(codes_v[i])]) * old_v;
            v = v * beta2 + (1.0f - beta2) * g * g;
            m = float(dynamic_map(true)[size_t(codes_m[i])]) * old_m;
            m = m * beta1 + (1.0f - beta1) * g;
            p = rounded(p + step_size * (m / (std::sqrt(v) + eps)), type);
            if (c.weight_decay > 0)
                p = rounded(p * (1.0f - float(c.lr) * float(c.weight_decay)), type);
        }
        b.params.push_back(p);
        b.m.push_back(m);
        b.v.push_back(v);
        b.absmax_m = std::fmax(b.absmax_m, std::fabs(m));
        b.absmax_v = std::fmax(b.absmax_v, std::fabs(v));
    }
    for (size_t i = 0; i < b.m.size(); i++) {
        int code = search(true, b.m[i] / b.absmax_m);
        if (std::signbit(dynamic_map(true)[size_t(code)]) != std::signbit(b.m[i]))
            code += b.m[i] > 0 ? 1 : -1;
        b.codes_m.push_back(code & 255); // 0 - 1 wraps around
        b.codes_v.push_back(search(false, b.v[i] / b.absmax_v));
    }
    return b;
}

void expect_exact(Backend &backend, const Adamw8bitCase &c)
{
    SCOPED_TRACE(testing::PrintToString(c));
    const Adamw8bitRun before(backend, c), run(backend, c);
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    for (size_t k = 0; k < c.numel.size(); k++) {
        const size_t n = size_t(c.numel[k]);
        const std::vector<double> params = run.params.values(k), m = run.exp_avgs.values(k),
                                  v = run.exp_avg_sqs.values(k),
                                  absmax_m = run.exp_avg_absmaxs.values(k),
                                  absmax_v = run.exp_avg_sq_absmaxs.values(k);
        for (size_t begin = 0; begin < n; begin += 256) {
            const size_t end = std::min(begin + 256, n);
            const double t = double(c.step) + (c.steps ? double(k) : 0);
            const Block b = expected_block(before, c, k, begin, end, t);
            ASSERT_EQ(absmax_m[begin / 256], b.absmax_m) << "tensor " << k << " from " << begin;
            ASSERT_EQ(absmax_v[begin / 256], b.absmax_v) << "tensor " << k << " from " << begin;
            for (size_t i = begin; i < end; i++) {
                const size_t in_block = i - begin;
                ASSERT_EQ(params[i], b.params[in_block]) << i;
                ASSERT_EQ(m[i], b.codes_m[in_block]) << i << ": " << b.m[in_block];
                ASSERT_EQ(v[i], b.codes_v[in_block]) << i << ": " << b.v[in_block];
            }
        }
    }
}

Adamw8bitCase exact()
{
    Adamw8bitCase c;
    c.bnb_exact = true;
    c.numel = {700, 1, 256, 0, 257};
    c.weight_decay = 0.1;
    return c;
}
} // namespace

TEST_P(Adamw8bitBnb, EveryTypeAndStep)
{
    for (const hr_dtype param : float_types())
        for (const hr_dtype grad : float_types())
            for (const int64_t step : {1, 2, 100, 10000})
                for (const double weight_decay : {0.0, 0.1}) {
                    Adamw8bitCase c = exact();
                    c.param = {param};
                    c.grad = {grad};
                    c.step = step;
                    c.weight_decay = weight_decay;
                    expect_exact(*backend, c);
                }
}

TEST_P(Adamw8bitBnb, ScaledGradientsAndCounters)
{
    Adamw8bitCase c = exact();
    c.grad_scale = 3.0f;
    c.clip_coef = 0.7f;
    c.steps = HR_F32;
    expect_exact(*backend, c);
}

TEST_P(Adamw8bitBnb, NonfiniteGradients)
{
    Adamw8bitCase c = exact();
    c.grads = [](size_t k, size_t i) {
        const double bad[] = {NAN, INFINITY, -INFINITY, 1e-42, 0, -0.0, 1e18, -1e-30};
        return noise(k, i) > 0.6 ? bad[i % 8] : noise(k + 9, i);
    };
    expect_exact(*backend, c);
}

TEST_P(Adamw8bitBnb, ZerosOfBothSigns)
{
    for (const double grad : {0.0, -0.0}) {
        Adamw8bitCase c = exact();
        c.exp_avg_absmaxs = c.exp_avg_sq_absmaxs = [](size_t, size_t) { return 0.0; };
        c.grads = [=](size_t, size_t i) { return i < 300 ? grad : i % 2 ? 1.0 : grad; };
        expect_exact(*backend, c);
        c.exp_avgs = [](size_t, size_t) { return 127.0; };
        expect_exact(*backend, c);
    }
}

// Moments on every code, on every midpoint between two and next to it, over a scale of 1: the
// moments are the gradient and its square.
TEST_P(Adamw8bitBnb, WhereCodesChange)
{
    std::vector<float> values;
    for (const bool is_signed : {false, true})
        for (size_t code = 0; code < 255; code++) {
            const std::vector<double> &map = dynamic_map(is_signed);
            for (const double x : {map[code], (map[code] + map[code + 1]) / 2})
                for (const float y : {float(x), std::sqrt(std::fabs(float(x)))})
                    for (const float near : {y, std::nextafter(y, 2.0f), std::nextafter(y, -2.0f)})
                        values.push_back(near);
        }
    Adamw8bitCase c = exact();
    c.beta1 = c.beta2 = 0;
    c.numel = {int64_t(values.size())};
    c.grads = [&](size_t, size_t i) { return i % 256 == 0 ? 1 : double(values[i]); };
    expect_exact(*backend, c);
}
