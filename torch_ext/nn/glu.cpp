// glu.cpp: headroom::glu and headroom::glu_backward.
//
// What a call does not ask for is returned as a tensor without elements, because a schema has no
// optional results.
#include <tuple>

#include "torch_ext/core/rows.h"

namespace
{

using namespace headroom;

// The rows of gate and up: two tensors, or the halves of one.
class Inputs
{
  public:
    Inputs(const Tensor &gate, const OptionalTensor &up, int64_t activation, bool packed)
        : gate_view(gate), matrix(matrix_of(gate_view, "gate")), exec(gate_view),
          sizes(gate_view.sizes, gate_view.sizes + gate_view.dim)
    {
        config.activation =
            static_cast<hr_activation>(activation < 0 || activation > 4 ? -1 : activation);
        config.dtype = float_of(gate_view, "gate");
        if (packed && up)
            fail("up is given, but with packed the second half of gate is up");
        if (packed && matrix.cols % 2 != 0)
            fail("gate has " + std::to_string(matrix.cols) +
                 " columns, wanted an even number with packed");
        gate_in_.emplace(gate, "gate");
        gate_rows = *gate_in_->get();
        if (packed) {
            matrix.cols /= 2;
            sizes.back() = matrix.cols;
            up_rows = second_half(gate_rows);
        } else if (up) {
            up_in_.emplace(require_like(gate_view, "gate", *up, "up"), "up");
            up_rows = *up_in_->get();
        }
    }

    Tensor empty_h() const
    {
        return new_tensor(gate_view.tensor, {sizes.data(), sizes.size()});
    }

    hr_rows second_half(const hr_rows &rows) const
    {
        const int64_t bytes = matrix.cols * (config.dtype == HR_F32 ? 4 : 2);
        return {rows.data ? static_cast<char *>(rows.data) + bytes : nullptr, rows.stride};
    }

    const hr_rows *up() const
    {
        return up_rows ? &*up_rows : nullptr;
    }

    const View gate_view;
    Matrix matrix;
    const Exec exec;
    std::vector<int64_t> sizes; // of h
    hr_glu_config config = HR_GLU_CONFIG_INIT;
    hr_rows gate_rows;
    std::optional<hr_rows> up_rows;

  private:
    std::optional<RowsIn> gate_in_, up_in_;
};

Tensor glu(const Tensor &gate, const OptionalTensor &up, int64_t activation, bool packed)
{
    const Inputs in(gate, up, activation, packed);
    Tensor h = in.empty_h();
    const hr_rows h_rows = rows_of(h);
    check(hr_glu_forward(&h_rows, &in.gate_rows, in.up(), in.matrix.rows, in.matrix.cols,
                         &in.config, &in.exec.exec));
    return h;
}

std::tuple<Tensor, Tensor, Tensor> glu_backward(const Tensor &dh, const Tensor &gate,
                                                const OptionalTensor &up, int64_t activation,
                                                bool packed, bool want_h)
{
    const Inputs in(gate, up, activation, packed);
    View h_view = in.gate_view; // as h is, wanted or not
    h_view.sizes = const_cast<int64_t *>(in.sizes.data());
    const RowsIn dh_in(require_like(h_view, "h", dh, "dh"), "dh");
    Tensor h = want_h ? in.empty_h() : nothing(gate);
    Tensor dgate = empty_rows(in.gate_view, gate);
    Tensor dup = empty_like_if(up.has_value(), in.gate_view);
    const hr_rows dgate_rows = rows_of(dgate), h_rows = rows_of(h);
    const hr_rows dup_rows = packed ? in.second_half(dgate_rows) : rows_of(dup);
    check(hr_glu_backward(&dgate_rows, in.up() ? &dup_rows : nullptr, want_h ? &h_rows : nullptr,
                          dh_in.get(), &in.gate_rows, in.up(), in.matrix.rows, in.matrix.cols,
                          &in.config, &in.exec.exec));
    return {dgate, dup, h};
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("glu(Tensor gate, Tensor? up, int activation, bool packed) -> Tensor");
    m.def("glu_backward(Tensor dh, Tensor gate, Tensor? up, int activation, bool packed, "
          "bool want_h) -> (Tensor dgate, Tensor dup, Tensor h)");
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("glu", TORCH_BOX(&glu));
    m.impl("glu_backward", TORCH_BOX(&glu_backward));
}
