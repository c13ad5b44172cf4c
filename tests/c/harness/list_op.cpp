#include "tests/c/harness/list_op.h"

#include <algorithm>

std::ostream &operator<<(std::ostream &out, const ListCase &c)
{
    out << c.numel.size() << " tensors of " << (c.type ? words_of({*c.type}) : "every type")
        << ", flags " << c.flags << ", shift " << c.shift << " of lists " << c.shifted;
    if (c.factor)
        out << ", factor " << *c.factor;
    return out << (c.on_device ? " on the device" : "") << (c.special ? ", special values" : "");
}

std::vector<hr_dtype> types_of(const ListCase &c, const ListOf &list, size_t before)
{
    const std::vector<hr_dtype> &all = list.types;
    if (c.type)
        return {std::count(all.begin(), all.end(), *c.type) ? *c.type : all[0]};
    std::vector<hr_dtype> types;
    for (size_t k = 0; k < std::max<size_t>(c.numel.size(), 1); k++)
        types.push_back(all[(c.first + k) / before % all.size()]);
    return types;
}

testing::AssertionResult is_close(double got, double wanted, hr_dtype dtype, double ulps)
{
    const bool same = got == wanted && std::signbit(got) == std::signbit(wanted);
    // Below `least` the format has no more bits to be precise with.
    const double least = dtype == HR_F16 ? 0x1p-14 : 0x1p-126;
    const double unit = epsilon_of(dtype) * std::max(std::fabs(wanted), least);
    const bool near = ulps > 0 && std::fabs(got - wanted) <= ulps * unit;
    if (same || near || (std::isnan(got) && std::isnan(wanted)))
        return testing::AssertionSuccess();
    return testing::AssertionFailure() << got << ", wanted " << wanted;
}
