// Calls of hr_linear_cross_entropy() and hr_linear_cross_entropy_backward() on made-up layers.
#pragma once

#include <memory>

#include "tests/c/quant/quantize_matrix_run.h"

struct LinearCrossEntropyCase {
    int64_t rows = 9, features = 6, classes = 11;
    int64_t gap = 0; // elements between rows of matrices
    hr_dtype dtype = HR_F32, grad_dtype = HR_F32;
    hr_linear_cross_entropy_mode mode = HR_LINEAR_CROSS_ENTROPY_TOKENS;
    size_t limit = 0; // of the workspace
    double weigh = 1; // multiplies the weights of classes
    bool bias = false, class_weight = false, token_weight = false, denominator = false;
    bool int32 = false, rank = false;
    bool dentropy = false; // the backward call has a gradient of the entropies
    double smoothing = 0, softcap = 0, z_loss = 0, scale = 1;
    hr_cross_entropy_reduction reduction = HR_REDUCE_MEAN;
    int64_t ignored = 3;  // every such row; 0: none; 1: all
    int64_t sequence = 0; // rows
    uint32_t wanted = 7;
    hr_format format = HR_DENSE; // others: the weight is config.matrix, and has no gradient
    bool nested = false;
};

class LinearCrossEntropyRun
{
  public:
    LinearCrossEntropyRun(Backend &backend, const LinearCrossEntropyCase &c);
    LinearCrossEntropyRun(const LinearCrossEntropyRun &) = delete;

    void set_weight(const hr_matrix *matrix); // instead of inputs.weight; NULL: that

    hr_status forward() const; // with the gradients that are wanted
    hr_status backward() const;
    hr_status call() const; // forward
    std::vector<uint8_t> image() const;
    bool whole() const;
    int64_t target_of(int64_t row) const;
    void set_target(int64_t row, int64_t target);
    std::vector<int64_t> integers(const Buffer &buffer) const; // of rows

    Backend &backend;
    LinearCrossEntropyCase shape;
    hr_linear_cross_entropy_config config;
    hr_exec exec;
    hr_linear_cross_entropy_needs needs = {};
    std::vector<Buffer> targets, argmaxes, ranks;
    Tensors hidden, weight, bias, class_weight, token_weight, denominator;
    // loss, lse, lse_low, target_logit, largest, entropy, mean_logit, log_sum_sq_probs;
    // result, factors, scale
    Tensors results, numbers;
    Tensors dhidden, dweight, dbias, dloss, dentropy;
    std::vector<Buffer> workspaces; // the last is in use
    // Arguments, for a test to spoil.
    hr_linear_cross_entropy_inputs inputs = {};
    hr_linear_cross_entropy_grads grads = {};
    hr_linear_cross_entropy_rows out = {};
    const hr_linear_cross_entropy_inputs *inputs_argument = &inputs;
    const hr_linear_cross_entropy_grads *grads_argument = &grads;
    const hr_linear_cross_entropy_config *config_argument = &config;
    const hr_exec *exec_argument = &exec;
    std::unique_ptr<MatrixRun> few_bits; // whose decoded elements are in `weight`
    float *result, *factors, *scale;
    const float *upstream, *lse, *lse_low;
    int64_t upstream_stride = 1;
    void *workspace_argument;
    size_t workspace_bytes;
    int64_t rows, features, classes;
};

// The same, whose call() is the backward one.
class LinearCrossEntropyBackwardRun : public LinearCrossEntropyRun
{
  public:
    using LinearCrossEntropyRun::LinearCrossEntropyRun;
    hr_status call() const
    {
        return backward();
    }
};

std::ostream &operator<<(std::ostream &out, const LinearCrossEntropyCase &c);
