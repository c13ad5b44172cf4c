// The loss of a linear layer, its by-products and its gradients, by their formulas in binary64.
#pragma once

#include "tests/c/loss/linear_cross_entropy_run.h"

using Vector = std::vector<double>;
using Matrix = std::vector<Vector>;

Matrix matrix_of(const Tensors &tensor, int64_t rows, int64_t cols, int64_t stride);

// `upstream` multiplies the losses of rows, and `of_entropy` their entropies.
struct LinearCrossEntropyReference {
    Vector loss, lse, target_logit, largest, entropy, mean_logit, log_sum_sq_probs, dbias;
    std::vector<int64_t> argmax, rank;
    double result = 0, factors[2] = {1, 1}; // what rows and their z-losses are multiplied by
    Matrix dhidden, dweight;

    LinearCrossEntropyReference(const LinearCrossEntropyRun &run, const Vector &upstream,
                                const Vector &of_entropy = {});

  private:
    const LinearCrossEntropyCase &shape;
    Matrix hidden, weight;
    Vector bias, class_weight, token_weight;
    double all_weights = 0; // the sum of class_weight

    double weight_of(size_t row) const;
    void set_factors(const LinearCrossEntropyRun &run);
    void add_row(size_t row, size_t target, double upstream, double of_entropy);
    Vector logits_of(size_t row, Vector &slopes) const;
    void add_gradients(size_t row, const Vector &dlogits);
};
