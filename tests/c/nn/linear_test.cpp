// Linear layers of matrices of few bits against sums in binary64, and against products with the
// decoded matrix: every format, dtype and size of workspace.
#include <array>
#include <cmath>

#include "tests/c/harness/bits.h"
#include "tests/c/harness/refused.h"
#include "tests/c/nn/linear_run.h"

using Linear = OnBackend;
ON_EVERY_BACKEND(Linear);

namespace
{

void expect_product(Backend &backend, const LinearCase &c)
{
    const LinearRun run(backend, c);
    ASSERT_EQ(run.call(), HR_OK) << c << ": " << hr_last_error();
    ASSERT_TRUE(run.whole()) << c;
    const std::vector<double> x = run.in.values(0), y = run.out.values(0), w = run.weight();
    const std::vector<double> bias = run.bias.values(0);
    const int64_t terms = run.in_cols(), cols = run.out_cols();
    for (int64_t i = 0; i < c.m; i++) {
        for (int64_t j = 0; j < cols; j++) {
            double sum = (c.bias ? bias[size_t(j)] : 0) + (c.adds ? 77 : 0), size = std::fabs(sum);
            for (int64_t p = 0; p < terms; p++) {
                const double term = x[size_t(i * run.in_rows.stride + p)] *
                                    w[size_t(c.backward ? p * c.cols + j : j * c.cols + p)];
                sum += term, size += std::fabs(term);
            }
            ASSERT_NEAR(y[size_t(i * run.out_rows.stride + j)], sum,
                        error_of_sum(sum, size, c.dtype))
                << c << ", row " << i << ", column " << j;
        }
        for (int64_t j = cols; j < cols + c.gap; j++)
            ASSERT_EQ(y[size_t(i * run.out_rows.stride + j)], 77) << c;
    }
}

// Every format, and whatever else in turn.
std::vector<LinearCase> cases(bool large)
{
    std::vector<LinearCase> all;
    int turn = 0;
    std::vector<std::array<int64_t, 3>> sizes = {{1, 1, 1},   {1, 9, 64},  {3, 5, 33},
                                                 {2, 17, 96}, {8, 3, 160}, {16, 4, 70},
                                                 {20, 9, 70}, {17, 2, 31}, {30, 7, 128}};
    if (large)
        sizes.insert(sizes.end(), {{20, 150, 320}, {5, 40, 2144}, {4, 33, 1500}, {21, 300, 129}});
    for (const auto &[m, rows, cols] : sizes)
        for (const hr_format format : {HR_NF4, HR_FP4, HR_INT8_ROWS})
            for (const bool backward : {false, true}) {
                LinearCase c;
                c.m = m, c.rows = rows, c.cols = cols, c.format = format, c.backward = backward;
                c.dtype = hr_dtype(turn % 3);
                c.nested = format != HR_INT8_ROWS && turn % 4 < 2;
                c.bias = !backward && turn % 5 < 3;
                c.block_size = turn % 7 < 3 ? 64 : turn % 7 < 6 ? 32 : 4096;
                c.gap = turn % 5 == 1 ? 3 : turn % 5 == 2 ? 8 : 0;
                c.shift = turn % 3 == 2;
                c.codes = turn % 11 == 3 ? 5 : 0;
                c.space = Space(turn % 4);
                all.push_back(c);
                turn++;
            }
    for (const int64_t m : {1, 4, 5, 8, 9, 16, 17}) { // about the number of rows that are few
        LinearCase c;
        c.m = m, c.cols = 64, c.bias = true;
        all.push_back(c);
    }
    return all;
}

} // namespace

TEST_P(Linear, IsTheProductWithTheDecodedMatrix)
{
    for (const LinearCase &c : cases(backend == &cpu_backend()))
        ASSERT_NO_FATAL_FAILURE(expect_product(*backend, c));
}

// Of few rows of x, too.
TEST_P(Linear, AddsToWhatIsThere)
{
    for (const int64_t m : {1, 20})
        for (const bool backward : {false, true})
            for (const hr_format format : {HR_NF4, HR_INT8_ROWS}) {
                LinearCase c;
                c.m = m, c.cols = 96, c.format = format, c.backward = backward, c.adds = true;
                c.dtype = HR_BF16, c.space = Space::LEAST;
                ASSERT_NO_FATAL_FAILURE(expect_product(*backend, c));
            }
}

