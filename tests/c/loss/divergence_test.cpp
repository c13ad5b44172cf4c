// Divergences against their formulas in binary64, and the same bits wherever they run.
#include <cmath>

#include "tests/c/harness/bits.h"
#include "tests/c/loss/divergence_run.h"
#include "tests/c/loss/made.h"

using Divergence = OnBackend;
ON_EVERY_BACKEND(Divergence);

namespace
{

constexpr double kUnit = 0x1p-24; // half an ulp at 1, in binary32

std::vector<DivergenceCase> cases()
{
    std::vector<DivergenceCase> all;
    const int64_t shapes[][2] = {{1, 1},   {7, 2},    {9, 7},    {6, 64},
                                 {3, 520}, {5, 1031}, {3, 2056}, {2, 5001}};
    int k = 0;
    for (const auto &[rows, classes] : shapes)
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

// What a run has left as a gradient, which may lie over the logits in a narrower type.
std::vector<double> gradients_of(const DivergenceRun &run)
{
    const Tensors &where = run.shape.in_place ? run.student : run.grad;
    return decode(where.buffers[0].content(), run.shape.grad_dtype);
}

// Of one row, by the formulas.
struct Exact {
    double loss = 0, size = 1;           // size: of what is added up
    std::vector<double> gradient, error; // error: in units of the last place of 1

    Exact(const DivergenceRun &run, const std::vector<double> &student,
          const std::vector<double> &teacher, int64_t row)
    {
        const DivergenceCase &c = run.shape;
        const std::vector<double> p = logarithms(c, student, row), q = logarithms(c, teacher, row);
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
        const std::vector<double> got = gradients_of(run);
        const double unit = epsilon_of(c.grad_dtype) / 2;
        const double tiny =
            c.grad_dtype == HR_F16 ? 0x1p-25 : 0x1p-125; // or it is that small, and 0
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
        for (const double dz : gradients_of(run))
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
        const auto put = [&](const Tensors &where, double a, double b) {
            const std::vector<uint8_t> bytes = encode({a, b}, HR_F32);
            run.backend.upload(where.data[0], bytes.data(), bytes.size());
        };
        put(run.student, 60 + step, 60);
        put(run.teacher, 52, 52);
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        // p is 1/2 + small / 4, up to small^3, and q is 1/2.
        const double small = step / temperature;
        const double share = beta > 0 && beta < 1 ? beta * (1 - beta) : 1;
        EXPECT_NEAR(run.loss.values(0)[0], share * small * small / 8, 2 * kUnit);
        const double wanted = share * small / 4 / temperature * run.dloss.values(0)[0];
        EXPECT_NEAR(gradients_of(run)[0], wanted, 4 * kUnit);
        EXPECT_NEAR(gradients_of(run)[1], -wanted, 4 * kUnit);
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
            for (const auto &[values, where] :
                 {std::pair{&student, &run.student}, {&teacher, &run.teacher}}) {
                const std::vector<uint8_t> bytes = encode(*values, HR_F32);
                run.backend.upload(where->data[0], bytes.data(), bytes.size());
            }
            ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
            const std::vector<double> loss = run.loss.values(0), grad = gradients_of(run);
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
    for (const auto &[dtype, grad_dtype] :
         {std::pair{HR_F32, HR_F32}, {HR_BF16, HR_BF16}, {HR_F32, HR_BF16}, {HR_F32, HR_F16}})
        for (const int64_t classes : {37, 1030, 2600}) {
            DivergenceCase c;
            c.rows = 4, c.classes = classes, c.dtype = dtype, c.grad_dtype = grad_dtype;
            c.gap = 24 - classes % 8, c.beta = classes == 1030 ? 0.5 : 0;
            DivergenceCase over = c;
            over.in_place = true;
            const DivergenceRun apart(*backend, c), inside(*backend, over);
            ASSERT_EQ(apart.call(), HR_OK) << hr_last_error();
            ASSERT_EQ(inside.call(), HR_OK) << hr_last_error();
            const std::vector<double> one = gradients_of(apart), other = gradients_of(inside);
            for (int64_t i = 0; i < c.rows; i++)
                for (int64_t j = 0; j < classes; j++)
                    ASSERT_EQ(one[size_t(i * apart.grad_rows.stride + j)],
                              other[size_t(i * inside.grad_rows.stride + j)])
                        << over << ", row " << i << ", class " << j;
        }
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

namespace
{

template <class Run> BadInputs<Run> bad_everywhere()
{
    return joined<Run>(
        {bad_config_or_exec<Run>(),
         bad_numbers<Run>("config->beta is", [](Run &r) -> double & { return r.config.beta; },
                          {-0.1, 1.1, 1e-7, 1 - 1e-7, NAN}),
         bad_numbers<Run>("config->temperature is",
                          [](Run &r) -> double & { return r.config.temperature; },
                          {0, -1, 1e-7, 1e7, INFINITY, NAN}),
         bad_sizes_or_dtypes<Run>(),
         {{"student is NULL", [](Run &r) { r.student_argument = nullptr; }},
          {"student->data is NULL", [](Run &r) { r.student_rows.data = nullptr; }},
          {"student->stride is 6, wanted", [](Run &r) { r.student_rows.stride = 6; }},
          {"teacher is NULL", [](Run &r) { r.teacher_argument = nullptr; }},
          {"teacher->data is at .* not a multiple of 4",
           [](Run &r) { r.teacher_rows.data = moved(r.teacher_rows.data, 2); }},
          {"teacher->stride is .*, wanted at most 2\\^59",
           [](Run &r) { r.teacher_rows.stride = INT64_MAX / 2; }}}});
}

} // namespace

TEST_P(Divergence, BadInputs)
{
    const DivergenceCase c;
    using Forward = RunOf<DivergenceRun, &DivergenceRun::forward>;
    expect_all_refused<Forward>(
        *backend, c,
        joined<Forward>({bad_everywhere<Forward>(),
                         {null_of<Forward>("loss", &DivergenceRun::loss),
                          odd<Forward>("loss", &DivergenceRun::loss),
                          odd<Forward>("statistics", &DivergenceRun::statistics)}}));
    using Backward = RunOf<DivergenceRun, &DivergenceRun::backward>;
    expect_all_refused<Backward>(
        *backend, c,
        joined<Backward>({bad_everywhere<Backward>(),
                          bad_gradients<Backward>("student", &DivergenceRun::student_rows),
                          {null_of<Backward>("statistics", &DivergenceRun::statistics),
                           odd<Backward>("statistics", &DivergenceRun::statistics)}}));
    Forward forward(*backend, c);
    expect_no_such_device(forward);
    Backward backward(*backend, c);
    expect_no_such_device(backward);
}
