#include "tests/c/optim/adamw_run.h"

#include <algorithm>
#include <cmath>

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
        std::vector<hr_dtype> type_of;
        for (size_t k = 0; k < std::max<size_t>(c.numel.size(), 1); k++)
            type_of.push_back(list == STEPS && c.mixed_counters && k % 2 ? HR_F32
                              : c.all_types && every[l] ? next_type(types[l], k / every[l])
                                                        : types[l]);
        const auto element = [&](size_t k, size_t i) {
            return c.spoiled == list && k == 0 && i == 0 ? c.spoil
                   : list == STEPS                       ? double(c.step - 1 + int64_t(k))
                   : c.value                             ? c.value(list, k, i)
                                                         : value(list, k, i, c.special);
        };
        const std::vector<int64_t> ones(c.numel.size(), 1), none;
        tensors.emplace_back(backend,
                             !given          ? none
                             : list == STEPS ? ones
                                             : c.numel,
                             type_of, shift_of(c, l), element);
        if (!given)
            tensors.back().argument = nullptr;
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
        const Tensors &params = tensors[PARAMS];
        weights.emplace(backend, *c.weights, params.numel, params.dtype, params.buffers);
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
    const auto argument = [this](AdamwList list) { return tensors[list].argument; };
    return hr_adamw(argument(PARAMS), argument(EXP_AVGS), argument(EXP_AVG_SQS),
                    argument(MAX_EXP_AVG_SQS), argument(STEPS), argument(GRADS), config_argument,
                    exec_argument);
}

std::vector<double> AdamwRun::values(AdamwList list, size_t tensor) const
{
    return tensors[list].argument ? tensors[list].values(tensor) : std::vector<double>();
}

std::vector<Tensors *> AdamwRun::lists()
{
    return given_lists(tensors);
}

std::vector<const std::vector<Buffer> *> AdamwRun::buffers() const
{
    std::vector<const std::vector<Buffer> *> all;
    for (const Tensors &list : tensors)
        all.push_back(&list.buffers);
    all.push_back(&scalars_);
    if (weights)
        all.push_back(&weights->buffers);
    return all;
}

std::vector<uint8_t> AdamwRun::image() const
{
    return image_of(buffers());
}

bool AdamwRun::whole() const
{
    return intact(buffers());
}

void AdamwRun::take(const AdamwRun &other)
{
    ::take(buffers(), other.buffers());
}

std::ostream &operator<<(std::ostream &out, const AdamwCase &c)
{
    out << c.numel.size() << " tensors, " << name_of(c.param) << " parameters, " << name_of(c.grad)
        << " gradients, " << name_of(c.state) << " states, shift " << c.shift << " of lists "
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
