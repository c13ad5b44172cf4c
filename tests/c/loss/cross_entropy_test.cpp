// Cross entropy against its formula in binary64, and the same bits wherever it runs.
#include <cmath>

#include "tests/c/harness/bits.h"
#include "tests/c/loss/cross_entropy_run.h"
#include "tests/c/loss/made.h"

using CrossEntropy = OnBackend;
ON_EVERY_BACKEND(CrossEntropy);

namespace
{

std::vector<CrossEntropyCase> cases()
{
    std::vector<CrossEntropyCase> all;
    int k = 0;
    for (const auto &[rows, classes] : kShapes)
        for (const hr_dtype dtype : {HR_F32, HR_BF16, HR_F16})
            for (const bool options : {false, true}) {
                CrossEntropyCase c;
                c.rows = rows, c.classes = classes;
                c.dtype = dtype;
                c.grad_dtype = dtype == HR_F32 && k % 3 == 2 ? HR_BF16 : dtype;
                c.in_place = k / 3 % 2;
                c.gap = k % 3 * 8;
                c.shift = k % 5 == 3;
                c.weight = k / 2 % 2;
                c.per_row = k % 3 == 1;
                c.int32 = k % 5 == 1;
                c.low = k % 7 != 6;
                c.workspace = k / 3 % 2;
                c.reduction = k % 3 == 0 ? HR_REDUCE_SUM : HR_REDUCE_MEAN;
                c.size = k % 5 == 4 ? 60 : 4;
                if (options) {
                    c.smoothing = k % 3 ? 0.1 : 0;
                    c.softcap = k % 4 ? 30 : 0;
                    c.z_loss = k % 5 ? 1e-2 : 0;
                }
                all.push_back(c);
                k++;
            }
    all.push_back({.rows = 0, .classes = 9, .reduction = HR_REDUCE_SUM});
    for (const bool workspace : {false, true}) /* on CUDA with it in two parts */
        all.push_back({.rows = 2048 + 75,
                       .classes = 3,
                       .weight = true,
                       .workspace = workspace,
                       .z_loss = 1e-2});
    return all;
}

std::vector<int64_t> argmaxes_of(const CrossEntropyRun &run)
{
    const std::vector<uint8_t> bytes = run.argmaxes[0].content();
    std::vector<int64_t> all(bytes.size() / 8);
    if (!all.empty())
        std::memcpy(all.data(), bytes.data(), bytes.size());
    return all;
}

// Of one row, by the formulas.
struct Exact {
    double lse = 0, loss = 0, z_loss = 0, weight = 0;
    std::vector<double> z, slope, p;

    Exact(const CrossEntropyRun &run, const std::vector<double> &logits,
          const std::vector<double> &weights, int64_t row)
    {
        const CrossEntropyCase &c = run.shape;
        const int64_t target = run.target_of(row);
        double sum = 0, smooth = 0, top = -INFINITY;
        for (int64_t j = 0; j < c.classes; j++) {
            const double logit = logits[size_t(row * (c.classes + c.gap) + j)];
            const double tanh = c.softcap > 0 ? std::tanh(logit / c.softcap) : 0;
            z.push_back(c.softcap > 0 ? c.softcap * tanh : logit);
            slope.push_back(1 - tanh * tanh);
            top = std::fmax(top, z.back());
        }
        for (const double one : z)
            sum += std::exp(one - top);
        lse = top + std::log(sum);
        for (size_t j = 0; j < z.size(); j++) {
            p.push_back(std::exp(z[j] - lse));
            smooth += (c.weight ? weights[j] : 1) * (lse - z[j]);
        }
        weight = c.weight ? weights[size_t(target)] : 1;
        z_loss = c.z_loss * lse * lse;
        loss = (1 - c.smoothing) * weight * (lse - z[size_t(target)]) +
               c.smoothing / double(c.classes) * smooth + z_loss;
    }
};

} // namespace

