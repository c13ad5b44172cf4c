/* columns_cpu.c: sums of columns: a thread takes some of them, and a row of those at a time. */
#include "kernels/core/columns.h"
#include "kernels/core/rows_cpu.h"

#define GRAIN 128 /* sums: a matrix with few columns still has some for each thread */

HR_INLINE void finish_sums(const column_sums *s, const double *totals, int64_t j0, int n)
{
    for (int j = 0; j < n && s->sums; j++)
        s->sums[j0 + j] = totals[j];
    for (int j = 0; j < n && s->out; j++) {
        const float before = s->adds_to_out ? hr_load(s->out, j0 + j, s->out_dtype) : 0.0f;
        hr_store(s->out, j0 + j, (float)((double)before + s->factor * totals[j]), s->out_dtype);
    }
}

HR_INLINE void sum_some_columns(void *context, int64_t begin, int64_t end)
{
    const column_sums *const s = (const column_sums *)context;
    double totals[TILE];
    float buffer[TILE];
    for (int64_t j0 = begin; j0 < end; j0 += TILE) {
        const int n = end - j0 < TILE ? (int)(end - j0) : TILE;
        for (int j = 0; j < n; j++)
            totals[j] = s->is_first ? 0.0 : s->sums[j0 + j];
        for (int64_t i = 0; i < s->rows; i++) {
            const float *const row = tile_in(buffer, row_at(&s->x, i, s->dtype), j0, n, s->dtype);
            for (int j = 0; j < n; j++)
                totals[j] += (double)row[j];
        }
        finish_sums(s, totals, j0, n);
    }
}

HR_INLINE void sum_some_rows(void *context, int64_t begin, int64_t end)
{
    const column_sums *const s = (const column_sums *)context;
    float buffer[TILE];
    for (int64_t i = begin; i < end; i++) {
        double total = s->is_first ? 0.0 : s->sums[i];
        for (int64_t j0 = 0; j0 < s->cols; j0 += TILE) {
            const int n = s->cols - j0 < TILE ? (int)(s->cols - j0) : TILE;
            const float *const row = tile_in(buffer, row_at(&s->x, i, s->dtype), j0, n, s->dtype);
            for (int j = 0; j < n; j++)
                total += (double)row[j];
        }
        finish_sums(s, &total, i, 1);
    }
}

CPU_VARIANTS(sum_some_columns)
CPU_VARIANTS(sum_some_rows)

hr_status sum_columns_cpu(const column_sums *s)
{
    if (s->of_rows)
        hr_parallel_for(0, s->rows, GRAIN, CPU_BEST(sum_some_rows), (void *)s);
    else
        hr_parallel_for(0, s->cols, GRAIN, CPU_BEST(sum_some_columns), (void *)s);
    return HR_OK;
}
