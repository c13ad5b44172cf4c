// hr_linear_cross_entropy_join(): from what parts of the classes have seen comes what all of them give.
#include <cmath>

#include "tests/c/harness/bits.h"
#include "tests/c/harness/refused.h"
#include "tests/c/loss/linear_cross_entropy_run.h"
#include "tests/c/loss/made.h"

using LinearCrossEntropyJoin = OnBackend;
ON_EVERY_BACKEND(LinearCrossEntropyJoin);

namespace
{
using Case = LinearCrossEntropyCase;

// Of three parts the second has no classes.
template <int64_t PARTS> class Joined : public LinearCrossEntropyRun
{
  public:
    Joined(Backend &on, const Case &c)
        : LinearCrossEntropyRun(on, c),
          parts(on, {c.rows * (4 * PARTS + c.gap)}, {HR_F32}, 0, garbage)
    {
        parts_rows = {parts.data[0], 4 * PARTS + c.gap};
        config.all_classes = c.classes;
        out.largest = out.entropy = out.mean_logit = out.log_sum_sq_probs = nullptr;
        out.argmax = nullptr;
        const int64_t first = PARTS > 1 ? c.classes / 2 : 0;
        std::vector<double> values = parts.values(0);
        see_part(values, 0, PARTS > 1 ? first : c.classes);
        if (PARTS > 1) {
            for (int64_t row = 0; row < rows; row++)
                for (int64_t j = 0; j < 4; j++)
                    values[size_t(row * parts_rows.stride + 4 + j)] = j == 0 ? -INFINITY : 0.0;
            see_part(values, first, c.classes - first);
        }
        parts.put(0, values);
        EXPECT_EQ(hr_linear_cross_entropy_query(&needs, rows, 1, 1, 0, &config, &exec), HR_OK);
        scratch.emplace_back(on, std::vector<uint8_t>(needs.workspace, 0x77));
        workspace_argument = scratch[0].data();
        workspace_bytes = needs.workspace;
    }
    hr_status call() const
    {
        return hr_linear_cross_entropy_join(result, factors, &out, parts_argument, part_count,
                                            inputs_argument, rows, config_argument,
                                            workspace_argument, workspace_bytes, exec_argument);
    }

    Tensors parts;
    hr_rows parts_rows = {};
    const hr_rows *parts_argument = &parts_rows;
    int64_t part_count = PARTS;
    std::vector<Buffer> scratch;

  private:
    void see_part(std::vector<double> &values, int64_t first, int64_t count) const
    {
        Case c = shape;
        c.limit = 0; // with fewer classes more rows fit, and need more workspace
        LinearCrossEntropyRun part(backend, c);
        const size_t element = bytes_of(shape.dtype);
        part.classes = count;
        part.config.first_class = first;
        part.config.all_classes = shape.classes;
        part.inputs.weight.data =
            moved(part.inputs.weight.data, size_t(first * part.inputs.weight.stride) * element);
        if (part.inputs.bias)
            part.inputs.bias = moved(part.inputs.bias, size_t(first) * element);
        part.out.loss = part.result = nullptr;
        part.grads_argument = nullptr;
        ASSERT_EQ(part.forward(), HR_OK) << hr_last_error();
        for (size_t k = 0; k < 4; k++) { // lse, lse_low, target_logit, weighted
            const std::vector<double> seen = part.results.values(k + 1);
            for (size_t row = 0; row < seen.size(); row++)
                values[row * size_t(parts_rows.stride) + size_t(first > 0) * 8 + k] = seen[row];
        }
    }
};

std::vector<Case> cases()
{
    std::vector<Case> all;
    for (const hr_dtype dtype : {HR_F32, HR_BF16})
        all.push_back({.rows = 10,
                       .features = 7,
                       .classes = 131,
                       .gap = 3,
                       .dtype = dtype,
                       .bias = true,
                       .class_weight = true,
                       .token_weight = true,
                       .int32 = true,
                       .smoothing = 0.1,
                       .softcap = 3,
                       .z_loss = 0.01,
                       .sequence = 5,
                       .wanted = 0});
    all.push_back({.rows = 300, .limit = 400, .ignored = 0, .wanted = 0}); // in chunks of rows
    all.push_back({.denominator = true, .z_loss = 0.1, .reduction = HR_REDUCE_SUM, .wanted = 0});
    all.push_back({.reduction = HR_REDUCE_MEAN_OR_ZERO, .ignored = 1, .wanted = 0});
    all.push_back({.rows = 0, .reduction = HR_REDUCE_MEAN_OR_ZERO, .wanted = 0});
    return all;
}

template <int64_t PARTS> void expect_what_all_give(Backend &backend)
{
    for (const Case &c : cases()) {
        SCOPED_TRACE(testing::PrintToString(c));
        const LinearCrossEntropyRun all(backend, c);
        const Joined<PARTS> joined(backend, c);
        ASSERT_EQ(all.forward(), HR_OK) << hr_last_error();
        ASSERT_EQ(joined.call(), HR_OK) << hr_last_error();
        EXPECT_TRUE(joined.whole() && joined.scratch[0].intact());
        EXPECT_EQ(joined.numbers.buffers[1].content(), all.numbers.buffers[1].content());
        const auto near = [](double got, double wanted, double terms = 1) {
            const double ulps = PARTS > 1 ? 4 * terms : 1;
            EXPECT_NEAR(got, wanted, ulps * 0x1p-23 * std::fmax(1, std::fabs(wanted)));
        };
        near(joined.numbers.values(0)[0], all.numbers.values(0)[0]);
        for (size_t row = 0; row < size_t(c.rows); row++) {
            for (const size_t k : {0, 1, 3}) // what is low is what rounding took off
                near(joined.results.values(k)[row], all.results.values(k)[row]);
            const double terms = std::sqrt(double(c.classes)); // of a sum that cancels
            near(joined.results.values(4)[row], all.results.values(4)[row], terms);
        }
        for (size_t row = 0; row < size_t(c.rows); row++) {
            const double lse = joined.results.values(1)[row] + joined.results.values(2)[row];
            const double whole = all.results.values(1)[row] + all.results.values(2)[row];
            EXPECT_NEAR(lse, whole,
                        PARTS > 1 ? 4 * 0x1p-23 * std::fmax(1, std::fabs(whole)) : 1e-13);
        }
    }
}
} // namespace

