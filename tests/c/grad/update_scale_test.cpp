// hr_update_scale() against the rule in the header written another way, over long random sequences;
// the rows that show what each setting does; and what it refuses.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "tests/c/harness/bits.h"
#include "tests/c/harness/refused.h"

using UpdateScale = OnBackend;
ON_EVERY_BACKEND(UpdateScale);

namespace
{
struct Start {
    float scale = 65536;
    int32_t growth = 0;
    std::optional<int32_t> hysteresis;
};

template <class T> std::vector<uint8_t> bytes_of_one(T value)
{
    std::vector<uint8_t> bytes(sizeof value);
    std::memcpy(bytes.data(), &value, sizeof value);
    return bytes;
}

class UpdateScaleRun
{
  public:
    UpdateScaleRun(Backend &b, const Start &start) : exec(b.exec()), backend_(&b)
    {
        buffers_.emplace_back(b, bytes_of_one(start.scale));
        buffers_.emplace_back(b, bytes_of_one(start.growth));
        buffers_.emplace_back(b, bytes_of_one(start.hysteresis.value_or(0)));
        buffers_.emplace_back(b, bytes_of_one(0.0f));
        scale = static_cast<float *>(buffers_[0].data());
        growth = static_cast<int32_t *>(buffers_[1].data());
        hysteresis = start.hysteresis ? static_cast<int32_t *>(buffers_[2].data()) : nullptr;
        found_inf = static_cast<float *>(buffers_[3].data());
    }
    hr_status call() const
    {
        return hr_update_scale(scale, growth, hysteresis, found_inf, config_argument,
                               exec_argument);
    }
    void step(float found)
    {
        backend_->upload(buffers_[3].data(), &found, sizeof found);
        ASSERT_EQ(call(), HR_OK) << hr_last_error();
    }
    float scale_now() const
    {
        return now<float>(0);
    }
    int32_t growth_now() const
    {
        return now<int32_t>(1);
    }
    int32_t hysteresis_now() const
    {
        return now<int32_t>(2);
    }
    std::vector<uint8_t> image() const
    {
        return image_of({&buffers_});
    }
    bool whole() const
    {
        return intact({&buffers_});
    }

    float *scale, *found_inf;
    int32_t *growth, *hysteresis;
    hr_update_scale_config config = HR_UPDATE_SCALE_CONFIG_INIT;
    hr_exec exec;
    const hr_update_scale_config *config_argument = &config;
    const hr_exec *exec_argument = &exec;

  private:
    template <class T> T now(size_t i) const
    {
        T value;
        std::memcpy(&value, buffers_[i].content().data(), sizeof value);
        return value;
    }

    Backend *backend_;
    std::vector<Buffer> buffers_;
};

// The state as a loss scaler in Python would keep it: the history since the scale last moved.
struct Model {
    float scale;
    int good = 0, overflows_left;

    void step(bool found, const hr_update_scale_config &c)
    {
        if (found) {
            good = 0;
            if (--overflows_left <= 0)
                scale = float(std::max(scale * c.backoff_factor, c.min_scale));
        } else if (++good == c.growth_interval) {
            good = 0;
            overflows_left = c.hysteresis;
            const double grown = std::min(scale * c.growth_factor, c.max_scale);
            if (grown < 0x1.ffffffp127) // rounds to a finite binary32
                scale = float(grown);
        }
    }
};
} // namespace

TEST_P(UpdateScale, FollowsTheRule)
{
    Digest digest;
    for (const int interval : {1, 2, 5})
        for (const int hysteresis : {0, 1, 2, 3}) // 0: no tracker
            for (const auto &[growth, backoff] : {std::pair(2.0, 0.5), {1.0001, 0.3}, {1e9, 1e-9}})
                for (const auto &[low, high] : {std::pair(0.0, std::numeric_limits<double>::max()),
                                                {1.0, 65536.0},
                                                {0.1, double(INFINITY)},
                                                {3.0, 3.0}}) {
                    Start start;
                    start.scale = 1000;
                    if (hysteresis)
                        start.hysteresis = hysteresis;
                    UpdateScaleRun run(*backend, start);
                    run.config.growth_interval = interval;
                    run.config.hysteresis = std::max(hysteresis, 1);
                    run.config.growth_factor = growth;
                    run.config.backoff_factor = backoff;
                    run.config.min_scale = low;
                    run.config.max_scale = high;
                    Model model{start.scale, 0, run.config.hysteresis};
                    for (size_t i = 0; i < 300; i++) {
                        // Long runs of both kinds, so that both bounds are reached.
                        const bool found =
                            noise(i / 40, interval) < 0 ? noise(1, i) < 0.6 : noise(2, i) < -0.9;
                        run.step(found ? 1.0f : 0.0f);
                        digest.add(run.image());
                        model.step(found, run.config);
                        ASSERT_EQ(run.scale_now(), model.scale) << "step " << i;
                        ASSERT_EQ(run.growth_now(), model.good) << "step " << i;
                        ASSERT_EQ(run.hysteresis_now(), hysteresis ? model.overflows_left : 0)
                            << "step " << i;
                    }
                    EXPECT_TRUE(run.whole());
                }
}

