/* matrix.h: checks a matrix of any format, for all functions that take one. */
#ifndef HR_CHECK_MATRIX_H
#define HR_CHECK_MATRIX_H

#include "capi/check/check.h"

/* Copies a matrix, whose header may be older, to `own`, and checks it. `written`: its codes and
 * scales are made, so that absmax must be there, too. */
hr_status hr_check_matrix(const char *function, hr_matrix *own, const hr_matrix *matrix,
                          int written);

#endif
