/* matrix.c: checks a matrix of any format. */
#include "capi/check/matrix.h"

#include <inttypes.h>

#include "capi/check/rows.h"
#include "kernels/quant/quantize_matrix.h"

static hr_status check_vector(const char *function, const char *name, const void *vector,
                              hr_dtype dtype, int needed)
{
    HR_REQUIRE(vector || !needed, "%s: %s is NULL", function, name);
    return hr_check_vector(function, name, vector, dtype);
}

static hr_status check_scales(const char *function, const hr_matrix *m, int written)
{
    const int some = m->rows > 0, nested = m->absmax_codes != NULL;
    const int four_bits = m->format == HR_NF4 || m->format == HR_FP4;
    if (m->format == HR_MXFP4) {
        HR_REQUIRE(m->cols % MATRIX_MX_BLOCK == 0,
                   "%s: matrix->cols is %" PRId64 ", wanted a multiple of 32 in MXFP4", function,
                   m->cols);
        return check_vector(function, "matrix->absmax_codes", m->absmax_codes, HR_U8, some);
    }
    HR_REQUIRE(!four_bits ||
                   (m->block_size >= MATRIX_MIN_BLOCK && m->block_size <= MATRIX_MAX_BLOCK &&
                    (m->block_size & (m->block_size - 1)) == 0),
               "%s: matrix->block_size is %" PRId32 ", wanted a power of two from 32 to 4096",
               function, m->block_size);
    HR_REQUIRE(four_bits || !nested,
               "%s: matrix->absmax_codes is given, but matrix->format is %d; only codes of 4 bits "
               "have them",
               function, (int)m->format);
    HR_TRY(check_vector(function, "matrix->absmax", m->absmax, HR_F32,
                        some && m->format != HR_DENSE && (!nested || written)));
    HR_TRY(
        check_vector(function, "matrix->absmax_scales", m->absmax_scales, HR_F32, some && nested));
    return check_vector(function, "matrix->offset", m->offset, HR_F32, some && nested);
}

hr_status hr_check_matrix(const char *function, hr_matrix *own, const hr_matrix *matrix,
                          int written)
{
    HR_REQUIRE(matrix, "%s: matrix is NULL", function);
    HR_TRY(hr_copy_config(function, "matrix->", own, sizeof *own, matrix, sizeof *own,
                          "HR_MATRIX_INIT"));
    if (!HR_CHECK_PASSES(!written || own->format != HR_MXFP4))
        return hr_fail(HR_UNSUPPORTED,
                       "%s: matrix->format is HR_MXFP4 (4), which is only read: give "
                       "hr_dequantize_matrix the codes and exponents of a checkpoint",
                       function);
    const hr_format least = written ? HR_NF4 : HR_DENSE, most = written ? HR_INT8_ROWS : HR_MXFP4;
    HR_REQUIRE(own->format >= least && own->format <= most,
               "%s: matrix->format is %d, wanted %d to %d", function, (int)own->format, (int)least,
               (int)most);
    if (own->format == HR_MXFP4)
        own->block_size = MATRIX_MX_BLOCK;
    HR_TRY(hr_check_float(function, "matrix->dtype", own->dtype));
    HR_TRY(hr_check_sizes(function, own->rows, own->cols));
    HR_REQUIRE(own->data || own->rows == 0, "%s: matrix->data is NULL", function);
    HR_TRY(check_scales(function, own, written));
    if (own->format != HR_DENSE)
        return HR_OK;
    return hr_check_rows(function, "matrix", &(hr_rows){own->data, own->stride}, own->rows,
                         own->cols, own->dtype);
}
