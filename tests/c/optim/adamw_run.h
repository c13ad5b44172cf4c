// A call of hr_adamw() on made-up data: what to vary, and everything a test wants to look at or
// spoil.
#pragma once

#include <deque>
#include <functional>
#include <optional>

#include "tests/c/harness/tensors.h"
#include "tests/c/weights/weights_data.h"

enum AdamwList { PARAMS, EXP_AVGS, EXP_AVG_SQS, MAX_EXP_AVG_SQS, STEPS, GRADS, LISTS };

struct AdamwCase {
    std::vector<int64_t> numel = {5};
    hr_dtype param = HR_F32, grad = HR_F32, state = HR_F32;
    bool amsgrad = false, decoupled = true, maximize = false, skip_nonfinite = false;
    int64_t step = 3;              // of the first tensor; device counters add the tensor's number
    std::optional<hr_dtype> steps; // counters on the device
    std::optional<hr_dtype> lr_on_device;
    std::optional<float> grad_scale, found_inf, clip_coef;
    size_t shift = 0;                 // elements past an aligned address,
    uint32_t shifted = ~0u;           // of these lists: one bit each, in the order of AdamwList
    std::optional<AdamwList> spoiled; // this list's first element is `spoil`
    double spoil = 0;
    std::optional<WeightsData::Ask> weights;
    bool mixed_counters = false; // the second and every other one is f32
    double lr = 1e-2;
    // What the lists hold, where not made up; the counters hold the step before.
    std::function<double(AdamwList list, size_t tensor, size_t i)> value;
    bool special = false;   // NaN, infinities, denormals, huge and tiny values among the data
    bool all_types = false; // each tensor has the next combination of types
};

extern const char *const adamw_list_names[LISTS];

class AdamwRun
{
  public:
    AdamwRun(Backend &backend, const AdamwCase &c);
    AdamwRun(const AdamwRun &) = delete;

    hr_status call() const;
    std::vector<double> values(AdamwList list, size_t tensor) const; // as they are now
    std::vector<Tensors *> lists();                                  // those that it was given
    std::vector<uint8_t> image() const;                              // the bytes of every buffer
    bool whole() const;                                              // the guards around them
    void take(const AdamwRun &other); // all that another run of the case has, wherever it lies

    std::deque<Tensors> tensors; // by AdamwList; the argument is NULL where the case has none
    hr_adamw_config config = HR_ADAMW_CONFIG_INIT;
    std::optional<WeightsData> weights;
    hr_exec exec;
    const hr_adamw_config *config_argument = &config;
    const hr_exec *exec_argument = &exec;

  private:
    std::vector<const std::vector<Buffer> *> buffers() const;
    void *scalar(Backend &backend, double value, hr_dtype dtype);

    std::vector<Buffer> scalars_;
};

// "bf16 parameters, f32 gradients, ...", for messages.
std::ostream &operator<<(std::ostream &out, const AdamwCase &c);
