// Norms of rows against their formulas in binary64, and the same bits wherever they run.
#include <cmath>

#include "tests/c/harness/bits.h"
#include "tests/c/harness/refused.h"
#include "tests/c/nn/norm_run.h"

using RowNorm = OnBackend;
ON_EVERY_BACKEND(RowNorm);

namespace
{

constexpr double kUnit = 0x1p-24; // half an ulp at 1, in binary32

// `all`: long rows too, which take the emulator long.
std::vector<RowNormCase> cases(bool all)
{
    std::vector<std::pair<int64_t, int64_t>> shapes = {{1, 1},   {5, 7},    {17, 64}, {9, 520},
                                                       {2, 777}, {2, 2056}, {1, 8200}};
    if (all)
        shapes.insert(shapes.end(), {{3, 512}, {3, 4104}, {2, 5001}, {4200, 3}});
    std::vector<RowNormCase> cases;
    int k = 0;
    for (const auto &[rows, cols] : shapes)
        for (const hr_dtype dtype : {HR_F32, HR_BF16, HR_F16}) {
            const bool layer = k / 3 % 2 == k % 2;
            cases.push_back({.rows = rows,
                             .cols = cols,
                             .gap = k % 4 * 8, // 0, or a multiple of 16 bytes
                             .kind = layer ? HR_NORM_LAYER : HR_NORM_RMS,
                             .casting = layer ? HR_NORM_ONCE : hr_norm_casting(k / 2 % 3),
                             .dtype = dtype,
                             .weight_dtype = k % 2 ? dtype : HR_F32,
                             .offset = double(k % 3 == 0),
                             .residual = k % 4 == 1,
                             .weight = k % 11 != 5,
                             .again = k % 5 != 2,
                             .shift = size_t(k % 7 == 3)});
            k++;
        }
    // Every kernel: rows that few threads hold, or a block, or none.
    for (const int64_t cols : {64, 1032, 8200})
        for (const hr_dtype dtype : {HR_F32, HR_BF16, HR_F16})
            for (const bool layer : {false, true})
                cases.push_back({.rows = cols == 8200 ? 1 : 3,
                                 .cols = cols,
                                 .kind = layer ? HR_NORM_LAYER : HR_NORM_RMS,
                                 .dtype = dtype,
                                 .weight_dtype = dtype});
    if (all)
        cases.push_back({.rows = 1, .cols = 1 << 20, .kind = HR_NORM_LAYER, .dtype = HR_BF16});
    for (const bool layer : {false, true})
        cases.push_back({.rows = 0, .cols = 9, .kind = layer ? HR_NORM_LAYER : HR_NORM_RMS});
    return cases;
}

double rounded(double x, hr_dtype dtype)
{
    return decode(encode({x}, dtype), dtype)[0];
}

struct Reader {
    const RowNormRun &run;
    std::vector<double> values;
    int64_t stride;

    Reader(const RowNormRun &run, const Tensors &tensor)
        : run(run), values(tensor.values(0)), stride(run.shape.cols + run.shape.gap)
    {
    }
    double operator()(int64_t i, int64_t j) const
    {
        return values[size_t(i * stride + j)];
    }
};

} // namespace

