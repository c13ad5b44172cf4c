// Linear layers with adapters against sums in binary64: every format and dtype, with and without what
// is dropped, and each gradient alone.
#include <array>
#include <cmath>

#include "tests/c/harness/bits.h"
#include "tests/c/nn/lora_run.h"

using Lora = OnBackend;
ON_EVERY_BACKEND(Lora);

namespace
{

// A matrix of a run, and how many of its elements it may differ by.
struct Values {
    std::vector<double> all;
    int64_t stride;
    double at(int64_t i, int64_t j) const
    {
        return all[size_t(i * stride + j)];
    }
};

Values values_of(const Tensors &tensors, const hr_rows &rows)
{
    return {tensors.values(0), rows.stride};
}

// What one rounding of `value` may take off, beside what sums in binary32 do.
double rounding(double value, hr_dtype dtype)
{
    return dtype == HR_F32 ? 0 : error_of_sum(value, 0, dtype);
}

// The adapters as products see them.
double rounded(double value, hr_dtype dtype)
{
    uint8_t bytes[8];
    encode(value, bytes, dtype);
    return decode(bytes, dtype);
}

// Adds up products, and what the rounding of their factors may do.
struct Sum {
    double value = 0, size = 0, error = 0;
    void add(double x, double y, double error_of_x = 0)
    {
        value += x * y, size += std::fabs(x * y), error += error_of_x * std::fabs(y);
    }
};

void expect_near(double got, const Sum &sum, hr_dtype dtype, const LoraCase &c)
{
    ASSERT_NEAR(got, sum.value, error_of_sum(sum.value, sum.size, dtype) + sum.error) << c;
}

void expect_forward(Backend &backend, const LoraCase &c)
{
    const LoraRun run(backend, c);
    ASSERT_EQ(run.call(), HR_OK) << c << ": " << hr_last_error();
    ASSERT_TRUE(run.whole()) << c;
    const LinearCase &l = c.linear;
    const Values x = values_of(run.linear.in, run.in_rows),
                 y = values_of(run.linear.out, run.out_rows);
    const Values a = values_of(run.a, run.a_rows), b = values_of(run.b, run.b_rows);
    const Values t = values_of(run.t, run.t_rows);
    const std::vector<double> w = run.weight(), bias = run.linear.bias.values(0);
    for (int64_t i = 0; i < l.m; i++) {
        for (int64_t r = 0; r < c.rank; r++) {
            Sum sum;
            for (int64_t p = 0; p < l.cols; p++)
                sum.add(x.at(i, p) * (c.dropout > 0 ? run.kept(i, p) : 1),
                        rounded(a.at(r, p), l.dtype));
            ASSERT_NO_FATAL_FAILURE(expect_near(t.at(i, r), sum, l.dtype, c));
        }
        for (int64_t j = 0; j < l.rows; j++) {
            Sum low, sum;
            for (int64_t r = 0; r < c.rank; r++)
                low.add(t.at(i, r), 0.75 * rounded(b.at(j, r), l.dtype));
            low.add(l.bias ? bias[size_t(j)] : 0, 1);
            sum = low;
            sum.error = rounding(low.value, l.dtype);
            for (int64_t p = 0; p < l.cols; p++)
                sum.add(x.at(i, p), w[size_t(j * l.cols + p)]);
            ASSERT_NO_FATAL_FAILURE(expect_near(y.at(i, j), sum, l.dtype, c));
        }
        for (int64_t j = 0; j < l.gap; j++) {
            ASSERT_EQ(y.at(i, l.rows + j), 77) << c;
            ASSERT_EQ(t.at(i, c.rank + j), 77) << c;
        }
    }
}

void expect_backward(Backend &backend, const LoraCase &c)
{
    const LoraRun run(backend, c);
    ASSERT_EQ(run.call(), HR_OK) << c << ": " << hr_last_error();
    ASSERT_TRUE(run.whole()) << c;
    const LinearCase &l = c.linear;
    const hr_dtype adapter = c.own ? l.dtype : HR_F32;
    const Values dy = values_of(run.linear.in, run.in_rows),
                 dx = values_of(run.linear.out, run.out_rows);
    const Values a = values_of(run.a, run.a_rows), b = values_of(run.b, run.b_rows);
    const Values da = values_of(run.da, run.da_rows), db = values_of(run.db, run.db_rows);
    const Values t = values_of(run.t, run.t_rows), x = values_of(run.x, run.x_rows);
    const std::vector<double> w = run.weight();
    const auto kept = [&](int64_t i, int64_t p) { return c.dropout > 0 ? run.kept(i, p) : 1; };
    std::vector<Sum> dt(size_t(l.m * c.rank));
    for (int64_t i = 0; i < l.m; i++)
        for (int64_t r = 0; r < c.rank; r++) {
            Sum &sum = dt[size_t(i * c.rank + r)];
            for (int64_t j = 0; j < l.rows; j++)
                sum.add(dy.at(i, j), 0.75 * rounded(b.at(j, r), l.dtype));
            sum.error = error_of_sum(sum.value, sum.size, l.dtype);
        }
    const auto dt_at = [&](int64_t i, int64_t r) -> const Sum & {
        return dt[size_t(i * c.rank + r)];
    };
    for (int64_t i = 0; i < l.m && c.dx; i++)
        for (int64_t p = 0; p < l.cols; p++) {
            Sum sum;
            for (int64_t r = 0; r < c.rank; r++)
                sum.add(dt_at(i, r).value, kept(i, p) * rounded(a.at(r, p), l.dtype),
                        dt_at(i, r).error);
            sum.error += rounding(sum.value, l.dtype);
            for (int64_t j = 0; j < l.rows; j++)
                sum.add(dy.at(i, j), w[size_t(j * l.cols + p)]);
            ASSERT_NO_FATAL_FAILURE(expect_near(dx.at(i, p), sum, l.dtype, c));
        }
    for (int64_t r = 0; r < c.rank && c.da; r++)
        for (int64_t p = 0; p < l.cols; p++) {
            Sum sum;
            for (int64_t i = 0; i < l.m; i++)
                sum.add(dt_at(i, r).value, kept(i, p) * x.at(i, p), dt_at(i, r).error);
            ASSERT_NO_FATAL_FAILURE(expect_near(da.at(r, p), sum, adapter, c));
        }
    for (int64_t j = 0; j < l.rows && c.db; j++)
        for (int64_t r = 0; r < c.rank; r++) {
            Sum sum;
            for (int64_t i = 0; i < l.m; i++)
                sum.add(0.75 * dy.at(i, j), t.at(i, r));
            ASSERT_NO_FATAL_FAILURE(expect_near(db.at(j, r), sum, adapter, c));
        }
    for (const auto &[wanted, tensors] :
         {std::pair{c.dx, &run.linear.out}, {c.da, &run.da}, {c.db, &run.db}})
        for (const double value : wanted ? std::vector<double>() : tensors->values(0))
            ASSERT_EQ(value, 77) << c;
}

void expect_products(Backend &backend, const LoraCase &c)
{
    if (c.linear.backward)
        expect_backward(backend, c);
    else
        expect_forward(backend, c);
}

// Every format, and whatever else in turn.
std::vector<LoraCase> cases()
{
    std::vector<LoraCase> all;
    int turn = 0;
    for (const auto &[m, rows, cols, rank] : std::vector<std::array<int64_t, 4>>{{1, 1, 1, 1},
                                                                                 {1, 9, 64, 3},
                                                                                 {3, 5, 33, 16},
                                                                                 {16, 4, 70, 1},
                                                                                 {20, 9, 70, 3},
                                                                                 {17, 2, 31, 8}})
        for (const hr_format format : {HR_DENSE, HR_NF4, HR_FP4, HR_INT8_ROWS})
            for (const bool backward : {false, true}) {
                LoraCase c;
                c.dense = format == HR_DENSE;
                c.linear.m = m, c.linear.rows = rows, c.linear.cols = cols, c.rank = rank;
                c.linear.format = c.dense ? HR_NF4 : format, c.linear.backward = backward;
                c.linear.dtype = hr_dtype(turn % 3);
                c.linear.nested = format == HR_NF4 && turn % 4 < 2;
                c.linear.bias = !backward && turn % 5 < 3;
                c.linear.gap = turn % 5 == 1 ? 3 : turn % 5 == 2 ? 8 : 0;
                c.linear.shift = turn % 7 == 2;
                c.own = turn % 2;
                c.dropout = turn % 3 == 0 ? 0 : turn % 3 == 1 ? 0.25 : 0.9;
                c.dx = turn % 11 != 1, c.da = turn % 7 != 3, c.db = turn % 5 != 4;
                all.push_back(c);
                turn++;
            }
    return all;
}

} // namespace

