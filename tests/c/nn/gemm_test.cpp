// Matrix products against sums in binary64: every layout, dtype, epilogue and lent product.
#include <array>
#include <cmath>

#include "tests/c/harness/bits.h"
#include "tests/c/nn/gemm_run.h"

using Gemm = OnBackend;
ON_EVERY_BACKEND(Gemm);

namespace
{

double gelu(double x)
{
    return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

double gelu_slope(double x)
{
    const double c = std::sqrt(2 / M_PI), t = std::tanh(c * (x + 0.044715 * x * x * x));
    return (1 + t) / 2 + x / 2 * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x);
}

void expect_product(Backend &backend, const GemmCase &c)
{
    const GemmRun run(backend, c);
    ASSERT_EQ(run.call(), HR_OK) << c << ": " << hr_last_error();
    ASSERT_TRUE(run.whole()) << c;
    const std::vector<double> got = run.c.values(0), got_aux = run.aux.values(0);
    const std::vector<double> got_gradient = run.gradient.values(0), bias = run.bias.values(0);
    std::vector<double> sums(size_t(std::max(c.m, c.n))), sizes(sums);
    for (int64_t index = 0; index < c.batch; index++)
        for (int64_t i = 0; i < c.m; i++)
            for (int64_t j = 0; j < c.n; j++) {
                double product = 0, size = 0;
                for (int64_t p = 0; p < c.k; p++) {
                    const double term = run.at_a(index, i, p) * run.at_b(index, p, j);
                    product += term, size += std::fabs(term);
                }
                const size_t at =
                    size_t(index * run.config.batch_stride_c + i * run.c_shape.stride + j);
                double x = c.alpha * product + (c.bias ? bias[size_t(j)] : 0);
                x += c.beta != 0 ? c.beta * run.at_addend(index, i, j) : 0;
                size = std::fabs(c.alpha) * size + 1;
                const size_t aux_at = size_t(i * run.aux_shape.stride + j);
                if (c.epilogue == HR_GEMM_GELU) {
                    if (c.aux) {
                        ASSERT_NEAR(got_aux[aux_at], x, error_of_sum(x, size, c.out_dtype)) << c;
                    }
                    x = gelu(x);
                } else if (c.epilogue == HR_GEMM_DGELU) {
                    x *= gelu_slope(run.before[3][aux_at]);
                    sums[size_t(j)] += got[at];
                    sizes[size_t(j)] += std::fabs(x) * (1 + epsilon_of(c.out_dtype) / 0x1p-19) + 1;
                }
                ASSERT_NEAR(got[at], x, error_of_sum(x, 2 * size, c.out_dtype))
                    << c << ", product " << index << ", row " << i << ", column " << j;
            }
    if (!c.bias_gradient)
        return;
    for (int64_t p = 0; p < c.k; p++) {
        for (int64_t i = 0; c.epilogue == HR_GEMM_BGRADA && i < c.m; i++)
            sums[size_t(i)] += run.at_a(0, i, p), sizes[size_t(i)] += 1;
        for (int64_t j = 0; c.epilogue == HR_GEMM_BGRADB && j < c.n; j++)
            sums[size_t(j)] += run.at_b(0, p, j), sizes[size_t(j)] += 1;
    }
    for (size_t j = 0; j < got_gradient.size(); j++)
        ASSERT_NEAR(got_gradient[j], sums[j], error_of_sum(sums[j], sizes[j], c.out_dtype)) << c;
}

// Both transposes, and whatever else in turn.
std::vector<GemmCase> cases(bool long_ones)
{
    std::vector<GemmCase> all;
    int turn = 0;
    for (const auto &[m, n, k] : std::vector<std::array<int64_t, 3>>{
             {1, 1, 1}, {3, 17, 5}, {17, 3, 1}, {1, 65, 17}, {9, 40, 33}, {40, 1, 3}, {5, 6, 0}})
        for (const hr_dtype dtype : {HR_F32, HR_BF16, HR_F16})
            for (const int transposes : {0, 1, 2, 3}) {
                GemmCase c;
                c.m = m, c.n = n, c.k = k, c.dtype = dtype;
                c.out_dtype = turn % 3 == 1 ? HR_F32 : dtype;
                c.transpose_a = transposes & 1, c.transpose_b = transposes & 2;
                c.gap = turn % 2 * 3;
                c.alpha = turn % 5 == 1 ? 0.5 : 1;
                c.beta = turn % 7 == 2 ? -1.5 : turn % 7 == 4 ? 1 : 0;
                c.bias = turn % 4 == 3;
                c.batch = turn % 6 == 5 ? 3 : 1;
                c.one_b = turn % 12 == 11;
                c.shift = turn % 3 == 2;
                c.addend = turn % 2 == 0 || turn % 12 == 5;
                all.push_back(c);
                turn++;
            }
    for (int turns = 0; long_ones && turns < 8; turns++) {
        GemmCase c;
        c.m = 130, c.n = 141, c.k = turns % 2 ? 65 : 300;
        c.transpose_a = turns & 1, c.transpose_b = turns & 2;
        c.dtype = c.out_dtype = turns & 4 ? HR_BF16 : HR_F32;
        c.gap = turns, c.beta = turns % 3, c.addend = turns & 4;
        all.push_back(c);
    }
    return all;
}

std::vector<GemmCase> epilogue_cases()
{
    std::vector<GemmCase> all;
    for (const hr_dtype dtype : {HR_F32, HR_BF16, HR_F16})
        for (int turn = 0; turn < 12; turn++) {
            GemmCase c;
            c.m = 19, c.n = turn % 2 ? 16 : 21, c.k = turn == 11 ? 0 : 11, c.gap = turn % 3;
            c.dtype = dtype, c.out_dtype = turn % 5 == 4 ? HR_F32 : dtype;
            c.transpose_a = turn & 1, c.transpose_b = turn & 2;
            const hr_gemm_epilogue epilogues[] = {HR_GEMM_GELU, HR_GEMM_DGELU, HR_GEMM_BGRADA,
                                                  HR_GEMM_BGRADB};
            c.epilogue = turn == 11 ? HR_GEMM_DGELU : epilogues[turn % 4];
            const bool is_gelu = c.epilogue == HR_GEMM_GELU;
            c.bias = is_gelu && turn % 8 == 0;
            c.aux = c.epilogue == HR_GEMM_DGELU || (is_gelu && turn != 4);
            c.bias_gradient = !is_gelu && turn != 1;
            c.beta = turn % 3 == 0;
            c.alpha = turn % 3 ? 1 : -0.75;
            c.shift = turn % 4 == 2;
            c.addend = turn % 6 < 3;
            all.push_back(c);
        }
    return all;
}

} // namespace

