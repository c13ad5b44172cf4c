// Calls of hr_norm_forward() and hr_norm_backward() on made-up rows.
#pragma once

#include "tests/c/harness/row_op.h"

struct RowNormCase {
    int64_t rows = 5, cols = 7;
    int64_t gap = 0; // elements between rows
    hr_norm_kind kind = HR_NORM_RMS;
    hr_norm_casting casting = HR_NORM_ONCE;
    hr_dtype dtype = HR_F32, weight_dtype = HR_F32;
    double eps = 1e-5, offset = 0;
    bool residual = false, weight = true, again = true; // again: backward writes y as well
    size_t shift = 0;                                   // elements past an aligned address
    bool special = false;                               // NaN, infinities and huge values
};

class RowNormRun
{
  public:
    RowNormRun(Backend &backend, const RowNormCase &c);
    RowNormRun(const RowNormRun &) = delete;

    hr_status forward() const;
    hr_status backward() const;
    hr_status call() const; // both
    std::vector<uint8_t> image() const;
    bool whole() const;

    RowNormCase shape;
    Tensors x, residual, y, sum, dy, dsum, dx, again, weight, bias, dweight, dbias, mean, rstd,
        workspace;
    // Arguments, for a test to spoil.
    hr_rows x_rows, residual_rows, y_rows, sum_rows, dy_rows, dsum_rows, dx_rows, again_rows;
    const hr_rows *x_argument = &x_rows, *y_argument = &y_rows;
    const hr_rows *residual_argument = shape.residual ? &residual_rows : nullptr;
    const hr_rows *dx_argument = &dx_rows, *dy_argument = &dy_rows;
    hr_norm_config config = HR_NORM_CONFIG_INIT;
    const hr_norm_config *config_argument = &config;
    hr_exec exec;
    const hr_exec *exec_argument = &exec;
    size_t workspace_bytes = 0;
    int64_t rows, cols;
};

std::ostream &operator<<(std::ostream &out, const RowNormCase &c);
