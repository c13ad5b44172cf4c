// hr_muon_momentum(): moments and updates to the bit against a second statement of the rule, the sums of
// squares, everything that it refuses, and equal bits wherever it runs.
#include "tests/c/harness/bits.h"
#include "tests/c/harness/refused.h"
#include "tests/c/optim/muon_run.h"

namespace
{
using Call = MuonMomentumRun;

// a + weight * (b - a), as torch's lerp computes it.
float between(float a, float b, float weight)
{
    return weight < 0.5f ? fused(weight, b - a, a) : fused(weight - 1, b - a, b);
}

double stored(float x, hr_dtype dtype)
{
    uint8_t bytes[8];
    encode(double(x), bytes, dtype);
    return decode(bytes, dtype);
}

void expect_rule(Backend &backend, const MuonCase &c)
{
    SCOPED_TRACE(testing::PrintToString(c));
    const Call fresh(backend, c), run(backend, c);
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    EXPECT_TRUE(run.whole());
    const float factor = float((c.maximize ? -1.0 : 1.0) * double(c.clip_coef.value_or(1)) /
                               double(c.grad_scale.value_or(1)));
    const std::vector<double> squares = run.values(Call::SQUARES, 0);
    for (size_t k = 0; k < c.shapes.size(); k++) {
        const bool codes = c.moment == HR_U8;
        const auto gs = fresh.values(Call::GRADS, k), us = run.update(k);
        const auto ms = codes ? decoded(fresh, Call::MOMENTS, Call::ABSMAXS, k)
                              : fresh.values(Call::MOMENTS, k);
        std::vector<float> moments;
        std::vector<double> wanted, sum_of = fresh.values(Call::UPDATES, k);
        double sum = 0;
        for (size_t i = 0; i < gs.size(); i++) {
            const float g = float(gs[i] * double(factor));
            const float m = between(float(ms[i]), g, float(1 - c.momentum));
            const float u = c.nesterov ? between(g, m, float(c.momentum)) : m;
            moments.push_back(m);
            wanted.push_back(stored(u, c.update));
            sum_of[place_of(run.matrices[k], i)] = wanted.back();
            sum += double(u) * double(u);
        }
        EXPECT_EQ(us, wanted);
        EXPECT_EQ(run.values(Call::UPDATES, k), sum_of); // and nothing else was written
        EXPECT_NEAR(squares[k], sum, sum * 0x1p-20);
        EXPECT_EQ(run.values(Call::GRADS, k), gs);
        if (codes) {
            expect_codes(run, Call::MOMENTS, Call::ABSMAXS, k, moments);
        } else {
            std::vector<double> kept;
            for (const float m : moments)
                kept.push_back(stored(m, c.moment));
            EXPECT_EQ(run.values(Call::MOMENTS, k), kept);
        }
    }
}

std::vector<MuonCase> code_cases()
{
    std::vector<MuonCase> all;
    for (MuonCase c : muon_cases())
        if (c.moment == HR_F32) {
            c.moment = HR_U8;
            c.block_size = 64 << all.size() % 4;
            all.push_back(c);
        }
    return all;
}

using MuonMomentumValues = OnBackend;
ON_EVERY_BACKEND(MuonMomentumValues);

TEST_P(MuonMomentumValues, EveryShapeTypeAndLayout)
{
    for (const MuonCase &c : muon_cases())
        expect_rule(*backend, c);
}

TEST_P(MuonMomentumValues, MomentsInCodes)
{
    for (const MuonCase &c : code_cases())
        expect_rule(*backend, c);
}

TEST_P(MuonMomentumValues, ManyChunksAndMatrices)
{
    MuonCase c;
    c.turned = true;
    c.shapes = {{260, 256}, {70, 600}, {1200, 30}};
    c.update = c.grad = HR_BF16;
    expect_rule(*backend, c);
    c.moment = HR_U8;
    expect_rule(*backend, c);
    c.shapes.assign(700, {3, 2});
    c.gap = 1;
    expect_rule(*backend, c);
    c.shapes.clear();
    expect_rule(*backend, c);
}

TEST_P(MuonMomentumValues, ScalarsOfTheStep)
{
    for (int scalars = 0; scalars < 8; scalars++) {
        MuonCase c;
        using Scalar = std::optional<float>;
        c.shapes = {{5, 7}, {9, 2}};
        c.grad_scale = scalars & 1 ? Scalar(1024.0f / 3) : std::nullopt;
        c.clip_coef = scalars & 2 ? Scalar(0.3f) : std::nullopt;
        c.found_inf = scalars & 4 ? Scalar(0.0f) : std::nullopt;
        expect_rule(*backend, c);
    }
    for (const float found : {1.0f, NAN})
        for (const hr_dtype moment : {HR_F32, HR_U8}) {
            MuonCase c;
            c.turned = true;
            c.shapes = {{5, 7}, {40, 3}};
            c.moment = moment;
            c.found_inf = found;
            const Call run(*backend, c);
            const std::vector<uint8_t> before = run.image();
            EXPECT_EQ(run.call(), HR_OK);
            EXPECT_EQ(run.image(), before);
        }
}

// All but the squares, whose sums have another order on CUDA.
std::vector<uint8_t> elements(const Call &run)
{
    return image_of({&run.tensors[Call::UPDATES].buffers, &run.tensors[Call::MOMENTS].buffers,
                     &run.tensors[Call::ABSMAXS].buffers});
}

std::vector<MuonCase> bit_cases()
{
    std::vector<MuonCase> all = muon_cases();
    for (const MuonCase &c : code_cases())
        all.push_back(c);
    for (size_t i = 0; i < all.size(); i++)
        all[i].special = i % 2;
    all[0].shapes.push_back({300, 300}); // for several threads
    return all;
}

TEST(MuonMomentumOnTheCpu, SameBitsOnEveryInstructionSet)
{
    expect_bits_on_the_cpu<Call>(bit_cases());
}

TEST(MuonMomentumOnCuda, SameElementsAsOnTheCpu)
{
    const auto on_the_cpu = [](const MuonCase &c, const auto &) {
        return baseline<Call>(c, elements);
    };
    expect_bits_on_cuda<Call>(bit_cases(), on_the_cpu, elements);
}

TEST(MuonMomentumOnCuda, RepeatsItselfAndCanBeCaptured)
{
    std::vector<MuonCase> some(2);
    some[0].shapes = {{300, 120}, {40, 900}};
    some[0].turned = some[1].turned = true;
    some[1].moment = HR_U8;
    some[1].shapes = {{70, 256}};
    expect_repeats_on_cuda<Call>(some);
    expect_capturable<Call>(some);
}

using MuonMomentumBadInputs = OnBackend;
ON_EVERY_BACKEND(MuonMomentumBadInputs);

TEST_P(MuonMomentumBadInputs, AreRefused)
{
    MuonCase good;
    good.shapes = {{1, 5}, {0, 3}, {60, 5}};
    good.turned = true;
    good.moment = HR_U8;
    good.grad_scale = 2.0f;
    good.found_inf = 0.0f;
    good.clip_coef = 0.5f;
    using R = Call;
    const auto tensors = [](R::List l) { return [=](R &r) -> Tensors & { return r.tensors[l]; }; };
    using Rule = ListRule<R>;
    BadInputs<R> all =
        joined<R>({bad_config_or_exec<R>(),
                   bad_lists<R>({{"updates", tensors(R::UPDATES), float_types(), Rule::LEADS},
                                 {"moments", tensors(R::MOMENTS), {HR_U8}},
                                 {"grads", tensors(R::GRADS), float_types()}}),
                   bad_numbers<R>("momentum is .*, wanted a finite",
                                  [](R &r) -> double & { return r.config.momentum; },
                                  {-0.1, NAN, INFINITY})});
    const auto matrix = [&](const std::string &message, auto change) {
        all.push_back({message, [=](R &r) { change(r.matrices[2]); }});
    };
    matrix("matrices\\[2\\] is \\[-1, 5\\]", [](hr_muon_matrix &m) { m.rows = -1; });
    matrix("matrices\\[2\\] is \\[60, -1\\]", [](hr_muon_matrix &m) { m.cols = -1; });
    matrix("wanted sizes of 0 or more and at most", [](hr_muon_matrix &m) { m.cols = INT64_MAX; });
    matrix("transposed is 2, wanted 0 or 1", [](hr_muon_matrix &m) { m.transposed = 2; });
    matrix("stride is 59, wanted 60 or more", [](hr_muon_matrix &m) { m.stride = 59; });
    matrix("stride is .*, wanted 60 or more", [](hr_muon_matrix &m) { m.stride = INT64_MAX / 8; });
    matrix("matrices\\[2\\] is \\[59, 5\\], but updates has numel 300",
           [](hr_muon_matrix &m) { m.rows = 59; });
    const BadInputs<R> others = {
        {"matrices is NULL", [](R &r) { r.matrices_argument = nullptr; }},
        {"skip_nonfinite is 1, wanted 0", [](R &r) { r.config.step.skip_nonfinite = 1; }},
        {"step.reserved", [](R &r) { r.config.step.reserved[0] = 1; }},
        {"nesterov is 2", [](R &r) { r.config.nesterov = 2; }},
        {"block_size is 100, wanted 64", [](R &r) { r.config.block_size = 100; }},
        {"absmaxs\\[2\\] has numel 1, wanted 2", [](R &r) { r.tensors[R::ABSMAXS].numel[2] = 1; }},
        {"squares is NULL", [](R &r) { r.squares = nullptr; }},
        {"squares is at", [](R &r) { r.squares = moved(r.squares, 2); }},
        {"workspace_bytes is .*, wanted", [](R &r) { r.workspace_bytes -= 8; }},
        {"workspace is at", [](R &r) { r.workspace = moved(static_cast<char *>(r.workspace), 4); }},
        {"workspace is at", [](R &r) { r.workspace = nullptr; }},
    };
    all.insert(all.end(), others.begin(), others.end());
    if (backend == &cpu_backend())
        all.push_back({"\\*grad_scale is 0, wanted", [](R &r) {
                           static const float zero = 0;
                           r.config.step.grad_scale = &zero;
                       }});
    expect_all_refused(*backend, good, all);
    Call run(*backend, good);
    expect_no_such_device(run);
}

TEST(MuonWorkspace, BadInputsAreRefused)
{
    const hr_muon_matrix huge = {1, INT64_C(1) << 59, 0, 0}, all[] = {huge, huge};
    const hr_muon_matrix small = {1, 4, 4, 0};
    size_t bytes[2] = {7, 7};
    EXPECT_EQ(hr_muon_workspace(nullptr, &small, 1), HR_INVALID_ARGUMENT);
    EXPECT_EQ(hr_muon_workspace(moved(bytes, 4), &small, 1), HR_INVALID_ARGUMENT);
    EXPECT_EQ(hr_muon_workspace(bytes, &small, -1), HR_INVALID_ARGUMENT);
    EXPECT_EQ(hr_muon_workspace(bytes, nullptr, 1), HR_INVALID_ARGUMENT);
    EXPECT_EQ(hr_muon_workspace(bytes, all, 2), HR_INVALID_ARGUMENT);
    EXPECT_TRUE(matches(hr_last_error(), "more than 2\\^59 elements"));
    EXPECT_EQ(bytes[0], 7u);
    EXPECT_EQ(hr_muon_workspace(bytes, all, 0), HR_OK);
    EXPECT_EQ(bytes[0], 0u);
}
} // namespace
