// lora.cpp: registers headroom::lora_linear and the op of its gradient.
#include <tuple>

#include "torch_ext/core/matrix.h"
#include "torch_ext/core/numbers.h"

namespace
{

using namespace headroom;

// How a call describes its matrix, beside its codes and scales.
struct Format {
    int64_t format, block_size;
    bool nested;
};

// What both passes are given beside the rows, in the dtype of these.
class Layer
{
  public:
    // `rows_in` is x or dy, which has as many columns as the matrix has columns, or in backward rows.
    Layer(const Tensor &rows_in, const char *name, bool backward, int64_t other, Tensor weight,
          OptionalTensor scales, const Tensor &a, const Tensor &b, const OptionalTensor &seed,
          const Format &format, double scale, double dropout, int64_t precision)
        : like(rows_in), name_(name), backward_(backward), seed_(seed)
    {
        const hr_dtype dtype = float_of(like, name);
        const auto [count, own] = matrix_of(like, name);
        m = count;
        rows = backward ? own : other, cols = backward ? other : own;
        if (format.format == HR_DENSE)
            take_dense(weight);
        else
            take_codes(weight, scales, format);
        matrix.dtype = dtype;
        const View of_a(a), of_b(b);
        config.adapter_dtype = float_of(of_a, "a");
        config.rank = of_a.dim == 2 ? of_a.sizes[0] : 0;
        require_with(of_a, "a", like, name);
        require_with(of_b, "b", like, name);
        if (config.adapter_dtype != HR_F32 && config.adapter_dtype != dtype)
            require_dtype_of(of_a, "a", like, name);
        require_dtype_of(of_b, "b", of_a, "a");
        if (of_a.dim != 2 || of_a.sizes[1] != cols || of_a.sizes[0] < 1)
            fail("a must be a matrix [rank, " + std::to_string(cols) + "] with 1 row or more");
        if (of_b.dim != 2 || of_b.sizes[0] != rows || of_b.sizes[1] != config.rank)
            fail("b must be a matrix [" + std::to_string(rows) + ", " +
                 std::to_string(config.rank) + "]");
        a_.emplace(a, "a");
        b_.emplace(b, "b");
        config.scale = scale;
        config.dropout = dropout;
        set_precision(config, precision);
        if (!seed)
            return;
        const View of_seed(*seed);
        require_with(of_seed, "seed", like, name);
        if (of_seed.numel() != 1 || of_seed.torch_dtype != aoti_torch_dtype_int64())
            fail("seed must be an int64 tensor of one element");
        require_memory(of_seed, "seed");
        config.seed = static_cast<const int64_t *>(of_seed.data);
    }
    Layer(const Layer &) = delete;

    // Another matrix of rows of the call: of its dtype, device and number of rows.
    hr_rows rows_in(std::optional<RowsIn> &kept, const OptionalTensor &tensor, const char *name,
                    int64_t wanted) const
    {
        if (!tensor)
            fail(std::string(name) + " is None, but a gradient is wanted that reads it");
        const View view(*tensor);
        require_with(view, name, like, name_);
        require_dtype_of(view, name, like, name_);
        const Matrix found = matrix_of(view, name);
        if (found.cols != wanted || view.numel() != m * wanted)
            fail(std::string(name) + " must be a tensor of " + std::to_string(m) + " rows of " +
                 std::to_string(wanted));
        return *kept.emplace(*tensor, name).get();
    }

    // The sizes of a result that belongs to the rows of the call.
    Tensor result(int64_t last) const
    {
        std::vector<int64_t> sizes(like.sizes, like.sizes + like.dim);
        sizes.back() = last;
        return new_tensor(like.tensor, {sizes.data(), sizes.size()});
    }

    size_t workspace_bytes(const hr_exec &exec) const
    {
        size_t bytes = 0;
        check(hr_lora_workspace(&bytes, m, &matrix, backward_, &config, &exec));
        return bytes;
    }

    const hr_rows *a() const
    {
        return a_->get();
    }
    const hr_rows *b() const
    {
        return b_->get();
    }

    const View like;
    int64_t m, rows, cols;
    hr_matrix matrix = HR_MATRIX_INIT;
    hr_lora_config config = HR_LORA_CONFIG_INIT;

  private:
    void take_dense(const Tensor &weight)
    {
        const View view(weight);
        require_with(view, "weight", like, name_);
        require_dtype_of(view, "weight", like, name_);
        if (view.dim != 2 || view.sizes[0] != rows || view.sizes[1] != cols)
            fail("weight must be a matrix [" + std::to_string(rows) + ", " + std::to_string(cols) +
                 "]");
        const hr_rows own = *dense_.emplace(weight, "weight").get();
        matrix.rows = rows, matrix.cols = cols;
        matrix.data = own.data, matrix.stride = own.stride;
    }