TEST_P(UpdateScale, Rows)
{
    const struct {
        const char *steps; // 'x' overflow, '.' none
        float scale;
        int32_t growth, hysteresis;
    } rows[] = {
        {"", 64, 0, 2},        {".", 64, 1, 2},       {"..", 64, 2, 2},  {"...", 128, 0, 2},
        {"......", 256, 0, 2}, {"x", 64, 0, 1},       {"xx", 32, 0, 0},  {"xxx", 16, 0, -1},
        {"..x..", 64, 2, 1},   {"..x...", 128, 0, 2}, {"x.x", 32, 0, 0}, {"xx...x", 64, 0, 1},
    };
    for (const auto &row : rows) {
        Start start;
        start.scale = 64;
        start.hysteresis = 2;
        UpdateScaleRun run(*backend, start);
        run.config.growth_interval = 3;
        run.config.hysteresis = 2;
        for (const char *step = row.steps; *step; step++)
            run.step(*step == 'x');
        EXPECT_EQ(run.scale_now(), row.scale) << row.steps;
        EXPECT_EQ(run.growth_now(), row.growth) << row.steps;
        EXPECT_EQ(run.hysteresis_now(), row.hysteresis) << row.steps;
    }
}

// As torch's: the scale grows where the tracker becomes the interval, which from above it does not.
TEST_P(UpdateScale, ATrackerAboveTheIntervalOnlyCounts)
{
    for (const int32_t growth : {3, 4, 100, INT32_MAX - 5}) {
        Start start;
        start.growth = growth;
        UpdateScaleRun run(*backend, start);
        run.config.growth_interval = 3;
        for (int i = 1; i <= 5; i++)
            run.step(0);
        EXPECT_EQ(run.scale_now(), 65536) << growth;
        EXPECT_EQ(run.growth_now(), growth + 5);
        run.step(1); // an overflow begins again
        EXPECT_EQ(run.scale_now(), 32768);
        EXPECT_EQ(run.growth_now(), 0);
    }
}

TEST_P(UpdateScale, AnyNonzeroFlagIsAnOverflow)
{
    for (const float found : {1.0f, -1.0f, 1e-45f, INFINITY, float(NAN)}) {
        UpdateScaleRun run(*backend, {});
        run.step(found);
        EXPECT_EQ(run.scale_now(), 32768) << found;
    }
    UpdateScaleRun run(*backend, {});
    run.step(-0.0f);
    EXPECT_EQ(run.scale_now(), 65536);
    EXPECT_EQ(run.growth_now(), 1);
}

TEST_P(UpdateScale, NeverBecomesInfinite)
{
    for (const double max_scale : {std::numeric_limits<double>::max(), double(INFINITY), 1e39}) {
        Start start;
        start.scale = 0x1p127f;
        UpdateScaleRun run(*backend, start);
        run.config.growth_interval = 1;
        run.config.max_scale = max_scale;
        run.step(0);
        EXPECT_EQ(run.scale_now(), 0x1p127f);
        EXPECT_EQ(run.growth_now(), 0); // it waits for another interval, as torch's does
    }
}

TEST_P(UpdateScale, ManyOverflowsEndAtZeroOrTheMinimum)
{
    for (const double low : {0.0, 0x1p-149, 1.0}) {
        UpdateScaleRun run(*backend, {});
        run.config.min_scale = low;
        for (int i = 0; i < 200; i++)
            run.step(1);
        EXPECT_EQ(run.scale_now(), low);
    }
}

TEST_P(UpdateScale, BadInputs)
{
    using Run = UpdateScaleRun;
    BadInputs<Run> all = {
        {": scale is NULL", [](Run &r) { r.scale = nullptr; }},
        {": growth_tracker is NULL", [](Run &r) { r.growth = nullptr; }},
        {": found_inf is NULL", [](Run &r) { r.found_inf = nullptr; }},
        {"hysteresis is 2, but hysteresis_tracker is NULL", [](Run &r) { r.hysteresis = nullptr; }},
        {": scale is at .* multiple of 4", [](Run &r) { r.scale = moved(r.scale, 1); }},
        {": growth_tracker is at .* multiple of 4", [](Run &r) { r.growth = moved(r.growth, 2); }},
        {": hysteresis_tracker is at .* multiple of 4",
         [](Run &r) { r.hysteresis = moved(r.hysteresis, 3); }},
        {": found_inf is at .* multiple of 4", [](Run &r) { r.found_inf = moved(r.found_inf, 2); }},
        {"max_scale 1,",
         [](Run &r) {
             r.config.min_scale = 2;
             r.config.max_scale = 1;
         }},
    };
    const auto numbers = [&](const char *message, double hr_update_scale_config::*member,
                             const std::vector<double> &values) {
        all = joined<Run>(
            {all, bad_numbers<Run>(
                      message, [=](Run &r) -> double & { return r.config.*member; }, values)});
    };
    using Config = hr_update_scale_config;
    numbers("growth_factor is", &Config::growth_factor, {1, 0.5, -2, NAN});
    numbers("backoff_factor is", &Config::backoff_factor, {0, 1, 1.5, -0.5, NAN});
    numbers("min_scale is", &Config::min_scale, {-1, NAN, INFINITY, 1e39});
    numbers("max_scale", &Config::max_scale, {-1, 0, NAN});
    for (const int value : {0, -1}) {
        all.push_back({"growth_interval is", [=](Run &r) { r.config.growth_interval = value; }});
        all.push_back({"hysteresis is", [=](Run &r) { r.config.hysteresis = value; }});
    }
    all = joined<Run>({all, bad_config_or_exec<Run>()});
    Start start;
    start.hysteresis = 2;
    for (const auto &bad : all) {
        Run run(*backend, start);
        run.config.hysteresis = 2;
        expect_refused(run, bad);
    }
    Run run(*backend, start);
    run.config.hysteresis = 2;
    EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
}

TEST(UpdateScaleOnTheCpu, ADeviceThatDoesNotExist)
{
    UpdateScaleRun run(cpu_backend(), {});
    expect_no_such_device(run);
}