TEST_P(Lora, IsTheProductAndThoseOfTheAdapters)
{
    for (const LoraCase &c : cases())
        ASSERT_NO_FATAL_FAILURE(expect_products(*backend, c));
}

// Also where eight elements of a row reach across its end, and where rows are many tiles.
TEST_P(Lora, DropsAlongLongRowsToo)
{
    for (const int64_t cols : {1023, 2056})
        for (const hr_dtype dtype : {HR_F32, HR_BF16, HR_F16})
            for (const bool backward : {false, true}) {
                LoraCase c;
                c.linear.m = 3, c.linear.rows = 2, c.linear.cols = cols;
                c.linear.dtype = dtype, c.linear.backward = backward;
                c.rank = 2, c.dropout = 0.5;
                ASSERT_NO_FATAL_FAILURE(expect_products(*backend, c));
            }
}

namespace
{

// A call of hr_lora_norms() with what a run has; norms lie where its y would.
hr_status norms_of(LoraRun &run, std::vector<double> *norms, Backend &backend)
{
    size_t bytes = 0;
    EXPECT_EQ(hr_lora_norms_workspace(&bytes, &run.matrix, &run.config, &run.exec), HR_OK)
        << hr_last_error();
    const Tensors out(backend, {run.matrix.rows}, {HR_F32}, 0, garbage);
    const Buffer workspace(backend, std::vector<uint8_t>(bytes + 256, 0x77));
    void *const at =
        reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(workspace.data()) + 255) / 256 * 256);
    const hr_status status =
        hr_lora_norms(static_cast<float *>(out.data[0]), &run.matrix, run.a_argument,
                      run.b_argument, &run.config, at, bytes, &run.exec);
    EXPECT_TRUE(run.whole() && intact({&out.buffers}) && workspace.intact());
    *norms = out.values(0);
    return status;
}

} // namespace