TEST_P(LinearCrossEntropyJoin, OnePartGivesWhatItGaveAlone)
{
    expect_what_all_give<1>(*backend);
}

TEST_P(LinearCrossEntropyJoin, SeveralPartsGiveWhatAllClassesGive)
{
    expect_what_all_give<3>(*backend);
}

TEST_P(LinearCrossEntropyJoin, BadInputsAreRefused)
{
    using R = Joined<3>;
    const std::string off = " is at .* not a multiple of [48] bytes";
    BadInputs<R> all = bad_config_or_exec<R>();
    const auto add = [&](const std::string &message, auto spoil) {
        all.push_back({message, spoil});
    };
    add("part_count is 0, wanted 1 to 2\\^54", [](R &r) { r.part_count = 0; });
    add("part_count is .*, wanted 1 to 2\\^54", [](R &r) { r.part_count = INT64_MAX; });
    add("parts is NULL", [](R &r) { r.parts_argument = nullptr; });
    add("parts->stride is 11", [](R &r) { r.parts_rows.stride = 11; });
    add("parts" + std::string("->data") + off,
        [](R &r) { r.parts_rows.data = moved(r.parts_rows.data, 2); });
    add("result" + off, [](R &r) { r.result = moved(r.result, 1); });
    add("factors" + off, [](R &r) { r.factors = moved(r.factors, 1); });
    add("rows_out->lse" + off, [](R &r) { r.out.lse = moved(r.out.lse, 1); });
    const std::string unsaid = "rows_out->largest, entropy, argmax, rank, mean_logit or "
                               "log_sum_sq_probs is given";
    add(unsaid, [](R &r) { r.out.largest = r.out.loss; });
    add(unsaid, [](R &r) { r.out.rank = static_cast<int64_t *>(r.ranks[0].data()); });
    add(unsaid, [](R &r) { r.out.mean_logit = r.out.loss; });
    add(unsaid, [](R &r) { r.out.log_sum_sq_probs = r.out.loss; });
    add("rows is -1, wanted 0 or more", [](R &r) { r.rows = -1; });
    add("inputs->token_weight" + off,
        [](R &r) { r.inputs.token_weight = moved(r.inputs.token_weight, 1); });
    add("workspace_bytes is 0", [](R &r) { r.workspace_bytes = 0; });
    expect_all_refused<R>(*backend, Case{.token_weight = true, .wanted = 0}, all);
    R run(*backend, {.wanted = 0});
    expect_no_such_device(run);
}

TEST(LinearCrossEntropyJoinBits, RepeatOnCudaAndInACapture)
{
    const std::vector<Case> some = {cases()[0], cases()[2]};
    expect_repeats_on_cuda<Joined<3>>(some);
    expect_capturable<Joined<3>>(some);
}
