// What the linear cross entropy refuses: arguments, and targets that are no class.
#include <cmath>
#include <limits>

#include "tests/c/harness/refused.h"
#include "tests/c/loss/linear_cross_entropy_run.h"

using LinearCrossEntropyRefused = OnBackend;
ON_EVERY_BACKEND(LinearCrossEntropyRefused);

namespace
{
using Case = LinearCrossEntropyCase;
using Call = LinearCrossEntropyRun;

constexpr hr_linear_cross_entropy_mode kVocabulary = HR_LINEAR_CROSS_ENTROPY_VOCABULARY;
} // namespace

TEST_P(LinearCrossEntropyRefused, BadInputsAmongTargetsAreRefusedOrGiveNaN)
{
    for (const int64_t target : {int64_t(11), int64_t(-1), std::numeric_limits<int64_t>::max()}) {
        Call run(*backend, {});
        run.set_target(4, target);
        if (backend == &cpu_backend()) {
            const std::vector<uint8_t> before = run.image();
            EXPECT_EQ(run.forward(), HR_INVALID_ARGUMENT);
            EXPECT_TRUE(matches(hr_last_error(), "target\\[4\\] is " + std::to_string(target)));
            EXPECT_EQ(run.image(), before);
            continue;
        }
        ASSERT_EQ(run.forward(), HR_OK) << hr_last_error();
        EXPECT_TRUE(std::isnan(run.numbers.values(0)[0]));
        EXPECT_TRUE(std::isnan(run.results.values(0)[4]));
        EXPECT_FALSE(std::isnan(run.results.values(0)[3]));
        EXPECT_TRUE(run.whole());
    }
}

// Then the device is waited for, and the first of them is named as on the CPU.
TEST_P(LinearCrossEntropyRefused, BadInputsAmongTargetsAreNamedOnRequest)
{
    const int64_t huge = std::numeric_limits<int32_t>::max();
    for (const bool int32 : {false, true})
        for (const auto &[row, target] :
             {std::pair<int64_t, int64_t>{4, 11}, {0, -1}, {2998, huge}})
            for (const int64_t sequence : {0, 10}) {
                Call run(*backend, {.rows = 3000, .int32 = int32, .sequence = sequence});
                run.config.check_target = 1;
                run.set_target(row, target);
                /* also of the same thread, and of another part */
                for (const int64_t later : {row + 512, int64_t(2999)})
                    run.set_target(std::min(later, int64_t(2999)), -7);
                const std::vector<uint8_t> before = run.image();
                EXPECT_EQ(run.forward(), HR_INVALID_ARGUMENT);
                EXPECT_TRUE(matches(hr_last_error(),
                                    "hr_linear_cross_entropy: target\\[" + std::to_string(row) +
                                        "\\] is " + std::to_string(target) +
                                        ", wanted a class from 0 to 10, or ignore_index, -100"));
                EXPECT_EQ(run.image(), before);
                EXPECT_TRUE(run.whole());
            }
}

TEST_P(LinearCrossEntropyRefused, ACheckOfGoodTargetsChangesNothing)
{
    for (const int64_t rows : {0, 1, 300}) {
        const Case c = {.rows = rows, .reduction = HR_REDUCE_SUM};
        const Call plain(*backend, c);
        Call checked(*backend, c);
        checked.config.check_target = 1;
        ASSERT_EQ(plain.forward(), HR_OK) << hr_last_error();
        ASSERT_EQ(checked.forward(), HR_OK) << hr_last_error();
        EXPECT_EQ(plain.image(), checked.image());
        EXPECT_TRUE(checked.whole());
    }
}

// A graph cannot wait; its backward pass does not look at the targets again.
TEST_P(LinearCrossEntropyRefused, ACheckOfTargetsInACaptureIsRefused)
{
    if (!backend->pretend_capture(false))
        GTEST_SKIP() << "only the emulator pretends";
    Call run(*backend, {});
    run.config.check_target = 1;
    const std::vector<uint8_t> before = run.image();
    backend->pretend_capture(true);
    const hr_status forward = run.forward();
    const std::string message = hr_last_error();
    const hr_status backward = run.backward();
    backend->pretend_capture(false);
    EXPECT_EQ(forward, HR_INVALID_ARGUMENT);
    EXPECT_TRUE(matches(message, "config->check_target is 1, but the stream is being captured"));
    EXPECT_EQ(backward, HR_OK) << hr_last_error();
    const Call untouched(*backend, {});
    EXPECT_EQ(before, untouched.image());
}

