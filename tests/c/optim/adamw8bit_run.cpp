#include "tests/c/optim/adamw8bit_run.h"

#include <cmath>

namespace
{
constexpr double kSpecial[] = {NAN,  INFINITY, -INFINITY, 1e-40, -3e-41,
                               1e30, -1e-30,   0,         -0.0,  7e-6};

// Shaped noise of one kind, with special values among it if the case asks for them.
Tensors::Value noise_of(const Adamw8bitCase &c, uint64_t kind, double (*shape)(double))
{
    return [kind, shape, special = c.special](size_t tensor, size_t i) {
        const double u = noise(kind + 16 * tensor, i);
        const bool here = special && noise(kind + 8 + 16 * tensor, i) > 0.4;
        return here ? kSpecial[size_t((u + 1) * 5)] : shape(u);
    };
}

Tensors::Value any_parameter(const Adamw8bitCase &c, uint64_t kind)
{
    return noise_of(c, kind, [](double u) { return u; });
}

Tensors::Value any_code(uint64_t kind)
{
    return noise_of({}, kind, [](double u) { return (u + 1) * 128; });
}

Tensors::Value any_scale(const Adamw8bitCase &c, uint64_t kind)
{
    const Tensors::Value value = noise_of(c, kind, [](double u) { return std::exp(4 * u); });
    return [value](size_t tensor, size_t i) { return std::fabs(value(tensor, i)); };
}

// Over six orders of magnitude, as gradients are.
Tensors::Value any_gradient(const Adamw8bitCase &c, uint64_t kind)
{
    return noise_of(c, kind,
                    [](double u) { return std::copysign(std::exp(14 * std::fabs(u) - 10), u); });
}

std::vector<int64_t> blocks_of(const Adamw8bitCase &c)
{
    std::vector<int64_t> blocks;
    for (const int64_t n : c.numel)
        blocks.push_back((n + c.block_size - 1) / c.block_size);
    return blocks;
}

std::vector<double> moments(const Tensors &codes, const Tensors &absmaxs, size_t tensor,
                            int32_t block_size, bool is_signed)
{
    std::vector<double> values = codes.values(tensor);
    const std::vector<double> scales = absmaxs.values(tensor);
    for (size_t i = 0; i < values.size(); i++)
        values[i] = dynamic_map(is_signed)[size_t(values[i])] * scales[i / size_t(block_size)];
    return values;
}
} // namespace

Adamw8bitRun::Adamw8bitRun(Backend &backend, const Adamw8bitCase &c)
    : params(backend, c.numel, c.param, shift_of(c, 0), c.params ? c.params : any_parameter(c, 1)),
      exp_avgs(backend, c.numel, {HR_U8}, shift_of(c, 1), c.exp_avgs ? c.exp_avgs : any_code(2)),
      exp_avg_absmaxs(backend, blocks_of(c), {HR_F32}, shift_of(c, 2),
                      c.exp_avg_absmaxs ? c.exp_avg_absmaxs : any_scale(c, 3)),
      exp_avg_sqs(backend, c.numel, {HR_U8}, shift_of(c, 3),
                  c.exp_avg_sqs ? c.exp_avg_sqs : any_code(4)),
      exp_avg_sq_absmaxs(backend, blocks_of(c), {HR_F32}, shift_of(c, 4),
                         c.exp_avg_sq_absmaxs ? c.exp_avg_sq_absmaxs : any_scale(c, 5)),
      steps(backend, std::vector<int64_t>(c.numel.size(), 1), {c.steps.value_or(HR_F64)},
            shift_of(c, 5), [&](size_t k, size_t) { return double(c.step - 1 + int64_t(k)); }),
      grads(backend, c.numel, c.grad, shift_of(c, 6), c.grads ? c.grads : any_gradient(c, 6)),
      exec(backend.exec())
{
    for (size_t k = 0; k < c.numel.size(); k++)
        seeds.push_back(0x9E3779B97F4A7C15u * (k + 1));
    steps.argument = c.steps ? &steps.list : nullptr;
    config.block_size = c.block_size;
    config.adamw.step.skip_nonfinite = c.skip_nonfinite;
    config.bnb_exact = c.bnb_exact;
    config.seeds = c.stochastic ? seeds.data() : nullptr;
    hr_adamw_config &adamw = config.adamw;
    adamw.step.lr = c.lr;
    adamw.beta1 = c.beta1;
    adamw.beta2 = c.beta2;
    adamw.eps = c.eps;
    adamw.weight_decay = c.weight_decay;
    adamw.step.t = c.step;
    adamw.decoupled = c.decoupled;
    adamw.step.maximize = c.maximize;
    if (c.lr_on_device) {
        adamw.step.lr_ptr = scalar(backend, c.lr, *c.lr_on_device);
        adamw.step.lr_dtype = *c.lr_on_device;
        adamw.step.lr = -1; // not looked at
    }
    adamw.step.grad_scale = static_cast<const float *>(scalar(backend, c.grad_scale, HR_F32));
    adamw.step.found_inf = static_cast<const float *>(scalar(backend, c.found_inf, HR_F32));
    adamw.step.clip_coef = static_cast<const float *>(scalar(backend, c.clip_coef, HR_F32));
    if (c.weights) {
        weights.emplace(backend, *c.weights, params.numel, params.dtype, params.buffers);
        adamw.step.weights = &weights->weights;
    }
}