TEST_P(CrossEntropy, FollowsTheFormulas)
{
    for (const CrossEntropyCase &c : cases()) {
        const CrossEntropyRun run(*backend, c);
        const std::vector<double> logits = run.logits.values(0), weights = run.weight.values(0);
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        EXPECT_TRUE(run.whole()) << c;
        const std::vector<double> loss = run.loss.values(0), lse = run.lse.values(0);
        const std::vector<double> low = run.lse_low.values(0), dloss = run.dloss.values(0);
        const std::vector<double> got = run.gradients();
        const std::vector<int64_t> argmax = argmaxes_of(run);
        double total = 0, z_total = 0, weight_total = 0, count = 0, all_weights = 0;
        for (const double w : weights)
            all_weights += c.weight ? w : 1;
        std::vector<Exact> rows;
        for (int64_t i = 0; i < c.rows; i++) {
            const size_t at = size_t(i);
            if (run.target_of(i) == -100) {
                ASSERT_EQ(loss[at], 0) << c;
                ASSERT_EQ(lse[at], 0) << c;
                ASSERT_EQ(argmax[at], -1) << c;
                rows.emplace_back(rows.empty() ? Exact(run, logits, weights, 0) : rows[0]);
                continue;
            }
            rows.emplace_back(run, logits, weights, i);
            const Exact &row = rows.back();
            const double size = std::fabs(row.lse) + 1;
            const double saved = lse[at] + (c.low ? low[at] : 0);
            const double through_cap = 4 * c.softcap * kUnit; // the error of tanh
            ASSERT_NEAR(saved, row.lse, (8 + size * (c.low ? 0.1 : 1)) * kUnit + through_cap) << c;
            ASSERT_NEAR(loss[at], row.loss,
                        std::fabs(row.loss) * kUnit + (8 + c.size * c.smoothing * 4) * kUnit +
                            2 * c.z_loss * std::fabs(row.lse) * 8 * kUnit +
                            through_cap * (1 + 2 * c.z_loss * size))
                << c << ", row " << i;
            const double z_best = *std::max_element(row.z.begin(), row.z.end());
            ASSERT_GE(row.z[size_t(argmax[at])], z_best - through_cap) << c;
            if (c.softcap == 0) {
                ASSERT_EQ(argmax[at], std::max_element(row.z.begin(), row.z.end()) - row.z.begin());
            }
            total += row.loss - row.z_loss;
            z_total += row.z_loss;
            weight_total += row.weight;
            count++;
        }
        const bool mean = c.reduction == HR_REDUCE_MEAN;
        const double factor = mean ? 1 / weight_total : 1, z_factor = mean ? 1 / count : 1;
        const double result = total * factor + z_total * z_factor;
        ASSERT_NEAR(run.result.values(0)[0], result,
                    std::fabs(result) * 4 * kUnit +
                        (16 + 4 * c.size + 8 * c.softcap) * kUnit * (mean ? 1 : double(c.rows)))
            << c;
        const double unit = epsilon_of(c.grad_dtype) / 2;
        const double tiny = tiny_of(c.grad_dtype);
        for (int64_t i = 0; i < c.rows; i++)
            for (int64_t j = 0; j < c.classes; j++) {
                const double dz = got[size_t(i * run.grad_rows.stride + j)];
                if (run.target_of(i) == -100) {
                    ASSERT_EQ(dz, 0) << c;
                    continue;
                }
                const Exact &row = rows[size_t(i)];
                const double a = dloss[c.per_row ? size_t(i) : 0] * factor;
                const double b = dloss[c.per_row ? size_t(i) : 0] * z_factor;
                const double s = c.smoothing, w = c.weight ? weights[size_t(j)] : 1;
                const double hot = j == run.target_of(i) ? a * (1 - s) * row.weight : 0;
                const double scale =
                    a * ((1 - s) * row.weight + s / double(c.classes) * all_weights) +
                    b * 2 * c.z_loss * row.lse;
                const double exact = row.slope[size_t(j)] * (row.p[size_t(j)] * scale -
                                                             a * s / double(c.classes) * w - hot);
                // The target is rounded once, whatever cancels; others have errors of exp and of z.
                const double z_error = 4 + (c.low ? 0 : std::fabs(row.lse)) + 4 * c.softcap +
                                       std::fabs(row.z[size_t(j)] - row.lse);
                ASSERT_NEAR(dz, exact,
                            std::fabs(exact) * (unit + 8 * kUnit) + tiny +
                                std::fabs(scale) * row.p[size_t(j)] * z_error * 2 * kUnit +
                                std::fabs(a) * s * kUnit * 4 +
                                (c.softcap > 0 ? std::fabs(a) * 4 * kUnit : 0))
                    << c << ", row " << i << ", class " << j;
            }
    }
}

// The error of a sum of exponentials does not grow while the largest logit does.
TEST_P(CrossEntropy, LongRowsThatRise)
{
    for (const hr_dtype dtype : {HR_F32, HR_BF16}) {
        CrossEntropyCase c;
        c.rows = 1, c.classes = backend->exec().device == HR_CPU ? 1 << 20 : 1 << 14;
        c.dtype = c.grad_dtype = dtype;
        const CrossEntropyRun run(*backend, c);
        std::vector<double> rising;
        for (int64_t j = 0; j < c.classes; j++)
            rising.push_back(std::ldexp(double(j), -12));
        run.logits.put(0, rising);
        const Exact exact(run, run.logits.values(0), {}, 0);
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        const double lse = run.lse.values(0)[0] + run.lse_low.values(0)[0];
        EXPECT_NEAR(lse, exact.lse, 16 * kUnit);
    }
}