TEST_P(Lora, NormsAreThoseOfTheSum)
{
    int turn = 0;
    for (const auto &[rows, cols, rank] :
         std::vector<std::array<int64_t, 3>>{{1, 1, 1}, {9, 70, 3}, {5, 33, 40}, {3, 1056, 2}})
        for (const hr_format format : {HR_DENSE, HR_NF4, HR_INT8_ROWS}) {
            LoraCase c;
            c.dense = format == HR_DENSE;
            c.linear.rows = rows, c.linear.cols = cols, c.rank = rank;
            c.linear.format = c.dense ? HR_NF4 : format, c.linear.dtype = hr_dtype(turn % 3);
            c.linear.gap = turn % 2 ? 8 : 0, c.own = turn % 4 == 0;
            LoraRun run(*backend, c);
            std::vector<double> norms;
            ASSERT_EQ(norms_of(run, &norms, *backend), HR_OK) << c << ": " << hr_last_error();
            const std::vector<double> w = run.weight();
            const Values a = values_of(run.a, run.a_rows), b = values_of(run.b, run.b_rows);
            for (int64_t i = 0; i < rows; i++) {
                double square = 0;
                for (int64_t p = 0; p < cols; p++) {
                    double sum = w[size_t(i * cols + p)];
                    for (int64_t r = 0; r < rank; r++)
                        sum += 0.75 * rounded(b.at(i, r), c.linear.dtype) *
                               rounded(a.at(r, p), c.linear.dtype);
                    square += sum * sum;
                }
                ASSERT_NEAR(norms[size_t(i)], std::sqrt(square), 2e-5 * std::sqrt(square)) << c;
            }
            turn++;
        }
    LoraCase none;
    none.linear.rows = 0;
    LoraRun run(*backend, none);
    std::vector<double> norms;
    EXPECT_EQ(norms_of(run, &norms, *backend), HR_OK) << hr_last_error();
}

