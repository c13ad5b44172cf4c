// gemm.cpp: headroom::gemm, and torch's own product on the CPU, lent to the C interface.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include "torch_ext/core/numbers.h"
#include "torch_ext/core/rows.h"

namespace
{

using namespace headroom;

// ---- The product that torch lends ---------------------------------------------------------------

// A matrix, or a batch of them, in memory that is not torch's.
Tensor borrowed(const hr_rows &x, int64_t rows, int64_t cols, bool transpose, hr_dtype dtype,
                int64_t batch, int64_t batch_stride)
{
    const int64_t pitch = std::max(x.stride, transpose ? rows : cols);
    const int64_t sizes[] = {batch, rows, cols};
    const int64_t strides[] = {batch_stride, transpose ? 1 : pitch, transpose ? pitch : 1};
    const int64_t skipped = batch == 1; // dimensions
    const int32_t type = dtype == HR_F32    ? aoti_torch_dtype_float32()
                         : dtype == HR_BF16 ? aoti_torch_dtype_bfloat16()
                                            : aoti_torch_dtype_float16();
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_create_tensor_from_blob(x.data, 3 - skipped, sizes + skipped, strides + skipped,
                                           0, type, aoti_torch_device_type_cpu(), 0, &handle));
    return Tensor(handle);
}

// The answer of an op of torch that takes nothing and returns a bool; false where it is missing.
bool asks(const char *op)
{
    StableIValue stack[] = {0};
    return torch_call_dispatcher(op, "", stack, TORCH_ABI_VERSION) == AOTI_TORCH_SUCCESS &&
           torch::stable::detail::to<bool>(stack[0]);
}

// Whether MKL, with which torch multiplies float32, takes half as many lanes as the processor has: on
// those of AMD it leaves AVX-512 alone, and the own loop is twice as fast.
bool has_unused_lanes()
{
#if defined(__x86_64__) && defined(__GNUC__)
    static const bool is_amd = (__builtin_cpu_init(), __builtin_cpu_is("amd"));
    return is_amd && hr_get_cpu_level() >= HR_CPU_AVX512;
#else
    return false;
#endif
}

// Rows of C from which the own loop wins what it loses by packing B.
constexpr int64_t few_rows = 32;

// Whether torch's product is worth more than the own loop. For 16 bits torch needs oneDNN, and that a
// processor with the instructions: else torch multiplies them 4 to 200 times slower than float32. The
// test is torch's own, so that both follow the same settings.
bool lends_product(hr_dtype dtype, int64_t m)
{
    static const bool bf16 = asks("mkldnn::_is_mkldnn_bf16_supported");
    static const bool f16 = asks("mkldnn::_is_mkldnn_fp16_supported");
    return dtype == HR_F32 ? m < few_rows || !has_unused_lanes() : dtype == HR_BF16 ? bf16 : f16;
}

// Calls torch's kernels themselves, below autograd, autocast, modes and the profiler.
hr_status torch_product(void *, const hr_rows *c, const hr_rows *a, const hr_rows *b,
                        const void *bias, int64_t m, int64_t n, int64_t k,
                        const hr_gemm_config *config)
{
    const bool adds_c = config->beta != 0;
    if (config->out_dtype != config->dtype || (bias && adds_c) || !lends_product(config->dtype, m))
        return HR_UNSUPPORTED;
    try {
        const hr_dtype dtype = config->dtype;
        const int64_t batch = config->batch;
        const Tensor left =
            borrowed(*a, m, k, config->transpose_a, dtype, batch, config->batch_stride_a);
        const Tensor right =
            borrowed(*b, k, n, config->transpose_b, dtype, batch, config->batch_stride_b);
        const Tensor out = borrowed(*c, m, n, false, dtype, batch, config->batch_stride_c);
        AOTITorchError error;
        if (!bias && !adds_c && config->alpha == 1) {
            error = (batch == 1 ? aoti_torch_cpu_mm_out
                                : aoti_torch_cpu_bmm_out)(out.get(), left.get(), right.get());
        } else {
            const hr_rows vector{const_cast<void *>(bias), n};
            const Tensor added =
                bias ? borrowed(vector, 1, n, false, dtype, 1, 0)
                : config->addend.data
                    ? borrowed(config->addend, m, n, false, dtype, batch, config->batch_stride_c)
                    : out;
            error = (batch == 1 ? aoti_torch_cpu_addmm_out : aoti_torch_cpu_baddbmm_out)(
                out.get(), added.get(), left.get(), right.get(), bias ? 1 : config->beta,
                config->alpha);
        }
        return error == AOTI_TORCH_SUCCESS ? HR_OK : HR_UNSUPPORTED;
    } catch (const std::exception &) {
        return HR_UNSUPPORTED;
    }
}