TEST_P(RowNorm, ForwardAndBackwardFollowTheFormulas)
{
    for (const RowNormCase &c : cases(backend->exec().device == HR_CPU)) {
        SCOPED_TRACE(testing::PrintToString(c.rows) + " x " + testing::PrintToString(c.cols));
        const RowNormRun run(*backend, c);
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        EXPECT_TRUE(run.whole()) << c;
        const bool layer = c.kind == HR_NORM_LAYER;
        const double unit = epsilon_of(c.dtype) / 2;         // of a stored value
        const double tiny = c.dtype == HR_F16 ? 0x1p-24 : 0; // the distance of its denormals
        const double flip = c.casting == HR_NORM_ONCE ? 0 : 2 * unit; // a value near a tie
        const Reader x(run, run.x), residual(run, run.residual), sum(run, run.sum);
        const Reader y(run, run.y), dy(run, run.dy), dsum(run, run.dsum), dx(run, run.dx);
        const Reader again(run, run.again);
        const std::vector<double> weight = run.weight.values(0), bias = run.bias.values(0);
        const std::vector<double> means = run.mean.values(0), rstds = run.rstd.values(0);
        std::vector<double> dweight(size_t(c.cols)), dbias(size_t(c.cols));
        std::vector<double> dweight_size(size_t(c.cols)), dbias_size(size_t(c.cols));
        for (int64_t i = 0; i < c.rows; i++) {
            std::vector<double> in, hat, plain, g; // plain: hat without a rounding, as dx has it
            double mean = 0, squares = 0, g_hat_mean = 0, g_mean = 0, g_size = 0;
            for (int64_t j = 0; j < c.cols; j++) {
                in.push_back(c.residual ? sum(i, j) : x(i, j));
                if (c.residual) {
                    ASSERT_EQ(in.back(), rounded(float(x(i, j)) + float(residual(i, j)), c.dtype));
                }
                mean += layer ? in.back() / double(c.cols) : 0;
            }
            for (const double v : in)
                squares += (v - mean) * (v - mean) / double(c.cols);
            const double rstd = 1 / std::sqrt(squares + c.eps);
            ASSERT_NEAR(rstds[size_t(i)], rstd, rstd * 16 * kUnit) << c;
            if (layer) {
                ASSERT_NEAR(means[size_t(i)], mean, 16 * kUnit * 4) << c;
            }
            const double factor =
                c.casting == HR_NORM_NARROW ? rounded(rstds[size_t(i)], c.dtype) : rstd;
            for (int64_t j = 0; j < c.cols; j++) {
                const double w = c.weight ? weight[size_t(j)] + c.offset : 1;
                const double b = layer ? bias[size_t(j)] : 0;
                const double exact_hat = (in[size_t(j)] - mean) * factor;
                plain.push_back((in[size_t(j)] - mean) * rstd);
                hat.push_back(c.casting == HR_NORM_ONCE ? exact_hat : rounded(exact_hat, c.dtype));
                const double exact = hat.back() * w + b;
                const double size =
                    (std::fabs(hat.back()) + std::fabs(mean * factor)) * std::fabs(w) +
                    std::fabs(b);
                ASSERT_NEAR(y(i, j), exact,
                            std::fabs(exact) * unit + size * (16 * kUnit + flip) +
                                (1 + std::fabs(w)) * tiny)
                    << c;
                if (c.again) {
                    ASSERT_EQ(again(i, j), y(i, j)) << c;
                }
                g.push_back(dy(i, j) * w);
                g_hat_mean += g.back() * plain.back() / double(c.cols);
                g_mean += layer ? g.back() / double(c.cols) : 0;
                g_size += std::fabs(g.back() * plain.back()) / double(c.cols);
                dweight[size_t(j)] += dy(i, j) * hat.back();
                dbias[size_t(j)] += dy(i, j);
                dweight_size[size_t(j)] += std::fabs(dy(i, j)) * (std::fabs(hat.back()) + 1);
                dbias_size[size_t(j)] += std::fabs(dy(i, j));
            }
            for (int64_t j = 0; j < c.cols; j++) {
                const double through = c.residual ? dsum(i, j) : 0;
                const double exact =
                    rstd * (g[size_t(j)] - plain[size_t(j)] * g_hat_mean - g_mean) + through;
                const double size =
                    rstd * (std::fabs(g[size_t(j)]) + (std::fabs(plain[size_t(j)]) + 1) * g_size +
                            std::fabs(g_mean) + 1) +
                    std::fabs(through);
                ASSERT_NEAR(dx(i, j), exact, std::fabs(exact) * unit + size * 32 * kUnit + 2 * tiny)
                    << c << ", row " << i << ", column " << j;
            }
        }
        const double weight_unit = epsilon_of(c.weight_dtype) / 2;
        const double weight_tiny = c.weight_dtype == HR_F16 ? 0x1p-24 : 0;
        const std::vector<double> got = run.dweight.values(0), got_bias = run.dbias.values(0);
        for (size_t j = 0; j < size_t(c.cols); j++) {
            ASSERT_NEAR(got[j], dweight[j],
                        std::fabs(dweight[j]) * weight_unit +
                            dweight_size[j] * (32 * kUnit + flip) + weight_tiny +
                            dweight_size[j] * tiny)
                << c << ", column " << j;
            if (layer) {
                ASSERT_NEAR(got_bias[j], dbias[j],
                            std::fabs(dbias[j]) * weight_unit + dbias_size[j] * 16 * kUnit +
                                weight_tiny)
                    << c << ", column " << j;
            }
        }
    }
}

