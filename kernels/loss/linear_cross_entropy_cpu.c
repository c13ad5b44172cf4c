/* linear_cross_entropy_cpu.c: the loops between the products: see linear_cross_entropy.h. */
#include "kernels/loss/cross_entropy_tiles.h"
#include "kernels/loss/linear_cross_entropy.h"

/* One after another: there are few rows beside what their products take. */
hr_status lce_list_rows_cpu(const lce_listing *l)
{
    double weights = 0.0, tokens = 0.0, weight_sum = (double)l->ce.all;
    int64_t count = 0;
    for (int64_t row = 0; row < l->ce.rows; row++) {
        const int64_t target = lce_target(l, row);
        if (ce_is_ignored(&l->ce, target)) {
            lce_clear(l, row);
            continue;
        }
        const double scale = (double)lce_token_weight(l, row);
        weights += scale * ce_weight(&l->ce, target);
        tokens += scale;
        lce_put(l, count++, row);
    }
    for (int64_t place = count; place < l->list.capacity; place++)
        lce_put(l, place, -1);
    if (l->ce.weight && l->ce.config.label_smoothing > 0.0) {
        weight_sum = 0.0;
        for (int64_t j = 0; j < l->ce.all; j++)
            weight_sum += (double)l->ce.weight[j];
    }
    lce_total(l, count, weights, tokens, weight_sum);
    return HR_OK;
}

/* ---- Logits ---------------------------------------------------------------------------------- */

/* How many logits are larger than the target's. */
HR_INLINE int64_t larger_ones(const float *logits, int64_t classes, float z)
{
    int64_t total = 0;
    for (int64_t j = 0; j < classes; j += TILE) {
        const int n = classes - j < TILE ? (int)(classes - j) : TILE;
        int32_t larger = 0;
        for (int i = 0; i < n; i++)
            larger += logits[j + i] > z;
        total += larger;
    }
    return total;
}

HR_INLINE void see_rows(void *context, int64_t begin, int64_t end)
{
    const lce_seeing *const s = (const lce_seeing *)context;
    for (int64_t row = begin; row < end; row++) {
        ce_seen *const to = s->seen + row;
        const int64_t target = ce_target(&s->ce, row);
        if (s->is_first)
            *to = ce_nothing_seen(s->ce.first);
        if (ce_is_ignored(&s->ce, target))
            continue;
        const float *const logits = (const float *)row_at(&s->ce.logits, row, HR_F32);
        ce_see(&s->ce, to, logits, target, s->wants);
        if (s->wants.rank)
            to->rank = larger_ones(logits, s->ce.classes, logits[target - s->ce.first]);
    }
}

CPU_VARIANTS(see_rows)

hr_status lce_see_cpu(const lce_seeing *s)
{
    hr_parallel_for(0, s->ce.rows, rows_per_task(s->ce.classes, 1), CPU_BEST(see_rows), (void *)s);
    return HR_OK;
}

hr_status lce_end_cpu(const lce_ending *e)
{
    for (int64_t i = 0; i < e->rows; i++)
        lce_end(e, i);
    return HR_OK;
}

hr_status lce_reduce_cpu(const lce_reduction *r)
{
    const lce_list *const list = &r->list;
    double loss = 0.0, z_loss = 0.0;
    for (int64_t i = 0; i < list->totals->count; i++) {
        loss += (double)list->loss[i];
        z_loss += (double)list->scale[i] * ce_z_loss(r->z_loss, (double)list->lse[i]);
    }
    lce_finish(r, loss, z_loss);
    return HR_OK;
}

/* ---- Rows of matrices ------------------------------------------------------------------------ */

HR_INLINE void move_row(const lce_move *m, int64_t to_row, int64_t from_row)
{
    float buffer[TILE];
    void *const to = row_at(&m->to, to_row, m->to_dtype);
    const void *const from = row_at(&m->from, from_row, m->from_dtype);
    for (int64_t j = 0; j < m->cols; j += TILE) {
        const int n = m->cols - j < TILE ? (int)(m->cols - j) : TILE;
        tile_out(to, tile_in(buffer, from, j, n, m->from_dtype), j, n, m->to_dtype);
    }
}

static void gather_rows(void *context, int64_t begin, int64_t end)
{
    const lce_move *const m = (const lce_move *)context;
    for (int64_t row = begin; row < end; row++) {
        const int64_t from = m->index ? m->index[row] : row;
        if (from >= 0)
            move_row(m, row, from);
        else
            memset(row_at(&m->to, row, m->to_dtype), 0,
                   (size_t)m->cols * (size_t)hr_element_size(m->to_dtype));
    }
}

static void scatter_rows(void *context, int64_t begin, int64_t end)
{
    const lce_move *const m = (const lce_move *)context;
    for (int64_t row = begin; row < end; row++)
        if (m->index[row] >= 0)
            move_row(m, m->index[row], row);
}

hr_status lce_gather_cpu(const lce_move *m)
{
    hr_parallel_for(0, m->rows, rows_per_task(m->cols, 1), gather_rows, (void *)m);
    return HR_OK;
}

hr_status lce_scatter_cpu(const lce_move *m)
{
    hr_parallel_for(0, m->rows, rows_per_task(m->cols, 1), scatter_rows, (void *)m);
    return HR_OK;
}

hr_status lce_scale_cpu(float *to, const void *vector, double factor, int64_t count, hr_dtype dtype)
{
    for (int64_t j = 0; j < count; j++)
        to[j] = lce_scaled(vector, factor, j, dtype);
    return HR_OK;
}

/* ---- Sums of gradients ----------------------------------------------------------------------- */

HR_INLINE void add_rows_of(const lce_addition *a, int64_t begin, int64_t end)
{
    for (int64_t row = begin; row < end; row++) {
        void *const restrict high = row_at(&a->high, row, a->dtype);
        uint16_t *const restrict low = a->low ? a->low + row * a->cols : NULL;
        const float *const restrict addend = (const float *)row_at(&a->addend, row, HR_F32);
        for (int64_t j = 0; j < a->cols; j++)
            lce_add(a, high, low, addend[j], j);
    }
}

/* Flags become constants, so that the loops vectorize. */
HR_INLINE void add_rows(void *context, int64_t begin, int64_t end)
{
    lce_addition a = *(const lce_addition *)context;
    a.dtype = a.dtype == HR_F16 ? HR_F16 : a.dtype;
    if (a.dtype == HR_BF16 && a.low && !a.is_first && !a.overwrites && !a.is_last) {
        const lce_addition most = {a.high, a.low, a.addend, a.rows, a.cols, HR_BF16, 0, 0, 0};
        add_rows_of(&most, begin, end);
    } else {
        add_rows_of(&a, begin, end);
    }
}

CPU_VARIANTS(add_rows)

hr_status lce_add_cpu(const lce_addition *a)
{
    hr_parallel_for(0, a->rows, rows_per_task(a->cols, 1), CPU_BEST(add_rows), (void *)a);
    return HR_OK;
}
