// Calls of hr_route(), hr_experts_forward() and hr_experts_backward() on made-up rows and stacks.
#pragma once

#include <memory>

#include "tests/c/nn/linear_run.h"

struct ExpertsCase {
    int64_t tokens = 7, slots = 2, experts = 4, hidden = 6, features = 5;
    int64_t gap = 0; // elements between rows of x, dy and of the matrices, and between matrices
    hr_activation activation = HR_SILU;
    hr_dtype dtype = HR_F32, weight_dtype = HR_F32, matrix_dtype = HR_F32;
    bool gated = true, transposed = false, interleaved = false, biases = false;
    double limit = 0;
    double size = 2; // of x
    int64_t tile = 0;
    int32_t index_bytes = 8;
    hr_experts_save save = HR_EXPERTS_SAVE_GATE_UP;
    uint32_t wanted = 1023; // without those of what the case does not have
    // Few bits, without a gap: all codes and scales are made up. block_size is that of 4 bits.
    hr_format gate_up_format = HR_DENSE, down_format = HR_DENSE;
    bool nested = false;
    int32_t block_size = 32;
    int64_t gate_up_rank = 0, down_rank = 0; // of adapters
    hr_dtype adapter_dtype = HR_F32;
};

// The factors of what adapters add.
constexpr double kAdapterScales[] = {0.75, -1.5};

class ExpertsRun
{
  public:
    ExpertsRun(Backend &backend, const ExpertsCase &c);
    ExpertsRun(const ExpertsRun &) = delete;

    hr_status route() const;
    hr_status forward() const;
    hr_status backward() const;
    hr_status call() const; // all three, with the offsets copied to the host
    std::vector<uint8_t> image() const;
    std::vector<uint8_t> gradients() const; // the bytes of them and of y
    std::vector<int32_t> numbers(const Buffer &buffer) const;
    bool whole() const;
    std::vector<double> matrices(size_t k) const; // of gate_up or down, decoded by the definition

    ExpertsCase shape;
    int64_t rows, width;
    std::vector<int64_t> experts_of; // each row; some have none
    hr_experts_config config;
    hr_exec exec;
    Tensors x, dy, y, dx, weight, dweight;
    // gate_up, down, gate_up_bias, down_bias, and A and B of both
    Tensors stacks, grads;
    std::unique_ptr<LinearRun> few_bits[2]; // that hold gate_up and down of few bits
    Buffer index, order, offsets;
    // Arguments, for a test to spoil.
    hr_experts_sizes sizes;
    hr_experts_params params = HR_EXPERTS_PARAMS_INIT;
    hr_experts_needs needs = {};
    Tensors kept; // gate_up, activated
    Buffer workspace;
    hr_rows x_rows, dy_rows;
    hr_experts_saved saved = {};
    hr_experts_grads gradient = {};
    const hr_rows *x_argument = &x_rows, *dy_argument = &dy_rows;
    const hr_experts_params *params_argument = &params;
    const hr_experts_sizes *sizes_argument = &sizes;
    const hr_experts_config *config_argument = &config;
    const hr_exec *exec_argument = &exec;
    void *y_argument, *dx_argument, *dweight_argument, *workspace_argument;
    const void *weight_argument;
    mutable std::vector<int32_t> ends; // offsets_host
    const int32_t *order_argument, *ends_argument = nullptr;
    int32_t index_bytes;
    int64_t route_rows, route_experts;
    void *offsets_argument, *index_argument;
    size_t forward_bytes, backward_bytes;
};

std::ostream &operator<<(std::ostream &out, const ExpertsCase &c);
