// Calls of hr_cross_entropy_forward(), _reduce() and _backward() on made-up logits.
#pragma once

#include "tests/c/harness/tensors.h"

struct CrossEntropyCase {
    int64_t rows = 5, classes = 7;
    int64_t gap = 0; // elements between rows
    hr_dtype dtype = HR_F32, grad_dtype = HR_F32;
    double weigh = 1; // multiplies the weights
    bool weight = false, per_row = false, low = true, in_place = false, int32 = false;
    bool workspace = false;
    double smoothing = 0, softcap = 0, z_loss = 0;
    hr_cross_entropy_reduction reduction = HR_REDUCE_MEAN;
    size_t shift = 0;     // elements past an aligned address
    double size = 4;      // of logits
    bool special = false; // NaN, infinities and huge values
    int64_t ignored = 3;  // every such row; 0: none
};

class CrossEntropyRun
{
  public:
    CrossEntropyRun(Backend &backend, const CrossEntropyCase &c);
    CrossEntropyRun(const CrossEntropyRun &) = delete;

    hr_status forward() const;
    hr_status reduce() const;
    hr_status backward() const;
    hr_status call() const; // all three
    std::vector<uint8_t> image() const;
    bool whole() const;
    int64_t target_of(int64_t row) const;
    std::vector<double> gradients() const; // which may lie over the logits in a narrower type
    // Puts another target into the row.
    void set_target(int64_t row, int64_t target);

    Backend &backend;
    CrossEntropyCase shape;
    std::vector<Buffer> targets, argmaxes, workspaces;
    Tensors logits, grad, weight, loss, lse, lse_low, dloss, result, factors;
    // Arguments, for a test to spoil.
    hr_rows logits_rows, grad_rows;
    const hr_rows *logits_argument = &logits_rows, *grad_argument = &grad_rows;
    void *target, *argmax;
    int64_t dloss_stride;
    hr_cross_entropy_config config = HR_CROSS_ENTROPY_CONFIG_INIT;
    const hr_cross_entropy_config *config_argument = &config;
    hr_exec exec;
    const hr_exec *exec_argument = &exec;
    int64_t rows, classes;

  private:
    hr_status forward(const hr_cross_entropy_config *how) const;
};

std::ostream &operator<<(std::ostream &out, const CrossEntropyCase &c);