const void *Adamw8bitRun::scalar(Backend &backend, std::optional<double> value, hr_dtype dtype)
{
    if (!value)
        return nullptr;
    scalars_.emplace_back(backend, encode({*value}, dtype));
    return scalars_.back().data();
}

hr_status Adamw8bitRun::call() const
{
    return hr_adamw8bit(params.argument, exp_avgs.argument, exp_avg_absmaxs.argument,
                        exp_avg_sqs.argument, exp_avg_sq_absmaxs.argument, steps.argument,
                        grads.argument, config_argument, exec_argument);
}

std::vector<Tensors *> Adamw8bitRun::lists()
{
    std::vector<Tensors *> given = {&params,      &exp_avgs,           &exp_avg_absmaxs,
                                    &exp_avg_sqs, &exp_avg_sq_absmaxs, &grads};
    if (steps.argument)
        given.push_back(&steps);
    return given;
}

std::vector<const std::vector<Buffer> *> Adamw8bitRun::buffers() const
{
    std::vector<const std::vector<Buffer> *> all = {&params.buffers,
                                                    &exp_avgs.buffers,
                                                    &exp_avg_absmaxs.buffers,
                                                    &exp_avg_sqs.buffers,
                                                    &exp_avg_sq_absmaxs.buffers,
                                                    &steps.buffers,
                                                    &grads.buffers,
                                                    &scalars_};
    if (weights)
        all.push_back(&weights->buffers);
    return all;
}

std::vector<uint8_t> Adamw8bitRun::image() const
{
    return image_of(buffers());
}

bool Adamw8bitRun::whole() const
{
    return intact(buffers());
}

void Adamw8bitRun::take(const Adamw8bitRun &other)
{
    ::take(buffers(), other.buffers());
}

std::vector<double> Adamw8bitRun::exp_avg(size_t tensor) const
{
    return moments(exp_avgs, exp_avg_absmaxs, tensor, config.block_size, true);
}

std::vector<double> Adamw8bitRun::exp_avg_sq(size_t tensor) const
{
    return moments(exp_avg_sqs, exp_avg_sq_absmaxs, tensor, config.block_size, false);
}

const std::vector<double> &dynamic_map(bool is_signed)
{
    static const auto load = [](int32_t which) {
        std::vector<float> map(256);
        EXPECT_EQ(hr_dynamic_map(map.data(), which), HR_OK) << hr_last_error();
        return std::vector<double>(map.begin(), map.end());
    };
    static const std::vector<double> maps[] = {load(0), load(1)};
    return maps[is_signed];
}

int nearest(const std::vector<double> &map, double y)
{
    int best = 0;
    for (int code = 1; code < 256; code++)
        if (std::fabs(map[size_t(code)] - y) < std::fabs(map[size_t(best)] - y))
            best = code;
    return best;
}

std::ostream &operator<<(std::ostream &out, const Adamw8bitCase &c)
{
    out << c.numel.size() << " tensors of " << (c.numel.empty() ? 0 : c.numel[0]) << ", "
        << name_of(c.param[0]) << " parameters, " << name_of(c.grad[0]) << " gradients, blocks of "
        << c.block_size << ", shift " << c.shift << ", step " << c.step;
    out << (c.decoupled ? "" : ", L2") << (c.maximize ? ", maximize" : "")
        << (c.skip_nonfinite ? ", skip_nonfinite" : "") << (c.bnb_exact ? ", bnb_exact" : "")
        << (c.stochastic ? ", stochastic" : "") << (c.special ? ", special values" : "");
    if (c.weights)
        out << ", weights mode " << c.weights->mode;
    out << (c.steps ? ", steps on the device" : "") << (c.lr_on_device ? ", lr on the device" : "");
    return out << (c.grad_scale ? ", grad_scale" : "") << (c.clip_coef ? ", clip_coef" : "");
}
