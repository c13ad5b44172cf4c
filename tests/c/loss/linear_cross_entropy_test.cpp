// The loss of a linear layer and its gradients against their formulas in binary64, in every order of
// computation, with gradients at once and from the log-sum-exp.
#include <cmath>

#include "tests/c/harness/bits.h"
#include "tests/c/harness/refused.h"
#include "tests/c/loss/linear_cross_entropy_reference.h"

using LinearCrossEntropy = OnBackend;
ON_EVERY_BACKEND(LinearCrossEntropy);

namespace
{

using Case = LinearCrossEntropyCase;
using Call = LinearCrossEntropyRun;
using Reference = LinearCrossEntropyReference;

double largest_of(const Vector &values)
{
    double most = 1e-3;
    for (const double value : values)
        most = std::fmax(most, std::fabs(value));
    return most;
}

void expect_near(const Vector &got, const Vector &exact, double unit, const char *what)
{
    ASSERT_EQ(got.size(), exact.size());
    for (size_t i = 0; i < got.size(); i++)
        ASSERT_NEAR(got[i], exact[i], 16 * unit * largest_of(exact)) << what << " " << i;
}

void expect_near(const Matrix &got, const Matrix &exact, double unit, const char *what)
{
    Vector all, wanted;
    for (const Vector &row : got)
        all.insert(all.end(), row.begin(), row.end());
    for (const Vector &row : exact)
        wanted.insert(wanted.end(), row.begin(), row.end());
    expect_near(all, wanted, unit, what);
}

// Gradients, which are those of a sum times `scale` where they keep their range.
void expect_gradients(const Call &run, const Reference &exact, double scale)
{
    const Case &c = run.shape;
    const int64_t stride = c.features + c.gap;
    const hr_dtype coarser =
        c.dtype == HR_F32 || &run.backend == &cpu_backend() ? c.grad_dtype : c.dtype;
    const double unit = epsilon_of(coarser) / 2;
    const auto scaled = [&](Matrix m) {
        for (Vector &row : m)
            for (double &value : row)
                value *= scale;
        return m;
    };
    if (c.wanted & 1)
        expect_near(scaled(matrix_of(run.dhidden, c.rows, c.features, stride)), exact.dhidden, unit,
                    "dhidden");
    if (c.wanted & 2)
        expect_near(scaled(matrix_of(run.dweight, c.classes, c.features, stride)), exact.dweight,
                    unit, "dweight");
    if (c.wanted & 4)
        expect_near(scaled({run.dbias.values(0)}), {exact.dbias}, unit, "dbias");
}

constexpr hr_linear_cross_entropy_mode kTokens = HR_LINEAR_CROSS_ENTROPY_TOKENS,
                                       kVocabulary = HR_LINEAR_CROSS_ENTROPY_VOCABULARY;

// Heads of few bits, in one part and in several.
std::vector<Case> few_bits_cases(bool parts)
{
    std::vector<Case> all;
    int turn = 0;
    for (const hr_format format : {HR_NF4, HR_FP4, HR_INT8_ROWS})
        for (const hr_dtype dtype : {HR_F32, HR_BF16, HR_F16}) {
            Case c = {.features = 7, .classes = 131, .dtype = dtype, .bias = turn % 2 == 0};
            c.format = format, c.nested = format != HR_INT8_ROWS && turn % 4 < 2;
            c.mode = turn % 2 ? kTokens : kVocabulary;
            c.grad_dtype = dtype == HR_F16 ? HR_F32 : dtype;
            c.limit = 4 * 131 * 4, c.wanted = 5, c.gap = turn % 3;
            c.smoothing = 0.1, c.z_loss = 0.01, c.class_weight = c.token_weight = true;
            all.push_back(c);
            turn++;
        }
    for (const hr_dtype dtype : {HR_F32, HR_BF16}) {
        if (!parts)
            break;
        Case c = {.rows = 4, .features = 16501, .classes = 150, .dtype = dtype, .bias = true};
        c.grad_dtype = dtype, c.scale = 0.02, c.limit = 2 * 150 * 4, c.wanted = 5;
        c.format = HR_NF4, c.nested = true;
        all.push_back(c);
        c.mode = kVocabulary, c.format = HR_INT8_ROWS, c.nested = false;
        all.push_back(c);
    }
    return all;
}

// Sizes at which both orders need several parts: of 3 rows, and of 64 classes.
std::vector<Case> cases()
{
    std::vector<Case> all = few_bits_cases(false);
    for (const hr_dtype dtype : {HR_F32, HR_BF16, HR_F16}) {
        const hr_dtype grad = dtype == HR_F16 ? HR_F32 : dtype;
        all.push_back({.dtype = dtype, .grad_dtype = grad, .limit = 3 * 11 * 4, .rank = true});
        for (const hr_linear_cross_entropy_mode mode : {kTokens, kVocabulary})
            all.push_back({.rows = 10,
                           .features = 7,
                           .classes = 131,
                           .gap = 3,
                           .dtype = dtype,
                           .grad_dtype = grad,
                           .mode = mode,
                           .limit = 4 * 131 * 4,
                           .bias = true,
                           .class_weight = true,
                           .token_weight = true,
                           .int32 = true,
                           .smoothing = 0.1,
                           .softcap = 3,
                           .z_loss = 0.01,
                           .scale = 0.7,
                           .sequence = 5});
    }
    all.push_back({.dtype = HR_BF16, .grad_dtype = HR_F32, .limit = 2 * 11 * 4, .bias = true});
    all.push_back({.denominator = true, .reduction = HR_REDUCE_SUM, .ignored = 0, .wanted = 1});
    all.push_back({.mode = HR_LINEAR_CROSS_ENTROPY_AUTO, .z_loss = 0.1, .wanted = 2});
    all.push_back({.bias = true, .reduction = HR_REDUCE_MEAN_OR_ZERO, .ignored = 1});
    all.push_back({.rows = 0, .bias = true, .reduction = HR_REDUCE_MEAN_OR_ZERO});
    all.push_back({.rows = 1, .features = 1, .classes = 1, .ignored = 0, .wanted = 0});
    return all;
}

} // namespace

