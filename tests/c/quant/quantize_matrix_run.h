// Calls of hr_quantize_matrix() and hr_dequantize_matrix() on made-up matrices.
#pragma once

#include <cmath>

#include "tests/c/harness/row_op.h"

struct MatrixCase {
    int64_t rows = 5, cols = 77;
    hr_format format = HR_NF4;
    int32_t block_size = 64;
    bool nested = false, search = false;
    hr_dtype from = HR_F32, to = HR_F32;
    int64_t gap = 0;      // elements between rows, of both matrices
    size_t shift = 0;     // elements past an aligned address, and bytes for codes
    bool special = false; // NaN, infinities, denormals, zeros and huge values
    // The rectangle that is decoded; its sizes are the rest unless they are given.
    int64_t row = 0, col = 0, some_rows = -1, some_cols = -1;

    bool powers() const // which are not quantized, but read
    {
        return format == HR_MXFP4;
    }
    bool four_bits() const
    {
        return format != HR_INT8_ROWS;
    }
    int64_t blocks() const
    {
        return four_bits() ? hr_block_count(rows * cols, block_size) : rows;
    }
    int64_t count_rows() const
    {
        return some_rows < 0 ? rows - row : some_rows;
    }
    int64_t count_cols() const
    {
        return some_cols < 0 ? cols - col : some_cols;
    }
};

inline std::ostream &operator<<(std::ostream &out, const MatrixCase &c)
{
    const char *const names[] = {"dense", "nf4", "fp4", "int8", "mxfp4"};
    return out << names[c.format] << ' ' << c.rows << " x " << c.cols << " in blocks of "
               << c.block_size << (c.nested ? ", nested" : "") << (c.search ? ", search" : "")
               << ", " << name_of(c.from) << " to " << name_of(c.to) << ", gap " << c.gap
               << ", shift " << c.shift << (c.special ? ", special values" : "") << ", "
               << c.count_rows() << " rows from " << c.row << ", " << c.count_cols()
               << " columns from " << c.col;
}

class MatrixRun
{
  public:
    MatrixRun(Backend &backend, const MatrixCase &c)
        : shape(c), x(backend, {c.rows * (c.cols + c.gap)}, {c.from}, c.shift, values(c)),
          codes(backend, {c.four_bits() ? (c.rows * c.cols + 1) / 2 : c.rows * c.cols}, {HR_U8},
                c.shift, c.powers() ? bytes : garbage),
          absmax(backend, {c.powers() ? 0 : c.blocks()}, {HR_F32}, c.shift, garbage),
          absmax_codes(backend, {c.nested || c.powers() ? c.blocks() : 0}, {HR_U8}, c.shift,
                       c.powers() ? bytes : garbage),
          absmax_scales(backend, {c.nested ? hr_block_count(c.blocks(), 256) : 0}, {HR_F32},
                        c.shift, garbage),
          offset(backend, {c.nested ? 1 : 0}, {HR_F32}, c.shift, garbage),
          out(backend, {c.count_rows() * (c.count_cols() + c.gap)}, {c.to}, c.shift, garbage),
          exec(backend.exec()), from(c.from), row(c.row), rows(c.count_rows()), col(c.col),
          cols(c.count_cols())
    {
        config.search = c.search;
        matrix.format = c.format;
        matrix.dtype = c.to;
        matrix.rows = c.rows;
        matrix.cols = c.cols;
        matrix.data = codes.data[0];
        matrix.block_size = c.block_size;
        if (c.powers())
            matrix.block_size = 0; // is not read
        else
            matrix.absmax = static_cast<float *>(absmax.data[0]);
        if (c.nested || c.powers())
            matrix.absmax_codes = static_cast<uint8_t *>(absmax_codes.data[0]);
        if (c.nested) {
            matrix.absmax_scales = static_cast<float *>(absmax_scales.data[0]);
            matrix.offset = static_cast<float *>(offset.data[0]);
        }
        x_rows = {x.data[0], c.cols + c.gap};
        out_rows = {out.data[0], c.count_cols() + c.gap};
    }
    MatrixRun(const MatrixRun &) = delete;

    hr_status quantize() const
    {
        return hr_quantize_matrix(matrix_argument, x_argument, from, config_argument,
                                  exec_argument);
    }
    hr_status decode() const
    {
        return hr_dequantize_matrix(out_argument, matrix_argument, row, rows, col, cols,
                                    exec_argument);
    }
    hr_status call() const
    {
        const hr_status status = shape.powers() ? HR_OK : quantize();
        return status == HR_OK ? decode() : status;
    }
    std::vector<uint8_t> image() const
    {
        return image_of({&x.buffers, &codes.buffers, &absmax.buffers, &absmax_codes.buffers,
                         &absmax_scales.buffers, &offset.buffers, &out.buffers});
    }
    bool whole() const
    {
        return intact({&x.buffers, &codes.buffers, &absmax.buffers, &absmax_codes.buffers,
                       &absmax_scales.buffers, &offset.buffers, &out.buffers});
    }

    // Element i of the matrix, before.
    double before(int64_t i) const
    {
        return x.values(0)[size_t(i / shape.cols * (shape.cols + shape.gap) + i % shape.cols)];
    }

    MatrixCase shape;
    Tensors x, codes, absmax, absmax_codes, absmax_scales, offset, out;
    // Arguments, for a test to spoil.
    hr_matrix matrix = HR_MATRIX_INIT;
    hr_rows x_rows, out_rows;
    const hr_matrix *matrix_argument = &matrix;
    const hr_rows *x_argument = &x_rows, *out_argument = &out_rows;
    hr_quantize_matrix_config config = HR_QUANTIZE_MATRIX_CONFIG_INIT;
    const hr_quantize_matrix_config *config_argument = &config;
    hr_exec exec;
    const hr_exec *exec_argument = &exec;
    hr_dtype from;
    int64_t row, rows, col, cols;

  private:
    // Codes and exponents, all of them in any order.
    static double bytes(size_t, size_t i)
    {
        return double((i * 167 + i / 256 * 13 + 5) % 256);
    }
    static Tensors::Value values(const MatrixCase &c)
    {
        return [=](size_t, size_t i) {
            constexpr double kSpecial[] = {NAN,  INFINITY, -INFINITY, 3e38,  -3e38, 1e-40,
                                           -0.0, -2e-38,   1e-45,     6e-21, 1.0,   0.0};
            const int64_t block = int64_t(i) / (c.four_bits() ? c.block_size : c.cols + c.gap);
            if (c.special && block % 3 == 0) // blocks of what is finite and tiny, or zeros
                return block % 2 ? noise(1, i) * 1e-39 : 0.0;
            const bool special = c.special && noise(50, i) < -0.9;
            return special ? kSpecial[i * 7 % 12] : noise(1, i) * noise(2, i) * 3;
        };
    }
};