// A target that is almost certain: its loss and its gradient are what is left of a difference.
TEST_P(CrossEntropy, SmallLossesKeepTheirDigits)
{
    CrossEntropyCase c;
    c.rows = 2, c.classes = 3000, c.ignored = 0, c.reduction = HR_REDUCE_SUM;
    const CrossEntropyRun run(*backend, c);
    std::vector<double> values(size_t(2 * c.classes), -8.0);
    values[0] = 30.25, values[size_t(2 * c.classes - 1)] = 14;
    run.logits.put(0, values);
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    // Of the order of the last place of lse in binary32, which is 1.9e-6 and 9.5e-7.
    const double rest[] = {2999 * std::exp(-38.25), 2999 * std::exp(-22.0)};
    for (size_t i = 0; i < 2; i++) {
        EXPECT_NEAR(run.loss.values(0)[i], std::log1p(rest[i]), kUnit);
        const double gradient = run.gradients()[i ? size_t(2 * c.classes - 1) : 0];
        const double dloss = run.dloss.values(0)[0];
        EXPECT_NEAR(gradient, -rest[i] / (1 + rest[i]) * dloss, kUnit * dloss);
    }
}

// What rounding took off lse, up to 1.9e-6 here, is not missing from the probabilities.
TEST_P(CrossEntropy, LargeLogitsHaveExactGradients)
{
    CrossEntropyCase c;
    c.rows = 9, c.classes = 2, c.ignored = 0, c.reduction = HR_REDUCE_SUM;
    CrossEntropyRun run(*backend, c);
    std::vector<double> values;
    for (int64_t row = 0; row < c.rows; row++) {
        values.insert(values.end(), 2, 40.0 + 2.5 * double(row));
        run.set_target(row, 0);
    }
    run.logits.put(0, values);
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    const double half = run.dloss.values(0)[0] / 2;
    for (size_t i = 0; i < 18; i++)
        EXPECT_NEAR(run.gradients()[i], i % 2 ? half : -half, 4 * kUnit * half);
}

TEST_P(CrossEntropy, RowsWithInfinitiesAndNans)
{
    for (const int64_t classes : {5, 1500}) {
        CrossEntropyCase c;
        c.rows = 6, c.classes = classes, c.ignored = 0, c.reduction = HR_REDUCE_SUM;
        CrossEntropyRun run(*backend, c);
        std::vector<double> values(size_t(c.rows * classes), 1.0); // row 0: all are equal
        const auto at = [&](int64_t row, int64_t j) -> double & {
            return values[size_t(row * classes + j)];
        };
        for (int64_t j = 0; j < classes; j++)
            at(2, j) = -INFINITY;            // all are masked
        at(1, 0) = at(1, 1) = -INFINITY;     // some are
        at(3, 1) = NAN, at(4, 2) = INFINITY; // no loss
        at(5, 0) = -INFINITY;                // the target is masked
        for (int64_t row = 0; row < c.rows; row++)
            run.set_target(row, row == 5 ? 0 : 3);
        run.logits.put(0, values);
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        const std::vector<double> loss = run.loss.values(0), lse = run.lse.values(0);
        const std::vector<double> grad = run.gradients();
        EXPECT_NEAR(loss[0], std::log(double(classes)), 1e-6);
        EXPECT_NEAR(loss[1], std::log(double(classes) - 2), 1e-6);
        EXPECT_EQ(grad[size_t(classes)], 0);
        EXPECT_TRUE(std::isnan(loss[2]) && lse[2] == -INFINITY &&
                    std::isnan(grad[size_t(2 * classes)]));
        EXPECT_TRUE(std::isnan(loss[3]) && std::isnan(loss[4]));
        EXPECT_EQ(loss[5], INFINITY);
        EXPECT_NEAR(lse[5], 1 + std::log(double(classes) - 1), 1e-5);
        EXPECT_EQ(grad[size_t(5 * classes)], -run.dloss.values(0)[0]);
        EXPECT_EQ(argmaxes_of(run), (std::vector<int64_t>{0, 2, 0, 0, 2, 1}));
    }
}

TEST_P(CrossEntropy, ReductionsWithoutRows)
{
    for (const bool empty : {false, true})
        for (const hr_cross_entropy_reduction reduction :
             {HR_REDUCE_SUM, HR_REDUCE_MEAN, HR_REDUCE_MEAN_OR_ZERO}) {
            CrossEntropyCase c;
            c.rows = empty ? 0 : 4, c.ignored = 1, c.reduction = reduction, c.z_loss = 0.1;
            const CrossEntropyRun run(*backend, c);
            ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
            const double got = run.result.values(0)[0];
            EXPECT_TRUE(reduction == HR_REDUCE_MEAN ? std::isnan(got) : got == 0) << c;
            if (!empty) {
                EXPECT_EQ(run.gradients(), std::vector<double>(28, 0.0)) << c;
            }
        }
}