TEST_P(Gemm, IsTheSumOfProducts)
{
    for (const GemmCase &c : cases(!backend->is_emulated()))
        ASSERT_NO_FATAL_FAILURE(expect_product(*backend, c));
}

TEST_P(Gemm, EpiloguesFollowTheFormulas)
{
    for (const GemmCase &c : epilogue_cases())
        ASSERT_NO_FATAL_FAILURE(expect_product(*backend, c));
}

TEST_P(Gemm, EmptyMatricesAndBatches)
{
    for (const auto &[m, n, k, batch] : std::vector<std::array<int64_t, 4>>{
             {0, 5, 3, 1}, {5, 0, 3, 1}, {0, 0, 0, 1}, {2, 3, 4, 0}, {0, 3, 2, 2}}) {
        GemmCase c;
        c.m = m, c.n = n, c.k = k, c.batch = batch;
        const GemmRun run(*backend, c);
        EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
        EXPECT_TRUE(run.whole());
    }
    GemmCase c;
    c.m = 0, c.epilogue = HR_GEMM_DGELU, c.aux = c.bias_gradient = true;
    ASSERT_NO_FATAL_FAILURE(expect_product(*backend, c));
}

// alpha 0: A and B may be anything.
TEST_P(Gemm, AlphaZeroReadsNeitherFactor)
{
    GemmCase c;
    c.beta = 2, c.bias = true;
    GemmRun run(*backend, c);
    run.config.alpha = 0;
    run.a_rows = run.b_rows = {nullptr, 0};
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    for (size_t i = 0; i < size_t(c.m * c.n); i++)
        EXPECT_NEAR(run.c.values(0)[i], 2 * run.before[2][i] + run.bias.values(0)[i % 5], 1e-6);
}

// The heads of a projection: matrices of a batch side by side.
TEST_P(Gemm, MatricesOfABatchMayLieSideBySide)
{
    GemmCase c;
    c.m = 4, c.n = 3, c.k = 2, c.gap = 9, c.batch = 4;
    GemmRun run(*backend, c);
    run.config.batch_stride_c = 3;
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    const std::vector<double> got = run.c.values(0);
    for (int64_t index = 0; index < 4; index++)
        for (int64_t i = 0; i < 4; i++)
            for (int64_t j = 0; j < 3; j++) {
                double sum = 0;
                for (int64_t p = 0; p < 2; p++)
                    sum += run.at_a(index, i, p) * run.at_b(index, p, j);
                EXPECT_NEAR(got[size_t(index * 3 + i * 12 + j)], sum, 1e-6);
            }
}

