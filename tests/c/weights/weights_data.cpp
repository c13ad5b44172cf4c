#include "tests/c/weights/weights_data.h"

#include <algorithm>

#include "tests/c/harness/elements.h"
#include "tests/c/harness/tensors.h"

WeightsData::WeightsData(Backend &backend, const Ask &ask, const std::vector<int64_t> &sizes,
                         const std::vector<hr_dtype> &params)
    : numel(sizes)
{
    const hr_weights_mode mode = ask.mode;
    const bool plain = mode == HR_WEIGHTS_NEAREST || mode == HR_WEIGHTS_STOCHASTIC;
    const bool random = mode == HR_WEIGHTS_STOCHASTIC || mode == HR_WEIGHTS_REMAINDER8_STOCHASTIC;
    for (size_t k = 0; k < numel.size(); k++) {
        const hr_dtype type = mode == HR_WEIGHTS_KAHAN         ? params[k]
                              : mode == HR_WEIGHTS_MASTER      ? HR_F32
                              : mode == HR_WEIGHTS_REMAINDER16 ? HR_I16
                                                               : HR_I8;
        const bool any_bits = type == HR_I16 || type == HR_I8;
        std::vector<uint8_t> content(plain ? 0 : size_t(numel[k]) * bytes_of(type));
        for (size_t i = 0; i < content.size() && any_bits; i++)
            content[i] = uint8_t(128 * (noise(90 + k, i) + 1));
        for (size_t i = 0; i < content.size() && !any_bits; i += bytes_of(type))
            encode((mode == HR_WEIGHTS_KAHAN ? 1e-3 : 1) * noise(90 + k, i), &content[i], type);
        if (ask.zero_residuals)
            std::fill(content.begin(), content.end(), uint8_t(0));
        buffers.emplace_back(backend, content, ask.shift * bytes_of(type));
        data.push_back(buffers.back().data());
        dtype.push_back(type);
        seeds.push_back(0x123456789ABCDEFu * (k + 1));
        places.push_back({int64_t(5 * k + 3), 37, 1000});
    }
    residuals = {int64_t(numel.size()), data.data(), numel.data(), dtype.data()};
    weights.mode = mode;
    weights.residuals = plain ? nullptr : &residuals;
    weights.seeds = random ? seeds.data() : nullptr;
    weights.places = ask.places ? places.data() : nullptr;
    if (ask.stalled) {
        buffers.emplace_back(backend, std::vector<uint8_t>(8));
        weights.stalled = static_cast<int64_t *>(buffers.back().data());
    }
}
