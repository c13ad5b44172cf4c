// Configs of other headers: a smaller size has the defaults for what it lacks, a larger one is
// refused.
#include <cstring>

#include "tests/c/grad/unscale_norm_run.h"
#include "tests/c/harness/refused.h"
#include "tests/c/optim/adafactor_run.h"
#include "tests/c/optim/adamw8bit_run.h"
#include "tests/c/optim/adamw_run.h"

namespace
{

// Both calls succeed and leave the same bytes.
template <class Run> void expect_same(const Run &a, const Run &b)
{
    ASSERT_EQ(a.call(), HR_OK) << hr_last_error();
    ASSERT_EQ(b.call(), HR_OK) << hr_last_error();
    EXPECT_EQ(a.image(), b.image());
}

template <class Run> void expect_size_is_refused(Run &run, size_t size)
{
    expect_refused<Run>(run, {"config->size is " + std::to_string(size) + ", wanted",
                              [=](Run &r) { r.config.size = size; }});
}

} // namespace

TEST(Configs, OfAnOlderHeaderHaveDefaults)
{
    const AdamwCase adamw;
    const AdafactorCase adafactor;
    const NormCase norm;
    for (const size_t size :
         {offsetof(hr_adamw_config, beta1), offsetof(hr_adamw_config, amsgrad)}) {
        AdamwRun a(cpu_backend(), adamw), b(cpu_backend(), adamw);
        const hr_step_config step = a.config.step;
        a.config = HR_ADAMW_CONFIG_INIT;
        a.config.step = b.config.step = step;
        if (size > offsetof(hr_adamw_config, beta1))
            b.config = a.config;
        cut(b.config, size);
        expect_same(a, b);
    }
    for (const size_t size :
         {offsetof(hr_adafactor_config, phases), offsetof(hr_adafactor_config, relative_step)})
        for (const int is_torch : {0, 1}) {
            AdafactorRun a(cpu_backend(), adafactor), b(cpu_backend(), adafactor);
            const hr_step_config step = a.config.step;
            const hr_adafactor_config hf = HR_ADAFACTOR_HF_INIT, torch = HR_ADAFACTOR_TORCH_INIT;
            a.config = is_torch ? torch : hf;
            a.config.step = step;
            b.config = a.config;
            cut(b.config, size);
            expect_same(a, b);
        }
    NormRun a(cpu_backend(), norm), b(cpu_backend(), norm);
    a.config = HR_UNSCALE_NORM_CONFIG_INIT;
    b.config.p = 2.0;
    cut(b.config, offsetof(hr_unscale_norm_config, max_norm));
    expect_same(a, b);
}

// The inner config of an older header is shorter, so that what follows it lies elsewhere.
TEST(Configs, OfAnOlderHeaderMayHoldAShorterOne)
{
    Adamw8bitCase c;
    c.block_size = 128;
    Adamw8bitRun a(cpu_backend(), c), b(cpu_backend(), c);
    const size_t inner = offsetof(hr_adamw_config, decoupled);
    const size_t begin = offsetof(hr_adamw8bit_config, adamw);
    const size_t after = offsetof(hr_adamw8bit_config, block_size);
    const hr_adamw8bit_config full = b.config;
    char *const bytes = reinterpret_cast<char *>(&b.config);
    memset(bytes, 0xEE, sizeof b.config);
    const size_t size = begin + inner + sizeof full.block_size + sizeof full.bnb_exact;
    memcpy(bytes, &size, sizeof size);
    memcpy(bytes + begin, &full.adamw, inner);
    memcpy(bytes + begin, &inner, sizeof inner);
    memcpy(bytes + begin + inner, reinterpret_cast<const char *>(&full) + after, 8);
    expect_same(a, b);
}

TEST(Configs, OfANewerHeaderAreRefused)
{
    AdamwRun adamw(cpu_backend(), AdamwCase());
    Adamw8bitRun adamw8bit(cpu_backend(), Adamw8bitCase());
    AdafactorRun adafactor(cpu_backend(), AdafactorCase());
    NormRun norm(cpu_backend(), NormCase());
    for (const size_t more : {4, 8, 1000}) {
        expect_size_is_refused(adamw, sizeof adamw.config + more);
        expect_size_is_refused(adamw8bit, sizeof adamw8bit.config + more);
        expect_size_is_refused(adafactor, sizeof adafactor.config + more);
        expect_size_is_refused(norm, sizeof norm.config + more);
    }
}

TEST(Configs, ThatAreTooShortAreRefused)
{
    AdamwRun adamw(cpu_backend(), AdamwCase());
    Adamw8bitRun adamw8bit(cpu_backend(), Adamw8bitCase());
    AdafactorRun adafactor(cpu_backend(), AdafactorCase());
    for (const size_t size : {0, 1, 7, 8, 16, 95}) {
        expect_size_is_refused(adamw, size);
        expect_size_is_refused(adamw8bit, size);
        expect_size_is_refused(adafactor, size);
    }
    expect_size_is_refused(adamw, sizeof adamw.config - 1);
}
