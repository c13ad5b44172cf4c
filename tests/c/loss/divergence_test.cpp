// Divergences against their formulas in binary64, and the same bits wherever they run.
#include <cmath>

#include "tests/c/harness/bits.h"
#include "tests/c/loss/divergence_run.h"
#include "tests/c/loss/made.h"

using Divergence = OnBackend;
ON_EVERY_BACKEND(Divergence);

namespace
{

std::vector<DivergenceCase> cases()
{
    std::vector<DivergenceCase> all;
    int k = 0;
    for (const auto &[rows, classes] : kShapes)
        for (const hr_dtype dtype : {HR_F32, HR_BF16, HR_F16})
            for (const double beta : {0.0, 1.0, 0.5, 0.9}) {
                DivergenceCase c;
                c.rows = rows, c.classes = classes;
                c.dtype = dtype;
                c.grad_dtype = dtype != HR_F32 || k % 3 == 2 ? dtype : k % 2 ? HR_BF16 : HR_F16;
                c.beta = k % 11 == 3 ? 0.05 : beta;
                c.temperature = k % 4 == 1 ? 2.0 : k % 4 == 3 ? 0.7 : 1.0;
                c.in_place = k / 3 % 2;
                c.gap = k % 3 * 8;
                c.shift = k % 5 == 3;
                c.teacher_shift = k % 7 == 3 ? 3 : c.shift;
                c.per_row = k % 3 == 1;
                c.size = k % 5 == 4 ? 60 : 4;
                c.distance = k % 3 == 0 ? 0.01 : 4;
                c.ignored = k % 4 ? 3 : 0;
                all.push_back(c);
                k++;
            }
    all.push_back({.rows = 0, .classes = 9});
    return all;
}

// Of one row, by the formulas.
struct Exact {
    double loss = 0, size = 1;           // size: of what is added up
    std::vector<double> gradient, error; // error: in units of the last place of 1
    std::vector<double> p, q;            // logarithms of the probabilities

    Exact(const DivergenceRun &run, const std::vector<double> &student,
          const std::vector<double> &teacher, int64_t row)
    {
        const DivergenceCase &c = run.shape;
        p = logarithms(c, student, row), q = logarithms(c, teacher, row);
        const double b = c.beta;
        double mean = 0;
        std::vector<double> over(p.size());
        for (size_t j = 0; j < p.size(); j++) {
            const double m =
                b == 1 ? q[j] : std::log(b * std::exp(q[j]) + (1 - b) * std::exp(p[j]));
            over[j] = p[j] - m;
            if (b == 0)
                loss += std::exp(q[j]) * (q[j] - p[j]);
            else
                mean += std::exp(p[j]) * over[j];
            if (b > 0 && b < 1)
                loss += b * std::exp(q[j]) * (q[j] - m);
            const double d = std::exp(b == 0 ? q[j] : p[j]) * std::fabs(p[j] - q[j]);
            size += d;
        }
        loss += b == 1 ? mean : b > 0 ? (1 - b) * mean : 0;
        for (size_t j = 0; j < p.size(); j++) {
            const double each = b == 0 ? std::exp(p[j]) - std::exp(q[j])
                                       : (b < 1 ? 1 - b : 1) * std::exp(p[j]) * (over[j] - mean);
            const double log_largest = std::fmax(p[j], b == 0 ? q[j] : p[j]);
            gradient.push_back(each / c.temperature);
            // The larger probability is as exact as its logarithm, which is rounded twice, and is
            // multiplied by the logarithm of a ratio less its mean.
            const double factors = 4 * (1 + std::fabs(over[j]) + std::fabs(mean));
            const double of_largest = std::fabs(each) * (4 - 2 * log_largest);
            error.push_back((of_largest + std::exp(log_largest) * factors) / c.temperature);
        }
    }

  private:
    static std::vector<double> logarithms(const DivergenceCase &c,
                                          const std::vector<double> &logits, int64_t row)
    {
        std::vector<double> z;
        double top = -INFINITY, sum = 0;
        for (int64_t j = 0; j < c.classes; j++) {
            z.push_back(logits[size_t(row * (c.classes + c.gap) + j)] / c.temperature);
            top = std::fmax(top, z.back());
        }
        for (const double one : z)
            sum += std::exp(one - top);
        for (double &one : z)
            one -= top + std::log(sum);
        return z;
    }
};

} // namespace