TEST_P(Gemm, WorkspaceIsForTheDevice)
{
    hr_gemm_config config = HR_GEMM_CONFIG_INIT;
    const hr_exec exec = backend->exec();
    size_t bytes = 77;
    ASSERT_EQ(hr_gemm_workspace(&bytes, 3, 4, 5, &config, &exec), HR_OK) << hr_last_error();
    if (exec.device == HR_CPU)
        EXPECT_EQ(bytes, 0u);
    else
        EXPECT_GE(bytes, size_t(1) << 20);
    const GemmCase c;
    GemmRun run(*backend, c);
    run.workspace_argument = nullptr, run.workspace_bytes = 0;
    EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
}

TEST(GemmBits, AreTheSameOnEveryInstructionSetAndThreadCount)
{
    std::vector<GemmCase> some;
    for (int turn = 0; turn < 4; turn++) {
        GemmCase c;
        c.m = 150, c.n = 140, c.k = turn % 2 ? 270 : 20, c.batch = turn == 3 ? 2 : 1;
        c.dtype = c.out_dtype = hr_dtype(turn % 3);
        c.transpose_a = turn & 1, c.transpose_b = turn & 2;
        c.beta = 0.5; // a case without garbage in its gaps
        c.bias = turn == 0;
        some.push_back(c);
    }
    std::vector<GemmCase> epilogues = epilogue_cases();
    for (size_t i = 0; i < epilogues.size(); i += 7)
        some.push_back(epilogues[i]);
    expect_bits_on_the_cpu<GemmRun>(some);
}

TEST(GemmBits, RepeatOnCuda)
{
    std::vector<GemmCase> all = cases(false), some;
    for (size_t i = 0; i < all.size(); i += 9)
        some.push_back(all[i]);
    expect_repeats_on_cuda<GemmRun>(some);
}

namespace
{
struct Lent {
    hr_status answer = HR_OK;
    int calls = 0;
    const hr_gemm_config *config = nullptr;
};

hr_status lent_product(void *context, const hr_rows *c, const hr_rows *, const hr_rows *,
                       const void *, int64_t, int64_t, int64_t, const hr_gemm_config *config)
{
    Lent &lent = *static_cast<Lent *>(context);
    lent.calls++;
    lent.config = config;
    if (lent.answer == HR_OK)
        *static_cast<float *>(c->data) = 42;
    return lent.answer;
}
} // namespace

TEST(GemmOnTheCpu, TheHostMayLendItsProduct)
{
    Lent lent;
    ASSERT_EQ(hr_set_gemm(lent_product, &lent), HR_OK);
    {
        const GemmRun run(cpu_backend(), GemmCase{});
        EXPECT_EQ(run.call(), HR_OK);
        EXPECT_EQ(run.c.values(0)[0], 42);
        EXPECT_EQ(lent.calls, 1);
    }
    lent.answer = HR_UNSUPPORTED;
    ASSERT_NO_FATAL_FAILURE(expect_product(cpu_backend(), GemmCase{}));
    EXPECT_EQ(lent.calls, 2);
    lent.answer = HR_INTERNAL;
    const GemmRun other(cpu_backend(), GemmCase{});
    EXPECT_EQ(other.call(), HR_INTERNAL);
    lent.answer = HR_UNSUPPORTED; // sums of a factor are written beside the host's product
    lent.calls = 0;
    int asked = 0;
    for (GemmCase c : epilogue_cases()) {
        ASSERT_NO_FATAL_FAILURE(expect_product(cpu_backend(), c));
        const bool sums = c.epilogue == HR_GEMM_BGRADA || c.epilogue == HR_GEMM_BGRADB;
        asked += sums && c.k > 0 && c.batch > 0;
    }
    EXPECT_EQ(lent.calls, asked);
    EXPECT_GT(asked, 0);
    lent.answer = HR_INTERNAL;
    lent.calls = 0;
    GemmCase empty;
    empty.k = 0;
    ASSERT_NO_FATAL_FAILURE(expect_product(cpu_backend(), empty));
    EXPECT_EQ(lent.calls, 0);
    ASSERT_EQ(hr_set_gemm(nullptr, nullptr), HR_OK);
    ASSERT_NO_FATAL_FAILURE(expect_product(cpu_backend(), GemmCase{}));
    EXPECT_EQ(lent.calls, 0);
}