TEST_P(LinearCrossEntropy, ResultsAndGradientsFollowTheFormulas)
{
    std::vector<Case> all = cases();
    all.push_back({.rows = 2048 + 75, /* on CUDA in two parts */
                   .features = 2,
                   .classes = 5,
                   .class_weight = true,
                   .token_weight = true,
                   .smoothing = 0.1,
                   .z_loss = 0.01,
                   .wanted = 1});
    for (const Case &c : all) {
        SCOPED_TRACE(testing::PrintToString(c));
        const Call run(*backend, c);
        ASSERT_EQ(run.forward(), HR_OK) << hr_last_error();
        EXPECT_TRUE(run.whole());
        const Reference exact(run, Vector(size_t(c.rows), 1));
        const double unit = epsilon_of(HR_F32) / 2;
        const Vector *const wanted[] = {
            &exact.loss,    &exact.lse,     nullptr,           &exact.target_logit,
            &exact.largest, &exact.entropy, &exact.mean_logit, &exact.log_sum_sq_probs};
        for (size_t k = 0; k < 8; k++) {
            if (wanted[k])
                expect_near(run.results.values(k), *wanted[k], 4 * unit, "result of rows");
        }
        EXPECT_EQ(run.integers(run.argmaxes[0]), exact.argmax);
        if (c.rank) {
            EXPECT_EQ(run.integers(run.ranks[0]), exact.rank);
        }
        EXPECT_NEAR(run.numbers.values(0)[0], exact.result,
                    16 * unit * std::fmax(1, std::fabs(exact.result)));
        for (size_t k = 0; k < 2; k++)
            EXPECT_NEAR(run.numbers.values(1)[k], exact.factors[k], 4 * unit);
        const double scale = run.numbers.values(2)[0];
        EXPECT_EQ(scale == 1, c.dtype != HR_F16);
        expect_gradients(run, exact, scale);
    }
}

TEST_P(LinearCrossEntropy, BackwardComputesTheGradientsOfRows)
{
    for (const Case &c : cases()) {
        if (c.wanted == 0)
            continue;
        SCOPED_TRACE(testing::PrintToString(c));
        const Call run(*backend, c);
        ASSERT_EQ(run.forward(), HR_OK) << hr_last_error();
        ASSERT_EQ(run.backward(), HR_OK) << hr_last_error();
        EXPECT_TRUE(run.whole());
        expect_gradients(run, Reference(run, run.dloss.values(0)), 1);
    }
}

