#include "tests/c/loss/linear_cross_entropy_reference.h"

#include <cmath>

Matrix matrix_of(const Tensors &tensor, int64_t rows, int64_t cols, int64_t stride)
{
    const Vector values = tensor.values(0);
    Matrix m(static_cast<size_t>(rows), Vector(static_cast<size_t>(cols)));
    for (size_t i = 0; i < m.size(); i++)
        for (size_t j = 0; j < m[i].size(); j++)
            m[i][j] = values[i * size_t(stride) + j];
    return m;
}

LinearCrossEntropyReference::LinearCrossEntropyReference(const LinearCrossEntropyRun &run,
                                                         const Vector &upstream,
                                                         const Vector &of_entropy)
    : shape(run.shape)
{
    const size_t n = size_t(shape.rows), h = size_t(shape.features), v = size_t(shape.classes);
    const int64_t stride = shape.features + shape.gap;
    hidden = matrix_of(run.hidden, shape.rows, shape.features, stride);
    weight = matrix_of(run.weight, shape.classes, shape.features, stride);
    bias = shape.bias ? run.bias.values(0) : Vector(v);
    class_weight = shape.class_weight ? run.class_weight.values(0) : Vector(v, 1);
    token_weight = shape.token_weight ? run.token_weight.values(0) : Vector(n, 1);
    for (const double one : class_weight)
        all_weights += one;
    loss = lse = target_logit = largest = entropy = mean_logit = log_sum_sq_probs = Vector(n);
    argmax = rank = std::vector<int64_t>(n, -1);
    dbias = Vector(v), dhidden = Matrix(n, Vector(h)), dweight = Matrix(v, Vector(h));
    set_factors(run);
    for (size_t i = 0; i < n; i++)
        if (run.target_of(int64_t(i)) >= 0)
            add_row(i, size_t(run.target_of(int64_t(i))), upstream[i],
                    of_entropy.empty() ? 0 : of_entropy[i]);
}

double LinearCrossEntropyReference::weight_of(size_t row) const
{
    return token_weight[row + (shape.sequence ? 1 : 0)];
}

void LinearCrossEntropyReference::set_factors(const LinearCrossEntropyRun &run)
{
    double weights = 0, tokens = 0;
    for (int64_t i = 0; i < shape.rows; i++)
        if (run.target_of(i) >= 0) {
            weights += weight_of(size_t(i)) * class_weight[size_t(run.target_of(i))];
            tokens += weight_of(size_t(i));
        }
    if (shape.denominator)
        factors[0] = factors[1] = 1 / run.denominator.values(0)[0];
    else if (shape.reduction != HR_REDUCE_SUM)
        factors[0] = 1 / weights, factors[1] = 1 / tokens;
    if (shape.reduction == HR_REDUCE_MEAN_OR_ZERO && tokens == 0)
        factors[0] = factors[1] = 0;
}

Vector LinearCrossEntropyReference::logits_of(size_t row, Vector &slopes) const
{
    Vector z = bias;
    for (size_t j = 0; j < z.size(); j++) {
        for (size_t k = 0; k < hidden[row].size(); k++)
            z[j] += hidden[row][k] * weight[j][k];
        z[j] *= shape.scale;
        const double tanh = shape.softcap > 0 ? std::tanh(z[j] / shape.softcap) : 0;
        slopes.push_back(shape.scale * (1 - tanh * tanh));
        z[j] = shape.softcap > 0 ? shape.softcap * tanh : z[j];
    }
    return z;
}

void LinearCrossEntropyReference::add_row(size_t i, size_t target, double upstream,
                                          double of_entropy)
{
    Vector slopes, dlogits;
    const Vector z = logits_of(i, slopes);
    const double classes = double(z.size()), share = shape.smoothing;
    argmax[i] = std::max_element(z.begin(), z.end()) - z.begin();
    largest[i] = z[size_t(argmax[i])], target_logit[i] = z[target], rank[i] = 0;
    double sum = 0, smooth = 0, squares = 0;
    for (const double one : z) {
        sum += std::exp(one - largest[i]);
        rank[i] += one > z[target];
    }
    lse[i] = entropy[i] = largest[i] + std::log(sum);
    for (size_t j = 0; j < z.size(); j++) {
        smooth += class_weight[j] * (lse[i] - z[j]);
        entropy[i] -= std::exp(z[j] - lse[i]) * z[j];
        squares += std::exp(2 * (z[j] - lse[i]));
        mean_logit[i] += z[j] / classes;
    }
    log_sum_sq_probs[i] = std::log(squares);
    const double hot = (1 - share) * class_weight[target], spread = share / classes;
    const double plain = weight_of(i) * (hot * (lse[i] - z[target]) + spread * smooth);
    const double z_loss = weight_of(i) * shape.z_loss * lse[i] * lse[i];
    loss[i] = plain + z_loss;
    result += plain * factors[0];
    result += shape.z_loss != 0 ? z_loss * factors[1] : 0;
    for (size_t j = 0; j < z.size(); j++) {
        const double p = std::exp(z[j] - lse[i]);
        const double of_loss =
            hot * (p - (j == target)) + spread * (all_weights * p - class_weight[j]);
        const double of_z_loss = 2 * shape.z_loss * lse[i] * p;
        const double of_row =
            (factors[0] * of_loss + factors[1] * of_z_loss) * weight_of(i) * upstream;
        dlogits.push_back((of_row - of_entropy * p * (z[j] - lse[i] + entropy[i])) * slopes[j]);
    }
    add_gradients(i, dlogits);
}

void LinearCrossEntropyReference::add_gradients(size_t row, const Vector &dlogits)
{
    for (size_t j = 0; j < dlogits.size(); j++) {
        dbias[j] += dlogits[j];
        for (size_t k = 0; k < hidden[row].size(); k++) {
            dhidden[row][k] += dlogits[j] * weight[j][k];
            dweight[j][k] += dlogits[j] * hidden[row][k];
        }
    }
}
