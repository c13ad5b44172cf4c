// Calls of hr_divergence_forward() and hr_divergence_backward() on made-up logits.
#pragma once

#include "tests/c/harness/tensors.h"

struct DivergenceCase {
    int64_t rows = 5, classes = 7;
    int64_t gap = 0; // elements between rows
    hr_dtype dtype = HR_F32, grad_dtype = HR_F32;
    double beta = 0, temperature = 1;
    bool per_row = false, in_place = false;
    size_t shift = 0, teacher_shift = 0; // elements past an aligned address
    double size = 4, distance = 4;       // of logits, and of the teacher's from the student's
    bool special = false;                // NaN, infinities and huge values
    int64_t ignored = 3;                 // every such row; 0: none, and no vector that says so
};

class DivergenceRun
{
  public:
    DivergenceRun(Backend &backend, const DivergenceCase &c);
    DivergenceRun(const DivergenceRun &) = delete;

    hr_status forward() const;
    hr_status backward() const;
    hr_status call() const; // both
    std::vector<uint8_t> image() const;
    bool whole() const;
    bool is_ignored(int64_t row) const;
    std::vector<double> gradients() const; // which may lie over the logits in a narrower type

    Backend &backend;
    DivergenceCase shape;
    std::vector<Buffer> flags;
    Tensors student, teacher, grad, loss, statistics, dloss;
    // Arguments, for a test to spoil.
    hr_rows student_rows, teacher_rows, grad_rows;
    const hr_rows *student_argument = &student_rows, *teacher_argument = &teacher_rows,
                  *grad_argument = &grad_rows;
    const uint8_t *ignored;
    int64_t dloss_stride;
    hr_divergence_config config = HR_DIVERGENCE_CONFIG_INIT;
    const hr_divergence_config *config_argument = &config;
    hr_exec exec;
    const hr_exec *exec_argument = &exec;
    int64_t rows, classes;
};

std::ostream &operator<<(std::ostream &out, const DivergenceCase &c);
