/* muon_checks.c: checks what both passes of Muon take: matrices and their workspace. */
#include "capi/check/muon_checks.h"

#include <inttypes.h>

#include "kernels/optim/muon_matrix.h"

#define MOST (INT64_C(1) << 59) /* elements */

hr_status muon_check_matrices(const char *function, const hr_muon_matrix *matrices, int64_t count,
                              const int64_t *numel)
{
    HR_REQUIRE(matrices || count == 0, "%s: matrices is NULL", function);
    int64_t total = 0;
    for (int64_t k = 0; k < count; k++) {
        const hr_muon_matrix m = matrices[k];
        HR_REQUIRE(m.rows >= 0 && m.cols >= 0 && (m.rows == 0 || m.cols <= MOST / m.rows) &&
                       m.rows <= MOST && m.cols <= MOST,
                   "%s: matrices[%" PRId64 "] is [%" PRId64 ", %" PRId64
                   "], wanted sizes of 0 or more and at most 2^59 elements",
                   function, k, m.rows, m.cols);
        HR_REQUIRE(m.transposed == 0 || m.transposed == 1,
                   "%s: matrices[%" PRId64 "].transposed is %" PRId64 ", wanted 0 or 1", function,
                   k, m.transposed);
        const int64_t lines = m.transposed ? m.cols : m.rows;
        const int64_t length = m.transposed ? m.rows : m.cols;
        HR_REQUIRE(lines <= 1 || (m.stride >= length && m.stride <= MOST / lines),
                   "%s: matrices[%" PRId64 "].stride is %" PRId64 ", wanted %" PRId64
                   " or more, and at most 2^59 elements in all",
                   function, k, m.stride, length);
        HR_REQUIRE(!numel || numel[k] == m.rows * m.cols,
                   "%s: matrices[%" PRId64 "] is [%" PRId64 ", %" PRId64
                   "], but updates has numel %" PRId64,
                   function, k, m.rows, m.cols, numel ? numel[k] : 0);
        HR_REQUIRE(m.rows * m.cols + m.rows <= MOST - total,
                   "%s: matrices has more than 2^59 elements", function);
        total += m.rows * m.cols + m.rows;
    }
    return HR_OK;
}

size_t muon_workspace_bytes(const hr_muon_matrix *matrices, int64_t count)
{
    int64_t chunks = 0, rows = 0;
    for (int64_t k = 0; k < count; k++) {
        chunks += muon_most_chunks(&matrices[k]);
        rows += matrices[k].rows;
    }
    return sizeof(double) * (size_t)(chunks > rows ? chunks : rows);
}

hr_status muon_check_workspace(const char *function, size_t wanted, const void *workspace,
                               size_t bytes)
{
    HR_REQUIRE(bytes >= wanted, "%s: workspace_bytes is %zu, wanted %zu", function, bytes, wanted);
    HR_REQUIRE(wanted == 0 || (workspace && (uintptr_t)workspace % 8 == 0),
               "%s: workspace is at %p, wanted a multiple of 8 bytes", function, workspace);
    return HR_OK;
}