[[maybe_unused]] const hr_status lent = hr_set_gemm(torch_product, nullptr);

// ---- The op -------------------------------------------------------------------------------------

// A factor [..., rows, cols] of two or three dimensions. Whichever of the last two is dense in memory
// is taken for the rows of the C interface; if neither is, a copy is read.
struct Factor {
    Factor(const Tensor &given, const char *name, bool transpose) : tensor(given)
    {
        const View before(tensor);
        if (before.dim != 2 && before.dim != 3)
            fail(std::string(name) + " has " + std::to_string(before.dim) +
                 " dimensions, wanted 2 or 3");
        if (!describe(before, transpose)) {
            tensor = dense_of(tensor, name);
            describe(View(tensor), transpose);
        }
        require_memory(View(tensor), name);
    }
    Factor(const Factor &) = delete;

    Tensor tensor;
    hr_rows rows_in_memory;
    int64_t batch, batch_stride, rows, cols; // of op(tensor)
    int32_t transpose;

  private:
    bool describe(const View &view, bool wants_transpose)
    {
        const int64_t last = view.dim - 1;
        const int64_t r = view.sizes[last - 1], s = view.strides[last - 1];
        const int64_t c = view.sizes[last], t = view.strides[last];
        const bool by_rows = (c <= 1 || t == 1) && (r <= 1 || s >= c);
        const bool by_columns = (r <= 1 || s == 1) && (c <= 1 || t >= r);
        batch = view.dim == 3 ? view.sizes[0] : 1;
        batch_stride = view.dim == 3 ? view.strides[0] : 0;
        rows = wants_transpose ? c : r;
        cols = wants_transpose ? r : c;
        transpose = wants_transpose == by_rows;
        rows_in_memory = {view.data, by_rows ? std::max(s, c) : std::max(t, r)};
        return by_rows || by_columns;
    }
};

std::string sizes_of(const Factor &x)
{
    return std::string("[") + std::to_string(x.rows) + ", " + std::to_string(x.cols) + "]";
}

// op(a) and op(b), which fit each other, and what to do with them.
struct Product {
    Product(const Tensor &a, const Tensor &b, bool transpose_a, bool transpose_b, double alpha,
            int64_t precision)
        : left(a, "a", transpose_a), right(b, "b", transpose_b), like(left.tensor), m(left.rows),
          n(right.cols), k(left.cols)
    {
        const View other(right.tensor);
        config.dtype = float_of(like, "a");
        require_dtype_of(other, "b", like, "a");
        require_with(other, "b", like, "a");
        if (like.dim != other.dim || left.batch != right.batch || left.cols != right.rows)
            fail("a and b do not fit: op(a) is " + std::to_string(left.batch) + " x " +
                 sizes_of(left) + ", op(b) is " + std::to_string(right.batch) + " x " +
                 sizes_of(right));
        config.transpose_a = left.transpose, config.transpose_b = right.transpose;
        config.alpha = alpha;
        config.batch = left.batch;
        config.batch_stride_a = left.batch_stride, config.batch_stride_b = right.batch_stride;
        config.batch_stride_c = m * n;
        set_precision(config, precision);
    }
    Product(const Product &) = delete;

    // Writes it to `out`, which is on the device of the factors, and adds the bias.
    void run(const View &out, int64_t stride, const OptionalTensor &bias)
    {
        Tensor dense;
        const void *vector = nullptr;
        if (bias) {
            dense = dense_of(*bias, "bias");
            const View view(dense);
            if (view.dim != 1 || view.sizes[0] != n || !view.is_with(like) ||
                view.torch_dtype != out.torch_dtype)
                fail("bias must be a tensor [" + std::to_string(n) +
                     "] with the dtype and device of the result");
            vector = view.data;
        }
        const Exec exec(like);
        size_t bytes = 0;
        check(hr_gemm_workspace(&bytes, m, n, k, &config, &exec.exec));
        Tensor workspace;
        if (bytes)
            workspace = workspace_of(bytes, left.tensor);
        const hr_rows rows{out.data, stride};
        check(hr_gemm(&rows, &left.rows_in_memory, &right.rows_in_memory, vector, m, n, k, &config,
                      bytes ? workspace.mutable_data_ptr() : nullptr, bytes, &exec.exec));
    }

