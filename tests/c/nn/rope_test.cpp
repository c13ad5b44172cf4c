// Rotary embeddings against their formula in binary64, and the same bits wherever they run.
#include <cmath>

#include "tests/c/harness/bits.h"
#include "tests/c/harness/refused.h"
#include "tests/c/nn/rope_run.h"

using Rope = OnBackend;
ON_EVERY_BACKEND(Rope);

namespace
{

std::vector<RopeCase> cases()
{
    std::vector<RopeCase> all;
    const int64_t dims[][2] = {{32, 0}, {2, 0}, {48, 32}, {24, 16}, {10, 6}, {38, 0}, {128, 0}};
    int k = 0;
    for (const auto &[head_dim, rotary_dim] : dims)
        for (const hr_dtype dtype : {HR_F32, HR_BF16, HR_F16})
            for (const bool interleaved : {false, true}) {
                RopeCase c;
                c.head_dim = head_dim, c.rotary_dim = rotary_dim;
                c.dtype = dtype;
                c.interleaved = interleaved;
                c.table_dtype = k % 3 == 1 ? dtype : HR_F32;
                c.layout = Layout((k + k / 6) % 3);
                c.positions = Positions((k / 2) % 3);
                c.inverse = k % 4 == 1 || k % 4 == 2;
                c.in_place = k % 5 == 2;
                c.wide = k % 4 == 3;
                c.shift = k % 7 == 5;
                all.push_back(c);
                k++;
            }
    all.push_back({.batch = 1, .tokens = 35, .q_heads = 1, .k_heads = 9, .layout = BY_HEAD});
    all.push_back({.tokens = 3, .q_heads = 11, .k_heads = 0});
    all.push_back({.batch = 1, .tokens = 1, .head_dim = 530, .shift = 1});
    all.push_back({.batch = 0, .positions = PER_BATCH});
    all.push_back({.tokens = 0});
    return all;
}

} // namespace

TEST_P(Rope, FollowsTheFormula)
{
    for (const RopeCase &c : cases()) {
        const RopeRun run(*backend, c);
        std::vector<double> expected = (c.in_place ? run.in : run.out).values(0), slack;
        slack.resize(expected.size());
        const std::vector<double> in = run.in.values(0);
        const std::vector<double> cos = run.cos.values(0), sin = run.sin.values(0);
        const int64_t pairs = run.rotary / 2;
        const auto expect = [&](const hr_heads &heads, int64_t count) {
            const int64_t from =
                (static_cast<char *>(heads.data) - static_cast<char *>(run.in.data[0])) /
                int64_t(bytes_of(c.dtype));
            for (int64_t b = 0; b < c.batch; b++)
                for (int64_t t = 0; t < c.tokens; t++)
                    for (int64_t h = 0; h < count; h++) {
                        const size_t v = size_t(from + b * heads.batch_stride +
                                                t * heads.token_stride + h * heads.head_stride);
                        for (int64_t i = 0; i < pairs; i++) {
                            const size_t row = size_t(run.position(b, t) * run.cols() + i);
                            const size_t one = v + size_t(c.interleaved ? 2 * i : i);
                            const size_t other = v + size_t(c.interleaved ? 2 * i + 1 : pairs + i);
                            const double s = c.inverse ? -sin[row] : sin[row];
                            expected[one] = in[one] * cos[row] - in[other] * s;
                            expected[other] = in[other] * cos[row] + in[one] * s;
                            slack[one] = slack[other] = 0x1p-23 * 4 + 0x1p-24;
                        }
                        for (int64_t j = run.rotary; j < c.head_dim; j++)
                            expected[v + size_t(j)] = in[v + size_t(j)];
                    }
        };
        expect(run.q, c.q_heads);
        expect(run.k, c.k_heads);
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        EXPECT_TRUE(run.whole()) << c;
        const std::vector<double> got = (c.in_place ? run.in : run.out).values(0);
        const double unit = epsilon_of(c.dtype) / 2;
        for (size_t i = 0; i < got.size(); i++)
            ASSERT_NEAR(got[i], expected[i],
                        slack[i] ? std::fabs(expected[i]) * unit + slack[i] : 0)
                << c << ", element " << i;
    }
}

// Queries alone, and the rows of wider strides.
TEST_P(Rope, KeysMayBeLeftOut)
{
    RopeCase c;
    const RopeRun both(*backend, c);
    RopeRun alone(*backend, c);
    ASSERT_EQ(both.call(), HR_OK);
    alone.k_argument = alone.k_out_argument = nullptr;
    alone.shape.k_heads = 0;
    ASSERT_EQ(alone.call(), HR_OK) << hr_last_error();
    const size_t q = size_t(c.batch * c.tokens * c.q_heads * c.head_dim);
    const std::vector<double> expected = both.out.values(0), got = alone.out.values(0);
    for (size_t i = 0; i < got.size(); i++)
        ASSERT_EQ(got[i], i < q ? expected[i] : 77) << i;
}

