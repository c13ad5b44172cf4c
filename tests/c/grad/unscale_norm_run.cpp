#include "tests/c/grad/unscale_norm_run.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace
{
template <class T> std::vector<uint8_t> repeated(T value, size_t count)
{
    std::vector<uint8_t> bytes(count * sizeof value);
    for (size_t i = 0; i < count; i++)
        std::memcpy(&bytes[i * sizeof value], &value, sizeof value);
    return bytes;
}

constexpr float kUnwritten = -77;
} // namespace

NormRun::NormRun(Backend &backend, const NormCase &c)
    : grads(backend, c.numel, c.types, c.shift, c.value), exec(backend.exec())
{
    outputs_.emplace_back(backend, repeated(kUnwritten, 1));
    outputs_.emplace_back(backend, repeated(kUnwritten, c.numel.size()));
    outputs_.emplace_back(backend, repeated(kFoundBefore, 1));
    outputs_.emplace_back(backend, repeated(int64_t(-77), 1));
    outputs_.emplace_back(backend, repeated(kUnwritten, 1));
    const auto output = [&](NormOutput wanted, size_t i) {
        return c.outputs.value_or(0) & wanted ? outputs_[i].data() : nullptr;
    };
    result.norm = static_cast<float *>(output(NORM, 0));
    result.norms = static_cast<float *>(output(NORMS, 1));
    result.found_inf = static_cast<float *>(output(FOUND_INF, 2));
    result.culprit = static_cast<int64_t *>(output(CULPRIT, 3));
    result.clip_coef = static_cast<float *>(output(CLIP_COEF, 4));
    const auto scalar = [&](std::optional<float> value) -> const float * {
        if (!value)
            return nullptr;
        scalars_.emplace_back(backend, encode({*value}, HR_F32));
        return static_cast<const float *>(scalars_.back().data());
    };
    config.p = c.p;
    config.max_norm = c.max_norm;
    config.write = c.write;
    config.grad_scale = scalar(c.grad_scale);
    config.clip_coef = scalar(c.clip_coef);
    if (!c.outputs)
        return;
    result_argument = &result;
    EXPECT_EQ(hr_unscale_norm_workspace(&workspace_bytes, &grads.list), HR_OK) << hr_last_error();
    workspace_.emplace_back(backend, repeated(uint8_t(0xFF), workspace_bytes)); // NaN
    workspace = workspace_.back().data();
}

hr_status NormRun::call() const
{
    return hr_unscale_norm(grads.argument, result_argument, config_argument, workspace,
                           workspace_bytes, exec_argument);
}

std::vector<Tensors *> NormRun::lists()
{
    return {&grads};
}

template <class T> std::vector<T> NormRun::output(size_t i) const
{
    const std::vector<uint8_t> bytes = outputs_[i].content();
    std::vector<T> values(bytes.size() / sizeof(T));
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<uint8_t *>(values.data()));
    return values;
}

float NormRun::norm() const
{
    return output<float>(0)[0];
}

std::vector<float> NormRun::norms() const
{
    return output<float>(1);
}

float NormRun::found_inf() const
{
    return output<float>(2)[0];
}

int64_t NormRun::culprit() const
{
    return output<int64_t>(3)[0];
}

float NormRun::clip_coef() const
{
    return output<float>(4)[0];
}

std::vector<uint8_t> NormRun::results() const
{
    return image_of({&outputs_});
}

std::vector<uint8_t> NormRun::gradients() const
{
    return image_of({&grads.buffers});
}

std::vector<uint8_t> NormRun::image() const
{
    return image_of({&grads.buffers, &outputs_, &scalars_, &workspace_});
}

bool NormRun::whole() const
{
    return intact({&grads.buffers, &outputs_, &scalars_, &workspace_});
}

ExactNorm::ExactNorm(const Tensors &grads, const NormCase &c)
{
    const float factor = float(double(c.clip_coef.value_or(1)) / double(c.grad_scale.value_or(1)));
    const bool maximum = std::isinf(c.p);
    const auto combine = [&](long double a, long double b) {
        return !maximum ? a + b : std::isnan(a) || std::isnan(b) ? NAN : std::max(a, b);
    };
    long double total = 0;
    for (size_t k = 0; k < grads.buffers.size(); k++) {
        scaled.push_back(grads.values(k));
        long double sum = 0;
        for (double &x : scaled.back()) {
            x = double(float(x * double(factor))); // the product of two binary32 fits in binary64
            const long double size = std::fabs(x);
            sum = combine(sum, maximum ? size : std::pow(size, (long double)c.p));
            if (culprit < 0 && !std::isfinite(x))
                culprit = int64_t(k);
        }
        norms.push_back(maximum ? sum : std::pow(sum, 1 / (long double)c.p));
        total = combine(total, sum);
    }
    norm = maximum ? total : std::pow(total, 1 / (long double)c.p);
    clip_coef = c.max_norm / (norm + 1e-6L);
    if (clip_coef > 1)
        clip_coef = 1;
}

void expect_exact(const NormRun &run, const ExactNorm &exact, const NormCase &c)
{
    SCOPED_TRACE(testing::PrintToString(c));
    // Sums in binary64 leave the rounding to binary32. The squares of a CUDA device are half in
    // binary32.
    const double bound = run.exec.device != HR_CPU && c.p == 2 ? 2.5 : 0.501;
    EXPECT_LE(ulps(run.norm(), exact.norm), bound) << run.norm() << ", wanted " << exact.norm;
    const std::vector<float> norms = run.norms();
    ASSERT_EQ(norms.size(), exact.norms.size());
    for (size_t k = 0; k < norms.size(); k++)
        EXPECT_LE(ulps(norms[k], exact.norms[k]), bound)
            << "tensor " << k << ": " << norms[k] << ", wanted " << exact.norms[k];
    EXPECT_EQ(run.found_inf(), exact.culprit < 0 ? NormRun::kFoundBefore : 1);
    EXPECT_EQ(run.culprit(), exact.culprit);
    EXPECT_LE(ulps(run.clip_coef(), exact.clip_coef), bound > 1 ? 2 * bound : bound)
        << run.clip_coef() << ", wanted " << exact.clip_coef;
    EXPECT_TRUE(run.whole());
    for (size_t k = 0; c.write && k < norms.size(); k++) {
        const std::vector<double> got = run.grads.values(k);
        const auto wanted = decode(encode(exact.scaled[k], run.grads.dtype[k]), run.grads.dtype[k]);
        for (size_t i = 0; i < got.size(); i++)
            if (got[i] != wanted[i] && !(std::isnan(got[i]) && std::isnan(wanted[i]))) {
                ADD_FAILURE() << "element " << i << " of tensor " << k << " is " << got[i]
                              << ", wanted " << wanted[i];
                return;
            }
    }
}

void expect_exact(Backend &backend, const NormCase &c)
{
    const NormRun run(backend, c);
    const ExactNorm exact(run.grads, c);
    const std::vector<uint8_t> before = run.gradients();
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    expect_exact(run, exact, c);
    EXPECT_TRUE(c.write || run.gradients() == before);
}

std::ostream &operator<<(std::ostream &out, const NormCase &c)
{
    out << c.numel.size() << " tensors";
    for (size_t k = 0; k < std::min(c.numel.size(), size_t(4)); k++)
        out << (k ? ", " : " of ") << c.numel[k];
    for (const hr_dtype type : c.types)
        out << " " << name_of(type);
    out << ", p " << c.p << ", shift " << c.shift << (c.write ? ", write" : "");
    out << (c.grad_scale ? ", grad_scale" : "") << (c.clip_coef ? ", clip_coef" : "");
    return out;
}
