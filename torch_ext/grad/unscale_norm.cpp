// unscale_norm.cpp: registers headroom::unscale_norm_ and headroom::grad_norm, which does not
// change the gradients; and for each the fast path that takes a table of addresses (describe.cpp).
#include "torch_ext/core/members.h"

namespace
{

using namespace headroom;

template <typename T>
T *result_of(const OptionalTensor &tensor, int64_t numel, const View &like, const char *name)
{
    if (!tensor)
        return nullptr;
    const View view(*tensor);
    const int32_t wanted = sizeof(T) == 4 ? aoti_torch_dtype_float32() : aoti_torch_dtype_int64();
    if (!view.is_with(like) || view.torch_dtype != wanted || view.numel() != numel ||
        !view.is_contiguous())
        fail(std::string(name) + " must be a contiguous " + (sizeof(T) == 4 ? "float32" : "int64") +
             " tensor of " + std::to_string(numel) + " elements on " + like.device_name());
    require_memory(view, name);
    return static_cast<T *>(view.data);
}

struct Options {
    const OptionalTensor &norm, &norms, &found_inf, &culprit, &clip, &grad_scale, &clip_coef;
    double p, max_norm;
    bool write;
};

void run(const hr_tensor_list &grads, const Options &o, const Tensor &first)
{
    const View like(first);
    hr_unscale_norm_config config = HR_UNSCALE_NORM_CONFIG_INIT;
    config.p = o.p;
    config.max_norm = o.max_norm;
    config.write = o.write;
    config.grad_scale = scalar_of(o.grad_scale, like, "grad_scale");
    config.clip_coef = scalar_of(o.clip_coef, like, "clip_coef");
    const hr_unscale_norm_result result{
        result_of<float>(o.norm, 1, like, "norm"),
        result_of<float>(o.norms, grads.count, like, "norms"),
        result_of<float>(o.found_inf, 1, like, "found_inf"),
        result_of<int64_t>(o.culprit, 1, like, "culprit"),
        result_of<float>(o.clip, 1, like, "clip"),
    };
    const bool measured = o.norm || o.norms || o.found_inf || o.culprit || o.clip;
    size_t bytes = 0;
    Tensor workspace;
    if (measured) {
        check(hr_unscale_norm_workspace(&bytes, &grads));
        workspace = workspace_of(bytes, first);
    }
    const Exec exec(like);
    check(hr_unscale_norm(&grads, measured ? &result : nullptr, &config,
                          measured ? workspace.mutable_data_ptr() : nullptr, bytes, &exec.exec));
}

void run(const Tensors &grads, const Options &options)
{
    if (grads.empty())
        return;
    const View like(grads[0]);
    const NoGrad no_grad;
    List list;
    Staging staging;
    list.reserve(grads.size());
    for (size_t k = 0; k < grads.size(); k++) {
        const View grad(grads[k]);
        check_device(grad, like, "grads", k, "grads");
        std::optional<Layout> layout;
        if (!grad.is_contiguous())
            layout.emplace(grad, "grads", k, !options.write);
        staging.add(list, grad, layout ? &*layout : nullptr, "grads", k, options.write);
    }
    run(list.view(), options, grads[0]);
    staging.write_back();
}

void unscale_norm_(const Tensors &grads, const OptionalTensor &norm, const OptionalTensor &norms,
                   const OptionalTensor &found_inf, const OptionalTensor &culprit,
                   const OptionalTensor &clip, const OptionalTensor &grad_scale,
                   const OptionalTensor &clip_coef, double p, double max_norm)
{
    run(grads, {norm, norms, found_inf, culprit, clip, grad_scale, clip_coef, p, max_norm, true});
}

void grad_norm(const Tensors &grads, const OptionalTensor &norm, const OptionalTensor &norms,
               const OptionalTensor &found_inf, const OptionalTensor &culprit,
               const OptionalTensor &clip, const OptionalTensor &grad_scale,
               const OptionalTensor &clip_coef, double p, double max_norm)
{
    run(grads, {norm, norms, found_inf, culprit, clip, grad_scale, clip_coef, p, max_norm, false});
}

// The table holds one list, the gradients.
void unscale_norm_table_(const Tensor &first, const Tensor &table, const OptionalTensor &norm,
                         const OptionalTensor &norms, const OptionalTensor &found_inf,
                         const OptionalTensor &culprit, const OptionalTensor &clip,
                         const OptionalTensor &grad_scale, const OptionalTensor &clip_coef,
                         double p, double max_norm)
{
    check_table(table, 1);
    run(list_of(table, 0),
        {norm, norms, found_inf, culprit, clip, grad_scale, clip_coef, p, max_norm, true}, first);
}

void grad_norm_table(const Tensor &first, const Tensor &table, const OptionalTensor &norm,
                     const OptionalTensor &norms, const OptionalTensor &found_inf,
                     const OptionalTensor &culprit, const OptionalTensor &clip,
                     const OptionalTensor &grad_scale, const OptionalTensor &clip_coef, double p,
                     double max_norm)
{
    check_table(table, 1);
    run(list_of(table, 0),
        {norm, norms, found_inf, culprit, clip, grad_scale, clip_coef, p, max_norm, false}, first);
}

#define ARGUMENTS                                                                    \
    "*, Tensor(b!)? norm=None, Tensor(c!)? norms=None, Tensor(d!)? found_inf=None, " \
    "Tensor(e!)? culprit=None, Tensor(f!)? clip=None, Tensor? grad_scale=None, "     \
    "Tensor? clip_coef=None, float p=2.0, float max_norm=0.0) -> ()"

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("unscale_norm_(Tensor(a!)[] grads, " ARGUMENTS);
    m.def("grad_norm(Tensor[] grads, " ARGUMENTS);
    m.def("_unscale_norm_table_(Tensor(a!) first, Tensor table, " ARGUMENTS);
    m.def("_grad_norm_table(Tensor first, Tensor table, " ARGUMENTS);
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("unscale_norm_", TORCH_BOX(&unscale_norm_));
    m.impl("grad_norm", TORCH_BOX(&grad_norm));
    m.impl("_unscale_norm_table_", TORCH_BOX(&unscale_norm_table_));
    m.impl("_grad_norm_table", TORCH_BOX(&grad_norm_table));
}