TEST_P(Rope, InverseTurnsBack)
{
    RopeCase c;
    c.in_place = true, c.head_dim = 40, c.rotary_dim = 16;
    RopeRun run(*backend, c);
    const std::vector<double> before = run.in.values(0);
    const std::vector<double> cos = run.cos.values(0), sin = run.sin.values(0);
    ASSERT_EQ(run.call(), HR_OK);
    run.config.inverse = 1;
    ASSERT_EQ(run.call(), HR_OK);
    const std::vector<double> after = run.in.values(0);
    for (int64_t b = 0; b < c.batch; b++)
        for (int64_t t = 0; t < c.tokens; t++)
            for (int64_t j = 0; j < c.head_dim; j++) {
                const size_t i = size_t(b * run.q.batch_stride + t * run.q.token_stride + j);
                const size_t row = size_t(run.position(b, t) * run.cols() + j % 8);
                const double size =
                    j < 16 ? cos[row] * cos[row] + sin[row] * sin[row] : 1; // no real angle
                ASSERT_NEAR(after[i], before[i] * size, 0x1p-20);
            }
}

// The tensors of these are large enough for several threads; the values include NaN and infinity.
TEST(RopeBits, AreTheSameOnEveryInstructionSetAndThreadCount)
{
    std::vector<RopeCase> all = cases();
    for (const hr_dtype dtype : {HR_F32, HR_BF16, HR_F16})
        for (const bool interleaved : {false, true})
            all.push_back({.batch = 1,
                           .tokens = 70,
                           .q_heads = 2,
                           .k_heads = 1,
                           .head_dim = interleaved ? 70 : 300,
                           .dtype = dtype,
                           .interleaved = interleaved,
                           .in_place = interleaved == (dtype == HR_F32),
                           .special = true});
    expect_bits_on_the_cpu<RopeRun>(all);
}

TEST(RopeBits, OfCudaAreThoseOfTheCpu)
{
    std::vector<RopeCase> all = cases();
    for (RopeCase &c : all)
        c.special = true;
    expect_bits_of_the_cpu<RopeRun>(all);
}

// Only the CPU can look at positions before the call.
TEST_P(Rope, BadInputsInPositions)
{
    for (const int64_t bad : {int64_t(-1), kRows, INT64_MAX, INT64_MIN}) {
        RopeCase c;
        c.positions = PER_BATCH, c.head_dim = 24, c.rotary_dim = 16;
        const RopeRun good(*backend, c);
        ASSERT_EQ(good.call(), HR_OK);
        RopeRun run(*backend, c);
        const std::vector<uint8_t> before = run.image();
        const int64_t b = 1, t = 3, token = b * c.tokens + t;
        backend->upload(moved(run.position_rows.data, size_t(token) * 8), &bad, 8);
        if (run.exec.device == HR_CPU) {
            EXPECT_EQ(run.call(), HR_INVALID_ARGUMENT);
            EXPECT_TRUE(matches(hr_last_error(), "positions\\[1\\]\\[3\\] is " +
                                                     std::to_string(bad) +
                                                     ", but cos and sin have rows for 0 to 22"));
            EXPECT_EQ(run.image(), before);
            continue;
        }
        ASSERT_EQ(run.call(), HR_OK);
        const std::vector<double> got = run.out.values(0), expected = good.out.values(0);
        const int64_t q = c.batch * c.tokens * c.q_heads * c.head_dim;
        for (int64_t i = 0; i < int64_t(got.size()); i++) {
            const int64_t heads = i < q ? c.q_heads : c.k_heads, in_part = i < q ? i : i - q;
            const bool is_token = in_part / c.head_dim / heads == token && i % c.head_dim < 16;
            if (is_token)
                ASSERT_TRUE(std::isnan(got[size_t(i)])) << i;
            else
                ASSERT_EQ(got[size_t(i)], expected[size_t(i)]) << i;
        }
    }
}