TEST_P(Divergence, FollowsTheFormulas)
{
    for (const DivergenceCase &c : cases()) {
        const DivergenceRun run(*backend, c);
        const std::vector<double> student = run.student.values(0), teacher = run.teacher.values(0);
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        EXPECT_TRUE(run.whole()) << c;
        const std::vector<double> loss = run.loss.values(0), dloss = run.dloss.values(0);
        const std::vector<double> got = run.gradients();
        const double unit = epsilon_of(c.grad_dtype) / 2;
        const double tiny = tiny_of(c.grad_dtype);
        for (int64_t i = 0; i < c.rows; i++) {
            const int64_t first = i * run.grad_rows.stride;
            if (run.is_ignored(i)) {
                ASSERT_EQ(loss[size_t(i)], 0) << c;
                for (int64_t j = 0; j < c.classes; j++)
                    ASSERT_EQ(got[size_t(first + j)], 0) << c;
                continue;
            }
            const Exact row(run, student, teacher, i);
            ASSERT_NEAR(loss[size_t(i)], row.loss, (row.size * 2 + 4) * kUnit)
                << c << ", row " << i;
            for (int64_t j = 0; j < c.classes; j++) {
                const double d = dloss[c.per_row ? size_t(i) : 0];
                const double exact = row.gradient[size_t(j)] * d;
                ASSERT_NEAR(got[size_t(first + j)], exact,
                            std::fabs(exact) * unit + tiny + row.error[size_t(j)] * d * kUnit)
                    << c << ", row " << i << ", class " << j;
            }
        }
    }
}

// The loss and its gradient are there as small as the lesser weight, and so are their errors.
TEST_P(Divergence, NearTheEndsOfBeta)
{
    for (const double least : {1e-6, 1e-3})
        for (const double beta : {least, 1 - least})
            for (const auto &[distance, temperature] :
                 {std::pair{0.01, 1.0}, {4.0, 1.0}, {4.0, 0.1}}) {
                DivergenceCase c;
                c.rows = 6, c.classes = 300, c.ignored = 0, c.beta = beta;
                c.distance = distance, c.temperature = temperature;
                const DivergenceRun run(*backend, c);
                ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
                const std::vector<double> loss = run.loss.values(0), got = run.gradients();
                const double unit = least * kUnit, dloss = run.dloss.values(0)[0];
                for (int64_t i = 0; i < c.rows; i++) {
                    const Exact row(run, run.student.values(0), run.teacher.values(0), i);
                    const size_t classes = row.p.size();
                    double size = 1;
                    std::vector<double> larger, ratio;
                    for (size_t j = 0; j < classes; j++) {
                        larger.push_back(std::fmax(row.p[j], row.q[j]));
                        ratio.push_back(std::fabs(row.p[j] - row.q[j]));
                        size += std::exp(larger[j]) * ratio[j];
                    }
                    EXPECT_NEAR(loss[size_t(i)], row.loss,
                                (size * 2 + 4) * unit + std::fabs(row.loss) * kUnit)
                        << c << ", row " << i;
                    for (size_t j = 0; j < classes; j++)
                        EXPECT_NEAR(
                            got[size_t(i) * classes + j], row.gradient[j] * dloss,
                            (std::exp(larger[j]) * 4 * (size + ratio[j]) * unit / temperature +
                             std::fabs(row.gradient[j]) * (4 - 2 * larger[j]) * kUnit) *
                                    dloss +
                                0x1p-125)
                            << c << ", row " << i << ", class " << j;
                }
            }
}

// A divergence has no sign, and is 0 where the two are the same, wherever the logits are.
TEST_P(Divergence, OfADistributionFromItselfIsZero)
{
    for (const auto &[beta, temperature] :
         {std::pair{0.0, 1.0}, {1.0, 1.0}, {0.3, 1.0}, {0.3, 0.7}, {0.0, 1e-6}, {1.0, 1e6}}) {
        DivergenceCase c;
        c.beta = beta, c.temperature = temperature, c.distance = 0, c.size = 60, c.classes = 1500,
        c.ignored = 0;
        const DivergenceRun run(*backend, c);
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        for (const double loss : run.loss.values(0))
            EXPECT_EQ(loss, 0) << c;
        for (const double dz : run.gradients())
            EXPECT_EQ(dz, 0) << c;
    }
}

// What is missing from a binary32 log-sum-exp is not missing from the ratio: student and teacher are
// the same but for one number that is added to all logits, and for one class.
TEST_P(Divergence, CloseRowsFarFromZero)
{
    DivergenceCase c;
    c.rows = 1, c.classes = 2, c.ignored = 0;
    for (const auto &[beta, temperature] : {std::pair{0.0, 1.0},
                                            {1.0, 1.0},
                                            {0.5, 1.0},
                                            {0.0, 0.7},
                                            {1.0, 0.7},
                                            {0.5, 0.7},
                                            {0.0, 3.0}}) {
        c.beta = beta, c.temperature = temperature;
        DivergenceRun run(*backend, c);
        const double step = 0x1p-9;
        run.student.put(0, {60 + step, 60});
        run.teacher.put(0, {52, 52});
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        // p is 1/2 + small / 4, up to small^3, and q is 1/2.
        const double small = step / temperature;
        const double share = beta > 0 && beta < 1 ? beta * (1 - beta) : 1;
        EXPECT_NEAR(run.loss.values(0)[0], share * small * small / 8, 2 * kUnit);
        const double wanted = share * small / 4 / temperature * run.dloss.values(0)[0];
        EXPECT_NEAR(run.gradients()[0], wanted, 4 * kUnit);
        EXPECT_NEAR(run.gradients()[1], -wanted, 4 * kUnit);
    }
}

