// A call of hr_gemm() on made-up matrices.
#pragma once

#include <algorithm>
#include <cmath>
#include <ostream>

#include "tests/c/harness/tensors.h"

struct GemmCase {
    int64_t m = 3, n = 5, k = 7;
    int64_t gap = 0; // elements between the rows of a matrix
    hr_dtype dtype = HR_F32, out_dtype = HR_F32;
    bool transpose_a = false, transpose_b = false, bias = false;
    double alpha = 1, beta = 0;
    int64_t batch = 1;
    hr_gemm_epilogue epilogue = HR_GEMM_NONE;
    bool aux = false, bias_gradient = false;
    size_t shift = 0;
    bool one_b = false;  // for all products of the batch
    bool addend = false; // apart from C
};

inline std::ostream &operator<<(std::ostream &out, const GemmCase &c)
{
    return out << c.m << " x " << c.n << " x " << c.k << ", gap " << c.gap << ", "
               << name_of(c.dtype) << " to " << name_of(c.out_dtype)
               << (c.transpose_a ? ", A^T" : "") << (c.transpose_b ? ", B^T" : "")
               << (c.bias ? ", bias" : "") << ", alpha " << c.alpha << ", beta " << c.beta
               << ", batch " << c.batch << ", epilogue " << c.epilogue << ", shift " << c.shift
               << (c.addend ? ", addend" : "");
}

// A stored matrix, and the stride of a batch.
struct StoredMatrix {
    int64_t rows, cols, stride, batch_stride;
    StoredMatrix(int64_t rows, int64_t cols, int64_t gap)
        : rows(rows), cols(cols), stride(cols + gap), batch_stride(rows * (cols + gap) + 8)
    {
    }
    std::vector<int64_t> numel(int64_t batch, bool wanted = true) const
    {
        return {wanted && batch > 0 ? (batch - 1) * batch_stride + rows * stride : 0};
    }
};

class GemmRun
{
  public:
    GemmRun(Backend &backend, const GemmCase &c)
        : shape(c), a_shape(c.transpose_a ? c.k : c.m, c.transpose_a ? c.m : c.k, c.gap),
          b_shape(c.transpose_b ? c.n : c.k, c.transpose_b ? c.k : c.n, c.gap),
          c_shape(c.m, c.n, c.gap), aux_shape(c.m, c.n, c.gap),
          addend_shape(c.m, c.n, c.gap ? 1 : 0),
          a(backend, a_shape.numel(c.batch), {c.dtype}, c.shift, noise_of(A)),
          b(backend, b_shape.numel(c.one_b ? 1 : c.batch), {c.dtype}, c.shift, noise_of(B)),
          c(backend, c_shape.numel(c.batch), {c.out_dtype}, c.shift,
            c.beta != 0 && !c.addend ? noise_of(C) : garbage),
          addend(backend,
                 {c.addend && c.batch > 0
                      ? (c.batch - 1) * c_shape.batch_stride + c.m * addend_shape.stride
                      : 0},
                 {c.out_dtype}, c.shift, c.beta != 0 ? noise_of(C) : garbage),
          bias(backend, {c.bias ? c.n : 0}, {c.out_dtype}, c.shift, noise_of(BIAS)),
          aux(backend, aux_shape.numel(1, c.aux), {c.out_dtype}, c.shift,
              c.epilogue == HR_GEMM_DGELU ? noise_of(AUX) : garbage),
          gradient(backend,
                   {!c.bias_gradient               ? 0
                    : c.epilogue == HR_GEMM_BGRADA ? c.m
                                                   : c.n},
                   {c.out_dtype}, c.shift, garbage),
          workspace(backend, std::vector<uint8_t>(workspace_for(backend), 0x77)),
          exec(backend.exec()), m(c.m), n(c.n), k(c.k)
    {
        for (const Tensors *const tensor : {&a, &b, &this->c, &aux, &addend})
            before.push_back(tensor->values(0));
        config.dtype = c.dtype, config.out_dtype = c.out_dtype;
        config.transpose_a = c.transpose_a, config.transpose_b = c.transpose_b;
        config.alpha = c.alpha, config.beta = c.beta;
        config.batch = c.batch;
        config.batch_stride_a = a_shape.batch_stride;
        config.batch_stride_b = c.one_b ? 0 : b_shape.batch_stride;
        config.batch_stride_c = c_shape.batch_stride;
        config.epilogue = c.epilogue;
        if (c.addend)
            config.addend = {addend.data[0], addend_shape.stride};
        if (c.aux)
            config.aux = {aux.data[0], aux_shape.stride};
        if (c.bias_gradient)
            config.bias_gradient = gradient.data[0];
        a_rows = {a.data[0], a_shape.stride}, b_rows = {b.data[0], b_shape.stride};
        c_rows = {this->c.data[0], c_shape.stride};
        bias_argument = c.bias ? bias.data[0] : nullptr;
        workspace_argument = workspace.data();
        workspace_bytes = workspace_for(backend);
    }
    GemmRun(const GemmRun &) = delete;

