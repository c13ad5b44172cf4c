/* muon_checks.h: checks what both passes of Muon take: matrices and their workspace. */
#ifndef HR_MUON_CHECKS_H
#define HR_MUON_CHECKS_H

#include "capi/check/check.h"

/* Checks where updates lie, and that they have `numel` elements each (NULL: any number). */
hr_status muon_check_matrices(const char *function, const hr_muon_matrix *matrices, int64_t count,
                              const int64_t *numel);

/* The workspace for matrices that were checked. */
size_t muon_workspace_bytes(const hr_muon_matrix *matrices, int64_t count);

hr_status muon_check_workspace(const char *function, size_t wanted, const void *workspace,
                               size_t bytes);

#endif