TEST_P(Linear, AddsToWhatIsElsewhere)
{
    for (const int64_t m : {1, 20})
        for (const bool backward : {false, true}) {
            LinearCase c;
            c.m = m, c.backward = backward, c.space = Space::LEAST, c.gap = 3, c.adds = true;
            const LinearRun there(*backend, c), other(*backend, c); // 77 in all elements
            LinearRun run(*backend, c);
            run.config.addend = other.out_rows;
            const std::vector<uint8_t> before = other.image();
            run.out.put(0, std::vector<double>(size_t(run.out.numel[0]), NAN));
            ASSERT_EQ(there.call(), HR_OK) << hr_last_error();
            ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
            EXPECT_EQ(other.image(), before);
            const std::vector<double> got = run.out.values(0), wanted = there.out.values(0);
            for (int64_t i = 0; i < c.m; i++)
                for (int64_t j = 0; j < run.out_cols(); j++) {
                    const size_t at = size_t(i * run.out_rows.stride + j);
                    ASSERT_EQ(got[at], wanted[at]) << c << i << ", " << j;
                }
        }
}

// Tiles and lanes: columns about a multiple of what a turn takes.
TEST_P(Linear, FewRowsOfAnyNumberOfColumns)
{
    for (const int64_t m : {1, 8})
        for (const int64_t cols : {512, 1024, 1025, 1056, 2016, 2080})
            for (const hr_format format : {HR_NF4, HR_INT8_ROWS}) {
                LinearCase c;
                c.m = m, c.rows = 3, c.cols = cols, c.format = format, c.dtype = HR_BF16;
                c.block_size = 128;
                ASSERT_NO_FATAL_FAILURE(expect_product(*backend, c));
            }
}

// With the payload that quantizing leaves.
TEST_P(Linear, AScaleThatIsNoNumberReachesEveryResult)
{
    for (const int64_t m : {1, 20})
        for (const hr_dtype dtype : {HR_F32, HR_BF16, HR_F16})
            for (const hr_format format : {HR_NF4, HR_INT8_ROWS}) {
                LinearCase c;
                c.m = m, c.cols = 64, c.dtype = dtype, c.format = format;
                const LinearRun run(*backend, c);
                std::vector<uint8_t> scales = run.absmax.buffers[0].content();
                scales[0] = scales[1] = scales[2] = 0xFF, scales[3] = 0x7F;
                run.absmax.buffers[0].put(scales);
                ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
                const std::vector<double> y = run.out.values(0);
                for (int64_t i = 0; i < m; i++) {
                    ASSERT_TRUE(std::isnan(y[size_t(i * c.rows)])) << c;
                    ASSERT_FALSE(std::isnan(y[size_t(i * c.rows + 1)])) << c;
                }
            }
}

TEST_P(Linear, WithoutRows)
{
    for (const bool backward : {false, true})
        for (const hr_format format : {HR_NF4, HR_INT8_ROWS}) {
            LinearCase c;
            c.format = format, c.backward = backward;
            c.m = 0;
            LinearRun run(*backend, c);
            EXPECT_EQ(run.needs.best, 0u);
            run.workspace_argument = nullptr, run.workspace_bytes = 0;
            EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
            for (const int64_t m : {1, 20}) {
                c.m = m, c.rows = 0;
                ASSERT_NO_FATAL_FAILURE(expect_product(*backend, c));
                LinearRun nowhere(*backend, c); // no bytes may lie anywhere
                if (nowhere.workspace_bytes == 0)
                    nowhere.workspace_argument = moved(nowhere.workspace_argument, 1);
                EXPECT_EQ(nowhere.call(), HR_OK) << hr_last_error();
            }
            c.rows = 9;
        }
}

TEST_P(Linear, TheQuerySaysWhatPartsTake)
{
    const hr_exec exec = backend->exec();
    const bool cpu = exec.device == HR_CPU;
    float scale = 0;
    alignas(64) uint8_t codes[64] = {};
    hr_matrix matrix = HR_MATRIX_INIT;
    matrix.format = HR_NF4, matrix.dtype = HR_BF16;
    matrix.rows = 14336, matrix.cols = 4096;
    matrix.data = codes, matrix.absmax = &scale;
    hr_linear_config config = HR_LINEAR_CONFIG_INIT;
    hr_gemm_config gemm = HR_GEMM_CONFIG_INIT;
    size_t product = 0;
    ASSERT_EQ(hr_gemm_workspace(&product, 32, 14336, 4096, &gemm, &exec), HR_OK);
    const size_t part = size_t(cpu ? 4 : 32) << 20;
    hr_linear_needs needs;
    for (const int backward : {0, 1}) {
        ASSERT_EQ(hr_linear_query(&needs, 32, &matrix, backward, nullptr, &exec), HR_OK);
        EXPECT_EQ(needs.least, size_t(backward ? 14336 : 4096) * 2);
        EXPECT_LE(needs.best, part + product);
        EXPECT_GT(needs.best, part * 3 / 4 + product);
        EXPECT_EQ((needs.best - product) % (needs.least * 64), 0u); // whole blocks
        EXPECT_EQ(needs.whole, size_t(14336) * 4096 * 2 + product);
    }
    ASSERT_EQ(hr_linear_query(&needs, 1, &matrix, 0, &config, &exec), HR_OK);
    EXPECT_LE(needs.best, size_t(4096) * 4); // x, for few rows
    EXPECT_EQ(needs.whole, needs.best);
    matrix.rows = 1 << 20; // 64 columns of it are more than a part
    ASSERT_EQ(hr_linear_query(&needs, 32, &matrix, 1, &config, &exec), HR_OK);
    EXPECT_EQ(needs.best, (size_t(1) << 20) * 2 * 64 + product);
    matrix.format = HR_DENSE, matrix.stride = 4096;
    ASSERT_EQ(hr_linear_query(&needs, 32, &matrix, 0, &config, &exec), HR_OK);
    EXPECT_EQ(needs.least, 0u);
    EXPECT_EQ(needs.best, product);
}