// Of losses and entropies together, and of entropies alone.
TEST_P(LinearCrossEntropy, BackwardComputesTheGradientsOfEntropies)
{
    for (Case c : cases()) {
        if (c.wanted == 0)
            continue;
        c.dentropy = true;
        SCOPED_TRACE(testing::PrintToString(c));
        Call run(*backend, c);
        ASSERT_EQ(run.forward(), HR_OK) << hr_last_error();
        ASSERT_EQ(run.backward(), HR_OK) << hr_last_error();
        EXPECT_TRUE(run.whole());
        const Vector of_entropy = run.dentropy.values(0);
        expect_gradients(run, Reference(run, run.dloss.values(0), of_entropy), 1);
        if (c.rows == 0)
            continue;
        const Buffer zero(*backend, std::vector<uint8_t>(4, 0));
        run.upstream = static_cast<const float *>(zero.data());
        run.upstream_stride = run.config.dentropy_stride = 0;
        ASSERT_EQ(run.backward(), HR_OK) << hr_last_error();
        const Vector zeros(of_entropy.size(), 0), same(of_entropy.size(), of_entropy[0]);
        expect_gradients(run, Reference(run, zeros, same), 1);
    }
}

// Classes that are masked by minus infinity have no gradient, and change no result.
TEST_P(LinearCrossEntropy, MaskedClassesAddNothingToEntropies)
{
    const Case all = {.bias = true, .dentropy = true, .ignored = 0};
    Case fewer = all;
    fewer.classes = 7;
    Call few(*backend, fewer), run(*backend, all);
    std::vector<float> bias(11, -INFINITY);
    for (size_t j = 0; j < 7; j++)
        bias[j] = float(few.bias.values(0)[j]);
    backend->upload(run.bias.data[0], bias.data(), sizeof(float) * 11);
    for (int64_t row = 0; row < all.rows; row++) {
        run.set_target(row, row % 7);
        few.set_target(row, row % 7);
    }
    for (const Call *one : {&few, &run}) {
        ASSERT_EQ(one->forward(), HR_OK) << hr_last_error();
        ASSERT_EQ(one->backward(), HR_OK) << hr_last_error();
    }
    for (const size_t k : {0u, 1u, 5u, 7u}) // and not the mean, which is minus infinity
        expect_near(run.results.values(k), few.results.values(k), epsilon_of(HR_F32), "result");
    expect_near(run.dhidden.values(0), few.dhidden.values(0), epsilon_of(HR_F32), "dhidden");
    for (size_t j = 0; j < 11; j++)
        EXPECT_EQ(run.dbias.values(0)[j] == 0, j >= 7) << j;
}

// In parts of 64 classes, where there are more features than 4 MiB hold of these.
TEST_P(LinearCrossEntropy, OfAMatrixHasTheBitsOfItsDecodedElements)
{
    const auto results = [](const Call &run) {
        return image_of({&run.results.buffers, &run.numbers.buffers, &run.dhidden.buffers,
                         &run.dbias.buffers, &run.argmaxes});
    };
    for (const Case &c : few_bits_cases(backend == &cpu_backend())) {
        SCOPED_TRACE(testing::PrintToString(c));
        const Call decoded(*backend, c);
        ASSERT_EQ(decoded.forward(), HR_OK) << hr_last_error();
        EXPECT_TRUE(decoded.whole());
        Call run(*backend, c);
        hr_matrix dense = HR_MATRIX_INIT;
        dense.dtype = c.dtype, dense.rows = c.classes, dense.cols = c.features;
        dense.stride = c.features + c.gap, dense.data = run.weight.data[0];
        const hr_matrix *const none = nullptr;
        for (const hr_matrix *matrix : {&std::as_const(dense), none}) {
            run.set_weight(matrix);
            ASSERT_EQ(run.forward(), HR_OK) << hr_last_error();
            if (c.dtype != HR_F32 || c.features < 100) {
                EXPECT_EQ(results(run), results(decoded));
                continue;
            }
            const Vector got = decoded.dhidden.values(0), wanted = run.dhidden.values(0);
            const double bound = 16 * epsilon_of(HR_F32) * largest_of(wanted);
            for (size_t i = 0; i < got.size(); i++) // sums over parts of the classes
                ASSERT_NEAR(got[i], wanted[i], bound) << i;
        }
    }
}

