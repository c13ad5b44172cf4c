// What the cross entropy refuses: arguments, and targets that are no class.
#include <cmath>

#include "tests/c/loss/cross_entropy_run.h"
#include "tests/c/loss/made.h"

using CrossEntropyRefused = OnBackend;
ON_EVERY_BACKEND(CrossEntropyRefused);

// A target that is no class: an error on the CPU, NaN on CUDA; and no stray read.
TEST_P(CrossEntropyRefused, BadInputsAmongTargets)
{
    for (const bool int32 : {false, true}) {
        CrossEntropyCase c;
        c.rows = 5, c.classes = 40, c.weight = true, c.int32 = int32, c.ignored = 0;
        CrossEntropyRun run(*backend, c);
        run.set_target(2, int32 ? -7 : INT64_C(1) << 40);
        const std::vector<uint8_t> before = run.image();
        const bool cpu = backend->exec().device == HR_CPU;
        for (const auto call :
             {&CrossEntropyRun::forward, &CrossEntropyRun::reduce, &CrossEntropyRun::backward}) {
            ASSERT_EQ((run.*call)(), cpu ? HR_INVALID_ARGUMENT : HR_OK) << hr_last_error();
            if (cpu) {
                EXPECT_TRUE(matches(hr_last_error(),
                                    int32 ? "target\\[2\\] is -7, wanted a class from 0 to 39"
                                          : "target\\[2\\] is 1099511627776, wanted a class"));
                EXPECT_EQ(run.image(), before);
            }
        }
        EXPECT_TRUE(run.whole());
        if (cpu)
            continue;
        for (size_t row = 0; row < 5; row++)
            EXPECT_EQ(std::isnan(run.loss.values(0)[row]), row == 2);
        EXPECT_TRUE(std::isnan(run.result.values(0)[0]));
        const std::vector<double> grad = run.gradients();
        for (size_t j = 80; j < 120; j++)
            EXPECT_TRUE(std::isnan(grad[j]));
    }
}

namespace
{

template <class Run> BadInputs<Run> bad_everywhere()
{
    return joined<Run>(
        {bad_config_or_exec<Run>(),
         bad_numbers<Run>("label_smoothing is",
                          [](Run &r) -> double & { return r.config.label_smoothing; },
                          {-0.1, 1.1, NAN}),
         bad_numbers<Run>("softcap is", [](Run &r) -> double & { return r.config.softcap; },
                          {-1, 1e-60, INFINITY, 1e39, NAN}),
         bad_numbers<Run>("z_loss is", [](Run &r) -> double & { return r.config.z_loss; },
                          {-1e-4, INFINITY, NAN}),
         bad_sizes_or_dtypes<Run>(),
         {{"config->target_bytes is 2", [](Run &r) { r.config.target_bytes = 2; }},
          {"config->reduction is 3",
           [](Run &r) { r.config.reduction = hr_cross_entropy_reduction(3); }},
          {"target is NULL", [](Run &r) { r.target = nullptr; }},
          {"target is at .* not a multiple of 8", [](Run &r) { r.target = moved(r.target, 4); }},
          {"weight is at .* not a multiple of 4",
           [](Run &r) { r.weight.data[0] = moved(r.weight.data[0], 2); }}}});
}

} // namespace

TEST_P(CrossEntropyRefused, BadInputs)
{
    CrossEntropyCase c;
    c.weight = true, c.workspace = true, c.z_loss = 0.1;
    using Forward = RunOf<CrossEntropyRun, &CrossEntropyRun::forward>;
    expect_all_refused<Forward>(
        *backend, c,
        joined<Forward>(
            {bad_everywhere<Forward>(),
             {null_of<Forward>("loss", &CrossEntropyRun::loss),
              null_of<Forward>("lse", &CrossEntropyRun::lse),
              odd<Forward>("loss", &CrossEntropyRun::loss),
              odd<Forward>("lse", &CrossEntropyRun::lse),
              odd<Forward>("lse_low", &CrossEntropyRun::lse_low),
              {"argmax is at", [](Forward &r) { r.argmax = moved(r.argmax, 4); }},
              {"logits is NULL", [](Forward &r) { r.logits_argument = nullptr; }},
              {"logits->data is NULL", [](Forward &r) { r.logits_rows.data = nullptr; }},
              {"logits->stride is 6, wanted", [](Forward &r) { r.logits_rows.stride = 6; }}}}));
    using Backward = RunOf<CrossEntropyRun, &CrossEntropyRun::backward>;
    expect_all_refused<Backward>(
        *backend, c,
        joined<Backward>(
            {bad_everywhere<Backward>(),
             bad_gradients<Backward>("logits", &CrossEntropyRun::logits_rows),
             {null_of<Backward>("lse", &CrossEntropyRun::lse),
              odd<Backward>("factors", &CrossEntropyRun::factors),
              odd<Backward>("lse", &CrossEntropyRun::lse),
              odd<Backward>("lse_low", &CrossEntropyRun::lse_low),
              {"logits is NULL", [](Backward &r) { r.logits_argument = nullptr; }},
              {"logits->data is NULL", [](Backward &r) { r.logits_rows.data = nullptr; }}}}));
    using Reduce = RunOf<CrossEntropyRun, &CrossEntropyRun::reduce>;
    expect_all_refused<Reduce>(
        *backend, c,
        joined<Reduce>({bad_everywhere<Reduce>(),
                        {null_of<Reduce>("loss", &CrossEntropyRun::loss),
                         null_of<Reduce>("lse", &CrossEntropyRun::lse),
                         odd<Reduce>("loss", &CrossEntropyRun::loss),
                         odd<Reduce>("lse", &CrossEntropyRun::lse),
                         odd<Reduce>("result", &CrossEntropyRun::result),
                         odd<Reduce>("factors", &CrossEntropyRun::factors),
                         {"config->workspace is at .* multiple of 8",
                          [](Reduce &r) { r.config.workspace = moved(r.config.workspace, 4); }},
                         {"config->workspace_bytes is 16383, wanted 16384",
                          [](Reduce &r) { r.config.workspace_bytes--; }},
                         {"result and factors are NULL",
                          [](Reduce &r) { r.result.data[0] = r.factors.data[0] = nullptr; }}}}));
    CrossEntropyRun run(*backend, c);
    expect_no_such_device(run);
    Backward gradient(*backend, c);
    expect_no_such_device(gradient);
    Reduce total(*backend, c);
    expect_no_such_device(total);
}
