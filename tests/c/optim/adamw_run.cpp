#include "tests/c/optim/adamw_run.h"

#include <cmath>
#include <limits>

const char *const adamw_list_names[LISTS] = {"params",          "exp_avgs", "exp_avg_sqs",
                                             "max_exp_avg_sqs", "steps",    "grads"};

namespace
{
// Uniform in [0, 1), the same on every machine.
double uniform(uint64_t a, uint64_t b, uint64_t c)
{
    uint64_t x = a * 0x9E3779B97F4A7C15u + b * 0xBF58476D1CE4E5B9u + c * 0x94D049BB133111EBu;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return double((x ^ x >> 31) >> 11) * 0x1p-53;
}

double value(AdamwList list, size_t tensor, size_t i, bool special)
{
    constexpr double kSpecial[] = {NAN,  INFINITY, -INFINITY, 1e-40, -3e-41,
                                   1e30, -1e-30,   0,         -0.0,  7e-6};
    const double u = uniform(list, tensor, i);
    const bool square = list == EXP_AVG_SQS || list == MAX_EXP_AVG_SQS;
    if (special && uniform(list + 10, tensor, i) < 0.4) {
        const double x = kSpecial[size_t(u * 10)];
        return square ? std::fabs(x) : x;
    }
    return square ? u * 1e-2 : 2 * u - 1;
}

hr_dtype next_type(hr_dtype dtype, size_t by)
{
    return hr_dtype((size_t(dtype) + by) % 3);
}
} // namespace

AdamwRun::AdamwRun(Backend &backend, const AdamwCase &c) : exec(backend.exec())
{
    const hr_dtype types[LISTS] = {c.param, c.state, c.state, c.state, c.steps.value_or(HR_F64),
                                   c.grad};
    const size_t every[LISTS] = {1, 9, 9, 9, 0, 3}; // so that 27 tensors have all combinations
    for (int l = 0; l < LISTS; l++) {
        const AdamwList list = AdamwList(l);
        const bool given = list == STEPS ? bool(c.steps) : list != MAX_EXP_AVG_SQS || c.amsgrad;
        for (size_t k = 0; k < c.numel.size(); k++) {
            const hr_dtype type = list == STEPS && c.mixed_counters && k % 2 ? HR_F32
                                  : c.all_types && every[l] ? next_type(types[l], k / every[l])
                                                            : types[l];
            const size_t n = list == STEPS ? 1 : size_t(c.numel[k]);
            std::vector<double> content(given ? n : 0);
            for (size_t i = 0; i < content.size(); i++)
                content[i] = list == STEPS ? double(c.step - 1 + int64_t(k))
                             : c.value     ? c.value(list, k, i)
                                           : value(list, k, i, c.special);
            if (c.spoiled == list && k == 0)
                content.at(0) = c.spoil;
            tensors_[l].emplace_back(backend, encode(content, type),
                                     shift_of(c, l) * bytes_of(type));
            data[l].push_back(tensors_[l].back().data());
            numel[l].push_back(int64_t(n));
            dtype[l].push_back(type);
        }
        lists[l] = {int64_t(c.numel.size()), data[l].data(), numel[l].data(), dtype[l].data()};
        list_arguments[l] = given ? &lists[l] : nullptr;
    }
    config.step.lr = c.lr;
    config.weight_decay = 0.1;
    config.step.t = c.step;
    config.decoupled = c.decoupled;
    config.amsgrad = c.amsgrad;
    config.step.maximize = c.maximize;
    config.step.skip_nonfinite = c.skip_nonfinite;
    if (c.lr_on_device) {
        config.step.lr_ptr = scalar(backend, config.step.lr, *c.lr_on_device);
        config.step.lr_dtype = *c.lr_on_device;
        config.step.lr = -1; // not looked at
    }
    const auto float_scalar = [&](std::optional<float> value) {
        return value ? static_cast<const float *>(scalar(backend, *value, HR_F32)) : nullptr;
    };
    config.step.grad_scale = float_scalar(c.grad_scale);
    config.step.found_inf = float_scalar(c.found_inf);
    config.step.clip_coef = float_scalar(c.clip_coef);
    if (c.weights) {
        weights.emplace(backend, *c.weights, numel[PARAMS], dtype[PARAMS], tensors_[PARAMS]);
        config.step.weights = &weights->weights;
    }
}

void *AdamwRun::scalar(Backend &backend, double value, hr_dtype dtype)
{
    scalars_.emplace_back(backend, encode({value}, dtype));
    return scalars_.back().data();
}

hr_status AdamwRun::call() const
{
    const auto &l = list_arguments;
    return hr_adamw(l[PARAMS], l[EXP_AVGS], l[EXP_AVG_SQS], l[MAX_EXP_AVG_SQS], l[STEPS], l[GRADS],
                    config_argument, exec_argument);
}

std::vector<double> AdamwRun::values(AdamwList list, size_t tensor) const
{
    return decode(tensors_[list][tensor].content(), dtype[list][tensor]);
}

std::vector<const Buffer *> AdamwRun::buffers() const
{
    std::vector<const Buffer *> all;
    for (const auto &list : tensors_)
        for (const Buffer &buffer : list)
            all.push_back(&buffer);
    for (const Buffer &buffer : scalars_)
        all.push_back(&buffer);
    if (weights)
        for (const Buffer &buffer : weights->buffers)
            all.push_back(&buffer);
    return all;
}

std::vector<uint8_t> AdamwRun::image() const
{
    std::vector<uint8_t> all;
    for (const Buffer *buffer : buffers()) {
        const std::vector<uint8_t> bytes = buffer->content();
        all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return all;
}

bool AdamwRun::whole() const
{
    for (const Buffer *buffer : buffers())
        if (!buffer->intact())
            return false;
    return true;
}

void AdamwRun::take(const AdamwRun &other)
{
    const std::vector<const Buffer *> to = buffers(), from = other.buffers();
    ASSERT_EQ(to.size(), from.size());
    for (size_t i = 0; i < to.size(); i++)
        to[i]->take(*from[i]);
}

std::ostream &operator<<(std::ostream &out, const AdamwCase &c)
{
    const char *const names[] = {"f32", "bf16", "f16", "u8", "i8", "i16", "f64"};
    out << c.numel.size() << " tensors, " << names[c.param] << " parameters, " << names[c.grad]
        << " gradients, " << names[c.state] << " states, shift " << c.shift << " of lists "
        << c.shifted << ", step " << c.step;
    out << (c.amsgrad ? ", amsgrad" : "") << (c.decoupled ? "" : ", L2")
        << (c.maximize ? ", maximize" : "") << (c.skip_nonfinite ? ", skip_nonfinite" : "");
    out << (c.steps ? ", steps on the device" : "") << (c.mixed_counters ? " of two types" : "")
        << (c.lr_on_device ? ", lr on the device" : "");
    out << (c.grad_scale ? ", grad_scale" : "") << (c.clip_coef ? ", clip_coef" : "");
    if (c.weights)
        out << ", weights mode " << c.weights->mode << (c.weights->places ? ", cut" : "")
            << (c.weights->stalled ? ", counted" : "");
    return out << (c.special ? ", special values" : "") << (c.all_types ? ", all types" : "");
}