TEST_P(LinearCrossEntropy, AddsToGradientsThatExist)
{
    for (const hr_dtype dtype : {HR_F32, HR_BF16}) {
        Case c = {.dtype = dtype, .grad_dtype = dtype, .limit = 2 * 11 * 4, .bias = true};
        const Call fresh(*backend, c);
        Call added(*backend, c);
        added.config.add_to_weight_grads = 1;
        ASSERT_EQ(fresh.forward(), HR_OK) << hr_last_error();
        ASSERT_EQ(added.forward(), HR_OK) << hr_last_error();
        const double unit = 77 * epsilon_of(dtype);
        for (size_t i = 0; i < 66; i++)
            EXPECT_NEAR(added.dweight.values(0)[i], 77 + fresh.dweight.values(0)[i], unit);
        for (size_t i = 0; i < 11; i++)
            EXPECT_NEAR(added.dbias.values(0)[i], 77 + fresh.dbias.values(0)[i], unit);
        EXPECT_EQ(added.dhidden.values(0), fresh.dhidden.values(0));
    }
}

// The sum over 96 chunks of a row is as exact as that over all rows at once.
TEST_P(LinearCrossEntropy, RoundsSumsOfABf16GradientOnce)
{
    Case c = {.rows = 96, .dtype = HR_BF16, .grad_dtype = HR_BF16, .ignored = 0};
    const Call whole(*backend, c);
    c.limit = 11 * 4;
    const Call chunks(*backend, c);
    ASSERT_EQ(whole.needs.rows, 96);
    ASSERT_EQ(chunks.needs.rows, 1);
    ASSERT_EQ(whole.forward(), HR_OK) << hr_last_error();
    ASSERT_EQ(chunks.forward(), HR_OK) << hr_last_error();
    const Reference exact(whole, Vector(96, 1));
    double errors[2] = {};
    for (size_t i = 0; i < 66; i++) {
        const double value = exact.dweight[i / 6][i % 6];
        errors[0] += std::fabs(whole.dweight.values(0)[i] - value);
        errors[1] += std::fabs(chunks.dweight.values(0)[i] - value);
    }
    EXPECT_LT(errors[1], 1.5 * errors[0]);
}

// Sums in halves are added in vectors where addresses allow it, and one by one elsewhere.
TEST_P(LinearCrossEntropy, SumsInHalvesHaveTheSameBitsAtEveryAddress)
{
    for (const int64_t features : {24, 280}) // 3 vectors, and more than a warp has
        for (const int32_t adds : {0, 1}) {
            const Case c = {.rows = 20,
                            .features = features,
                            .classes = 37,
                            .gap = 8,
                            .dtype = HR_BF16,
                            .grad_dtype = HR_BF16,
                            .limit = 8 * 37 * 4};
            Call aligned(*backend, c), odd(*backend, c);
            aligned.config.add_to_weight_grads = odd.config.add_to_weight_grads = adds;
            odd.grads.weight.data = moved(odd.grads.weight.data, 2);
            ASSERT_EQ(aligned.forward(), HR_OK) << hr_last_error();
            ASSERT_EQ(odd.forward(), HR_OK) << hr_last_error();
            const Vector one = aligned.dweight.values(0), other = odd.dweight.values(0);
            for (int64_t row = 0; row < c.classes; row++)
                for (int64_t j = 0; j < features + c.gap - 1; j++) {
                    const size_t at = size_t(row * (features + c.gap) + j);
                    ASSERT_EQ(one[at], other[at + 1]) << row << ", " << j;
                    ASSERT_TRUE(j < features || one[at] == 77) << row << ", " << j;
                }
            EXPECT_TRUE(aligned.whole() && odd.whole());
        }
}

// A z-loss hides nothing of losses that weigh little; where nothing weighs anything, or no row
// counts, the mean is NaN or 0 and has no gradient.
TEST_P(LinearCrossEntropy, RowsThatWeighLittleOrNothing)
{
    for (const hr_dtype dtype : {HR_F32, HR_F16}) {
        Case c = {.limit = 3 * 11 * 4, .weigh = 1e-8, .class_weight = true, .z_loss = 1};
        c.dtype = dtype;
        const Call little(*backend, c);
        ASSERT_EQ(little.forward(), HR_OK) << hr_last_error();
        const double exact = Reference(little, Vector(9, 1)).result;
        EXPECT_NEAR(little.numbers.values(0)[0], exact, 4e-7 * std::fabs(exact));
        for (const hr_cross_entropy_reduction reduction : {HR_REDUCE_MEAN, HR_REDUCE_MEAN_OR_ZERO})
            for (const int64_t rows : {9, 5, 0}) {
                c.rows = rows, c.weigh = 0, c.z_loss = 0, c.ignored = rows == 5 ? 1 : 3;
                c.reduction = reduction;
                const Call run(*backend, c);
                ASSERT_EQ(run.forward(), HR_OK) << hr_last_error();
                const double result = run.numbers.values(0)[0];
                EXPECT_TRUE(reduction == HR_REDUCE_MEAN ? std::isnan(result) : result == 0);
                EXPECT_TRUE(std::isfinite(run.numbers.values(2)[0]));
                EXPECT_EQ(run.dweight.values(0), Vector(66, 0));
                EXPECT_EQ(run.dhidden.values(0), Vector(size_t(rows) * 6, 0));
            }
    }
}