TEST_P(Rope, BadInputs)
{
    using R = RopeRun;
    BadInputs<R> bad = bad_config_or_exec<R>();
    const BadInputs<R> own = {
        {"config->dtype is f64", [](R &r) { r.config.dtype = HR_F64; }},
        {"config->table_dtype is i8", [](R &r) { r.config.table_dtype = HR_I8; }},
        {"config->offset is -1", [](R &r) { r.config.offset = -1; }},
        {"config->batch_step is -1", [](R &r) { r.config.batch_step = -1; }},
        {"shape is NULL", [](R &r) { r.shape_argument = nullptr; }},
        {"shape->batch is -1, wanted 0 or more", [](R &r) { r.shape.batch = -1; }},
        {"shape->tokens is -1", [](R &r) { r.shape.tokens = -1; }},
        {"shape->q_heads is -1", [](R &r) { r.shape.q_heads = -1; }},
        {"shape->k_heads is -1", [](R &r) { r.shape.k_heads = -1; }},
        {"shape->head_dim is 0, wanted 1 or more", [](R &r) { r.shape.head_dim = 0; }},
        {"shape->table_rows is 9223372036854775807, wanted .* at most 2\\^59",
         [](R &r) { r.shape.table_rows = INT64_MAX; }},
        {"rotary_dim is 34, wanted an even number from 2 to head_dim \\(32\\)",
         [](R &r) { r.config.rotary_dim = 34; }},
        {"rotary_dim is 7, wanted an even", [](R &r) { r.config.rotary_dim = 7; }},
        {"rotary_dim is -2, wanted an even", [](R &r) { r.config.rotary_dim = -2; }},
        {"rotary_dim is 31, wanted an even", [](R &r) { r.shape.head_dim = 31; }},
        {"q_out is NULL", [](R &r) { r.q_out_argument = nullptr; }},
        {": q is NULL", [](R &r) { r.q_argument = nullptr; }},
        {"k_out is NULL, but k is not", [](R &r) { r.k_out_argument = nullptr; }},
        {"k is NULL, but k_out is not", [](R &r) { r.k_argument = nullptr; }},
        {"k is NULL, but shape->k_heads is 2",
         [](R &r) { r.k_argument = r.k_out_argument = nullptr; }},
        {"q_out has stride -1, wanted 0 or more", [](R &r) { r.q_out.batch_stride = -1; }},
        {": q has stride -1", [](R &r) { r.q.token_stride = -1; }},
        {"k has stride -1", [](R &r) { r.k.head_stride = -1; }},
        {": q has more than 2\\^59 elements, or", [](R &r) { r.q.batch_stride = INT64_MAX / 2; }},
        {"q_out has more than 2\\^59 elements", [](R &r) { r.shape.q_heads = INT64_C(1) << 58; }},
        {"q_out->data is NULL", [](R &r) { r.q_out.data = nullptr; }},
        {": q->data is NULL", [](R &r) { r.q.data = nullptr; }},
        {"k->data is at .* not a multiple of 4 bytes", [](R &r) { r.k.data = moved(r.k.data, 2); }},
        {"q_out has vectors that share memory: a stride is 31, wanted 32 or more",
         [](R &r) { r.q_out.head_stride = 31; }},
        {"q_out has vectors that share memory: a stride is 0, wanted 32",
         [](R &r) { r.q_out.batch_stride = 0, r.shape.tokens = 1; }},
        {"k_out has vectors that share memory: a stride is 32, wanted 160",
         [](R &r) { r.k_out.token_stride = 32; }},
        {"q_out is in the place of q, but has other strides",
         [](R &r) { r.q_out.data = r.q.data, r.q.head_stride = 0; }},
        {"k_out is in the place of k, but has other strides",
         [](R &r) { r.k_out.data = r.k.data, r.k.batch_stride = 0; }},
        {"cos is NULL", [](R &r) { r.cos_argument = nullptr; }},
        {"sin is NULL", [](R &r) { r.sin_argument = nullptr; }},
        {"cos->stride is 15, wanted cols \\(16\\)", [](R &r) { r.cos_rows.stride = 15; }},
        {"sin->data is NULL", [](R &r) { r.sin_rows.data = nullptr; }},
        {"sin->data is at .* not a multiple of 4",
         [](R &r) { r.sin_rows.data = moved(r.sin_rows.data, 1); }},
    };
    const BadInputs<R> with_offset = {
        {"the last position is offset \\(5\\) \\+ 1 \\* batch_step \\(5\\) \\+ 4, but cos and sin "
         "have 14 rows",
         [](R &r) { r.config.offset++; }},
        {"the last position is .* but cos and sin have 13 rows",
         [](R &r) { r.shape.table_rows--; }},
        {"batch_step \\(100\\)", [](R &r) { r.config.batch_step = 100; }},
    };
    const BadInputs<R> with_positions = {
        {"positions->stride is 4, wanted 0 or tokens \\(5\\) or more",
         [](R &r) { r.position_rows.stride = 4; }},
        {"positions->stride is -5", [](R &r) { r.position_rows.stride = -5; }},
        {"positions->data is NULL", [](R &r) { r.position_rows.data = nullptr; }},
        {"positions->data is at .* not a multiple of 8 bytes",
         [](R &r) { r.position_rows.data = moved(r.position_rows.data, 4); }},
    };
    RopeCase given;
    given.positions = PER_BATCH;
    expect_all_refused(*backend, RopeCase{}, joined<R>({bad, own, with_offset}));
    expect_all_refused(*backend, given, with_positions);
    RopeRun run(*backend, RopeCase{});
    expect_no_such_device(run);
}
