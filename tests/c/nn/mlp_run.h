// Calls of hr_mlp_forward() and hr_mlp_backward() on made-up rows and weights.
#pragma once

#include <memory>

#include "tests/c/quant/quantize_matrix_run.h"

struct MlpCase {
    int64_t tokens = 5, hidden = 6, features = 7;
    int64_t gap = 0; // elements between rows of x, y, dy, dx and of the matrices
    hr_norm_kind norm = HR_NORM_RMS;
    hr_norm_casting casting = HR_NORM_ONCE;
    hr_activation activation = HR_SILU;
    hr_dtype dtype = HR_F32, norm_dtype = HR_F32;
    bool gated = true, apart = false; // apart: gate and up are two matrices
    bool biases = false, residual = true;
    int64_t tile = 0;
    hr_mlp_save save = HR_MLP_SAVE_GATE_UP;
    uint32_t wanted = 127;       // without those of weights that the case does not have
    hr_format format = HR_DENSE; // others: matrices are those of config, and have no gradient
    bool nested = false;
};

class MlpRun
{
  public:
    MlpRun(Backend &backend, const MlpCase &c);
    MlpRun(const MlpRun &) = delete;

    hr_status forward() const;
    hr_status backward() const;
    hr_status call() const; // both
    std::vector<uint8_t> image() const;
    std::vector<uint8_t> gradients() const; // the bytes of them and of y
    bool whole() const;

    MlpCase shape;
    hr_mlp_config config = HR_MLP_CONFIG_INIT;
    hr_exec exec;
    hr_mlp_needs needs = {};
    Tensors x, y, dy, dx;
    // norm_weight, norm_bias, gate_up, up, down, gate_up_bias, up_bias, down_bias
    Tensors weights, grads;
    Tensors statistics, rows;               // mean, rstd; normed, gate_up, activated
    Buffer workspace;                       // of megabytes on a GPU, for cuBLAS
    std::unique_ptr<MatrixRun> few_bits[3]; // whose decoded elements are in `weights`
    // Arguments, for a test to spoil.
    hr_rows x_rows, y_rows, dy_rows, dx_rows;
    const hr_rows *x_argument = &x_rows, *y_argument = &y_rows, *dy_argument = &dy_rows;
    const hr_rows *dx_argument = &dx_rows;
    hr_mlp_params params = {}, gradient = {};
    const hr_mlp_params *params_argument = &params, *gradient_argument = &gradient;
    hr_mlp_saved saved = {};
    void *workspace_argument = workspace.data();
    const hr_mlp_config *config_argument = &config;
    const hr_exec *exec_argument = &exec;
    int64_t tokens, hidden, features;
    size_t forward_bytes, backward_bytes;
};

hr_mlp_config config_of(const MlpCase &c);
std::ostream &operator<<(std::ostream &out, const MlpCase &c);
