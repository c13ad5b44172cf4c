// A run of an optimizer that goes from the CPU to CUDA and back, or the other way round: the bytes
// of one that stayed where it was.
#include <cmath>
#include <memory>

#include "tests/c/optim/adafactor_run.h"
#include "tests/c/optim/adamw8bit_run.h"
#include "tests/c/optim/adamw_run.h"

namespace
{
constexpr int kSteps = 2; // on each device

// Goes on from one backend to the next with everything it has.
template <class Run, class Case>
std::unique_ptr<Run> run_on(const std::vector<Backend *> &backends, const Case &c)
{
    std::unique_ptr<Run> run;
    for (Backend *backend : backends) {
        auto next = std::make_unique<Run>(*backend, c);
        if (run)
            next->take(*run);
        run = std::move(next);
        for (int step = 0; step < kSteps; step++)
            EXPECT_EQ(run->call(), HR_OK) << hr_last_error();
    }
    return run;
}

template <class Run, class Case> void expect_same_wherever(const Case &c)
{
    Backend *const cpu = &cpu_backend(), *const cuda = cuda_backend();
    const std::vector<uint8_t> stayed = run_on<Run>({cpu, cpu, cpu}, c)->image();
    EXPECT_NE(stayed, run_on<Run>({cpu, cpu}, c)->image()) << c;
    EXPECT_EQ(run_on<Run>({cpu, cuda, cpu}, c)->image(), stayed) << c;
    EXPECT_EQ(run_on<Run>({cuda, cpu, cuda}, c)->image(), stayed) << c;
}

// Every way to keep weights, and what keeps them wide already.
std::vector<std::optional<WeightsData::Ask>> every_way()
{
    std::vector<std::optional<WeightsData::Ask>> all = {std::nullopt};
    for (int mode = HR_WEIGHTS_STOCHASTIC; mode <= HR_WEIGHTS_REMAINDER8_STOCHASTIC; mode++)
        all.push_back(WeightsData::Ask{hr_weights_mode(mode), mode == HR_WEIGHTS_STOCHASTIC, true});
    return all;
}

void expect_near(const Tensors &got, const Tensors &expected, double relative, double absolute)
{
    for (size_t k = 0; k < got.buffers.size(); k++) {
        const std::vector<double> a = got.values(k), b = expected.values(k);
        for (size_t i = 0; i < a.size(); i++)
            ASSERT_LE(std::fabs(a[i] - b[i]), relative * std::fabs(b[i]) + absolute)
                << "element " << i << " of tensor " << k;
    }
}
} // namespace

class Resume : public testing::Test
{
  protected:
    void SetUp() override
    {
        if (!cuda_backend())
            GTEST_SKIP() << "no CUDA device";
    }
};

TEST_F(Resume, AdamwOnAnotherDevice)
{
    for (const hr_dtype param : {HR_F32, HR_BF16, HR_F16})
        for (const auto &way : every_way()) {
            AdamwCase c;
            if (way &&
                (param == HR_F32 || (param == HR_F16 && way->mode >= HR_WEIGHTS_REMAINDER16)))
                continue;
            c.numel = {257, 3, 0, 70};
            c.param = c.grad = param;
            c.state = way ? HR_F32 : param;
            c.amsgrad = param == HR_F16;
            c.steps = HR_F64;
            c.weights = way;
            expect_same_wherever<AdamwRun>(c);
        }
}

TEST_F(Resume, Adamw8bitOnAnotherDevice)
{
    for (const bool stochastic : {false, true})
        for (const auto &way : every_way()) {
            Adamw8bitCase c;
            c.numel = {257, 3, 0, 70};
            c.param = c.grad = {HR_BF16};
            if (!way)
                c.param = c.grad = float_types();
            c.block_size = stochastic ? 64 : 256;
            c.stochastic = stochastic;
            c.steps = HR_F64;
            c.weights = way;
            expect_same_wherever<Adamw8bitRun>(c);
        }
}

// Its devices agree in sums to 2^-20 and in updates to 2^-18 for each step; of which it makes six.
TEST_F(Resume, AdafactorOnAnotherDevice)
{
    Backend *const cpu = &cpu_backend(), *const cuda = cuda_backend();
    for (const bool torch : {false, true})
        for (const auto &way : every_way()) {
            if (way && way->mode != (torch ? HR_WEIGHTS_MASTER : HR_WEIGHTS_REMAINDER16))
                continue; // what rounds weights to 16 bits makes of a small difference a large one
            AdafactorCase c;
            c.shapes = {matrix(9, 70), vector(129), matrix(3, 3, 2)};
            if (torch) {
                c.semantics = HR_ADAFACTOR_TORCH;
                c.config = HR_ADAFACTOR_TORCH_INIT;
            }
            c.momentum = !torch;
            c.config.beta1 = torch ? 0 : 0.9;
            if (way)
                c.params = {HR_BF16};
            c.weights = way;
            const auto stayed = run_on<AdafactorRun>({cpu, cpu, cpu}, c);
            for (const auto &path : {std::vector<Backend *>{cpu, cuda, cpu}, {cuda, cpu, cuda}}) {
                SCOPED_TRACE(testing::PrintToString(c));
                const auto moved = run_on<AdafactorRun>(path, c);
                const double sum = 6 * 0x1p-20, update = 6 * 0x1p-18;
                expect_near(moved->row_vars, stayed->row_vars, sum, 0);
                expect_near(moved->col_vars, stayed->col_vars, sum, 0);
                expect_near(moved->variances, stayed->variances, sum, 0);
                expect_near(moved->steps, stayed->steps, 0, 0);
                expect_near(moved->exp_avgs, stayed->exp_avgs, update, 0x1p-28);
                for (size_t k = 0; k < c.shapes.size(); k++) {
                    const auto weights = [&](const AdafactorRun &run) {
                        return way ? run.weights_as_f32()[k] : run.params.values(k);
                    };
                    const std::vector<double> a = weights(*moved), b = weights(*stayed);
                    for (size_t i = 0; i < a.size(); i++) // an update is 1e-2 of a weight
                        EXPECT_NEAR(a[i], b[i], 6 * 0x1p-22);
                }
            }
        }
}