    const Factor left, right;
    const View like;
    const int64_t m, n, k;
    hr_gemm_config config = HR_GEMM_CONFIG_INIT;
};

Tensor gemm(const Tensor &a, const Tensor &b, const OptionalTensor &c, const OptionalTensor &bias,
            bool transpose_a, bool transpose_b, double alpha, double beta, bool float32_out,
            int64_t precision)
{
    Product product(a, b, transpose_a, transpose_b, alpha, precision);
    const int64_t sizes[] = {product.left.batch, product.m, product.n};
    const size_t skipped = product.like.dim == 2;
    Tensor out = new_tensor(product.left.tensor, {sizes + skipped, 3 - skipped},
                            float32_out ? ScalarType::Float : product.left.tensor.scalar_type());
    const View to(out);
    if (c) {
        const View from(*c);
        if (!from.has_sizes_of(to) || !from.is_with(product.like) ||
            from.torch_dtype != to.torch_dtype)
            fail("c must have the sizes, dtype and device of the result");
        require_memory(from, "c");
        const bool has_rows = from.dim == 2 && (product.n <= 1 || from.strides[1] == 1) &&
                              from.strides[0] >= product.n;
        if (beta != 0 && has_rows)
            product.config.addend = {from.data, from.strides[0]};
        else if (beta != 0)
            torch::stable::copy_(out, *c);
    }
    product.config.out_dtype = float32_out ? HR_F32 : product.config.dtype;
    product.config.beta = c ? beta : 0;
    product.run(to, product.n, bias);
    return out;
}

// Of products that are not of few rows.
bool lends_product_of(ScalarType dtype)
{
    return dtype == ScalarType::BFloat16 ? lends_product(HR_BF16, few_rows)
           : dtype == ScalarType::Half   ? lends_product(HR_F16, few_rows)
           : dtype == ScalarType::Float  ? lends_product(HR_F32, few_rows)
                                         : true;
}

// Into a matrix that exists, whose rows may have gaps between them.
void gemm_(const Tensor &c, const Tensor &a, const Tensor &b, const OptionalTensor &bias,
           bool transpose_a, bool transpose_b, double alpha, double beta, int64_t precision)
{
    Product product(a, b, transpose_a, transpose_b, alpha, precision);
    const View to(c);
    const int64_t m = product.m, n = product.n;
    if (product.like.dim != 2 || to.dim != 2 || to.sizes[0] != m || to.sizes[1] != n)
        fail("c must be a matrix [" + std::to_string(m) + ", " + std::to_string(n) +
             "], the product of two");
    require_with(to, "c", product.like, "a");
    if (to.torch_dtype != product.like.torch_dtype && to.torch_dtype != aoti_torch_dtype_float32())
        fail(std::string("c has dtype ") + torch::headeronly::toString(c.scalar_type()) +
             ", wanted float32 or that of a");
    if ((n > 1 && to.strides[1] != 1) || (m > 1 && to.strides[0] < n))
        fail("c must have dense rows: its strides are " + std::to_string(to.strides[0]) + ", " +
             std::to_string(to.strides[1]));
    require_memory(to, "c");
    product.config.out_dtype = float_of(to, "c");
    product.config.beta = beta;
    product.run(to, std::max(to.strides[0], n), bias);
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("gemm(Tensor a, Tensor b, Tensor? c, Tensor? bias, bool transpose_a, bool transpose_b, "
          "float alpha, float beta, bool float32_out, int precision) -> Tensor");
    m.def("lends_product(ScalarType dtype) -> bool");
    m.def("gemm_(Tensor(a!) c, Tensor a, Tensor b, Tensor? bias, bool transpose_a, "
          "bool transpose_b, float alpha, float beta, int precision) -> ()");
}

// For all devices, because no tensor argument names one.
STABLE_TORCH_LIBRARY_IMPL(headroom, CompositeExplicitAutograd, m)
{
    m.impl("lends_product", TORCH_BOX(&lends_product_of));
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("gemm", TORCH_BOX(&gemm));
    m.impl("gemm_", TORCH_BOX(&gemm_));
}
