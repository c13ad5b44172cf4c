#include "tests/c/harness/tensors.h"

#include <algorithm>
#include <cmath>

Tensors::Tensors(Backend &backend, const std::vector<int64_t> &sizes,
                 const std::vector<hr_dtype> &types, size_t shift, const Value &value)
    : numel(sizes)
{
    for (size_t k = 0; k < numel.size(); k++) {
        dtype.push_back(types[k % types.size()]);
        std::vector<double> content(static_cast<size_t>(numel[k]));
        for (size_t i = 0; i < content.size(); i++)
            content[i] = value(k, i);
        buffers.emplace_back(backend, encode(content, dtype[k]), shift * bytes_of(dtype[k]));
        data.push_back(buffers.back().data());
    }
    list = {int64_t(numel.size()), data.data(), numel.data(), dtype.data()};
}

std::vector<double> Tensors::values(size_t tensor) const
{
    return decode(buffers[tensor].content(), dtype[tensor]);
}

void Tensors::put(size_t tensor, const std::vector<double> &values) const
{
    buffers[tensor].put(encode(values, dtype[tensor]));
}

std::vector<Tensors *> given_lists(std::deque<Tensors> &all)
{
    std::vector<Tensors *> given;
    for (Tensors &list : all)
        if (list.argument)
            given.push_back(&list);
    return given;
}

std::vector<uint8_t> image_of(const std::vector<const std::vector<Buffer> *> &groups)
{
    std::vector<uint8_t> all;
    for (const auto *group : groups)
        for (const Buffer &buffer : *group) {
            const std::vector<uint8_t> bytes = buffer.content();
            all.insert(all.end(), bytes.begin(), bytes.end());
        }
    return all;
}

bool intact(const std::vector<const std::vector<Buffer> *> &groups)
{
    return std::all_of(groups.begin(), groups.end(), [](const std::vector<Buffer> *group) {
        return std::all_of(group->begin(), group->end(),
                           [](const Buffer &buffer) { return buffer.intact(); });
    });
}

void take(const std::vector<const std::vector<Buffer> *> &to,
          const std::vector<const std::vector<Buffer> *> &from)
{
    ASSERT_EQ(to.size(), from.size());
    for (size_t i = 0; i < to.size(); i++) {
        ASSERT_EQ(to[i]->size(), from[i]->size());
        for (size_t k = 0; k < to[i]->size(); k++)
            (*to[i])[k].take((*from[i])[k]);
    }
}

double noise(uint64_t a, uint64_t b)
{
    uint64_t x = (a + 1) * 0x9E3779B97F4A7C15u + b * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return double((x ^ x >> 31) >> 11) * 0x1p-52 - 1;
}

double ulps(float got, long double exact)
{
    const float rounded = float(exact);
    if (std::isnan(got) && std::isnan(rounded))
        return 0;
    if (!std::isfinite(got) || !std::isfinite(rounded))
        return got == rounded ? 0 : INFINITY;
    const int exponent = exact == 0 ? -126 : std::max(std::ilogb(exact), -126);
    return double(std::fabs(got - exact) / std::ldexp(1.0L, exponent - 23));
}

Tensors::Value made_up(size_t list, bool special, double size)
{
    return [=](size_t k, size_t i) {
        constexpr double kSpecial[] = {NAN,  INFINITY, -INFINITY, 1e-40, -3e-41, 1e30,
                                       3e38, -1e-30,   0,         -0.0,  7e-6,   -3e38};
        const size_t role = (list + 1) * 1000000;
        const double x = noise(role + k, i);
        if (special && noise(role + k, i + 500000) < -0.3)
            return kSpecial[size_t((x + 1) * 6)];
        return x * size;
    };
}

std::vector<hr_dtype> float_types()
{
    return {HR_F32, HR_BF16, HR_F16};
}

std::string words_of(const std::vector<hr_dtype> &types)
{
    std::string words;
    for (size_t i = 0; i < types.size(); i++)
        words += (i == 0                 ? ""
                  : i + 1 < types.size() ? ", "
                                         : " or ") +
                 std::string(name_of(types[i]));
    return words;
}
