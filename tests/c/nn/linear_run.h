// A call of hr_linear_forward() or hr_linear_backward() with a made-up matrix of codes.
#pragma once

#include <algorithm>
#include <ostream>

#include "tests/c/harness/row_op.h"

// How much workspace a call gets, of what hr_linear_query() says.
enum class Space { LEAST, ODD, BEST, WHOLE };

struct LinearCase {
    int64_t m = 20, rows = 9, cols = 70; // m is more than few rows
    hr_format format = HR_NF4;
    bool nested = false, backward = false, bias = false;
    hr_dtype dtype = HR_F32;
    int32_t block_size = 64;
    int64_t gap = 0;  // elements between rows of x and y
    size_t shift = 0; // elements of x, y and bias past an aligned address
    size_t codes = 0; // bytes of the codes past an aligned address
    Space space = Space::BEST;
    bool adds = false; // to what is there, 77
};

std::ostream &operator<<(std::ostream &out, const LinearCase &c);

class LinearRun
{
  public:
    LinearRun(Backend &backend, const LinearCase &c);
    LinearRun(const LinearRun &) = delete;

    hr_status call() const;
    std::vector<uint8_t> image() const; // all but the workspace
    bool whole() const;

    std::vector<double> weight() const; // [rows * cols], decoded by the definition
    int64_t in_cols() const;
    int64_t out_cols() const;

    LinearCase shape;
    Tensors in, out, bias, codes, absmax, absmax_codes, absmax_scales, offset;
    hr_matrix matrix = HR_MATRIX_INIT;
    hr_linear_config config = HR_LINEAR_CONFIG_INIT;
    hr_linear_needs needs = {};
    size_t workspace_bytes = 0;
    Buffer workspace; // after what says how large it is
    // Arguments, for a test to spoil.
    hr_rows in_rows, out_rows;
    const hr_rows *in_argument = &in_rows, *out_argument = &out_rows;
    const hr_matrix *matrix_argument = &matrix;
    const hr_linear_config *config_argument = &config;
    void *bias_argument, *workspace_argument;
    hr_exec exec;
    const hr_exec *exec_argument = &exec;
    int64_t m;

  private:
    size_t allowance(Backend &backend); // bytes of workspace; sets needs
};