// Parts of what backward can give leave the others alone and have the same bits.
TEST_P(RowNorm, EachOutputOfBackwardMayBeLeftOut)
{
    RowNormCase c;
    c.rows = 20, c.cols = 72, c.kind = HR_NORM_LAYER, c.dtype = HR_BF16;
    const RowNormRun all(*backend, c);
    ASSERT_EQ(all.call(), HR_OK);
    for (int only = 0; only < 4; only++) {
        const RowNormRun run(*backend, c);
        ASSERT_EQ(run.forward(), HR_OK);
        const bool sums = only == 1 || only == 2;
        const std::vector<double> scratch = run.workspace.values(0);
        ASSERT_EQ(hr_norm_backward(
                      only == 0 ? &run.dx_rows : nullptr, only == 1 ? run.dweight.data[0] : nullptr,
                      only == 2 ? run.dbias.data[0] : nullptr,
                      only == 3 ? &run.again_rows : nullptr, only == 3 ? nullptr : &run.dy_rows,
                      nullptr, &run.x_rows, run.weight.data[0], run.bias.data[0],
                      static_cast<float *>(run.mean.data[0]),
                      static_cast<float *>(run.rstd.data[0]), c.rows, c.cols, &run.config,
                      run.workspace.data[0], sums ? run.workspace_bytes : 0, &run.exec),
                  HR_OK)
            << hr_last_error();
        EXPECT_TRUE(run.whole());
        EXPECT_EQ(run.workspace.values(0) == scratch, !sums);
        const Tensors RowNormRun::*const outputs[] = {&RowNormRun::dx, &RowNormRun::dweight,
                                                      &RowNormRun::dbias, &RowNormRun::again};
        for (int k = 0; k < 4; k++) {
            const std::vector<double> untouched((run.*outputs[k]).values(0).size(), 77.0);
            EXPECT_EQ((run.*outputs[k]).values(0),
                      k == only ? (all.*outputs[k]).values(0) : untouched)
                << k;
        }
    }
}

// y may be x, dx may be dy, and sum may be x.
TEST_P(RowNorm, OutputsMayTakeThePlaceOfInputs)
{
    for (const hr_dtype dtype : {HR_F32, HR_BF16}) {
        RowNormCase c;
        c.rows = 9, c.cols = 520, c.dtype = dtype, c.residual = true;
        const RowNormRun apart(*backend, c);
        RowNormRun inside(*backend, c);
        ASSERT_EQ(apart.call(), HR_OK);
        inside.sum_rows = inside.x_rows;
        inside.dx_rows = inside.dy_rows;
        ASSERT_EQ(inside.call(), HR_OK);
        EXPECT_EQ(inside.x.values(0), apart.sum.values(0));
        EXPECT_EQ(inside.dy.values(0), apart.dx.values(0));
        RowNormCase alone = c;
        alone.residual = false;
        const RowNormRun one(*backend, alone);
        RowNormRun same(*backend, alone);
        ASSERT_EQ(one.forward(), HR_OK);
        same.y_rows = same.x_rows;
        ASSERT_EQ(same.forward(), HR_OK);
        EXPECT_EQ(same.x.values(0), one.y.values(0));
    }
}

namespace
{
std::vector<RowNormCase> cases_for_bits()
{
    std::vector<RowNormCase> all = cases(false);
    for (const hr_dtype dtype : {HR_F32, HR_BF16, HR_F16})
        for (const bool layer : {false, true})
            all.push_back({.rows = 70,
                           .cols = 203,
                           .kind = layer ? HR_NORM_LAYER : HR_NORM_RMS,
                           .dtype = dtype,
                           .weight_dtype = dtype,
                           .residual = true,
                           .special = dtype != HR_F32});
    return all;
}
} // namespace

TEST(RowNormBits, AreTheSameOnEveryInstructionSetAndThreadCount)
{
    expect_bits_on_the_cpu<RowNormRun>(cases_for_bits());
}

