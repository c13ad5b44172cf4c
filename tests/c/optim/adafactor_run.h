// A call of hr_adafactor() on made-up data, and what it should give, in long double.
#pragma once

#include <optional>

#include "tests/c/harness/tensors.h"
#include "tests/c/weights/weights_data.h"

struct AdafactorCase {
    std::vector<hr_adafactor_shape> shapes = {{1, 5, 7, 1, 0, 0, 0}};
    std::vector<hr_dtype> params = {HR_F32}, grads = {HR_F32};
    hr_adafactor_semantics semantics = HR_ADAFACTOR_HF;
    bool momentum = false, rms_values = true, steps = true;
    double counted = 0; // what every counter has above those made up
    std::optional<hr_dtype> lr_on_device;
    std::optional<float> grad_scale, found_inf, clip_coef;
    size_t shift = 0;       // elements past an aligned address,
    uint32_t shifted = ~0u; // of these lists: one bit each, in the order of the call
    Tensors::Value grad = noise;
    std::optional<WeightsData::Ask> weights;
    hr_adafactor_config config = HR_ADAFACTOR_HF_INIT; // what is not named above
};

hr_adafactor_shape matrix(int64_t rows, int64_t cols, int64_t batch = 1);
hr_adafactor_shape vector(int64_t numel);

class AdafactorRun
{
  public:
    AdafactorRun(Backend &backend, const AdafactorCase &c);
    AdafactorRun(const AdafactorRun &) = delete;

    hr_status call() const;
    hr_status call(int32_t phases); // one after another gives the same as all at once

    std::vector<uint8_t> results() const; // the bytes of what it writes
    std::vector<uint8_t> image() const;   // every byte that the call can reach
    bool whole() const;                   // the guards, those behind the workspace included
    void take(const AdafactorRun &other); // all that another run of the case has
    std::vector<std::vector<double>> weights_as_f32() const; // params, completed by residuals

    std::vector<hr_adafactor_shape> shapes;
    Tensors params, row_vars, col_vars, variances, exp_avgs, rms_values, steps, grads;
    std::optional<WeightsData> weights;
    hr_adafactor_config config;
    void *workspace = nullptr;
    size_t workspace_bytes = 0; // exactly what was asked for
    hr_exec exec;
    const hr_adafactor_shape *shapes_argument;
    const hr_adafactor_config *config_argument = &config;
    const hr_exec *exec_argument = &exec;

  private:
    std::vector<const std::vector<Buffer> *> buffers() const;

    Backend &backend_;
    std::vector<Buffer> scalars_, workspace_;
};

// What the call leaves, by tensor.
struct ExactAdafactor {
    ExactAdafactor(const AdafactorRun &run, const AdafactorCase &c);

    struct Result {
        std::vector<long double> params, changes, row_vars, col_vars, variances, exp_avgs;
        long double rms, step;
    };
    std::vector<Result> results;
};

// Everything that the call gave, against what it should, to the tolerance of the header.
void expect_exact(const AdafactorRun &run, const ExactAdafactor &exact, const AdafactorCase &c);
// Makes the call too.
void expect_exact(Backend &backend, const AdafactorCase &c);

std::ostream &operator<<(std::ostream &out, const AdafactorCase &c);