TEST_P(LinearCrossEntropy, AConfigOfAnOlderHeaderHasDefaults)
{
    const Call now(*backend, {});
    Call older(*backend, {});
    ASSERT_EQ(now.forward(), HR_OK) << hr_last_error();
    for (const size_t size : {offsetof(hr_linear_cross_entropy_config, dentropy) + 4,
                              offsetof(hr_linear_cross_entropy_config, entropy),
                              offsetof(hr_linear_cross_entropy_config, matrix) + 4,
                              offsetof(hr_linear_cross_entropy_config, matrix),
                              offsetof(hr_linear_cross_entropy_config, check_target)}) {
        if (size < offsetof(hr_linear_cross_entropy_config, entropy))
            older.config.matrix = reinterpret_cast<const hr_matrix *>(1);
        older.config.dentropy = reinterpret_cast<const float *>(1);
        cut(older.config, size);
        ASSERT_EQ(older.forward(), HR_OK) << hr_last_error();
        EXPECT_EQ(now.image(), older.image());
        ASSERT_EQ(older.backward(), HR_OK) << hr_last_error();
        ASSERT_EQ(older.forward(), HR_OK) << hr_last_error();
    }
}

TEST_P(LinearCrossEntropy, AMatrixTakesAPartOfItInWorkspace)
{
    const hr_exec exec = backend->exec();
    hr_linear_cross_entropy_config config = HR_LINEAR_CROSS_ENTROPY_CONFIG_INIT;
    config.dtype = HR_BF16;
    const auto workspace = [&] {
        hr_linear_cross_entropy_needs needs = {};
        EXPECT_EQ(hr_linear_cross_entropy_query(&needs, 512, 4096, 128256, 1, &config, &exec),
                  HR_OK)
            << hr_last_error();
        return needs.workspace;
    };
    const size_t dense = workspace();
    float unread = 0;
    hr_matrix matrix = HR_MATRIX_INIT;
    matrix.format = HR_NF4, matrix.dtype = HR_BF16, matrix.rows = 128256, matrix.cols = 4096;
    matrix.data = matrix.absmax = &unread;
    config.matrix = &matrix;
    // Decoded on the CPU before they are widened, as those of a dense matrix are.
    EXPECT_EQ(workspace() - dense, size_t(backend == &cpu_backend() ? 2 : 32) << 20);
}

TEST_P(LinearCrossEntropy, QueryChoosesTheModeFromTheLimit)
{
    const hr_exec exec = backend->exec();
    hr_linear_cross_entropy_config config = HR_LINEAR_CROSS_ENTROPY_CONFIG_INIT;
    const auto query = [&](size_t limit) {
        config.workspace_limit = limit;
        hr_linear_cross_entropy_needs needs = {};
        EXPECT_EQ(hr_linear_cross_entropy_query(&needs, 8192, 512, 50257, 3, &config, &exec), HR_OK)
            << hr_last_error();
        return needs;
    };
    const hr_linear_cross_entropy_needs large = query(256 << 20), small = query(1 << 20);
    EXPECT_EQ(large.mode, kTokens);
    EXPECT_EQ(large.classes, 50257);
    EXPECT_LE(large.rows * large.classes * 4, 256 << 20);
    EXPECT_GE(large.rows, 1024);
    EXPECT_EQ(small.mode, kVocabulary);
    EXPECT_EQ(small.rows, 8192);
    EXPECT_EQ(small.classes, 64);
    EXPECT_LT(small.workspace, large.workspace);
    config.mode = kTokens;
    EXPECT_EQ(query(1 << 20).rows, 5);
}

