// A call of hr_accumulate() on made-up data.
#pragma once

#include <optional>

#include "tests/c/harness/tensors.h"

struct AccumulateCase {
    std::vector<int64_t> numel = {5};
    std::vector<hr_dtype> types = {HR_F32}; // of the gradients
    bool compensated = false, zero_grads = false;
    std::optional<double> factor;
    std::optional<float> factor_on_device;
    size_t shift = 0;       // elements past an aligned address,
    uint32_t shifted = ~0u; // of these lists: one bit each, in the order of the call
    bool special = false;   // NaN, infinities, denormals, huge and tiny values among the data
};

class AccumulateRun
{
  public:
    AccumulateRun(Backend &backend, const AccumulateCase &c);
    AccumulateRun(const AccumulateRun &) = delete;

    hr_status call() const;
    std::vector<uint8_t> image() const; // every byte that the call can reach
    bool whole() const;                 // the guards

    Tensors sums, losts, grads;
    hr_accumulate_config config = HR_ACCUMULATE_CONFIG_INIT;
    hr_exec exec;
    const hr_accumulate_config *config_argument = &config;
    const hr_exec *exec_argument = &exec;

  private:
    std::vector<Buffer> scalars_;
};

std::ostream &operator<<(std::ostream &out, const AccumulateCase &c);