namespace
{

// The same by one product with the whole matrix, decoded. On the CPU, without few rows.
std::vector<uint8_t> by_one_product(const LinearCase &c)
{
    const LinearRun run(cpu_backend(), c);
    const size_t size = bytes_of(c.dtype);
    const Buffer whole(cpu_backend(), std::vector<uint8_t>(size_t(c.rows * c.cols) * size));
    const hr_rows w = {whole.data(), c.cols};
    EXPECT_EQ(hr_dequantize_matrix(&w, &run.matrix, 0, c.rows, 0, c.cols, &run.exec), HR_OK);
    hr_gemm_config config = HR_GEMM_CONFIG_INIT;
    config.dtype = config.out_dtype = c.dtype;
    config.transpose_b = !c.backward;
    EXPECT_EQ(hr_gemm(&run.out_rows, &run.in_rows, &w, run.bias_argument, c.m, run.out_cols(),
                      run.in_cols(), &config, nullptr, 0, &run.exec),
              HR_OK);
    return run.image();
}

} // namespace

TEST(LinearOnTheCpu, PartsOfAnySizeHaveTheBitsOfOneProduct)
{
    int turn = 0;
    for (const hr_dtype dtype : {HR_F32, HR_BF16, HR_F16})
        for (const hr_format format : {HR_NF4, HR_FP4, HR_INT8_ROWS})
            for (const bool backward : {false, true}) {
                LinearCase c;
                c.m = 20, c.rows = 150, c.cols = turn % 2 ? 192 : 201;
                c.dtype = dtype, c.format = format, c.backward = backward;
                c.nested = format != HR_INT8_ROWS && turn % 3 == 0, c.bias = !backward;
                const std::vector<uint8_t> expected = by_one_product(c);
                for (const Space space : {Space::LEAST, Space::ODD, Space::BEST, Space::WHOLE}) {
                    c.space = space;
                    const LinearRun run(cpu_backend(), c);
                    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
                    EXPECT_TRUE(run.image() == expected) << c;
                }
                turn++;
            }
}

TEST_P(Linear, DenseMatricesAreMultipliedWhereTheyLie)
{
    for (const bool backward : {false, true}) {
        LinearCase c;
        c.backward = backward;
        const LinearRun decoded(*backend, c);
        ASSERT_EQ(decoded.call(), HR_OK) << hr_last_error();
        Tensors weight(*backend, {c.rows * (c.cols + 2)}, {HR_F32}, 0, [&](size_t, size_t i) {
            const size_t row = i / size_t(c.cols + 2), col = i % size_t(c.cols + 2);
            return col < size_t(c.cols) ? decoded.weight()[row * size_t(c.cols) + col] : NAN;
        });
        LinearRun run(*backend, c);
        run.matrix = HR_MATRIX_INIT;
        run.matrix.rows = c.rows, run.matrix.cols = c.cols, run.matrix.stride = c.cols + 2;
        run.matrix.data = weight.data[0];
        run.workspace_argument = nullptr, run.workspace_bytes = 0;
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        const std::vector<double> got = run.out.values(0), wanted = decoded.out.values(0);
        for (size_t i = 0; i < got.size(); i++)
            ASSERT_NEAR(got[i], wanted[i], 1e-4);
    }
}

TEST(LinearBits, AreTheSameOnEveryInstructionSetAndThreadCount)
{
    std::vector<LinearCase> some;
    int turn = 0;
    for (const int64_t m : {1, 3, 8, 20})
        for (const hr_format format : {HR_NF4, HR_FP4, HR_INT8_ROWS})
            for (const int64_t cols : {1088, 1073}) {
                LinearCase c;
                c.m = m, c.rows = 70, c.cols = cols, c.format = format;
                c.dtype = hr_dtype(turn % 3);
                c.backward = m == 20 && turn % 2;
                c.nested = format == HR_NF4;
                some.push_back(c);
                turn++;
            }
    expect_bits_on_the_cpu<LinearRun>(some);
}

TEST(LinearBits, RepeatOnCuda)
{
    std::vector<LinearCase> all = cases(false), some;
    for (size_t i = 0; i < all.size(); i += 9)
        some.push_back(all[i]);
    expect_repeats_on_cuda<LinearRun>(some);
    expect_capturable<LinearRun>(some);
}