TEST(RowNormBits, RepeatOnCuda)
{
    std::vector<RowNormCase> some;
    for (size_t k = 0; k < cases(false).size(); k += 6)
        some.push_back(cases(false)[k]);
    expect_repeats_on_cuda<RowNormRun>(some);
}

TEST_P(RowNorm, BadInputs)
{
    const std::vector<BadInput<RowNormRun>> bad = {
        {"rows is -1, wanted 0 or more", [](RowNormRun &r) { r.rows = -1; }},
        {"cols is 0, wanted 1 or more", [](RowNormRun &r) { r.cols = 0; }},
        {"wanted at most 2\\^59 elements", [](RowNormRun &r) { r.cols = INT64_MAX / 2; }},
        {"config is NULL", [](RowNormRun &r) { r.config_argument = nullptr; }},
        {"config->size is 3, wanted", [](RowNormRun &r) { r.config.size = 3; }},
        {"config->kind is 2", [](RowNormRun &r) { r.config.kind = hr_norm_kind(2); }},
        {"config->casting is 3, wanted 0, 1 or 2",
         [](RowNormRun &r) { r.config.casting = hr_norm_casting(3); }},
        {"config->casting is 1, wanted HR_NORM_ONCE",
         [](RowNormRun &r) { r.config.casting = HR_NORM_LLAMA; }},
        {"config->dtype is f64", [](RowNormRun &r) { r.config.dtype = HR_F64; }},
        {"config->weight_dtype is not an hr_dtype",
         [](RowNormRun &r) { r.config.weight_dtype = hr_dtype(-1); }},
        {"eps is -1", [](RowNormRun &r) { r.config.eps = -1; }},
        {"eps is nan", [](RowNormRun &r) { r.config.eps = NAN; }},
        {"offset is inf", [](RowNormRun &r) { r.config.offset = INFINITY; }},
        {"exec is NULL", [](RowNormRun &r) { r.exec_argument = nullptr; }},
        {"exec->device is -2", [](RowNormRun &r) { r.exec.device = -2; }},
        {"x->stride is 6, wanted cols \\(7\\) or more", [](RowNormRun &r) { r.x_rows.stride = 6; }},
        {"x->stride is .*, wanted at most 2\\^59",
         [](RowNormRun &r) { r.x_rows.stride = INT64_MAX / 2; }},
        {"x->data is NULL", [](RowNormRun &r) { r.x_rows.data = nullptr; }},
        {"x->data is at .* not a multiple of 4 bytes",
         [](RowNormRun &r) { r.x_rows.data = moved(r.x_rows.data, 2); }},
        {"x is NULL", [](RowNormRun &r) { r.x_argument = nullptr; }},
        {"y is NULL", [](RowNormRun &r) { r.y_argument = nullptr; }},
        {"residual is NULL, but sum is not", [](RowNormRun &r) { r.residual_argument = nullptr; }},
        {"hr_norm_forward: bias is given, but only HR_NORM_LAYER",
         [](RowNormRun &r) { r.config.kind = HR_NORM_RMS; }},
        {"hr_norm_forward: mean is given, but only HR_NORM_LAYER",
         [](RowNormRun &r) { r.config.kind = HR_NORM_RMS, r.bias.data[0] = nullptr; }},
        {"y->data is NULL", [](RowNormRun &r) { r.y_rows.data = nullptr; }},
        {"sum->data is NULL", [](RowNormRun &r) { r.sum_rows.data = nullptr; }},
        {"residual->stride is 0", [](RowNormRun &r) { r.residual_rows.stride = 0; }},
        {"weight is at .* not a multiple of 4 bytes",
         [](RowNormRun &r) { r.weight.data[0] = moved(r.weight.data[0], 1); }},
        {"bias is at .* not a multiple of 4 bytes",
         [](RowNormRun &r) { r.bias.data[0] = moved(r.bias.data[0], 1); }},
        {"mean is at .* not a multiple of 4 bytes",
         [](RowNormRun &r) { r.mean.data[0] = moved(r.mean.data[0], 1); }},
        {"rstd is at .* not a multiple of 4 bytes",
         [](RowNormRun &r) { r.rstd.data[0] = moved(r.rstd.data[0], 1); }},
    };
    RowNormCase c;
    c.kind = HR_NORM_LAYER, c.residual = true;
    for (const BadInput<RowNormRun> &one : bad) {
        RowNormRun run(*backend, c);
        expect_refused(run, one);
    }
    RowNormRun run(*backend, c);
    expect_no_such_device(run);
}