TEST_P(Lora, WithoutRows)
{
    for (const bool backward : {false, true})
        for (const auto &[m, rows] : {std::pair<int64_t, int64_t>{0, 9}, {5, 0}}) {
            LoraCase c;
            c.linear.m = m, c.linear.rows = rows, c.linear.backward = backward;
            c.dropout = 0.5;
            ASSERT_NO_FATAL_FAILURE(expect_products(*backend, c));
        }
}

TEST_P(Lora, TheWorkspaceHasCopiesAndAPart)
{
    const hr_exec exec = backend->exec();
    alignas(64) uint8_t codes[64] = {};
    float scale = 0;
    int64_t seed = 0;
    hr_matrix matrix = HR_MATRIX_INIT;
    matrix.format = HR_NF4, matrix.dtype = HR_BF16;
    matrix.rows = 4096, matrix.cols = 14336;
    matrix.data = codes, matrix.absmax = &scale;
    hr_lora_config config = HR_LORA_CONFIG_INIT;
    config.rank = 16, config.seed = &seed;
    hr_gemm_config gemm = HR_GEMM_CONFIG_INIT;
    size_t product = 0, bytes = 0;
    ASSERT_EQ(hr_gemm_workspace(&product, 1, 1, 1, &gemm, &exec), HR_OK);
    const size_t part = size_t(exec.device == HR_CPU ? 4 : 32) << 20;
    const size_t copies = 16 * (4096 + 14336) * 2, dt = 16 * 3000 * 2;
    for (const double dropout : {0.0, 0.5})
        for (const int backward : {0, 1}) {
            config.dropout = dropout;
            ASSERT_EQ(hr_lora_workspace(&bytes, 3000, &matrix, backward, &config, &exec), HR_OK);
            EXPECT_LE(bytes, part + product + copies + (backward ? dt : 0) + 1024);
            EXPECT_GE(bytes, part / 2 + product + copies);
        }
    ASSERT_EQ(hr_lora_workspace(&bytes, 0, &matrix, 0, &config, &exec), HR_OK);
    EXPECT_EQ(bytes, 0u);
}

TEST(LoraBits, AreTheSameOnEveryInstructionSetAndThreadCount)
{
    std::vector<LoraCase> some;
    int turn = 0;
    for (const int64_t cols : {1088, 1073})
        for (const bool backward : {false, true})
            for (const hr_format format : {HR_NF4, HR_INT8_ROWS}) {
                LoraCase c;
                c.linear.m = 40, c.linear.rows = 70, c.linear.cols = cols;
                c.linear.format = format, c.linear.backward = backward;
                c.linear.dtype = hr_dtype(turn % 3);
                c.dropout = turn % 2 ? 0.25 : 0;
                some.push_back(c);
                turn++;
            }
    expect_bits_on_the_cpu<LoraRun>(some);
}

TEST(LoraBits, RepeatOnCuda)
{
    const std::vector<LoraCase> all = cases();
    std::vector<LoraCase> some;
    for (size_t i = 0; i < all.size(); i += 7)
        some.push_back(all[i]);
    expect_repeats_on_cuda<LoraRun>(some);
    expect_capturable<LoraRun>(some);
}