namespace
{
const Case kAll = {.bias = true, .class_weight = true, .token_weight = true, .denominator = true};

// What both functions refuse: checked once for both.
template <class R> BadInputs<R> bad_inputs()
{
    const auto spoiled = [](auto member) { return [=](R &r) { member(r) = moved(member(r), 1); }; };
    const std::string off = " is at .* not a multiple of [48] bytes";
    BadInputs<R> all = {
        {"rows is -1, wanted 0 or more", [](R &r) { r.rows = -1; }},
        {"features is 0, wanted 1 or more", [](R &r) { r.features = 0; }},
        {"classes is 0, wanted 1 or more", [](R &r) { r.classes = 0; }},
        {"wanted at most 2\\^56 elements", [](R &r) { r.rows = INT64_MAX / 2; }},
        {"config->dtype is f64", [](R &r) { r.config.dtype = HR_F64; }},
        {"config->grad_dtype is bf16, wanted f32", [](R &r) { r.config.grad_dtype = HR_BF16; }},
        {"config->target_bytes is 2", [](R &r) { r.config.target_bytes = 2; }},
        {"config->reduction is 3",
         [](R &r) { r.config.reduction = hr_cross_entropy_reduction(3); }},
        {"config->mode is 3", [](R &r) { r.config.mode = hr_linear_cross_entropy_mode(3); }},
        {"config->add_to_weight_grads is -1", [](R &r) { r.config.add_to_weight_grads = -1; }},
        {"config->allow_tf32 is 3", [](R &r) { r.config.allow_tf32 = 3; }},
        {"config->allow_reduced_precision_reduction is 3",
         [](R &r) { r.config.allow_reduced_precision_reduction = 3; }},
        {"config->deterministic is 3", [](R &r) { r.config.deterministic = 3; }},
        {"config->check_target is 2", [](R &r) { r.config.check_target = 2; }},
        {"config->capability is -1, wanted 10 times", [](R &r) { r.config.capability = -1; }},
        {"config->sequence is 4, wanted 0 or a divisor", [](R &r) { r.config.sequence = 4; }},
        {"config->sequence is -3", [](R &r) { r.config.sequence = -3; }},
        {"inputs is NULL", [](R &r) { r.inputs_argument = nullptr; }},
        {"inputs->hidden->data is NULL", [](R &r) { r.inputs.hidden.data = nullptr; }},
        {"inputs->hidden->stride is 5", [](R &r) { r.inputs.hidden.stride = 5; }},
        {"inputs->weight->stride is 5", [](R &r) { r.inputs.weight.stride = 5; }},
        {"inputs->bias" + off, spoiled([](R & r) -> auto & { return r.inputs.bias; })},
        {"inputs->class_weight" + off,
         spoiled([](R & r) -> auto & { return r.inputs.class_weight; })},
        {"inputs->token_weight" + off,
         spoiled([](R & r) -> auto & { return r.inputs.token_weight; })},
        {"inputs->denominator" + off,
         spoiled([](R & r) -> auto & { return r.inputs.denominator; })},
        {"inputs->target is NULL", [](R &r) { r.inputs.target = nullptr; }},
        {"inputs->target" + off, spoiled([](R & r) -> auto & { return r.inputs.target; })},
        {"grads->hidden->stride is 5", [](R &r) { r.grads.hidden.stride = 5; }},
        {"grads->weight->stride is 5", [](R &r) { r.grads.weight.stride = 5; }},
        {"grads->bias" + off, spoiled([](R & r) -> auto & { return r.grads.bias; })},
        {"grads->hidden is inputs->hidden",
         [](R &r) { r.grads.hidden.data = r.inputs.hidden.data; }},
        {"grads->weight is inputs->weight",
         [](R &r) { r.grads.weight.data = r.inputs.weight.data; }},
        {"workspace_bytes is 0", [](R &r) { r.workspace_bytes = 0; }},
        {"workspace is at", [](R &r) { r.workspace_argument = nullptr; }},
        {"workspace is at", [](R &r) { r.workspace_argument = moved(r.workspace_argument, 8); }},
    };
    const auto numbers = [&](const std::string &name, auto number, const std::vector<double> &bad) {
        for (BadInput<R> &one : bad_numbers<R>("config->" + name + " is ", number, bad))
            all.push_back(std::move(one));
    };
    numbers("label_smoothing", [](R &r) -> double & { return r.config.label_smoothing; },
            {-0.1, 1.1, NAN});
    numbers("softcap", [](R &r) -> double & { return r.config.softcap; },
            {-1, NAN, INFINITY, 1e-60});
    numbers("z_loss", [](R &r) -> double & { return r.config.z_loss; }, {-1, NAN, INFINITY});
    numbers("logit_scale", [](R &r) -> double & { return r.config.logit_scale; },
            {0, NAN, INFINITY, 1e-60});
    return all;
}
} // namespace

