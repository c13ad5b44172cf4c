// glu.cpp: headroom::glu and headroom::glu_backward.
#include <tuple>

#include "torch_ext/core/numbers.h"
#include "torch_ext/core/rows.h"

namespace
{

using namespace headroom;

// The rows of gate and up: two tensors, or the halves of one.
class Inputs
{
  public:
    Inputs(const Tensor &gate, const OptionalTensor &up, int64_t activation, bool packed)
        : view(gate), matrix(matrix_of(view, "gate")), exec(view), gate_in_(gate, "gate")
    {
        set(config.activation, activation, "activation");
        config.dtype = float_of(view, "gate");
        if (packed && up)
            fail("up is given, but with packed the second half of gate is up");
        if (packed && matrix.cols % 2 != 0)
            fail("gate has " + std::to_string(matrix.cols) +
                 " columns, wanted an even number with packed");
        matrix.cols /= packed ? 2 : 1;
        sizes.assign(view.sizes, view.sizes + view.dim);
        sizes.back() = matrix.cols;
        if (up)
            up_in_.emplace(require_like(view, "gate", *up, "up"), "up");
        if (packed)
            half_ = second_half(*gate_in_.get());
        up_rows = packed ? &half_ : up ? up_in_->get() : nullptr;
    }

    hr_rows second_half(const hr_rows &rows) const
    {
        const int64_t bytes = matrix.cols * (config.dtype == HR_F32 ? 4 : 2);
        return {rows.data ? static_cast<char *>(rows.data) + bytes : nullptr, rows.stride};
    }

    Tensor empty_h(bool wanted = true) const
    {
        return wanted ? new_tensor(view.tensor, {sizes.data(), sizes.size()})
                      : nothing(view.tensor);
    }

    const hr_rows *gate() const
    {
        return gate_in_.get();
    }

    const View view; // of gate
    Matrix matrix;
    const Exec exec;
    std::vector<int64_t> sizes; // of h
    hr_glu_config config = HR_GLU_CONFIG_INIT;
    const hr_rows *up_rows;

  private:
    const RowsIn gate_in_;
    std::optional<RowsIn> up_in_;
    hr_rows half_;
};

Tensor glu(const Tensor &gate, const OptionalTensor &up, int64_t activation, bool packed)
{
    const Inputs in(gate, up, activation, packed);
    Tensor h = in.empty_h();
    const hr_rows h_rows = rows_of(h);
    check(hr_glu_forward(&h_rows, in.gate(), in.up_rows, in.matrix.rows, in.matrix.cols, &in.config,
                         &in.exec.exec));
    return h;
}

std::tuple<Tensor, Tensor, Tensor> glu_backward(const Tensor &dh, const Tensor &gate,
                                                const OptionalTensor &up, int64_t activation,
                                                bool packed, bool want_h)
{
    const Inputs in(gate, up, activation, packed);
    View h_view = in.view; // as h is, wanted or not
    h_view.sizes = const_cast<int64_t *>(in.sizes.data());
    const RowsIn dh_in(require_like(h_view, "h", dh, "dh"), "dh");
    Tensor h = in.empty_h(want_h), dgate = empty_rows(in.view, gate);
    Tensor dup = empty_like_if(up.has_value(), in.view);
    const hr_rows dgate_rows = rows_of(dgate), h_rows = rows_of(h);
    const hr_rows dup_rows = packed ? in.second_half(dgate_rows) : rows_of(dup);
    check(hr_glu_backward(&dgate_rows, in.up_rows ? &dup_rows : nullptr, want_h ? &h_rows : nullptr,
                          dh_in.get(), in.gate(), in.up_rows, in.matrix.rows, in.matrix.cols,
                          &in.config, &in.exec.exec));
    return {dgate, dup, h};
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("glu(Tensor gate, Tensor? up, int activation, bool packed) -> Tensor h");
    m.def("glu_backward(Tensor dh, Tensor gate, Tensor? up, int activation, bool packed, "
          "bool want_h) -> (Tensor dgate, Tensor dup, Tensor h)");
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("glu", TORCH_BOX(&glu));
    m.impl("glu_backward", TORCH_BOX(&glu_backward));
}
