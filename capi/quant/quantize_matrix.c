/* quantize_matrix.c: hr_quantize_matrix and hr_dequantize_matrix: checks, then the kernel of the
 * device. */
#include "kernels/quant/quantize_matrix.h"

#include <inttypes.h>

#include "capi/check/matrix.h"
#include "capi/check/rows.h"
#include "kernels/core/copy.h"

/* Quantizes the scales, from which their mean has been subtracted. */
static hr_status quantize_scales(const hr_matrix *m, const hr_exec *exec)
{
    const int64_t blocks = matrix_blocks(m), scales = hr_block_count(blocks, MATRIX_SCALES);
    void *const data[] = {m->absmax_codes, m->absmax_scales, m->absmax};
    const hr_dtype u8 = HR_U8, f32 = HR_F32;
    const hr_tensor_list codes = {1, &data[0], &blocks, &u8};
    const hr_tensor_list absmaxs = {1, &data[1], &scales, &f32};
    const hr_tensor_list values = {1, &data[2], &blocks, &f32};
    hr_quantize_config config = HR_QUANTIZE_CONFIG_INIT;
    config.block_size = MATRIX_SCALES;
    return hr_quantize_blocks(&codes, &absmaxs, &values, &config, exec);
}

hr_status hr_quantize_matrix(const hr_matrix *matrix, const hr_rows *x, hr_dtype dtype,
                             const hr_quantize_matrix_config *config, const hr_exec *exec)
{
    static const char function[] = "hr_quantize_matrix";
    hr_quantize_matrix_config own = HR_QUANTIZE_MATRIX_CONFIG_INIT;
    HR_REQUIRE(config, "%s: config is NULL", function);
    HR_TRY(hr_copy_config(function, "config->", &own, sizeof own, config, sizeof own,
                          "HR_QUANTIZE_MATRIX_CONFIG_INIT"));
    HR_TRY(hr_check_flag(function, "search", own.search));
    HR_TRY(hr_check_exec(function, exec));
    quantize_matrix_args args = {.dtype = dtype, .search = own.search};
    HR_TRY(hr_check_matrix(function, &args.matrix, matrix, 1));
    HR_REQUIRE(x, "%s: x is NULL", function);
    HR_TRY(hr_check_float(function, "dtype", dtype));
    HR_TRY(hr_check_rows(function, "x", x, args.matrix.rows, args.matrix.cols, dtype));
    args.x = *x;
    if (args.matrix.rows == 0)
        return HR_OK;
    HR_ON_DEVICE(exec, quantize_matrix, &args);
    return args.matrix.absmax_codes ? quantize_scales(&args.matrix, exec) : HR_OK;
}

/* Copies the rectangle of a dense matrix. */
static hr_status copy(const dequantize_matrix_args *a, const hr_exec *exec)
{
    const int64_t size = (int64_t)hr_dtype_size(a->matrix.dtype);
    const int64_t to_pitch = a->out.stride * size, from_pitch = a->matrix.stride * size;
    const char *const from =
        (const char *)a->matrix.data + (a->row * a->matrix.stride + a->col) * size;
    HR_ON_DEVICE(exec, copy_rows, a->out.data, to_pitch, from, from_pitch, a->cols * size, a->rows);
    return HR_OK;
}

/* A part that begins at `first` and has `count` of the `all` rows or columns. */
static hr_status check_part(const char *function, const char *name, int64_t first, int64_t count,
                            int64_t all)
{
    HR_REQUIRE(first >= 0 && count >= 0 && first <= all - count,
               "%s: %s is %" PRId64 " and %ss %" PRId64 ", wanted a part of the matrix's %" PRId64,
               function, name, first, name, count, all);
    return HR_OK;
}

hr_status hr_dequantize_matrix(const hr_rows *out, const hr_matrix *matrix, int64_t row,
                               int64_t rows, int64_t col, int64_t cols, const hr_exec *exec)
{
    static const char function[] = "hr_dequantize_matrix";
    dequantize_matrix_args args = {.row = row, .rows = rows, .col = col, .cols = cols};
    HR_TRY(hr_check_exec(function, exec));
    HR_TRY(hr_check_matrix(function, &args.matrix, matrix, 0));
    HR_TRY(check_part(function, "row", row, rows, args.matrix.rows));
    HR_TRY(check_part(function, "col", col, cols, args.matrix.cols));
    if (cols == 0)
        rows = 0;
    HR_REQUIRE(out, "%s: out is NULL", function);
    HR_TRY(hr_check_rows(function, "out", out, rows, cols, args.matrix.dtype));
    args.out = *out;
    if (rows == 0)
        return HR_OK;
    if (args.matrix.format == HR_DENSE)
        return copy(&args, exec);
    if (exec->device == HR_CPU)
        return dequantize_matrix_cpu(&args);
    HR_RETURN_CUDA(dequantize_matrix_cuda(&args, exec), exec);
}
