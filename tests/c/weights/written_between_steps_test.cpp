// Params that someone else writes between two steps, so that their residuals are those of other
// weights: what was written counts, in every kernel of an optimizer.
#include <cmath>

#include "tests/c/harness/pool.h"
#include "tests/c/optim/adafactor_run.h"
#include "tests/c/optim/adamw8bit_run.h"
#include "tests/c/optim/adamw_run.h"
#include "tests/c/weights/residual_modes.h"

namespace
{
// The weights of element i before a step.
struct Written {
    uint16_t param;
    std::vector<uint8_t> stale, fresh; // residuals: that of another weight, and this one's own
};

// `finite`: for an optimizer whose update of an element depends on others.
Written written(hr_weights_mode mode, hr_dtype dtype, size_t tensor, size_t i, bool finite)
{
    const uint16_t one = dtype == HR_BF16 ? 0x3F80 : 0x3C00;
    const uint16_t infinity = dtype == HR_BF16 ? 0x7F80 : 0x7C00, sign = i & 1 ? 0x8000 : 0;
    uint16_t param = i % 5 < 3 ? uint16_t(one + i % 100) : 0;
    if (i % 37 == 0 && !finite)
        param = infinity;
    param |= sign;
    const double u = noise(tensor + 7, i);
    if (is_remainder(mode)) {
        const bool is_special = (param & 0x7FFF) == 0 || param == (infinity | sign);
        const int bit = residual_bytes(mode) == 2 ? 32768 : 128;
        int stale = int(u * bit), fresh = stale;
        if (is_special) {
            stale = (param & 0x7FFF) ? 1 + std::abs(stale) % (bit - 1) : -1 - std::abs(stale) % bit;
            fresh = 0;
        }
        return bit == 128 ? Written{param, {uint8_t(stale)}, {uint8_t(fresh)}}
                          : Written{param, bytes_of_number(int16_t(stale)),
                                    bytes_of_number(int16_t(fresh))};
    }
    const hr_dtype type = residual_type(mode, dtype);
    // A denormal, where all masters about it fit: processors convert them in ways of their own.
    if (mode == HR_WEIGHTS_MASTER && dtype == HR_BF16 && tensor == 3)
        return {0, encode({i % 64 == 5 ? 1e-39 : 0}, type), encode({0}, type)};
    const double x = number(param, dtype);
    if (mode == HR_WEIGHTS_MASTER)
        return {param, encode({std::copysign(3 + std::fabs(u), u)}, type), encode({x}, type)};
    const double unit = dtype == HR_BF16 ? 0x1p-8 : 0x1p-11;
    return {param, encode({std::copysign(unit * (1.1 + std::fabs(u)), u)}, type),
            encode({0}, type)};
}

struct Lists {
    const std::vector<void *> &params;
    const WeightsData &weights;
    const std::vector<int64_t> &numel;
};

void write(Backend &backend, const Lists &lists, hr_dtype dtype, bool stale, bool finite)
{
    for (size_t k = 0; k < lists.numel.size(); k++) {
        std::vector<uint8_t> params, residuals;
        for (size_t i = 0; i < size_t(lists.numel[k]); i++) {
            const Written w = written(lists.weights.weights.mode, dtype, k, i, finite);
            const std::vector<uint8_t> param = bytes_of_number(w.param);
            const std::vector<uint8_t> &residual = stale ? w.stale : w.fresh;
            params.insert(params.end(), param.begin(), param.end());
            residuals.insert(residuals.end(), residual.begin(), residual.end());
        }
        if (params.empty())
            continue;
        backend.upload(lists.params[k], params.data(), params.size());
        backend.upload(lists.weights.data[k], residuals.data(), residuals.size());
    }
}

Lists lists_of(const AdamwRun &run)
{
    const Tensors &params = run.tensors[PARAMS];
    return {params.data, *run.weights, params.numel};
}

template <class Run> Lists lists_of(const Run &run)
{
    return {run.params.data, *run.weights, run.params.numel};
}

// The bytes after a step do not depend on the stale residuals.
template <class Run, class Case>
void expect_written_counts(Backend &backend, const Case &c, hr_dtype dtype, bool finite = false)
{
    for (const hr_cpu_level l : {HR_CPU_BASELINE, HR_CPU_AVX2, HR_CPU_AVX512, HR_CPU_AVX512_VBMI}) {
        const CpuLevel level(l);
        if (!level.available || (&backend != &cpu_backend() && l != HR_CPU_BASELINE))
            continue;
        const Run stale(backend, c), fresh(backend, c);
        write(backend, lists_of(stale), dtype, true, finite);
        write(backend, lists_of(fresh), dtype, false, finite);
        ASSERT_EQ(stale.call(), HR_OK) << hr_last_error();
        ASSERT_EQ(fresh.call(), HR_OK) << hr_last_error();
        EXPECT_TRUE(stale.image() == fresh.image()) << c << ", level " << l;
    }
}
} // namespace

using WrittenBetweenSteps = OnBackend;
ON_EVERY_BACKEND(WrittenBetweenSteps);

TEST_P(WrittenBetweenSteps, CountInAdamw)
{
    for (const ResidualMode &m : kResidualModes)
        for (int flags = 0; flags < 8; flags++) {
            AdamwCase c;
            c.numel = {1, 7, 0, 300, 2001};
            c.param = m.dtype;
            c.grad = flags & 1 ? HR_F32 : HR_BF16;
            c.state = flags & 2 ? HR_BF16 : HR_F32;
            c.shift = flags & 4 ? 3 : 0;
            c.amsgrad = flags == 6;
            c.skip_nonfinite = flags == 5;
            c.weights = WeightsData::Ask{m.mode, flags == 3, flags == 2, c.shift};
            expect_written_counts<AdamwRun>(*backend, c, m.dtype);
        }
}

TEST_P(WrittenBetweenSteps, CountInAdamw8bit)
{
    for (const ResidualMode &m : kResidualModes)
        for (int flags = 0; flags < 8; flags++) {
            Adamw8bitCase c;
            c.numel = {1, 7, 0, 300, 2001};
            c.param = {m.dtype};
            c.grad = {flags & 1 ? HR_F32 : HR_BF16};
            c.block_size = flags & 2 ? 64 : 256;
            c.lr = flags & 4 ? 0 : 1e-2; // a denormal stays visible
            c.shift = flags & 4 ? 3 : 0;
            c.stochastic = flags == 6;
            c.skip_nonfinite = flags == 5;
            c.weights = WeightsData::Ask{m.mode, flags == 3, flags == 7, c.shift};
            expect_written_counts<Adamw8bitRun>(*backend, c, m.dtype);
        }
}

TEST_P(WrittenBetweenSteps, CountInAdafactor)
{
    for (const ResidualMode &m : kResidualModes)
        for (int flags = 0; flags < 4; flags++) {
            AdafactorCase c;
            c.shapes = {matrix(20, 31), vector(700), matrix(3, 3, 50), matrix(0, 4)};
            c.params = {m.dtype};
            if (flags & 1) {
                c.semantics = HR_ADAFACTOR_TORCH;
                c.config = HR_ADAFACTOR_TORCH_INIT;
                c.config.eps1 = 0x1p-23;
            }
            c.momentum = flags == 2;
            c.config.beta1 = flags == 2 ? 0.9 : 0;
            c.weights = WeightsData::Ask{m.mode, flags == 3, flags == 1, size_t(flags == 3)};
            c.shift = flags == 3;
            expect_written_counts<AdafactorRun>(*backend, c, m.dtype, true);
        }
}