    hr_status call() const
    {
        return hr_gemm(c_argument, a_argument, b_argument, bias_argument, m, n, k, config_argument,
                       workspace_argument, workspace_bytes, exec_argument);
    }
    std::vector<uint8_t> image() const
    {
        return image_of({&a.buffers, &b.buffers, &c.buffers, &bias.buffers, &aux.buffers,
                         &gradient.buffers, &addend.buffers});
    }
    bool whole() const
    {
        return intact({&a.buffers, &b.buffers, &c.buffers, &bias.buffers, &aux.buffers,
                       &gradient.buffers, &addend.buffers}) &&
               workspace.intact();
    }
    // Of op(A) and op(B), as they were before the call.
    double at_a(int64_t index, int64_t i, int64_t p) const
    {
        const int64_t row = shape.transpose_a ? p : i, col = shape.transpose_a ? i : p;
        return before[0][size_t(index * config.batch_stride_a + row * a_shape.stride + col)];
    }
    double at_b(int64_t index, int64_t p, int64_t j) const
    {
        const int64_t row = shape.transpose_b ? j : p, col = shape.transpose_b ? p : j;
        return before[1][size_t(index * config.batch_stride_b + row * b_shape.stride + col)];
    }
    // What beta multiplies, before the call.
    double at_addend(int64_t index, int64_t i, int64_t j) const
    {
        return shape.addend
                   ? before[4][size_t(index * config.batch_stride_c + i * addend_shape.stride + j)]
                   : before[2][size_t(index * config.batch_stride_c + i * c_shape.stride + j)];
    }

    GemmCase shape;
    StoredMatrix a_shape, b_shape, c_shape, aux_shape, addend_shape;
    Tensors a, b, c, addend, bias, aux, gradient;
    Buffer workspace;
    std::vector<std::vector<double>> before;
    // Arguments, for a test to spoil.
    hr_rows a_rows, b_rows, c_rows;
    const hr_rows *a_argument = &a_rows, *b_argument = &b_rows, *c_argument = &c_rows;
    void *bias_argument, *workspace_argument;
    hr_gemm_config config = HR_GEMM_CONFIG_INIT;
    const hr_gemm_config *config_argument = &config;
    hr_exec exec;
    const hr_exec *exec_argument = &exec;
    size_t workspace_bytes;
    int64_t m, n, k;

  private:
    enum { A = 1, B, C, BIAS, AUX };

    // As queried; in the emulator so little that a product with an epilogue comes in parts.
    static size_t workspace_for(Backend &backend)
    {
        const hr_gemm_config config = HR_GEMM_CONFIG_INIT;
        const hr_exec exec = backend.exec();
        size_t bytes = 0;
        EXPECT_EQ(hr_gemm_workspace(&bytes, 1, 1, 1, &config, &exec), HR_OK) << hr_last_error();
        return backend.is_emulated() ? 2048 : bytes;
    }
    static Tensors::Value noise_of(int role)
    {
        return [=](size_t, size_t i) { return noise(uint64_t(role), i); };
    }
    static double garbage(size_t, size_t)
    {
        return NAN;
    }
};