    void take_codes(const Tensor &weight, const OptionalTensor &scales, const Format &format)
    {
        FewBits bits(rows, cols, format.format, format.block_size, format.nested);
        if (!scales)
            fail("scales is None, but weight has few bits");
        codes_ = weight, scales_ = *scales;
        require_with(View(weight), "weight", like, name_);
        bits.point_to(*codes_, *scales_);
        matrix = bits.matrix;
    }

    const char *name_;
    bool backward_;
    OptionalTensor seed_, codes_, scales_; // what the pointers point to
    std::optional<RowsIn> dense_, a_, b_;
};

std::tuple<Tensor, Tensor> lora_linear(const Tensor &x, const Tensor &weight,
                                       const OptionalTensor &scales, OptionalTensor bias,
                                       const Tensor &a, const Tensor &b, const OptionalTensor &seed,
                                       int64_t rows, int64_t format, int64_t block_size,
                                       bool nested, double scale, double dropout, int64_t precision)
{
    const Layer layer(x, "x", false, rows, weight, scales, a, b, seed, {format, block_size, nested},
                      scale, dropout, precision);
    const void *vector = nullptr;
    if (bias) {
        bias = dense_of(*bias, "bias");
        const View of(*bias);
        require_with(of, "bias", layer.like, "x");
        require_dtype_of(of, "bias", layer.like, "x");
        if (of.dim != 1 || of.sizes[0] != rows)
            fail("bias must be a tensor [" + std::to_string(rows) + "]");
        vector = of.data;
    }
    Tensor y = layer.result(rows), t = layer.result(layer.config.rank);
    if (layer.cols == 0) { // sums of no terms
        if (bias)
            torch::stable::copy_(y, *bias);
        else
            torch::stable::zero_(y);
        torch::stable::zero_(t);
        return {y, t};
    }
    const RowsIn from(x, "x");
    const hr_rows to = rows_of(y), down = rows_of(t);
    const Exec exec(layer.like);
    const size_t bytes = layer.workspace_bytes(exec.exec);
    const Tensor workspace = workspace_of(bytes, x);
    check(hr_lora_forward(&to, &down, from.get(), &layer.matrix, layer.a(), layer.b(), vector,
                          layer.m, &layer.config, View(workspace).data, bytes, &exec.exec));
    return {y, t};
}

std::tuple<Tensor, Tensor, Tensor>
lora_linear_backward(const Tensor &dy, const OptionalTensor &x, const OptionalTensor &t,
                     const Tensor &weight, const OptionalTensor &scales, const Tensor &a,
                     const Tensor &b, const OptionalTensor &seed, int64_t cols, int64_t format,
                     int64_t block_size, bool nested, double scale, double dropout,
                     int64_t precision, bool want_dx, bool want_da, bool want_db)
{
    const Layer layer(dy, "dy", true, cols, weight, scales, a, b, seed,
                      {format, block_size, nested}, scale, dropout, precision);
    Tensor dx = want_dx ? layer.result(cols) : nothing(dy);
    Tensor da = empty_like_if(want_da, View(a)), db = empty_like_if(want_db, View(b));
    if (layer.rows == 0 || cols == 0) { // sums of no terms
        for (Tensor *each : {&dx, &da, &db})
            torch::stable::zero_(*each);
        return {dx, da, db};
    }
    std::optional<RowsIn> x_in, t_in;
    hr_rows x_rows{}, t_rows{};
    if (want_da)
        x_rows = layer.rows_in(x_in, x, "x", cols);
    if (want_db)
        t_rows = layer.rows_in(t_in, t, "t", layer.config.rank);
    const RowsIn from(dy, "dy");
    const hr_rows dx_rows = rows_of(dx), da_rows = rows_of(da), db_rows = rows_of(db);
    const Exec exec(layer.like);
    const size_t bytes = layer.workspace_bytes(exec.exec);
    const Tensor workspace = workspace_of(bytes, dy);
    check(hr_lora_backward(want_dx ? &dx_rows : nullptr, want_da ? &da_rows : nullptr,
                           want_db ? &db_rows : nullptr, from.get(), &x_rows, &t_rows,
                           &layer.matrix, layer.a(), layer.b(), layer.m, &layer.config,
                           View(workspace).data, bytes, &exec.exec));
    return {dx, da, db};
}

// Norms of the rows of W + scale * b @ a. The dtype of the matrix is that which decoded elements have.
Tensor lora_norms(const Tensor &weight, const OptionalTensor &scales, const Tensor &a,
                  const Tensor &b, int64_t format, int64_t block_size, bool nested,
                  ScalarType dtype, double scale, int64_t precision)
{
    const int64_t sizes[] = {0, View(a).dim == 2 ? View(a).sizes[1] : 0};
    const Tensor no_rows = new_tensor(a, {sizes, 2}, dtype);
    const int64_t rows = View(b).dim == 2 ? View(b).sizes[0] : 0;
    const Layer layer(no_rows, "weight", false, rows, weight, scales, a, b, std::nullopt,
                      {format, block_size, nested}, scale, 0.0, precision);
    const Tensor norms = new_tensor(a, {&rows, 1}, ScalarType::Float);
    if (layer.cols == 0) { // sums of no terms
        Tensor zeros = norms;
        torch::stable::zero_(zeros);
        return norms;
    }
    const Exec exec(layer.like);
    size_t bytes = 0;
    check(hr_lora_norms_workspace(&bytes, &layer.matrix, &layer.config, &exec.exec));
    const Tensor workspace = workspace_of(bytes, a);
    check(hr_lora_norms(static_cast<float *>(View(norms).data), &layer.matrix, layer.a(), layer.b(),
                        &layer.config, View(workspace).data, bytes, &exec.exec));
    return norms;
}

// Bytes that lora_linear() and its gradient allocate besides their results, for plans. `tokens` are rows of x or dy,
// dtypes are hr_dtype. Without CUDA they are those of the CPU.
int64_t lora_linear_workspace(int64_t tokens, int64_t rows, int64_t cols, int64_t rank,
                              int64_t dtype, int64_t adapter_dtype, int64_t format,
                              int64_t block_size, bool nested, double dropout, bool backward,
                              bool is_cuda, int64_t precision)
{
    if (rows == 0 || cols == 0)
        return 0;
    hr_matrix matrix = HR_MATRIX_INIT;
    if (format == HR_DENSE) {
        matrix.rows = rows, matrix.cols = matrix.stride = cols;
    } else {
        FewBits bits(rows, cols, format, block_size, nested);
        bits.point_to_unread();
        matrix = bits.matrix;
    }
    matrix.data = unread;
    set(matrix.dtype, dtype, "dtype");
    hr_lora_config config = HR_LORA_CONFIG_INIT;
    config.rank = rank;
    config.dropout = dropout;
    config.seed = reinterpret_cast<int64_t *>(unread);
    set(config.adapter_dtype, adapter_dtype, "adapter_dtype");
    set_precision(config, precision);
    size_t bytes = 0;
    const auto query = [&](int32_t device) {
        const hr_exec exec = {device, nullptr};
        return hr_lora_workspace(&bytes, tokens, &matrix, backward, &config, &exec);
    };
    if (!is_cuda || query(0) != HR_OK)
        check(query(HR_CPU));
    return static_cast<int64_t>(bytes);
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("lora_linear(Tensor x, Tensor weight, Tensor? scales, Tensor? bias, Tensor a, Tensor b, "
          "Tensor? seed, int rows, int format, int block_size, bool nested, float scale, "
          "float dropout, int precision) -> (Tensor y, Tensor t)");
    m.def("lora_linear_backward(Tensor dy, Tensor? x, Tensor? t, Tensor weight, Tensor? scales, "
          "Tensor a, Tensor b, Tensor? seed, int cols, int format, int block_size, bool nested, "
          "float scale, float dropout, int precision, bool want_dx, bool want_da, bool want_db) "
          "-> (Tensor dx, Tensor da, Tensor db)");
    m.def("lora_norms(Tensor weight, Tensor? scales, Tensor a, Tensor b, int format, "
          "int block_size, bool nested, ScalarType dtype, float scale, int precision) -> Tensor");
    m.def("lora_linear_workspace(int tokens, int rows, int cols, int rank, int dtype, "
          "int adapter_dtype, int format, int block_size, bool nested, float dropout, "
          "bool backward, bool is_cuda, int precision) -> int");
}

// For all devices, because no tensor argument names one.
STABLE_TORCH_LIBRARY_IMPL(headroom, CompositeExplicitAutograd, m)
{
    m.impl("lora_linear_workspace", TORCH_BOX(&lora_linear_workspace));
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("lora_linear", TORCH_BOX(&lora_linear));
    m.impl("lora_linear_backward", TORCH_BOX(&lora_linear_backward));
    m.impl("lora_norms", TORCH_BOX(&lora_norms));
}
