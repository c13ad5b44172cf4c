// hr_newton_schulz(): both variants against the iteration in binary64, everything that it refuses, and
// the bits of every number of threads.
#include <array>
#include <cmath>

#include "tests/c/harness/bits.h"
#include "tests/c/harness/refused.h"

namespace
{
struct SchulzCase {
    int64_t batch = 2, m = 5, n = 9;
    hr_dtype dtype = HR_F32;
    hr_newton_schulz_variant variant = HR_NEWTON_SCHULZ_STANDARD;
    int64_t steps = 5;
    bool own_coefficients = true;
    double size = 1;
};

std::ostream &operator<<(std::ostream &out, const SchulzCase &c)
{
    return out << c.batch << " of " << c.m << " x " << c.n << ", " << name_of(c.dtype)
               << ", variant " << c.variant << ", steps " << c.steps << ", size " << c.size;
}

class SchulzRun
{
  public:
    SchulzRun(Backend &backend, const SchulzCase &c)
        : x(backend, {c.batch * c.m * c.n}, {c.dtype}, 0,
            [&](size_t, size_t i) { return c.size * noise(1, i); }),
          squares(backend, {c.batch}, {HR_F32}, 0, sums(c)), exec(backend.exec()), batch(c.batch),
          m(c.m), n(c.n)
    {
        for (int64_t k = 0; k < c.steps; k++)
            for (const double number : {3.4445 - 0.1 * double(k), -4.775, 2.0315})
                coefficients.push_back(number);
        config.dtype = c.dtype;
        config.variant = c.variant;
        config.steps = c.steps;
        config.coefficients = c.own_coefficients ? coefficients.data() : nullptr;
        // In the emulator so little that the products come in parts.
        const hr_exec cpu = {HR_CPU, nullptr};
        EXPECT_EQ(hr_newton_schulz_workspace(&workspace_bytes, batch, m, n, &config,
                                             backend.is_emulated() ? &cpu : &exec),
                  HR_OK)
            << hr_last_error();
        workspace_bytes += backend.is_emulated() ? 2048 : 0;
        space.emplace_back(backend, std::vector<uint8_t>(workspace_bytes, 0x7F));
        x_argument = x.data[0];
        squares_argument = static_cast<float *>(squares.data[0]);
        workspace = space[0].data();
    }
    SchulzRun(const SchulzRun &) = delete;

    hr_status call() const
    {
        return hr_newton_schulz(x_argument, squares_argument, batch, m, n, config_argument,
                                workspace, workspace_bytes, exec_argument);
    }
    std::vector<uint8_t> image() const
    {
        return image_of({&x.buffers, &squares.buffers});
    }
    bool whole() const
    {
        return intact({&x.buffers, &squares.buffers, &space});
    }

    Tensors x, squares;
    std::vector<Buffer> space;
    std::vector<double> coefficients;
    hr_exec exec;
    int64_t batch, m, n;
    void *x_argument, *workspace;
    float *squares_argument;
    size_t workspace_bytes = 0;
    hr_newton_schulz_config config = HR_NEWTON_SCHULZ_CONFIG_INIT;
    const hr_newton_schulz_config *config_argument = &config;
    const hr_exec *exec_argument = &exec;

