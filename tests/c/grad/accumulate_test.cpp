// hr_accumulate(): its formula step by step, to the bit, in every suite of a list op (list_op.h), and
// the compensated sum of many gradients against binary64.
#include "tests/c/harness/list_op.h"

namespace
{
// One operation of binary32: two operands of 24 bits leave binary64 room enough that rounding twice
// is rounding once.
double rounded(double x)
{
    return double(float(x));
}

struct Accumulate : ListOp<Accumulate, hr_accumulate_config> {
    enum { SUMS, LOSTS, GRADS };
    enum { COMPENSATED = 1, ZERO_GRADS = 2 };
    static constexpr unsigned kFlags = COMPENSATED | ZERO_GRADS;
    static constexpr auto kFactor = &Config::factor;
    static constexpr auto kFactorPtr = &Config::factor_ptr;

    static std::vector<ListOf> lists()
    {
        return {{"sums", {HR_F32}, 10},
                {"compensations", {HR_F32}, 1e-7, COMPENSATED},
                {"grads", float_types(), 1, 0, true}};
    }
    static Config config()
    {
        return HR_ACCUMULATE_CONFIG_INIT;
    }
    static void configure(Config &config, unsigned flags)
    {
        config.zero_grads = (flags & ZERO_GRADS) != 0;
    }
    static hr_status call(const Run &r)
    {
        return hr_accumulate(r[SUMS], r[LOSTS], r[GRADS], r.config_argument, r.exec_argument);
    }
    static void formula(double *x, double factor, unsigned flags)
    {
        const double term = rounded(x[GRADS] * factor), y = rounded(term - x[LOSTS]);
        const double total = rounded(x[SUMS] + (flags & COMPENSATED ? y : term));
        x[LOSTS] = rounded(rounded(total - x[SUMS]) - y);
        x[SUMS] = total;
        if (flags & ZERO_GRADS)
            x[GRADS] = 0;
    }
};
} // namespace

LIST_OP_SUITES(Accumulate);

// Gradients whose plain sum loses bits with every addition.
TEST_P(AccumulateValues, CompensationKeepsWhatAPlainSumLoses)
{
    constexpr int kCalls = 1000;
    constexpr double kRounding = 0x1p-24;
    for (const unsigned flags : {0u, unsigned(Accumulate::COMPENSATED)}) {
        ListCase c = Accumulate::with(flags, {33});
        c.type = HR_BF16;
        c.factor = 0.1;
        const Accumulate::Run run(*backend, c);
        const auto &sums = run.tensors[Accumulate::SUMS],
                   &compensations = run.tensors[Accumulate::LOSTS];
        const auto begin = sums.values(0), grad = run.tensors[Accumulate::GRADS].values(0);
        const auto lost = flags ? compensations.values(0) : std::vector<double>(33);
        for (int call = 0; call < kCalls; call++)
            ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        const auto end = sums.values(0);
        double worst = 0;
        for (size_t i = 0; i < 33; i++) {
            const double x = rounded(grad[i] * double(0.1f)); // as the header's x
            const double exact = begin[i] - lost[i] + kCalls * x;
            const double size = std::fabs(begin[i]) + std::fabs(lost[i]) + kCalls * std::fabs(x);
            worst = std::max(worst, std::fabs(end[i] - exact) / (kRounding * size));
        }
        EXPECT_EQ(worst <= 2, flags != 0) << worst;
        EXPECT_EQ(worst > 20, flags == 0) << worst;
    }
}