TEST_P(RowNorm, BadInputsOfBackward)
{
    using BackwardRun = BackwardOf<RowNormRun>;
    const std::vector<BadInput<BackwardRun>> bad = {
        {"rows is -1", [](BackwardRun &r) { r.rows = -1; }},
        {"config is NULL", [](BackwardRun &r) { r.config_argument = nullptr; }},
        {"exec is NULL", [](BackwardRun &r) { r.exec_argument = nullptr; }},
        {"x->data is NULL", [](BackwardRun &r) { r.sum_rows.data = nullptr; }},
        {"dx->stride is 6", [](BackwardRun &r) { r.dx_rows.stride = 6; }},
        {"y->stride is 6", [](BackwardRun &r) { r.again_rows.stride = 6; }},
        {"dy->data is NULL", [](BackwardRun &r) { r.dy_rows.data = nullptr; }},
        {"dsum->stride is 6", [](BackwardRun &r) { r.dsum_rows.stride = 6; }},
        {"dweight is at .* not a multiple of 4",
         [](BackwardRun &r) { r.dweight.data[0] = moved(r.dweight.data[0], 2); }},
        {"dbias is at .* not a multiple of 4",
         [](BackwardRun &r) { r.dbias.data[0] = moved(r.dbias.data[0], 2); }},
        {"rstd is NULL", [](BackwardRun &r) { r.rstd.data[0] = nullptr; }},
        {"rstd is at", [](BackwardRun &r) { r.rstd.data[0] = moved(r.rstd.data[0], 2); }},
        {"mean is NULL, wanted", [](BackwardRun &r) { r.mean.data[0] = nullptr; }},
        {"mean is at", [](BackwardRun &r) { r.mean.data[0] = moved(r.mean.data[0], 2); }},
        {"bias is given, but only HR_NORM_LAYER",
         [](BackwardRun &r) { r.config.kind = HR_NORM_RMS; }},
        {"dbias is given, but only HR_NORM_LAYER",
         [](BackwardRun &r) { r.config.kind = HR_NORM_RMS, r.bias.data[0] = nullptr; }},
        {"so there is nothing to do",
         [](BackwardRun &r) {
             r.dx_argument = nullptr, r.shape.again = false;
             r.dweight.data[0] = r.dbias.data[0] = nullptr;
         }},
        {"dy is NULL, which only y can do without",
         [](BackwardRun &r) { r.dy_argument = nullptr; }},
        {"workspace_bytes is .*, wanted", [](BackwardRun &r) { r.workspace_bytes--; }},
        {"workspace is at .*, wanted a multiple of 8 bytes",
         [](BackwardRun &r) { r.workspace.data[0] = moved(r.workspace.data[0], 4); }},
    };
    RowNormCase c;
    c.kind = HR_NORM_LAYER, c.residual = true;
    for (const BadInput<BackwardRun> &one : bad) {
        BackwardRun run(*backend, c);
        expect_refused(run, one);
    }
    BackwardRun run(*backend, c);
    expect_no_such_device(run);
}

TEST(NormWorkspace, BadInputs)
{
    hr_norm_config config = HR_NORM_CONFIG_INIT, unknown = HR_NORM_CONFIG_INIT;
    unknown.kind = hr_norm_kind(2);
    size_t bytes = 77;
    const auto refused = [&](const char *message, size_t *to, int64_t rows,
                             const hr_norm_config *with) {
        EXPECT_EQ(hr_norm_workspace(to, rows, 4, with), HR_INVALID_ARGUMENT);
        EXPECT_TRUE(matches(hr_last_error(), message));
        EXPECT_EQ(bytes, 77u);
    };
    refused("hr_norm_workspace: bytes is NULL", nullptr, 4, &config);
    refused("hr_norm_workspace: bytes is at", moved(&bytes, 4), 4, &config);
    refused("hr_norm_workspace: rows is -1", &bytes, -1, &config);
    refused("hr_norm_workspace: config is NULL", &bytes, 4, nullptr);
    refused("hr_norm_workspace: config->kind is 2", &bytes, 4, &unknown);
}
