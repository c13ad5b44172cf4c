// A call of hr_lora_forward() or hr_lora_backward(), whose matrix and rows are those of a LinearRun.
#pragma once

#include "tests/c/nn/linear_run.h"

struct LoraCase {
    LinearCase linear;
    bool dense = false;
    int64_t rank = 3;
    bool own = false; // adapters have the type of x, not f32
    double dropout = 0;
    bool dx = true, da = true, db = true;
};

std::ostream &operator<<(std::ostream &out, const LoraCase &c);

class LoraRun
{
  public:
    LoraRun(Backend &backend, const LoraCase &c);
    LoraRun(const LoraRun &) = delete;

    hr_status call() const;
    std::vector<uint8_t> image() const; // all but the workspace
    bool whole() const;

    std::vector<double> weight() const;          // [rows * cols]
    double kept(int64_t row, int64_t col) const; // what drop() multiplies an element with

    LoraCase shape;
    LinearRun linear;                  // its `in` is x, or dy; its `out` is y, or dx
    Tensors dense, a, b, t, x, da, db; // x of a backward pass
    Tensors seed;
    hr_matrix matrix;
    hr_lora_config config = HR_LORA_CONFIG_INIT;
    size_t workspace_bytes = 0;
    Buffer workspace; // after what says how large it is
    // Arguments, for a test to spoil.
    hr_rows in_rows, out_rows, a_rows, b_rows, t_rows, x_rows, da_rows, db_rows;
    const hr_rows *in_argument = &in_rows, *out_argument = &out_rows, *a_argument = &a_rows,
                  *b_argument = &b_rows, *t_argument = &t_rows, *x_argument = &x_rows,
                  *da_argument = &da_rows, *db_argument = &db_rows;
    const hr_matrix *matrix_argument = &matrix;
    const hr_lora_config *config_argument = &config;
    void *bias_argument, *workspace_argument;
    hr_exec exec;
    const hr_exec *exec_argument = &exec;
    int64_t m;

  private:
    size_t allowance(); // bytes of workspace
    std::vector<const std::vector<Buffer> *> buffers() const;
};
