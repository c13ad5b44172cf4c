// Every argument that hr_adamw() refuses: the status, the words, and that no byte changed.
#include "tests/c/optim/adamw_run.h"
#include "tests/c/optim/step_suites.h"

namespace
{
struct Adamw {
    using Case = AdamwCase;
    using Run = AdamwRun;

    template <AdamwList list> static Tensors &tensors(Run &r)
    {
        return r.tensors[list];
    }
    static hr_adamw_config &config(Run &r)
    {
        return r.config;
    }
    static void expect(Backend &backend, const Case &c)
    {
        const Run run(backend, c);
        EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
    }

    // Everything given, so that everything can be spoiled.
    static Case everything()
    {
        Case c;
        c.numel = {5, 0, 300};
        c.amsgrad = true;
        c.steps = HR_F64;
        c.grad_scale = 2.0f;
        c.found_inf = 0.0f;
        c.clip_coef = 0.5f;
        return c;
    }

    static std::vector<ListRule<Run>> rules()
    {
        using Rule = ListRule<Run>;
        std::vector<Rule> all;
        for (int l = 0; l < LISTS; l++) {
            Rule rule{adamw_list_names[l],
                      [=](Run &r) -> Tensors & { return r.tensors[size_t(l)]; }, float_types()};
            rule.role = l == PARAMS ? Rule::LEADS : Rule::MEASURED;
            rule.may_be_null = l == STEPS || l == MAX_EXP_AVG_SQS;
            if (l == STEPS) {
                rule.types = {HR_F32, HR_F64};
                rule.numel = 1;
            }
            all.push_back(rule);
        }
        return all;
    }

    static BadInputs<Run> refused()
    {
        BadInputs<Run> all =
            joined<Run>({bad_step<Run>([](Run &r) -> hr_step_config & { return r.config.step; },
                                       tensors<STEPS>),
                         bad_adam<Run>(config)});
        all.push_back({"amsgrad is 1.*max_exp_avg_sqs is NULL",
                       [](Run &r) { r.tensors[MAX_EXP_AVG_SQS].argument = nullptr; }});
        all.push_back(
            {"amsgrad is 0, but max_exp_avg_sqs is given", [](Run &r) { r.config.amsgrad = 0; }});
        for (const AdamwList l : {EXP_AVG_SQS, MAX_EXP_AVG_SQS})
            all.push_back({std::string(adamw_list_names[l]) + "\\[2\\] has another dtype",
                           [=](Run &r) { r.tensors[l].dtype[2] = HR_BF16; }});
        return all;
    }
};
} // namespace

BAD_INPUTS_SUITE(Adamw);

TEST_P(AdamwBadInputs, Weights)
{
    AdamwCase c = Adamw::everything();
    c.param = HR_BF16;
    c.weights = every_part();
    Adamw::expect(*backend, c);
    expect_all_refused(*backend, c, bad_weights<AdamwRun>(Adamw::tensors<PARAMS>));
}

// Values in host memory are looked at too; on a device they could not be without waiting for it.
TEST(AdamwBadInputsOnTheCpu, Values)
{
    AdamwCase c = Adamw::everything();
    for (const float scale : {0.0f, -1.0f, float(NAN), float(INFINITY)}) {
        c.grad_scale = scale;
        AdamwRun run(cpu_backend(), c);
        expect_refused(run, {"\\*grad_scale is .*, wanted a finite number > 0", [](AdamwRun &) {}});
    }
    c = Adamw::everything();
    c.step = -1;
    AdamwRun run(cpu_backend(), c);
    expect_refused(run, {"steps\\[0\\] holds -2", [](AdamwRun &) {}});
}
