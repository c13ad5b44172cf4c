/*
 * columns.h: sums of the columns of a matrix, or of its rows, in binary64 and in a fixed order: the
 * gradient of a bias. A matrix with too many rows to exist at a time comes in parts.
 */
#ifndef HR_COLUMNS_H
#define HR_COLUMNS_H

#include "capi/headroom.h"

/* sums[j] (+)= sum over rows of x[i][j], and with the last part out[j] (+)= factor * sums[j]. */
typedef struct column_sums {
    hr_rows x;
    hr_dtype dtype, out_dtype;
    int64_t rows, cols;
    int32_t of_rows; /* the sums are those of the rows: over cols, and there are `rows` of them */
    double factor;
    double *sums; /* from one part to the next; NULL where x is all there is */
    void *out;    /* NULL but for the last part */
    int32_t is_first, adds_to_out;
} column_sums;

#ifdef __cplusplus
extern "C" {
#endif
hr_status sum_columns_cpu(const column_sums *sums);
hr_status sum_columns_cuda(const column_sums *sums, const hr_exec *exec);
#ifdef __cplusplus
}
#endif

#endif
