// A call of hr_momentum() on made-up data: what to vary, and everything a test wants to look at or
// spoil.
#pragma once

#include <cmath>
#include <deque>
#include <optional>

#include "tests/c/harness/tensors.h"
#include "tests/c/weights/weights_data.h"

enum MomentumList { PARAMS, MOMENTS, ABSMAXS, STEPS, GRADS, LISTS };

inline const char *const momentum_list_names[LISTS] = {"params", "moments", "absmaxs", "steps",
                                                       "grads"};

struct MomentumCase {
    std::vector<int64_t> numel = {5};
    hr_dtype param = HR_F32, grad = HR_F32, moment = HR_F32; // u8: codes
    hr_momentum_rule rule = HR_SGD;
    double momentum = 0.9, dampening = 0, weight_decay = 0.1;
    bool nesterov = false, maximize = false, skip_nonfinite = false;
    int32_t block_size = 256;
    int64_t step = 3;              // of the first tensor; device counters add the tensor's number
    std::optional<hr_dtype> steps; // counters on the device
    std::optional<hr_dtype> lr_on_device;
    std::optional<float> grad_scale, found_inf, clip_coef;
    size_t shift = 0;       // elements past an aligned address,
    uint32_t shifted = ~0u; // of these lists: one bit each, in the order of MomentumList
    std::optional<MomentumList> spoiled; // this list's first element is `spoil`
    double spoil = 0;
    std::optional<WeightsData::Ask> weights;
    bool special = false;   // NaN, infinities, denormals, huge and tiny values among the data
    bool all_types = false; // each tensor has the next combination of types

    bool has(MomentumList list) const
    {
        return list == MOMENTS   ? rule == HR_LION || momentum != 0
               : list == ABSMAXS ? moment == HR_U8
               : list == STEPS   ? bool(steps)
                                 : true;
    }
};

class MomentumRun
{
  public:
    MomentumRun(Backend &backend, const MomentumCase &c) : exec(backend.exec())
    {
        const hr_dtype types[LISTS] = {c.param, c.moment, HR_F32, c.steps.value_or(HR_F64), c.grad};
        const size_t every[LISTS] = {1, 9, 0, 0, 3}; // so that 27 tensors have all combinations
        for (int l = 0; l < LISTS; l++) {
            const auto list = MomentumList(l);
            std::vector<int64_t> numel;
            std::vector<hr_dtype> type_of = {types[l]};
            for (size_t k = 0; k < c.numel.size() && c.has(list); k++) {
                numel.push_back(list == STEPS     ? 1
                                : list == ABSMAXS ? hr_block_count(c.numel[k], c.block_size)
                                                  : c.numel[k]);
                if (c.all_types && every[l] && types[l] != HR_U8) {
                    type_of.resize(k + 1);
                    type_of[k] = hr_dtype((size_t(types[l]) + k / every[l]) % 3);
                }
            }
            const auto noise = made_up(size_t(l), c.special, 1);
            tensors.emplace_back(backend, numel, type_of, shift_of(c, l), [&](size_t k, size_t i) {
                return c.spoiled == list && k == 0 && i == 0  ? c.spoil
                       : list == STEPS                        ? double(c.step - 1 + int64_t(k))
                       : list == ABSMAXS                      ? 0.25 + double(i % 7)
                       : list == MOMENTS && c.moment == HR_U8 ? double((i * 37 + k * 11) % 256)
                                                              : noise(k, i);
            });
            if (!c.has(list))
                tensors.back().argument = nullptr;
        }
        config.step.lr = 1e-2;
        config.step.t = c.step;
        config.step.maximize = c.maximize;
        config.step.skip_nonfinite = c.skip_nonfinite;
        config.rule = c.rule;
        config.momentum = c.momentum;
        config.dampening = c.dampening;
        config.nesterov = c.nesterov;
        config.weight_decay = c.weight_decay;
        config.block_size = c.block_size;
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
    MomentumRun(const MomentumRun &) = delete;

    hr_status call() const
    {
        return hr_momentum(tensors[PARAMS].argument, tensors[MOMENTS].argument,
                           tensors[ABSMAXS].argument, tensors[STEPS].argument,
                           tensors[GRADS].argument, config_argument, exec_argument);
    }
    std::vector<double> values(MomentumList list, size_t tensor) const // as they are now
    {
        return tensors[list].argument ? tensors[list].values(tensor) : std::vector<double>();
    }
    std::vector<Tensors *> lists() // those that it was given
    {
        return given_lists(tensors);
    }
    std::vector<uint8_t> image() const // the bytes of every buffer
    {
        return image_of(buffers());
    }
    bool whole() const // the guards around them
    {
        return intact(buffers());
    }

    std::deque<Tensors> tensors; // by MomentumList; the argument is NULL where the case has none
    hr_momentum_config config = HR_SGD_CONFIG_INIT;
    std::optional<WeightsData> weights;
    hr_exec exec;
    const hr_momentum_config *config_argument = &config;
    const hr_exec *exec_argument = &exec;

  private:
    std::vector<const std::vector<Buffer> *> buffers() const
    {
        std::vector<const std::vector<Buffer> *> all = {&scalars_};
        for (const Tensors &list : tensors)
            all.push_back(&list.buffers);
        if (weights)
            all.push_back(&weights->buffers);
        return all;
    }
    void *scalar(Backend &backend, double value, hr_dtype dtype)
    {
        scalars_.emplace_back(backend, encode({value}, dtype));
        return scalars_.back().data();
    }

    std::vector<Buffer> scalars_;
};

inline std::ostream &operator<<(std::ostream &out, const MomentumCase &c)
{
    out << (c.rule == HR_LION ? "Lion" : "SGD") << ", " << c.numel.size() << " tensors, "
        << name_of(c.param) << " parameters, " << name_of(c.grad) << " gradients, "
        << name_of(c.moment) << " moments, shift " << c.shift << " of lists " << c.shifted
        << ", step " << c.step << ", momentum " << c.momentum << ", dampening " << c.dampening
        << ", decay " << c.weight_decay << ", blocks of " << c.block_size;
    out << (c.nesterov ? ", nesterov" : "") << (c.maximize ? ", maximize" : "")
        << (c.skip_nonfinite ? ", skip_nonfinite" : "") << (c.steps ? ", steps on the device" : "")
        << (c.lr_on_device ? ", lr on the device" : "") << (c.grad_scale ? ", grad_scale" : "")
        << (c.clip_coef ? ", clip_coef" : "");
    if (c.weights)
        out << ", weights mode " << c.weights->mode << (c.weights->stalled ? ", counted" : "");
    return out << (c.special ? ", special values" : "") << (c.all_types ? ", all types" : "");
}
