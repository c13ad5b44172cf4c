// A call of hr_adamw8bit() on made-up data: what to vary, and everything a test wants to look at or
// spoil.
#pragma once

#include <optional>

#include "tests/c/harness/tensors.h"
#include "tests/c/weights/weights_data.h"

struct Adamw8bitCase {
    std::vector<int64_t> numel = {600};
    std::vector<hr_dtype> param = {HR_F32}, grad = {HR_F32}; // tensors take them in turn
    int32_t block_size = 256;
    bool decoupled = true, maximize = false, skip_nonfinite = false, bnb_exact = false;
    bool stochastic = false;
    double lr = 1e-2, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.1;
    int64_t step = 3;              // of the first tensor; device counters add the tensor's number
    std::optional<hr_dtype> steps; // counters on the device
    std::optional<hr_dtype> lr_on_device;
    std::optional<float> grad_scale, found_inf, clip_coef;
    size_t shift = 0;       // elements past an aligned address,
    uint32_t shifted = ~0u; // of these lists: one bit each, in the order of the call
    std::optional<WeightsData::Ask> weights;
    bool special = false; // NaN, infinities, denormals, huge and tiny values among the data
    // What the tensors hold, where not made up.
    Tensors::Value params, grads, exp_avgs, exp_avg_absmaxs, exp_avg_sqs, exp_avg_sq_absmaxs;
};

struct Adamw8bitRun {
    Adamw8bitRun(Backend &backend, const Adamw8bitCase &c);
    Adamw8bitRun(const Adamw8bitRun &) = delete;

    hr_status call() const;
    std::vector<Tensors *> lists();       // those that it was given
    std::vector<uint8_t> image() const;   // the bytes of every buffer
    bool whole() const;                   // the guards around them
    void take(const Adamw8bitRun &other); // all that another run of the case has

    // The moments as they are now, in binary64: exact products of a map's value and a scale.
    std::vector<double> exp_avg(size_t tensor) const;
    std::vector<double> exp_avg_sq(size_t tensor) const;

    Tensors params, exp_avgs, exp_avg_absmaxs, exp_avg_sqs, exp_avg_sq_absmaxs, steps, grads;
    hr_adamw8bit_config config = HR_ADAMW8BIT_CONFIG_INIT;
    hr_exec exec;
    std::vector<uint64_t> seeds;
    std::optional<WeightsData> weights;
    const hr_adamw8bit_config *config_argument = &config;
    const hr_exec *exec_argument = &exec;

  private:
    std::vector<const std::vector<Buffer> *> buffers() const;
    const void *scalar(Backend &backend, std::optional<double> value, hr_dtype dtype);

    std::vector<Buffer> scalars_;
};

// hr_dynamic_map(), in binary64.
const std::vector<double> &dynamic_map(bool is_signed);

// The code nearest to y, ties to the lower, by looking at every code.
int nearest(const std::vector<double> &map, double y);

// "3 tensors, bf16 parameters, ...", for messages.
std::ostream &operator<<(std::ostream &out, const Adamw8bitCase &c);
