// update_scale.cpp: registers headroom::update_scale_.
#include "torch_ext/core/tensor.h"

namespace
{

using namespace headroom;

int32_t *tracker_of(const Tensor &tensor, const View &like, const char *name)
{
    const View view(tensor);
    if (!view.is_with(like) || view.numel() != 1 || view.torch_dtype != aoti_torch_dtype_int32())
        fail(std::string(name) + " must be an int32 tensor of one element on " +
             like.device_name());
    require_memory(view, name);
    return static_cast<int32_t *>(view.data);
}

void update_scale_(const Tensor &scale, const Tensor &growth_tracker,
                   const OptionalTensor &hysteresis_tracker, const Tensor &found_inf,
                   double growth_factor, double backoff_factor, int64_t growth_interval,
                   double min_scale, double max_scale, int64_t hysteresis)
{
    hr_update_scale_config config = HR_UPDATE_SCALE_CONFIG_INIT;
    config.growth_factor = growth_factor;
    config.backoff_factor = backoff_factor;
    config.growth_interval = static_cast<int32_t>(growth_interval);
    config.min_scale = min_scale;
    config.max_scale = max_scale;
    config.hysteresis = static_cast<int32_t>(hysteresis);
    if (config.growth_interval != growth_interval || config.hysteresis != hysteresis)
        fail("growth_interval and hysteresis must be below 2^31");
    const View like(scale);
    const auto *const value = scalar_of(OptionalTensor(scale), like, "scale");
    const Exec exec(like);
    check(hr_update_scale(
        const_cast<float *>(value), tracker_of(growth_tracker, like, "growth_tracker"),
        hysteresis_tracker ? tracker_of(*hysteresis_tracker, like, "hysteresis_tracker") : nullptr,
        scalar_of(OptionalTensor(found_inf), like, "found_inf"), &config, &exec.exec));
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("update_scale_(Tensor(a!) scale, Tensor(b!) growth_tracker, "
          "Tensor(c!)? hysteresis_tracker, Tensor found_inf, *, float growth_factor=2.0, "
          "float backoff_factor=0.5, int growth_interval=2000, float min_scale=0.0, "
          "float max_scale=1.7976931348623157e308, int hysteresis=1) -> ()");
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("update_scale_", TORCH_BOX(&update_scale_));
}