  private:
    Tensors::Value sums(const SchulzCase &c) const
    {
        return [values = x.values(0), c](size_t, size_t index) {
            double sum = 0;
            for (size_t i = 0; i < size_t(c.m * c.n); i++)
                sum += std::pow(values[index * size_t(c.m * c.n) + i], 2);
            return sum;
        };
    }
};

using Matrix = std::vector<double>;

// a [r, k] times b [k, c], or its transpose.
Matrix times(const Matrix &a, const Matrix &b, int64_t r, int64_t k, int64_t c, bool transpose)
{
    Matrix out(size_t(r * c));
    for (int64_t i = 0; i < r; i++)
        for (int64_t j = 0; j < c; j++)
            for (int64_t p = 0; p < k; p++)
                out[size_t(i * c + j)] +=
                    a[size_t(i * k + p)] * b[size_t(transpose ? j * k + p : p * c + j)];
    return out;
}

void expect_iteration(Backend &backend, const SchulzCase &c)
{
    SCOPED_TRACE(testing::PrintToString(c));
    const SchulzRun run(backend, c);
    const std::vector<double> before = run.x.values(0), squares = run.squares.values(0);
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    EXPECT_TRUE(run.whole());
    const std::vector<double> got = run.x.values(0);
    const double jordan[] = {3.4445, -4.775, 2.0315};
    const auto numel = size_t(c.m * c.n);
    for (size_t index = 0; index < size_t(c.batch); index++) {
        Matrix x(before.begin() + long(index * numel), before.begin() + long((index + 1) * numel));
        for (double &element : x)
            element /= std::max(std::sqrt(squares[index]), 1e-7);
        for (int64_t k = 0; k < c.steps; k++) {
            const double *const by = c.own_coefficients ? &run.coefficients[size_t(3 * k)] : jordan;
            const Matrix a = times(x, x, c.m, c.n, c.m, true);
            Matrix b = times(a, a, c.m, c.m, c.m, false);
            for (size_t i = 0; i < b.size(); i++)
                b[i] = by[1] * a[i] + by[2] * b[i];
            const Matrix bx = times(b, x, c.m, c.m, c.n, false);
            for (size_t i = 0; i < x.size(); i++)
                x[i] = by[0] * x[i] + bx[i];
        }
        for (size_t i = 0; i < x.size(); i++)
            EXPECT_NEAR(got[index * numel + i], x[i], 16 * epsilon_of(c.dtype));
    }
}

std::vector<SchulzCase> schulz_cases()
{
    std::vector<SchulzCase> all;
    for (const auto variant : {HR_NEWTON_SCHULZ_STANDARD, HR_NEWTON_SCHULZ_GRAM})
        for (const hr_dtype dtype : {HR_F32, HR_F16, HR_BF16})
            for (const int64_t steps : {1, 2, 3, 4, 5}) {
                SchulzCase c;
                c.dtype = dtype;
                c.variant = variant;
                c.steps = steps;
                c.n = steps % 2 ? 9 : 16;
                c.own_coefficients = steps != 5;
                // in few bits Gram's squares of squares lose more
                if (dtype != HR_F32 && variant == HR_NEWTON_SCHULZ_GRAM && steps > 2)
                    continue;
                all.push_back(c);
            }
    all.push_back({1, 1, 1, HR_F32, HR_NEWTON_SCHULZ_STANDARD, 5, true, 1});
    all.push_back({3, 1, 7, HR_F32, HR_NEWTON_SCHULZ_GRAM, 5, true, 1});
    all.push_back({1, 6, 6, HR_F32, HR_NEWTON_SCHULZ_STANDARD, 3, true, 1e-12}); // below eps
    return all;
}

using NewtonSchulz = OnBackend;
ON_EVERY_BACKEND(NewtonSchulz);

TEST_P(NewtonSchulz, FollowsTheIteration)
{
    for (const SchulzCase &c : schulz_cases())
        expect_iteration(*backend, c);
}

TEST_P(NewtonSchulz, NothingToDo)
{
    for (const auto &[batch, m, n] :
         std::vector<std::array<int64_t, 3>>{{0, 5, 9}, {2, 0, 9}, {2, 0, 0}}) {
        SchulzCase c;
        c.batch = batch, c.m = m, c.n = n;
        const SchulzRun run(*backend, c);
        EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
    }
}

TEST_P(NewtonSchulz, BadInputsAreRefused)
{
    using R = SchulzRun;
    const BadInputs<R> all = joined<R>(
        {bad_config_or_exec<R>(),
         {
             {"batch is -1, wanted 0 or more", [](R &r) { r.batch = -1; }},
             {"m is -1 and n 9", [](R &r) { r.m = -1; }},
             {"m is 10 and n 9, wanted", [](R &r) { r.m = 10; }},
             {"wanted at most 2\\^55 elements", [](R &r) { r.n = INT64_MAX / 4; }},
             {"config->dtype is f64", [](R &r) { r.config.dtype = HR_F64; }},
             {"config->variant is 2", [](R &r) { r.config.variant = hr_newton_schulz_variant(2); }},
             {"config->steps is 0, wanted 1 to 100", [](R &r) { r.config.steps = 0; }},
             {"config->steps is 101", [](R &r) { r.config.steps = 101; }},
             {"config->eps is 0", [](R &r) { r.config.eps = 0; }},
             {"config->eps is nan", [](R &r) { r.config.eps = NAN; }},
             {"config->coefficients\\[4\\] is inf", [](R &r) { r.coefficients[4] = INFINITY; }},
             {"hr_newton_schulz: config->allow_tf32 is 2", [](R &r) { r.config.allow_tf32 = 2; }},
             {"hr_newton_schulz: config->allow_reduced_precision_reduction is 2",
              [](R &r) { r.config.allow_reduced_precision_reduction = 2; }},
             {"hr_newton_schulz: config->deterministic is 2",
              [](R &r) { r.config.deterministic = 2; }},
             {"x is NULL", [](R &r) { r.x_argument = nullptr; }},
             {"x is at .* not a multiple of 4",
              [](R &r) { r.x_argument = moved(static_cast<char *>(r.x_argument), 2); }},
             {"squares is NULL", [](R &r) { r.squares_argument = nullptr; }},
             {"squares is at", [](R &r) { r.squares_argument = moved(r.squares_argument, 2); }},
             {"workspace_bytes is 1000, wanted", [](R &r) { r.workspace_bytes = 1000; }},
             {"workspace is at .*, wanted a multiple of",
              [](R &r) { r.workspace = moved(static_cast<char *>(r.workspace), 32); }},
             {"workspace is at", [](R &r) { r.workspace = nullptr; }},
         }});
    expect_all_refused(*backend, SchulzCase(), all);
    R run(*backend, {});
    expect_no_such_device(run);
}

TEST(NewtonSchulzWorkspace, BadInputsAreRefused)
{
    hr_newton_schulz_config config = HR_NEWTON_SCHULZ_CONFIG_INIT;
    const hr_exec cpu = {HR_CPU, nullptr}, none = {-2, nullptr};
    size_t bytes[2] = {7, 7};
    EXPECT_EQ(hr_newton_schulz_workspace(nullptr, 1, 1, 1, &config, &cpu), HR_INVALID_ARGUMENT);
    EXPECT_EQ(hr_newton_schulz_workspace(moved(bytes, 4), 1, 1, 1, &config, &cpu),
              HR_INVALID_ARGUMENT);
    EXPECT_EQ(hr_newton_schulz_workspace(bytes, 1, 2, 1, &config, &cpu), HR_INVALID_ARGUMENT);
    EXPECT_EQ(hr_newton_schulz_workspace(bytes, 1, 1, 1, nullptr, &cpu), HR_INVALID_ARGUMENT);
    EXPECT_EQ(hr_newton_schulz_workspace(bytes, 1, 1, 1, &config, &none), HR_INVALID_ARGUMENT);
    EXPECT_TRUE(matches(hr_last_error(), "hr_newton_schulz_workspace: exec"));
    EXPECT_EQ(bytes[0], 7u);
    EXPECT_EQ(hr_newton_schulz_workspace(bytes, 3, 10, 20, &config, &cpu), HR_OK);
    EXPECT_EQ(bytes[0], 1280u + 2 * 768u); // of bf16, each rounded up to 256
}

// Whose symmetric products are computed up to the diagonal, in blocks of 128 rows, the last of them
// smaller; and more small matrices than a thread takes at a time.
std::vector<SchulzCase> cases_of_the_cpu()
{
    return {{1, 130, 131, HR_F32, HR_NEWTON_SCHULZ_GRAM, 3, true, 1},
            {1, 129, 129, HR_F32, HR_NEWTON_SCHULZ_STANDARD, 1, true, 1},
            {1700, 12, 14, HR_F32, HR_NEWTON_SCHULZ_STANDARD, 1, true, 1}};
}

TEST(NewtonSchulzOnTheCpu, FollowsTheIterationByBlocksAndShares)
{
    for (const SchulzCase &c : cases_of_the_cpu())
        expect_iteration(cpu_backend(), c);
    // In 16 bits the blocks have 256 rows.
    expect_iteration(cpu_backend(), {1, 257, 258, HR_BF16, HR_NEWTON_SCHULZ_STANDARD, 1, true, 1});
}

TEST(NewtonSchulzOnTheCpu, SameBitsOnEveryInstructionSet)
{
    std::vector<SchulzCase> all = schulz_cases();
    for (const SchulzCase &c : cases_of_the_cpu())
        all.push_back(c);
    expect_bits_on_the_cpu<SchulzRun>(all);
}

TEST(NewtonSchulzOnCuda, RepeatsItselfAndCanBeCaptured)
{
    expect_repeats_on_cuda<SchulzRun>(schulz_cases());
    expect_capturable<SchulzRun>(std::vector<SchulzCase>(1));
}
} // namespace
