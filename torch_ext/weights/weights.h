// weights.h: fills hr_weights from the arguments that every op with 16-bit weights has.
#pragma once

#include "torch_ext/core/members.h"

namespace headroom
{

using Integers = std::optional<std::vector<int64_t>>;

// The arguments of an op.
struct WeightOptions {
    int64_t mode;
    const Integers &seeds;  // a 64-bit number for each parameter
    const Integers &places; // offset, run and stride of each
    const OptionalTensor &stalled;
};

#define HR_WEIGHT_OPTIONS \
    "int weights_mode=0, int[]? weight_seeds=None, int[]? places=None, Tensor(z!)? stalled=None"

// The facts of a mode, or null if the number is not a mode.
inline const hr_weights_mode_info *mode_info(int64_t mode)
{
    const bool fits = mode >= 0 && mode <= INT32_MAX;
    return fits ? hr_get_weights_mode_info(static_cast<hr_weights_mode>(mode)) : nullptr;
}

// Whether a mode has residuals; false if the number is not a mode.
inline bool has_residuals(int64_t mode)
{
    const hr_weights_mode_info *const info = mode_info(mode);
    return info && info->has_residuals;
}

// The same for the C interface, which points into this object and the arguments.
class Weights
{
  public:
    Weights(const WeightOptions &o, const hr_tensor_list &residuals, size_t count, const View &like)
        : residuals_(residuals)
    {
        if (!mode_info(o.mode))
            fail("weights_mode is " + std::to_string(o.mode) + ", not an hr_weights_mode");
        weights_.mode = static_cast<hr_weights_mode>(o.mode);
        if (residuals.count)
            weights_.residuals = &residuals_;
        if (o.seeds) {
            check_count(*o.seeds, "weight_seeds", count);
            weights_.seeds = reinterpret_cast<const uint64_t *>(o.seeds->data());
        }
        if (o.places) {
            check_count(*o.places, "places", 3 * count);
            weights_.places = reinterpret_cast<const hr_place *>(o.places->data());
        }
        if (o.stalled) {
            const View view(*o.stalled);
            if (!view.is_with(like) || view.numel() != 1 ||
                view.torch_dtype != aoti_torch_dtype_int64())
                fail("stalled must be an int64 tensor of one element, with the parameters");
            require_memory(view, "stalled");
            weights_.stalled = static_cast<int64_t *>(view.data);
        }
    }
    Weights(const Weights &) = delete;

    // NULL if the weights are params alone, rounded to nearest, because kernels are faster without
    // it.
    const hr_weights *get() const
    {
        const bool plain = weights_.mode == HR_WEIGHTS_NEAREST && !weights_.residuals &&
                           !weights_.seeds && !weights_.stalled;
        return plain ? nullptr : &weights_;
    }

  private:
    hr_tensor_list residuals_;
    hr_weights weights_ = HR_WEIGHTS_INIT;
};

} // namespace headroom
