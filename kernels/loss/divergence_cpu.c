/*
 * divergence_cpu.c: the loops, a row after the other, in tiles that stay in the fastest cache. A row
 * is read twice: for the log-sum-exps of student and teacher, and for the sum over the classes. The
 * second time it comes from a cache.
 */
#include "kernels/core/rows_cpu.h"
#include "kernels/loss/divergence.h"

/* Copies a tile of logits and fills it up to whole groups of LANES with minus infinity. Returns the
 * number of elements with these. */
HR_INLINE int tile_filled(float *buffer, const void *row, int64_t j, int n, hr_dtype dtype)
{
    const float *const tile = tile_in(buffer, row, j, n, dtype);
    for (int i = 0; i < n; i++)
        buffer[i] = tile[i];
    const int whole = (n + LANES - 1) / LANES * LANES;
    for (int i = n; i < whole; i++)
        buffer[i] = -INFINITY;
    return whole;
}

HR_INLINE int tile_length(int64_t classes, int64_t j)
{
    return classes - j < TILE ? (int)(classes - j) : TILE;
}

/* The sum of whole groups of elements, in LANES that are added as a tree. */
HR_INLINE double tile_sum(const float *x, int whole)
{
    double lanes[LANES] = {0};
    for (int j = 0; j < whole; j += LANES)
        for (int lane = 0; lane < LANES; lane++)
            lanes[lane] += (double)x[j + lane];
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++)
            lanes[lane] += lanes[lane + width];
    return lanes[0];
}

/* The log-sum-exp of a row times the temperature. A tile is read once: the sum of those before it is
 * rescaled where the largest logit grew. A NaN is not the largest, but makes the sum one. */
HR_INLINE double row_lse(const divergence_args *a, const void *row, dv_scale scale)
{
    const hr_dtype dtype = a->config.dtype;
    float tile[TILE], top = -INFINITY;
    double sum = 0.0;
    for (int64_t j = 0; j < a->classes; j += TILE) {
        const int whole = tile_filled(tile, row, j, tile_length(a->classes, j), dtype);
        tile_prefetch(row, j, dtype);
        float lanes[LANES];
        for (int lane = 0; lane < LANES; lane++)
            lanes[lane] = top;
        for (int i = 0; i < whole; i += LANES)
            for (int lane = 0; lane < LANES; lane++)
                lanes[lane] = tile[i + lane] > lanes[lane] ? tile[i + lane] : lanes[lane];
        float largest = top;
        for (int lane = 0; lane < LANES; lane++)
            largest = lanes[lane] > largest ? lanes[lane] : largest;
        if (largest > top)
            sum *= 1.0 + ce_expm1(((double)top - (double)largest) / a->config.temperature);
        top = largest;
        const float base = ce_base(top);
        for (int i = 0; i < whole; i++)
            tile[i] = dv_exp(tile[i] - base, scale);
        sum += tile_sum(tile, whole);
    }
    return dv_lse(a, top, sum);
}

/* ---- Forward --------------------------------------------------------------------------------- */

HR_INLINE void forward_sums(const divergence_args *a, const dv_row *r, const void *student,
                            const void *teacher, dv_sums *sums, int kind)
{
    const hr_dtype dtype = a->config.dtype;
    float s[TILE], t[TILE], p[TILE], q[TILE];
    for (int64_t j = 0; j < a->classes; j += TILE) {
        const int n = tile_length(a->classes, j), whole = (n + LANES - 1) / LANES * LANES;
        tile_filled(s, student, j, n, dtype);
        tile_filled(t, teacher, j, n, dtype);
        for (int i = 0; i < whole; i++) {
            const dv_terms terms = dv_terms_of(r, s[i], t[i], kind);
            s[i] = terms.under_student;
            t[i] = terms.under_teacher;
            p[i] = terms.p;
            q[i] = terms.q;
        }
        if (kind != DV_REVERSE) {
            sums->under_teacher += tile_sum(t, whole);
            sums->q += tile_sum(q, whole);
        }
        if (kind != DV_FORWARD) {
            sums->under_student += tile_sum(s, whole);
            sums->p += tile_sum(p, whole);
        }
    }
}