// A z-loss hides nothing of losses that weigh little, and the mean of what weighs 0 has no gradient.
TEST_P(CrossEntropy, RowsThatWeighLittle)
{
    for (const double weigh : {1e-8, 0.0}) {
        CrossEntropyCase c;
        c.rows = 40, c.weight = true, c.weigh = weigh;
        const CrossEntropyRun plain(*backend, c);
        c.z_loss = 1;
        const CrossEntropyRun run(*backend, c);
        ASSERT_EQ(plain.call(), HR_OK) << hr_last_error();
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        double z_loss = 0, count = 0;
        for (int64_t i = 0; i < c.rows; i++)
            count += run.target_of(i) != -100;
        for (const double lse : run.lse.values(0))
            z_loss += lse * lse / count;
        if (weigh == 0) {
            EXPECT_TRUE(std::isnan(run.result.values(0)[0]));
            EXPECT_EQ(plain.gradients(), std::vector<double>(280, 0.0));
        } else {
            const double exact = plain.result.values(0)[0] + z_loss;
            EXPECT_NEAR(run.result.values(0)[0], exact, 4 * kUnit * exact);
        }
    }
}

// More rows than there are parts of 2,048: each row has a loss and weight of 1 or none.
TEST_P(CrossEntropy, AsManyRowsAsTakeLargerParts)
{
    const int64_t rows = 512 * 2048 + 1, counted = rows - (rows + 6) / 7;
    std::vector<int32_t> targets(static_cast<size_t>(rows), 0);
    for (size_t i = 0; i < targets.size(); i += 7)
        targets[i] = -100;
    CrossEntropyRun run(*backend, {.rows = 1, .int32 = true, .workspace = true});
    const Buffer target(
        *backend, std::vector<uint8_t>(reinterpret_cast<const uint8_t *>(targets.data()),
                                       reinterpret_cast<const uint8_t *>(targets.data() + rows)));
    const Tensors loss(*backend, {rows}, {HR_F32}, 0, [](size_t, size_t) { return 1; });
    ASSERT_EQ(hr_cross_entropy_reduce(static_cast<float *>(run.result.data[0]),
                                      static_cast<float *>(run.factors.data[0]),
                                      static_cast<const float *>(loss.data[0]), nullptr,
                                      target.data(), nullptr, rows, run.classes, &run.config,
                                      &run.exec),
              HR_OK)
        << hr_last_error();
    EXPECT_EQ(run.result.values(0)[0], 1);
    EXPECT_EQ(run.factors.values(0)[0], double(float(1 / double(counted))));
    EXPECT_TRUE(run.whole());
}

// The factors can be had before there is a loss, and have the same bits.
TEST_P(CrossEntropy, FactorsWithoutALoss)
{
    CrossEntropyCase c;
    c.rows = 300, c.weight = true, c.z_loss = 0.1;
    const CrossEntropyRun all(*backend, c), early(*backend, c);
    ASSERT_EQ(all.call(), HR_OK);
    ASSERT_EQ(hr_cross_entropy_reduce(nullptr, static_cast<float *>(early.factors.data[0]), nullptr,
                                      nullptr, early.target,
                                      static_cast<float *>(early.weight.data[0]), c.rows, c.classes,
                                      &early.config, &early.exec),
              HR_OK)
        << hr_last_error();
    EXPECT_EQ(early.factors.values(0), all.factors.values(0));
}

// Over the logits and apart, the same bits.
TEST_P(CrossEntropy, TheGradientMayTakeThePlaceOfTheLogits)
{
    expect_gradient_over_logits<CrossEntropyRun>(
        *backend, [](auto &c) { c.smoothing = c.classes == 1030 ? 0.2 : 0; });
}

TEST(CrossEntropyBits, AreTheSameOnEveryInstructionSetAndThreadCount)
{
    std::vector<CrossEntropyCase> all = cases();
    for (const hr_dtype dtype : {HR_F32, HR_BF16, HR_F16})
        all.push_back({.rows = 300,
                       .classes = 303,
                       .dtype = dtype,
                       .grad_dtype = dtype,
                       .weight = true,
                       .smoothing = 0.1,
                       .softcap = dtype == HR_F16 ? 20.0 : 0.0,
                       .special = true});
    expect_bits_on_the_cpu<CrossEntropyRun>(all);
}

TEST(CrossEntropyBits, RepeatOnCudaAndInACapture)
{
    std::vector<CrossEntropyCase> some;
    for (size_t k = 0; k < cases().size(); k += 5)
        some.push_back(cases()[k]);
    expect_repeats_on_cuda<CrossEntropyRun>(some);
    expect_capturable<CrossEntropyRun>(some);
}