// On a GPU that need not be there, what takes less time: the figures are those of the choice, with the
// rates of linear_cross_entropy_cost.c.
TEST_P(LinearCrossEntropy, QueryForAGpuChoosesTheModeByCost)
{
    if (backend == &cpu_backend())
        GTEST_SKIP() << "a GPU is named by its ordinal";
    const struct {
        int32_t capability;
        int64_t rows, features, classes;
        hr_dtype dtype;
        int32_t tf32;
        size_t limit;
        uint32_t wanted;
        hr_linear_cross_entropy_mode mode;
    } all[] = {
        {90, 8192, 4096, 128256, HR_BF16, 0, 0, 3, kVocabulary},
        {90, 1024, 4096, 128256, HR_BF16, 0, 0, 3, kTokens}, // all at once
        {90, 8192, 8192, 128256, HR_BF16, 0, 0, 3, kTokens}, // 2,048 rows at a time
        {90, 8192, 8192, 128256, HR_BF16, 0, size_t(1) << 28, 3, kVocabulary},
        {90, 8192, 4096, 128256, HR_F32, 0, 0, 3, kTokens},  // products are slow
        {90, 8192, 4096, 128256, HR_BF16, 0, 0, 1, kTokens}, // no sums
        {90, 8192, 4096, 128256, HR_BF16, 0, 0, 0, kTokens},
        {80, 8192, 4096, 128256, HR_BF16, 0, 0, 3, kTokens},
        {80, 8192, 2048, 128256, HR_BF16, 0, 0, 3, kVocabulary},
        {86, 8192, 2048, 128256, HR_BF16, 0, 0, 3, kTokens},
        {89, 8192, 2048, 128256, HR_BF16, 0, 0, 3, kVocabulary},
        {75, 8192, 2048, 128256, HR_F16, 0, 0, 3, kTokens}, // a product adds to the sums
        {100, 8192, 4096, 128256, HR_BF16, 0, 0, 3, kVocabulary},
        {110, 8192, 4096, 128256, HR_BF16, 0, 0, 3, kVocabulary}, // as 10.0
        {120, 8192, 4096, 128256, HR_BF16, 0, 0, 3, kTokens},
    };
    for (const auto &c : all) {
        SCOPED_TRACE(testing::Message() << c.capability << ", " << c.rows << " x " << c.features);
        hr_linear_cross_entropy_config config = HR_LINEAR_CROSS_ENTROPY_CONFIG_INIT;
        config.dtype = c.dtype;
        config.grad_dtype = c.dtype == HR_BF16 ? HR_BF16 : HR_F32;
        config.allow_tf32 = c.tf32;
        config.workspace_limit = c.limit;
        config.capability = c.capability;
        const hr_exec exec = {7, nullptr};
        hr_linear_cross_entropy_needs needs = {}, asked = {};
        ASSERT_EQ(hr_linear_cross_entropy_query(&needs, c.rows, c.features, c.classes, c.wanted,
                                                &config, &exec),
                  HR_OK)
            << hr_last_error();
        EXPECT_EQ(needs.mode, c.mode);
        config.mode = c.mode;
        ASSERT_EQ(hr_linear_cross_entropy_query(&asked, c.rows, c.features, c.classes, c.wanted,
                                                &config, &exec),
                  HR_OK);
        EXPECT_EQ(needs.workspace, asked.workspace);
        EXPECT_EQ(needs.rows, asked.rows);
        EXPECT_EQ(needs.classes, asked.classes);
    }
}

TEST(LinearCrossEntropyBits, AreTheSameOnEveryInstructionSetAndThreadCount)
{
    std::vector<Case> all = cases();
    all.push_back({.rows = 300,
                   .features = 130,
                   .classes = 700,
                   .dtype = HR_BF16,
                   .grad_dtype = HR_BF16,
                   .limit = 100 * 700 * 4,
                   .bias = true,
                   .smoothing = 0.1});
    all.push_back(
        {.bias = true, .smoothing = 0.1, .z_loss = 0.1, .scale = 3e38}); // infinite logits
    expect_bits_on_the_cpu<Call>(all);
}

TEST(LinearCrossEntropyBits, OfEntropiesAreTheSameOnEveryInstructionSetAndThreadCount)
{
    std::vector<Case> all = {cases()[9], cases()[10], cases()[11]};
    all.push_back({.rows = 90, .features = 13, .classes = 700, .limit = 40 * 700 * 4});
    for (Case &c : all)
        c.dentropy = true;
    expect_bits_on_the_cpu<LinearCrossEntropyBackwardRun>(all);
}

TEST(LinearCrossEntropyBits, RepeatOnCuda)
{
    expect_repeats_on_cuda<Call>(std::vector<Case>{cases()[3], cases()[5]});
}

TEST(LinearCrossEntropyBits, AreTheSameInACapture)
{
    const std::vector<Case> some = {cases()[1], cases()[2], cases()[5]};
    expect_capturable<Call>(some);
    expect_capturable<LinearCrossEntropyBackwardRun>(some);
}