TEST_P(LinearCrossEntropyRefused, BadInputsOfAMatrixAreRefused)
{
    const Case c = {.wanted = 5, .format = HR_NF4};
    const auto dense = [](Call &r) { r.few_bits->matrix.format = HR_DENSE; };
    BadInputs<Call> all = {
        {"config->matrix is f32 \\[12, 6\\], wanted f32 \\[11, 6\\], \\[classes, features\\]",
         [](Call &r) { r.few_bits->matrix.rows = 12; }},
        {"config->matrix is f32 \\[11, 5\\], wanted", [](Call &r) { r.few_bits->matrix.cols = 5; }},
        {"config->matrix is bf16", [](Call &r) { r.few_bits->matrix.dtype = HR_BF16; }},
        {"matrix->format is 5", [](Call &r) { r.few_bits->matrix.format = hr_format(5); }},
        {"matrix->data is NULL", [](Call &r) { r.few_bits->matrix.data = nullptr; }},
        {"matrix->absmax is NULL", [](Call &r) { r.few_bits->matrix.absmax = nullptr; }},
        {"matrix->size is 3", [](Call &r) { r.few_bits->matrix.size = 3; }},
        {"matrix->stride is 0", dense},
        {"grads->weight is given, wanted NULL with config->matrix",
         [](Call &r) { r.grads.weight.data = r.dweight.data[0]; }},
    };
    for (BadInput<Call> &each : all) // and not by a function that it calls
        each.message = "^hr_linear_cross_entropy: " + each.message;
    expect_all_refused<Call>(*backend, c, all);
    const Call run(*backend, c);
    hr_matrix wrong = run.few_bits->matrix;
    wrong.rows = 3;
    hr_linear_cross_entropy_config config = run.config;
    config.matrix = &wrong;
    hr_linear_cross_entropy_needs needs = {};
    EXPECT_EQ(hr_linear_cross_entropy_query(&needs, 9, 6, 11, 1, &config, &run.exec),
              HR_INVALID_ARGUMENT);
    EXPECT_TRUE(matches(hr_last_error(), "config->matrix is f32 \\[3, 6\\]"));
}

TEST_P(LinearCrossEntropyRefused, BadInputsAreRefused)
{
    const std::string off = " is at .* not a multiple of [48] bytes";
    BadInputs<Call> all = joined<Call>({bad_config_or_exec<Call>(), bad_inputs<Call>()});
    const auto add = [&](const std::string &message, auto spoil) {
        all.push_back({message, spoil});
    };
    add("result" + off, [](Call &r) { r.result = moved(r.result, 1); });
    add("factors" + off, [](Call &r) { r.factors = moved(r.factors, 1); });
    add("scale" + off, [](Call &r) { r.scale = moved(r.scale, 1); });
    add("rows_out->loss" + off, [](Call &r) { r.out.loss = moved(r.out.loss, 1); });
    add("rows_out->argmax" + off, [](Call &r) { r.out.argmax = moved(r.out.argmax, 4); });
    add("rows_out->mean_logit" + off,
        [](Call &r) { r.out.mean_logit = moved(r.out.mean_logit, 1); });
    add("rows_out->log_sum_sq_probs" + off,
        [](Call &r) { r.out.log_sum_sq_probs = moved(r.out.log_sum_sq_probs, 1); });
    add("rows_out->rank is given, which needs all classes at once", [](Call &r) {
        r.out.rank = r.out.argmax;
        r.rows = 1; /* within the workspace */
        r.classes = 65;
        r.inputs.class_weight = nullptr;
        r.config.mode = kVocabulary;
        r.config.workspace_limit = 1;
    });
    expect_all_refused<Call>(*backend, kAll, all);
}

