// Calls of hr_quantize_blocks() and hr_dequantize_blocks() on made-up data.
#pragma once

#include "tests/c/harness/tensors.h"

struct QuantizeCase {
    std::vector<int64_t> numel = {600};
    std::vector<hr_dtype> types = {HR_F32}; // of the values; tensors take them in turn
    bool is_signed = true;
    int32_t block_size = 256;
    size_t shift = 0; // elements past an aligned address
    Tensors::Value value = [](size_t k, size_t i) { return noise(k, i); };
};

class QuantizeRun
{
  public:
    QuantizeRun(Backend &backend, const QuantizeCase &c);
    QuantizeRun(const QuantizeRun &) = delete;

    hr_status call() const; // quantizes
    hr_status decode() const;
    std::vector<uint8_t> image() const; // every byte that the calls can reach
    bool whole() const;                 // the guards

    Tensors codes, absmaxs, values;
    hr_quantize_config config = HR_QUANTIZE_CONFIG_INIT;
    hr_exec exec;
    const hr_quantize_config *config_argument = &config;
    const hr_exec *exec_argument = &exec;
};