TEST_P(Divergence, RowsWithInfinitiesAndNans)
{
    for (const int64_t classes : {5, 1500})
        for (const double beta : {0.0, 1.0, 0.25}) {
            DivergenceCase c;
            c.rows = 7, c.classes = classes, c.ignored = 0, c.beta = beta;
            DivergenceRun run(*backend, c);
            std::vector<double> student(size_t(c.rows * classes), 1.0), teacher = student;
            const auto at = [&](std::vector<double> &of, int64_t row, int64_t j) -> double & {
                return of[size_t(row * classes + j)];
            };
            at(student, 0, 2) = at(teacher, 0, 2) = -INFINITY; // masked in both
            at(student, 1, 2) = -INFINITY;                     // in one
            at(teacher, 2, 2) = -INFINITY;
            at(student, 3, 1) = NAN, at(teacher, 4, 2) = INFINITY;
            for (int64_t j = 0; j < classes; j++)
                at(student, 5, j) = -INFINITY;
            at(student, 6, 0) = 300, at(teacher, 6, 1) = 300; // certain, of different classes
            run.student.put(0, student);
            run.teacher.put(0, teacher);
            ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
            const std::vector<double> loss = run.loss.values(0), grad = run.gradients();
            EXPECT_EQ(loss[0], 0) << c;
            for (int64_t j = 0; j < classes; j++)
                EXPECT_EQ(grad[size_t(j)], 0) << c << ", class " << j;
            const double n = double(classes), less = std::log1p(-1 / n);
            const double mixed_1 =
                0.25 * (-(n - 1) / n * std::log(0.25 + 0.75 * n / (n - 1)) + 1 / n * std::log(4)) -
                0.75 * std::log(0.75 + 0.25 * (n - 1) / n);
            const double mixed_2 = 0.75 * (-(n - 1) / n * std::log(0.75 + 0.25 * n / (n - 1)) +
                                           1 / n * std::log(4 / 3.0)) -
                                   0.25 * std::log(0.25 + 0.75 * (n - 1) / n);
            const double wanted_1 = beta == 0 ? INFINITY : beta == 1 ? -less : mixed_1;
            const double wanted_2 = beta == 0 ? -less : beta == 1 ? INFINITY : mixed_2;
            EXPECT_TRUE(loss[1] == wanted_1 || std::fabs(loss[1] - wanted_1) < 1e-6) << c;
            EXPECT_TRUE(loss[2] == wanted_2 || std::fabs(loss[2] - wanted_2) < 1e-6) << c;
            EXPECT_NEAR(grad[size_t(classes + 2)], beta == 0 ? -run.dloss.values(0)[0] / n : 0,
                        1e-7);
            for (const size_t row : {3, 4, 5})
                EXPECT_TRUE(std::isnan(loss[row])) << c << ", row " << row;
            const double entropy = -0.25 * std::log(0.25) - 0.75 * std::log(0.75);
            EXPECT_NEAR(loss[6], beta == 0.25 ? entropy : 299, 1e-5) << c;
        }
}

// Over the student's logits and apart, the same bits.
TEST_P(Divergence, TheGradientMayTakeThePlaceOfTheLogits)
{
    expect_gradient_over_logits<DivergenceRun>(
        *backend, [](auto &c) { c.beta = c.classes == 1030 ? 0.5 : 0; });
}

// The loss alone has the same bits.
TEST_P(Divergence, WithoutStatistics)
{
    DivergenceCase c;
    c.rows = 9, c.beta = 0.5;
    const DivergenceRun all(*backend, c);
    DivergenceRun alone(*backend, c);
    alone.statistics.data[0] = nullptr;
    ASSERT_EQ(all.forward(), HR_OK) << hr_last_error();
    ASSERT_EQ(alone.forward(), HR_OK) << hr_last_error();
    EXPECT_EQ(all.loss.values(0), alone.loss.values(0));
    EXPECT_TRUE(alone.whole());
}

TEST(DivergenceBits, AreTheSameOnEveryInstructionSetAndThreadCount)
{
    std::vector<DivergenceCase> all = cases();
    for (const hr_dtype dtype : {HR_F32, HR_BF16, HR_F16})
        for (const double beta : {0.0, 1.0, 0.5})
            all.push_back({.rows = 150,
                           .classes = 303,
                           .dtype = dtype,
                           .grad_dtype = dtype,
                           .beta = beta,
                           .temperature = 1.5,
                           .special = true});
    expect_bits_on_the_cpu<DivergenceRun>(all);
}

TEST(DivergenceBits, RepeatOnCudaAndInACapture)
{
    std::vector<DivergenceCase> some;
    for (size_t k = 0; k < cases().size(); k += 7)
        some.push_back(cases()[k]);
    expect_repeats_on_cuda<DivergenceRun>(some);
    expect_capturable<DivergenceRun>(some);
}