HR_INLINE void forward_rows(void *context, int64_t begin, int64_t end)
{
    const divergence_args *const a = (const divergence_args *)context;
    const dv_scale scale = dv_scale_of(a);
    const int kind = dv_kind(a);
    for (int64_t row = begin; row < end; row++) {
        if (dv_is_ignored(a, row)) {
            dv_finish_ignored(a, row);
            continue;
        }
        const void *const student = row_at(&a->student, row, a->config.dtype);
        const void *const teacher = row_at(&a->teacher, row, a->config.dtype);
        double lse[2];
        for (int which = 0; which < 2; which++)
            lse[which] = row_lse(a, which ? teacher : student, scale);
        const dv_row r = dv_row_of_lse(a, scale, lse[0], lse[1]);
        dv_sums sums = {0.0, 0.0, 0.0, 0.0};
        if (kind == DV_FORWARD)
            forward_sums(a, &r, student, teacher, &sums, DV_FORWARD);
        else if (kind == DV_REVERSE)
            forward_sums(a, &r, student, teacher, &sums, DV_REVERSE);
        else
            forward_sums(a, &r, student, teacher, &sums, DV_MIXED);
        dv_finish(a, row, &r, &sums);
    }
}

CPU_VARIANTS(forward_rows)

/* ---- Backward -------------------------------------------------------------------------------- */

HR_INLINE void backward_row(const divergence_args *a, const dv_row *r, int64_t row, int kind)
{
    const hr_dtype dtype = a->config.dtype;
    const void *const student = row_at(&a->student, row, dtype);
    const void *const teacher = row_at(&a->teacher, row, dtype);
    void *const grad = row_at(&a->grad, row, a->config.grad_dtype);
    const float factor = dv_factor(a, row, kind);
    float s[TILE], t[TILE];
    for (int64_t j = 0; j < a->classes; j += TILE) {
        const int n = tile_length(a->classes, j);
        tile_filled(s, student, j, n, dtype);
        tile_filled(t, teacher, j, n, dtype);
        tile_prefetch(student, j, dtype);
        tile_prefetch(teacher, j, dtype);
        for (int i = 0; i < n; i++)
            s[i] = dv_gradient(r, s[i], t[i], factor, kind);
        tile_out(grad, s, j, n, a->config.grad_dtype);
    }
}

HR_INLINE void backward_rows(void *context, int64_t begin, int64_t end)
{
    const divergence_args *const a = (const divergence_args *)context;
    const dv_scale scale = dv_scale_of(a);
    const int kind = dv_kind(a);
    for (int64_t row = begin; row < end; row++) {
        if (dv_is_ignored(a, row)) {
            const hr_dtype grad_dtype = a->config.grad_dtype;
            memset(row_at(&a->grad, row, grad_dtype), 0,
                   (size_t)a->classes * (size_t)hr_element_size(grad_dtype));
            continue;
        }
        const dv_row r = dv_row_of(a, scale, a->statistics + row * HR_DIVERGENCE_STATISTICS, 1);
        if (kind == DV_FORWARD)
            backward_row(a, &r, row, DV_FORWARD);
        else if (kind == DV_REVERSE)
            backward_row(a, &r, row, DV_REVERSE);
        else
            backward_row(a, &r, row, DV_MIXED);
    }
}

CPU_VARIANTS(backward_rows)

/* ---- Calls ----------------------------------------------------------------------------------- */

hr_status divergence_forward_cpu(const divergence_args *args)
{
    hr_parallel_for(0, args->rows, rows_per_task(args->classes, 1), CPU_BEST(forward_rows),
                    (void *)(uintptr_t)args);
    return HR_OK;
}

hr_status divergence_backward_cpu(const divergence_args *args)
{
    hr_parallel_for(0, args->rows, rows_per_task(args->classes, 1), CPU_BEST(backward_rows),
                    (void *)(uintptr_t)args);
    return HR_OK;
}
