// matrix.h: a matrix of few bits as two tensors, its codes and the bytes of its scales.
//
// codes   4 bits: uint8 of (rows * cols + 1) / 2 elements; int8: rows * cols of int8
// scales  uint8: the bytes of float32 absmax, one per block or row. If they are nested: a code per
//         block, zeros up to a multiple of 4 bytes, float32 absmax_scales, and float32 offset. mxfp4:
//         an exponent per block
#pragma once

#include "torch_ext/core/rows.h"

namespace headroom
{

// What a query is given for memory, of which it reads nothing. The address has the alignment of
// torch's memory, because with other codes a product of few rows may take another way.
alignas(64) inline uint8_t unread[64];

class FewBits
{
  public:
    FewBits(int64_t rows, int64_t cols, int64_t format, int64_t block_size, bool nested)
    {
        if (format < HR_NF4 || format > HR_MXFP4)
            fail("format is " + std::to_string(format) +
                 ", wanted 1 (nf4), 2 (fp4), 3 (int8) or 4 (mxfp4)");
        if (rows < 0 || cols < 0 || (rows > 0 && cols > (int64_t{1} << 59) / rows))
            fail("a matrix has shape [" + std::to_string(rows) + ", " + std::to_string(cols) +
                 "], wanted at most 2^59 elements");
        const bool four_bits = format != HR_INT8_ROWS, powers = format == HR_MXFP4;
        if (powers && (block_size != 32 || cols % 32 != 0))
            fail("block_size is " + std::to_string(block_size) + " and a row has " +
                 std::to_string(cols) + " elements, wanted whole blocks of 32 in mxfp4");
        if (four_bits && (block_size < 32 || block_size > 4096 || (block_size & (block_size - 1))))
            fail("block_size is " + std::to_string(block_size) +
                 ", wanted a power of two from 32 to 4096");
        if (nested && (!four_bits || powers))
            fail("nested is true, but only the scales of nf4 and fp4 have scales");
        matrix.format = static_cast<hr_format>(format);
        matrix.rows = rows;
        matrix.cols = cols;
        matrix.block_size = static_cast<int32_t>(block_size);
        codes = four_bits ? (rows * cols + 1) / 2 : rows * cols;
        blocks = four_bits ? hr_block_count(rows * cols, block_size) : rows;
        nested_ = nested;
        first_scale_ = (blocks + 3) / 4 * 4;
        bytes = nested   ? first_scale_ + 4 * hr_block_count(blocks, 256) + 4
                : powers ? blocks
                         : 4 * blocks;
    }

    bool is_empty() const
    {
        return codes == 0;
    }

    // Points the matrix to codes and scales. What cannot be read where it lies is read from a copy,
    // which the tensors then are.
    void point_to(Tensor &code_tensor, Tensor &scale_tensor)
    {
        require(code_tensor, "codes", matrix.format == HR_INT8_ROWS ? HR_I8 : HR_U8, codes);
        require(scale_tensor, "scales", HR_U8, bytes);
        const View of_codes(code_tensor), of_scales(scale_tensor);
        require_with(of_scales, "scales", of_codes, "codes");
        matrix.data = of_codes.data;
        if (matrix.format == HR_MXFP4) {
            matrix.absmax_codes = static_cast<uint8_t *>(of_scales.data);
            return;
        }
        char *scales = static_cast<char *>(of_scales.data);
        if (reinterpret_cast<uintptr_t>(scales) % 4 != 0) {
            scale_tensor = torch::stable::clone(scale_tensor);
            scales = static_cast<char *>(View(scale_tensor).data);
        }
        matrix.absmax = reinterpret_cast<float *>(scales);
        if (!nested_)
            return;
        matrix.absmax = nullptr;
        matrix.absmax_codes = reinterpret_cast<uint8_t *>(scales);
        matrix.absmax_scales = reinterpret_cast<float *>(scales + first_scale_);
        matrix.offset = reinterpret_cast<float *>(scales + bytes - 4);
    }

    // For a query, instead of point_to().
    void point_to_unread()
    {
        matrix.data = unread;
        matrix.absmax = reinterpret_cast<float *>(unread);
        if (matrix.format == HR_MXFP4)
            matrix.absmax_codes = unread;
    }

    hr_matrix matrix = HR_MATRIX_INIT;
    int64_t codes, blocks, bytes; // elements of codes, blocks or rows, bytes of scales

  private:
    static void require(Tensor &tensor, const char *name, hr_dtype dtype, int64_t numel)
    {
        const View view(tensor);
        if (dtype_of(view.torch_dtype) != dtype || view.numel() != numel)
            fail(std::string(name) + " has " + std::to_string(view.numel()) + " elements of " +
                 torch::headeronly::toString(view.tensor.scalar_type()) + ", wanted " +
                 std::to_string(numel) + " of " + (dtype == HR_U8 ? "uint8" : "int8"));
        require_memory(view, name);
        if (!view.is_contiguous())
            tensor = torch::stable::contiguous(tensor);
    }

    bool nested_;
    int64_t first_scale_; // where absmax_scales lie in nested scales
};

} // namespace headroom
