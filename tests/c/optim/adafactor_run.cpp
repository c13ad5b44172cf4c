#include "tests/c/optim/adafactor_run.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace
{
using Shape = hr_adafactor_shape;
using Values = std::vector<long double>;

const std::vector<hr_dtype> f32 = {HR_F32}, counters = {HR_F64, HR_F32};

std::vector<int64_t> sizes(const std::vector<Shape> &shapes, int64_t (*size)(const Shape &))
{
    std::vector<int64_t> all;
    std::transform(shapes.begin(), shapes.end(), std::back_inserter(all), size);
    return all;
}

int64_t numel_of(const Shape &s)
{
    return s.batch * s.rows * s.cols;
}

int64_t rows_of(const Shape &s)
{
    return s.factored ? s.batch * s.rows : 0;
}

int64_t cols_of(const Shape &s)
{
    return s.factored ? s.batch * s.cols : 0;
}

int64_t variances_of(const Shape &s)
{
    return s.factored ? 0 : numel_of(s);
}

int64_t one(const Shape &)
{
    return 1;
}

// A variance of a run that has had some steps.
double variance(size_t k, size_t i)
{
    return 0.2 + 0.1 * noise(k + 70, i);
}

Values wide(const std::vector<double> &values)
{
    return Values(values.begin(), values.end());
}

long double norm2(const Values &values)
{
    long double sum = 0;
    for (const long double x : values)
        sum += x * x;
    return sum;
}
} // namespace

Shape matrix(int64_t rows, int64_t cols, int64_t batch)
{
    return {batch, rows, cols, 1, 0, 0, 0};
}

Shape vector(int64_t numel)
{
    return {1, 1, numel, 0, 0, 0, 0};
}

AdafactorRun::AdafactorRun(Backend &backend, const AdafactorCase &c)
    : shapes(c.shapes), params(backend, sizes(shapes, numel_of), c.params, shift_of(c, 0),
                               [](size_t k, size_t i) { return 0.5 * noise(k + 40, i); }),
      row_vars(backend, sizes(shapes, rows_of), f32, shift_of(c, 1), variance),
      col_vars(backend, sizes(shapes, cols_of), f32, shift_of(c, 2), variance),
      variances(backend, sizes(shapes, variances_of), f32, shift_of(c, 3), variance),
      exp_avgs(backend, sizes(shapes, numel_of), f32, shift_of(c, 4),
               [](size_t k, size_t i) { return 1e-3 * noise(k + 50, i); }),
      rms_values(backend, sizes(shapes, one), f32, shift_of(c, 5),
                 [](size_t, size_t) { return 77; }),
      steps(backend, sizes(shapes, one), counters, shift_of(c, 6),
            [&](size_t k, size_t) { return c.counted + double(k % 9); }),
      grads(backend, sizes(shapes, numel_of), c.grads, shift_of(c, 7), c.grad), config(c.config),
      exec(backend.exec()), shapes_argument(shapes.data()), backend_(backend)
{
    exp_avgs.argument = c.momentum ? &exp_avgs.list : nullptr;
    rms_values.argument = c.rms_values ? &rms_values.list : nullptr;
    steps.argument = c.steps ? &steps.list : nullptr;
    const auto scalar = [&](double value, hr_dtype dtype) {
        scalars_.emplace_back(backend, encode({value}, dtype));
        return scalars_.back().data();
    };
    const auto f32_scalar = [&](std::optional<float> value) {
        return value ? static_cast<const float *>(scalar(*value, HR_F32)) : nullptr;
    };
    config.semantics = c.semantics;
    if (c.weights) {
        weights.emplace(backend, *c.weights, params.numel, params.dtype, params.buffers);
        config.step.weights = &weights->weights;
    }
    if (c.lr_on_device) {
        config.step.lr_dtype = *c.lr_on_device;
        config.step.lr_ptr = scalar(config.step.lr, config.step.lr_dtype);
        config.step.lr = -1;
    }
    config.step.grad_scale = f32_scalar(c.grad_scale);
    config.step.found_inf = f32_scalar(c.found_inf);
    config.step.clip_coef = f32_scalar(c.clip_coef);
    EXPECT_EQ(hr_adafactor_workspace(&workspace_bytes, shapes.data(), int64_t(shapes.size())),
              HR_OK)
        << hr_last_error();
    workspace_.emplace_back(backend, std::vector<uint8_t>(workspace_bytes, 0xFF)); // NaN
    workspace = workspace_.back().data();
}

hr_status AdafactorRun::call() const
{
    return hr_adafactor(params.argument, row_vars.argument, col_vars.argument, variances.argument,
                        exp_avgs.argument, rms_values.argument, steps.argument, grads.argument,
                        shapes_argument, config_argument, workspace, workspace_bytes,
                        exec_argument);
}

hr_status AdafactorRun::call(int32_t phases)
{
    config.phases = phases;
    return call();
}

std::vector<uint8_t> AdafactorRun::results() const
{
    return image_of({&params.buffers, &row_vars.buffers, &col_vars.buffers, &variances.buffers,
                     &exp_avgs.buffers, &rms_values.buffers, &steps.buffers});
}

