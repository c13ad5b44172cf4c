// What divergences refuse.
#include <cmath>

#include "tests/c/loss/divergence_run.h"
#include "tests/c/loss/made.h"

using DivergenceRefused = OnBackend;
ON_EVERY_BACKEND(DivergenceRefused);

namespace
{

template <class Run> BadInputs<Run> bad_everywhere()
{
    return joined<Run>(
        {bad_config_or_exec<Run>(),
         bad_numbers<Run>("config->beta is", [](Run &r) -> double & { return r.config.beta; },
                          {-0.1, 1.1, 1e-7, 1 - 1e-7, NAN}),
         bad_numbers<Run>("config->temperature is",
                          [](Run &r) -> double & { return r.config.temperature; },
                          {0, -1, 1e-7, 1e7, INFINITY, NAN}),
         bad_sizes_or_dtypes<Run>(),
         {{"student is NULL", [](Run &r) { r.student_argument = nullptr; }},
          {"student->data is NULL", [](Run &r) { r.student_rows.data = nullptr; }},
          {"student->stride is 6, wanted", [](Run &r) { r.student_rows.stride = 6; }},
          {"teacher is NULL", [](Run &r) { r.teacher_argument = nullptr; }},
          {"teacher->data is at .* not a multiple of 4",
           [](Run &r) { r.teacher_rows.data = moved(r.teacher_rows.data, 2); }},
          {"teacher->stride is .*, wanted at most 2\\^59",
           [](Run &r) { r.teacher_rows.stride = INT64_MAX / 2; }}}});
}

} // namespace

TEST_P(DivergenceRefused, BadInputs)
{
    const DivergenceCase c;
    using Forward = RunOf<DivergenceRun, &DivergenceRun::forward>;
    expect_all_refused<Forward>(
        *backend, c,
        joined<Forward>({bad_everywhere<Forward>(),
                         {null_of<Forward>("loss", &DivergenceRun::loss),
                          odd<Forward>("loss", &DivergenceRun::loss),
                          odd<Forward>("statistics", &DivergenceRun::statistics)}}));
    using Backward = RunOf<DivergenceRun, &DivergenceRun::backward>;
    expect_all_refused<Backward>(
        *backend, c,
        joined<Backward>({bad_everywhere<Backward>(),
                          bad_gradients<Backward>("student", &DivergenceRun::student_rows),
                          {null_of<Backward>("statistics", &DivergenceRun::statistics),
                           odd<Backward>("statistics", &DivergenceRun::statistics)}}));
    Forward forward(*backend, c);
    expect_no_such_device(forward);
    Backward backward(*backend, c);
    expect_no_such_device(backward);
}
