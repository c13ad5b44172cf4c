// A call of hr_unscale_norm() on made-up gradients, and what it should find, in long double.
#pragma once

#include <memory>
#include <optional>

#include "tests/c/harness/tensors.h"

enum NormOutput {
    NORM = 1,
    NORMS = 2,
    FOUND_INF = 4,
    CULPRIT = 8,
    CLIP_COEF = 16,
    EVERYTHING = 31
};

struct NormCase {
    std::vector<int64_t> numel = {5};
    std::vector<hr_dtype> types = {HR_F32};
    Tensors::Value value = noise;
    double p = 2, max_norm = 1;
    bool write = false;
    std::optional<float> grad_scale, clip_coef;
    size_t shift = 0;                             // elements past an aligned address
    std::optional<unsigned> outputs = EVERYTHING; // a set of NormOutput; nullopt: no result at all
};

class NormRun
{
  public:
    NormRun(Backend &backend, const NormCase &c);
    NormRun(const NormRun &) = delete;

    hr_status call() const;
    std::vector<Tensors *> lists();

    float norm() const;
    std::vector<float> norms() const;
    float found_inf() const; // kFoundBefore where it was not written
    int64_t culprit() const;
    float clip_coef() const;

    std::vector<uint8_t> results() const;   // the bytes of the outputs
    std::vector<uint8_t> gradients() const; // the bytes of the list
    std::vector<uint8_t> image() const;     // every byte that the call can reach
    bool whole() const;                     // the guards, those behind the workspace included

    static constexpr float kFoundBefore = 0.25f; // another call's flag; must not be cleared

    Tensors grads;
    hr_unscale_norm_result result = {};
    hr_unscale_norm_config config = HR_UNSCALE_NORM_CONFIG_INIT;
    void *workspace = nullptr;
    size_t workspace_bytes = 0; // exactly what was asked for
    hr_exec exec;
    const hr_unscale_norm_result *result_argument = nullptr;
    const hr_unscale_norm_config *config_argument = &config;
    const hr_exec *exec_argument = &exec;

  private:
    template <class T> std::vector<T> output(size_t i) const;

    std::vector<Buffer> outputs_, scalars_, workspace_;
};

// What a call on this list should give.
struct ExactNorm {
    ExactNorm(const Tensors &grads, const NormCase &c);

    std::vector<long double> norms;
    long double norm, clip_coef;
    int64_t culprit = -1;
    std::vector<std::vector<double>> scaled; // x', before it is rounded to its type
};

// Everything that the call gave, against what it should, to the tolerance of the header.
void expect_exact(const NormRun &run, const ExactNorm &exact, const NormCase &c);
// Makes the call too.
void expect_exact(Backend &backend, const NormCase &c);

std::ostream &operator<<(std::ostream &out, const NormCase &c);