std::vector<uint8_t> AdafactorRun::image() const
{
    std::vector<uint8_t> all = results();
    const std::vector<uint8_t> more = image_of({&grads.buffers, &scalars_, &workspace_});
    all.insert(all.end(), more.begin(), more.end());
    return all;
}

bool AdafactorRun::whole() const
{
    return intact(buffers());
}

void AdafactorRun::take(const AdafactorRun &other)
{
    ::take(buffers(), other.buffers());
}

std::vector<const std::vector<Buffer> *> AdafactorRun::buffers() const
{
    std::vector<const std::vector<Buffer> *> all = {
        &params.buffers,   &row_vars.buffers,   &col_vars.buffers, &variances.buffers,
        &exp_avgs.buffers, &rms_values.buffers, &steps.buffers,    &grads.buffers,
        &scalars_,         &workspace_};
    if (weights)
        all.push_back(&weights->buffers);
    return all;
}

std::vector<std::vector<double>> AdafactorRun::weights_as_f32() const
{
    std::vector<std::vector<double>> all;
    const Tensors joined(backend_, params.numel, f32, 0, [](size_t, size_t) { return 77; });
    EXPECT_EQ(hr_join_weights(&joined.list, &params.list, config.step.weights, &exec), HR_OK)
        << hr_last_error();
    for (size_t k = 0; k < shapes.size(); k++)
        all.push_back(joined.values(k));
    return all;
}

ExactAdafactor::ExactAdafactor(const AdafactorRun &run, const AdafactorCase &c)
{
    const bool torch = c.semantics == HR_ADAFACTOR_TORCH;
    const hr_adafactor_config &o = c.config;
    long double factor = c.clip_coef.value_or(1) / (long double)c.grad_scale.value_or(1);
    factor = float(o.step.maximize ? -factor : factor);
    const auto joined = run.weights ? run.weights_as_f32() : std::vector<std::vector<double>>();
    for (size_t k = 0; k < run.shapes.size(); k++) {
        const Shape s = run.shapes[k];
        const size_t numel = size_t(numel_of(s)), rows = size_t(s.rows), cols = size_t(s.cols);
        Result r{wide(run.weights ? joined[k] : run.params.values(k)),
                 Values(numel),
                 wide(run.row_vars.values(k)),
                 wide(run.col_vars.values(k)),
                 wide(run.variances.values(k)),
                 wide(run.exp_avgs.values(k)),
                 run.rms_values.values(k)[0],
                 run.steps.values(k)[0] + (c.steps ? 1 : 0)};
        if (numel == 0) {
            results.push_back(r);
            continue;
        }
        const long double t = c.steps ? r.step : o.step.t,
                          w = std::pow(t, (long double)o.beta2_decay);
        const double epsilons[] = {0x1p-23, 0x1p-7, 0x1p-10};
        const bool as_f32 = c.weights && c.weights->mode != HR_WEIGHTS_NEAREST;
        const long double epsilon = epsilons[as_f32 ? HR_F32 : run.params.dtype[k]];
        const long double eps1 = o.eps1 >= 0 ? o.eps1 : epsilon;
        const long double added = torch ? 0 : eps1;
        Values g = wide(run.grads.values(k));
        for (long double &x : g)
            x *= factor;
        const auto update = [&](long double &v, long double square) {
            v = (1 - w) * v + w * square;
        };
        Values v(numel);
        for (size_t b = 0; b < size_t(s.batch) && s.factored; b++) {
            Values row_sums(rows), col_sums(cols);
            for (size_t i = 0; i < rows * cols; i++) {
                const long double x = g[b * rows * cols + i];
                row_sums[i / cols] += x * x + added;
                col_sums[i % cols] += x * x + added;
            }
            long double mean = 0;
            for (size_t i = 0; i < rows; i++) {
                update(r.row_vars[b * rows + i], row_sums[i] / cols);
                mean += r.row_vars[b * rows + i] / rows;
            }
            for (size_t i = 0; i < cols; i++)
                update(r.col_vars[b * cols + i], col_sums[i] / rows);
            mean = torch ? std::max(mean, eps1) : mean;
            for (size_t i = 0; i < rows * cols; i++)
                v[b * rows * cols + i] =
                    r.row_vars[b * rows + i / cols] * r.col_vars[b * cols + i % cols] / mean;
        }
        for (size_t i = 0; i < numel && !s.factored; i++) {
            update(r.variances[i], g[i] * g[i] + added);
            v[i] = r.variances[i];
        }
        const bool scaled = torch || o.scale_parameter;
        const long double rms = std::sqrt(norm2(r.params) / numel);
        if (c.rms_values && scaled)
            r.rms = rms;
        for (size_t i = 0; i < numel; i++)
            g[i] /= std::sqrt(torch ? std::max(v[i], eps1 * eps1) : v[i]);
        const long double relative = 1 / std::sqrt(t), lr = o.step.lr;
        const long double rho = torch              ? std::min(lr, relative)
                                : !o.relative_step ? lr
                                : o.warmup_init    ? std::min(1e-6L * t, relative)
                                                   : std::min(1e-2L, relative);
        const long double alpha = scaled ? rho * std::max((long double)o.eps2, rms) : rho;
        const long double clip =
            std::max(1.0L, std::sqrt(norm2(g) / numel) / (long double)o.clip_threshold);
        const long double keep = 1 - (torch ? lr : alpha) * o.weight_decay;
        for (size_t i = 0; i < numel; i++) {
            long double change = alpha * g[i] / clip;
            if (c.momentum)
                change = r.exp_avgs[i] = o.beta1 * r.exp_avgs[i] + (1 - o.beta1) * change;
            r.changes[i] = change;
            r.params[i] = keep * r.params[i] - change;
        }
        results.push_back(r);
    }
}

