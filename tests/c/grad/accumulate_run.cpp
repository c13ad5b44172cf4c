#include "tests/c/grad/accumulate_run.h"

#include <cmath>

namespace
{
// The roles of the lists, so that their data differ.
enum { SUMS = 1000000, LOSTS = 2000000, GRADS = 3000000 };

Tensors::Value values(size_t role, bool special, double size)
{
    return [=](size_t k, size_t i) {
        constexpr double kSpecial[] = {NAN,  INFINITY, -INFINITY, 1e-40, -3e-41, 1e30,
                                       3e38, -1e-30,   0,         -0.0,  7e-6,   -3e38};
        const double x = noise(role + k, i);
        if (special && noise(role + k, i + 500000) < -0.3)
            return kSpecial[size_t((x + 1) * 6)];
        return x * size;
    };
}
} // namespace

AccumulateRun::AccumulateRun(Backend &backend, const AccumulateCase &c)
    : sums(backend, c.numel, {HR_F32}, shift_of(c, 0), values(SUMS, c.special, 10)),
      losts(backend, c.compensated ? c.numel : std::vector<int64_t>(), {HR_F32}, shift_of(c, 1),
            values(LOSTS, c.special, 1e-7)),
      grads(backend, c.numel, c.types, shift_of(c, 2), values(GRADS, c.special, 1)),
      exec(backend.exec())
{
    if (!c.compensated)
        losts.argument = nullptr;
    config.zero_grads = c.zero_grads;
    if (c.factor)
        config.factor = *c.factor;
    if (c.factor_on_device) {
        scalars_.emplace_back(backend, encode({*c.factor_on_device}, HR_F32));
        config.factor_ptr = static_cast<const float *>(scalars_.back().data());
        config.factor = NAN; // not looked at
    }
}

hr_status AccumulateRun::call() const
{
    return hr_accumulate(sums.argument, losts.argument, grads.argument, config_argument,
                         exec_argument);
}

std::vector<uint8_t> AccumulateRun::image() const
{
    return image_of({&sums.buffers, &losts.buffers, &grads.buffers, &scalars_});
}

bool AccumulateRun::whole() const
{
    return intact({&sums.buffers, &losts.buffers, &grads.buffers, &scalars_});
}

std::ostream &operator<<(std::ostream &out, const AccumulateCase &c)
{
    const char *const names[] = {"f32", "bf16", "f16"};
    out << c.numel.size() << " tensors";
    for (const hr_dtype type : c.types)
        out << " " << names[type];
    out << ", shift " << c.shift << " of lists " << c.shifted
        << (c.compensated ? ", compensated" : "");
    out << (c.zero_grads ? ", zero_grads" : "") << (c.factor ? ", factor" : "");
    return out << (c.factor_on_device ? ", factor on the device" : "")
               << (c.special ? ", special values" : "");
}