TEST_P(LinearCrossEntropyRefused, BadInputsOfBackwardAreRefused)
{
    using R = LinearCrossEntropyBackwardRun;
    const std::string off = " is at .* not a multiple of [48] bytes";
    BadInputs<R> all = joined<R>({bad_config_or_exec<R>(), bad_inputs<R>()});
    const auto add = [&](const std::string &message, auto spoil) {
        all.push_back({message, spoil});
    };
    add("grads is NULL", [](R &r) { r.grads_argument = nullptr; });
    add("dloss is NULL", [](R &r) { r.upstream = nullptr; });
    add("dloss" + off, [](R &r) { r.upstream = moved(r.upstream, 1); });
    add("dloss_stride is -1", [](R &r) { r.upstream_stride = -1; });
    add("dloss_stride is ", [](R &r) { r.upstream_stride = INT64_C(1) << 59; });
    add("factors" + off, [](R &r) { r.factors = moved(r.factors, 1); });
    add("lse is NULL", [](R &r) { r.lse = nullptr; });
    add("lse" + off, [](R &r) { r.lse = moved(r.lse, 1); });
    add("lse_low" + off, [](R &r) { r.lse_low = moved(r.lse_low, 1); });
    add("config->dentropy" + off,
        [](R &r) { r.config.dentropy = moved(static_cast<float *>(r.dentropy.data[0]), 1); });
    const auto add_to_entropies = [&](const std::string &message, auto spoil) {
        add(message, [=](R &r) {
            r.config.dentropy = static_cast<float *>(r.dentropy.data[0]);
            spoil(r);
        });
    };
    add_to_entropies("config->entropy is NULL", [](R &r) { r.config.entropy = nullptr; });
    add_to_entropies("config->entropy" + off,
                     [](R &r) { r.config.entropy = moved(r.config.entropy, 1); });
    add_to_entropies("config->dentropy_stride is -1", [](R &r) { r.config.dentropy_stride = -1; });
    add_to_entropies("config->dentropy_stride is ",
                     [](R &r) { r.config.dentropy_stride = INT64_C(1) << 56; });
    expect_all_refused<R>(*backend, kAll, all);
}

TEST(LinearCrossEntropyQuery, BadInputsAreRefused)
{
    const hr_exec exec = {HR_CPU, nullptr};
    const hr_linear_cross_entropy_config config = HR_LINEAR_CROSS_ENTROPY_CONFIG_INIT;
    hr_linear_cross_entropy_needs needs = {};
    const auto query = [&](hr_linear_cross_entropy_needs *to, int64_t rows, uint32_t wanted,
                           const hr_linear_cross_entropy_config *how, const hr_exec *where) {
        return hr_linear_cross_entropy_query(to, rows, 4, 5, wanted, how, where);
    };
    EXPECT_EQ(query(nullptr, 3, 0, &config, &exec), HR_INVALID_ARGUMENT);
    EXPECT_TRUE(matches(hr_last_error(), "needs is NULL"));
    EXPECT_EQ(query(moved(&needs, 4), 3, 0, &config, &exec), HR_INVALID_ARGUMENT);
    EXPECT_TRUE(matches(hr_last_error(), "needs is at"));
    EXPECT_EQ(query(&needs, -1, 0, &config, &exec), HR_INVALID_ARGUMENT);
    EXPECT_EQ(query(&needs, 3, 8, &config, &exec), HR_INVALID_ARGUMENT);
    EXPECT_TRUE(matches(hr_last_error(), "wanted is 8, wanted at most 7"));
    EXPECT_EQ(query(&needs, 3, 0, nullptr, &exec), HR_INVALID_ARGUMENT);
    EXPECT_EQ(query(&needs, 3, 0, &config, nullptr), HR_INVALID_ARGUMENT);
    EXPECT_EQ(needs.workspace, 0u);
    EXPECT_EQ(query(&needs, 3, 7, &config, &exec), HR_OK);
    EXPECT_GT(needs.workspace, 0u);
}

TEST_P(LinearCrossEntropyRefused, ADeviceThatDoesNotExist)
{
    Call run(*backend, {});
    expect_no_such_device(run);
}