namespace
{
// Within `relative` of the exact values, and `absolute`.
void expect_near(const std::vector<double> &got, const Values &exact, long double relative,
                 const std::function<long double(size_t)> &absolute, const std::string &what)
{
    ASSERT_EQ(got.size(), exact.size()) << what;
    for (size_t i = 0; i < got.size(); i++)
        if (!(std::fabs(got[i] - exact[i]) <= relative * std::fabs(exact[i]) + absolute(i))) {
            ADD_FAILURE() << what << ": element " << i << " is " << got[i] << ", wanted "
                          << double(exact[i]);
            return;
        }
}
} // namespace

void expect_exact(const AdafactorRun &run, const ExactAdafactor &exact, const AdafactorCase &c)
{
    SCOPED_TRACE(testing::PrintToString(c));
    const long double sum = 0x1p-20L, update = 0x1p-18L;
    const auto nothing = [](size_t) { return 0.0L; };
    const auto joined = c.weights ? run.weights_as_f32() : std::vector<std::vector<double>>();
    for (size_t k = 0; k < run.shapes.size(); k++) {
        const ExactAdafactor::Result &r = exact.results[k];
        const std::string name = " of tensor " + std::to_string(k);
        const auto change = [&](size_t i) { return update * std::fabs(r.changes[i]); };
        // Of weights: what their mode keeps of them, in the order of hr_weights_mode.
        const long double kept[] = {0x1p-8L,  0x1p-7L,  0x1p-16L, 0x1p-22L,
                                    0x1p-22L, 0x1p-15L, 0x1p-15L};
        const long double rounding =
            c.weights ? kept[c.weights->mode] : epsilon_of(run.params.dtype[k]) / 2 + 0x1p-22L;
        const long double smallest = run.params.dtype[k] == HR_F16 ? 0x1p-25L : 0x1p-31L;
        expect_near(run.row_vars.values(k), r.row_vars, sum, nothing, "row_var" + name);
        expect_near(run.col_vars.values(k), r.col_vars, sum, nothing, "col_var" + name);
        expect_near(run.variances.values(k), r.variances, sum, nothing, "variance" + name);
        expect_near(
            run.exp_avgs.values(k), r.exp_avgs, 0x1p-22L,
            [&](size_t i) { return change(i) + 0x1p-31L; }, "exp_avg" + name);
        expect_near(run.rms_values.values(k), {r.rms}, sum, nothing, "rms" + name);
        expect_near(run.steps.values(k), {r.step}, 0, nothing, "step" + name);
        expect_near(
            c.weights ? joined[k] : run.params.values(k), r.params, rounding,
            [&](size_t i) { return change(i) + smallest; }, "param" + name);
    }
    EXPECT_TRUE(run.whole());
}

void expect_exact(Backend &backend, const AdafactorCase &c)
{
    const AdafactorRun run(backend, c);
    const ExactAdafactor exact(run, c);
    const std::vector<uint8_t> grads = image_of({&run.grads.buffers});
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    expect_exact(run, exact, c);
    EXPECT_EQ(image_of({&run.grads.buffers}), grads);
}

std::ostream &operator<<(std::ostream &out, const AdafactorCase &c)
{
    out << (c.semantics == HR_ADAFACTOR_TORCH ? "torch" : "hf");
    for (size_t k = 0; k < std::min(c.shapes.size(), size_t(4)); k++)
        out << " [" << c.shapes[k].batch << ", " << c.shapes[k].rows << ", " << c.shapes[k].cols
            << (c.shapes[k].factored ? "]" : "] not factored");
    out << " (" << c.shapes.size() << ") params";
    for (const hr_dtype type : c.params)
        out << " " << name_of(type);
    out << ", grads";
    for (const hr_dtype type : c.grads)
        out << " " << name_of(type);
    return out << ", shift " << c.shift << " of lists " << c.shifted
               << (c.momentum ? ", momentum" : "") << (c.counted ? ", late" : "")
               << (c.grad_scale ? ", grad_scale" : "") << (c.clip_coef ? ", clip_coef" : "")
               << (c.weights ? ", weights mode " + std::to_string(c.weights->mode) : "");
}
