/*
 * norm_cpu.c: the loops. A row is taken from its first column to its last, because memory is read
 * fastest in its order, and then again while it is in the cache. Columns are taken in tiles, which
 * are converted to binary32, computed on, and converted back: outputs that are also inputs need no
 * other loop. norm_tiles.h has the computations, which are compiled once per instruction set; what
 * is here is compiled once.
 */
#include <stdbool.h>

#include "kernels/nn/norm_tiles.h"

/* Rows of up to KEPT elements stay in buffers as binary32, and so do the weights of a task. */
#define KEPT 8192

/* Some columns of weight and bias, ready for use. */
typedef struct ready_weights {
    int64_t first, count;
    _Alignas(64) float weight[KEPT], bias[KEPT];
} ready_weights;

/* The columns from j on: all columns at once if they fit, which later calls find there. */
static void read_weights(ready_weights *w, const norm_args *a, int64_t j)
{
    if (j >= w->first && j < w->first + w->count)
        return;
    const hr_dtype dtype = a->config.weight_dtype;
    const float offset = (float)a->config.offset;
    const int n = a->cols - j < KEPT ? (int)(a->cols - j) : KEPT;
    const float *const weight = a->weight ? tile_in(w->weight, a->weight, j, n, dtype) : NULL;
    const float *const bias = a->bias ? tile_in(w->bias, a->bias, j, n, dtype) : NULL;
    for (int i = 0; i < n; i++)
        w->weight[i] = weight ? weight[i] + offset : 1.0f;
    for (int i = 0; i < n; i++)
        w->bias[i] = bias ? bias[i] : NORM_NO_BIAS;
    w->first = j;
    w->count = n;
}

static void use_weights(norm_tile *t, ready_weights *w, const norm_args *a, int64_t j)
{
    read_weights(w, a, j);
    t->weight = w->weight + (j - w->first);
    t->bias = w->bias + (j - w->first);
}

static int tile_size(const norm_args *a, int64_t j)
{
    return a->cols - j < TILE ? (int)(a->cols - j) : TILE;
}

/* Asks for the n columns from j on of a row that a later pass will write, while this one reads: a
 * core that stores would wait for each line. Longer rows would not stay in the cache. It is inlined
 * because a compiler drops calls of functions that only prefetch. */
HR_INLINE void tile_claim(const norm_args *a, const hr_rows *rows, int64_t row, int64_t j, int n)
{
    const int size = hr_element_size(a->config.dtype);
    const char *const tile = (const char *)row_at(rows, row, a->config.dtype) + j * size;
    for (int byte = 0; a->cols <= KEPT && byte < n * size; byte += 64)
        __builtin_prefetch(tile + byte, 1);
}

/* ---- Forward --------------------------------------------------------------------------------- */

static void row_add(const norm_args *a, int64_t row)
{
    const hr_dtype dtype = a->config.dtype;
    float left[TILE], right[TILE];
    for (int64_t j = 0; j < a->cols; j += TILE) {
        const int n = tile_size(a, j);
        norm_tile t = {.x = tile_in(left, row_at(&a->x, row, dtype), j, n, dtype),
                       .dsum = tile_in(right, row_at(&a->residual, row, dtype), j, n, dtype)};
        RUN_INTO(add, &t, row_at(&a->sum, row, dtype), j, n, dtype, 0);
    }
}

static void forward_row(const norm_args *a, int64_t row, ready_weights *w)
{
    const hr_dtype dtype = a->config.dtype;
    const void *const x = row_at(a->sum.data ? &a->sum : &a->x, row, dtype);
    const int first = a->config.kind == HR_NORM_LAYER ? 0 : 1; /* an RMS norm has no mean */
    const int streamed = rows_are_streamed(&a->y, &a->x, a->rows, a->cols, dtype);
    float kept[KEPT], hat[TILE], mean = 0.0f, rstd = 0.0f;
    if (a->sum.data)
        row_add(a, row);
    for (int pass = first; pass < 3; pass++) {
        const bool is_kept = pass > first && a->cols <= KEPT && dtype != HR_F32;
        double total = 0.0;
        for (int64_t j = 0; j < a->cols; j += TILE) {
            const int n = tile_size(a, j);
            float *const place = kept + j % KEPT;
            norm_tile t = {.x = is_kept ? place : tile_in(place, x, j, n, dtype), .mean = mean};
            if (pass == 0) {
                RUN(sum, &t, n);
            } else if (pass == 1) {
                if (!streamed)
                    tile_claim(a, &a->y, row, j, n);
                RUN(sum_squares, &t, n);
            } else {
                t.factor = norm_factor(rstd, a->config.casting, dtype);
                tile_round(&t, a, hat, n);
                use_weights(&t, w, a, j);
                RUN_INTO(weigh, &t, row_at(&a->y, row, dtype), j, n, dtype, streamed);
            }
            total += t.total;
        }
        if (pass == 0)
            mean = (float)(total / (double)a->cols);
        if (pass == 1)
            rstd = norm_rstd(total, a->cols, (float)a->config.eps);
    }
    if (a->mean)
        hr_store(a->mean, row, mean, HR_F32); /* every NaN as the same */
    if (a->rstd)
        hr_store(a->rstd, row, rstd, HR_F32);
}

static void forward_rows(void *context, int64_t begin, int64_t end)
{
    const norm_args *const a = (const norm_args *)context;
    ready_weights w;
    w.first = w.count = 0;
    for (int64_t row = begin; row < end; row++)
        forward_row(a, row, &w);
    rows_streamed();
}

hr_status norm_forward_cpu(const norm_args *args)
{
    hr_parallel_for(0, args->rows, rows_per_task(args->cols, NORM_LEAST_ROWS), forward_rows,
                    (void *)args);
    return HR_OK;
}

/* ---- Backward -------------------------------------------------------------------------------- */

/* Groups of rows as in norm.h, but fewer: a group's sums are then small beside its rows, and there
 * are still more groups than cores. */
#define GROUPS     64
#define LEAST_ROWS 16

static int64_t group_rows(int64_t rows)
{
    const int64_t even = (rows + GROUPS - 1) / GROUPS;
    return even < LEAST_ROWS ? LEAST_ROWS : even;
}

static int64_t groups_of(int64_t rows)
{
    return (rows + group_rows(rows) - 1) / group_rows(rows);
}

/* `sums`: of the group, for dweight and dbias; NULL if neither is wanted. */
static void backward_row(const norm_args *a, int64_t row, ready_weights *w, float *sums)
{
    const hr_dtype dtype = a->config.dtype;
    const bool layer = a->config.kind == HR_NORM_LAYER;
    const void *const x = row_at(&a->x, row, dtype), *const dy = row_at(&a->dy, row, dtype);
    void *const dx = row_at(&a->dx, row, dtype);
    const int streamed = rows_are_streamed(&a->dx, &a->dy, a->rows, a->cols, dtype);
    float xs[KEPT], dys[KEPT], hat[TILE], other[TILE];
    const float rstd = a->rstd[row];
    double g_hat_sum = 0.0, g_sum = 0.0;
    for (int pass = a->dx.data ? 0 : 1; pass < 2; pass++) {
        const bool is_kept = pass == 1 && a->dx.data && a->cols <= KEPT && dtype != HR_F32;
        for (int64_t j = 0; j < a->cols; j += TILE) {
            const int n = tile_size(a, j);
            float *const x_place = xs + j % KEPT, *const dy_place = dys + j % KEPT;
            norm_tile t = {.x = is_kept ? x_place : tile_in(x_place, x, j, n, dtype),
                           .mean = a->mean ? a->mean[row] : 0.0f,
                           .factor = rstd,
                           .rstd = rstd,
                           .g_hat = (float)(g_hat_sum / (double)a->cols),
                           .g = layer ? (float)(g_sum / (double)a->cols) : 0.0f};
            use_weights(&t, w, a, j);
            if (a->dy.data)
                t.dy = is_kept ? dy_place : tile_in(dy_place, dy, j, n, dtype);
            if (pass == 0) {
                if (!streamed)
                    tile_claim(a, &a->dx, row, j, n);
                RUN(sum_gradients, &t, n);
                g_hat_sum += t.total;
                g_sum += t.total_g;
                continue;
            }
            norm_tile normed = t;
            normed.factor = norm_factor(rstd, a->config.casting, dtype);
            if (a->y.data || sums)
                tile_round(&normed, a, hat, n);
            if (a->y.data)
                RUN_INTO(weigh, &normed, row_at(&a->y, row, dtype), j, n, dtype, 0);
            norm_tile *const adds = a->dx.data && !norm_rounds(&a->config) ? &t : &normed;
            if (sums) {
                adds->dweight = sums + j;
                adds->dbias = layer ? sums + a->cols + j : NULL;
            }
            if (normed.dweight)
                RUN(add_dweight, &normed, n);
            if (normed.dbias)
                RUN(add_dbias, &normed, n);
            if (a->dx.data && a->dsum.data) {
                float own[TILE];
                t.out = own;
                RUN(gradient, &t, n);
                t.x = own;
                t.dsum = tile_in(other, row_at(&a->dsum, row, dtype), j, n, dtype);
                RUN_INTO(add, &t, dx, j, n, dtype, streamed);
            } else if (a->dx.data) {
                RUN_INTO(gradient, &t, dx, j, n, dtype, streamed);
            }
        }
    }
}

static void backward_groups(void *context, int64_t begin, int64_t end)
{
    const norm_args *const a = (const norm_args *)context;
    const int64_t size = group_rows(a->rows);
    const int64_t group_sums = norm_sums(a->config.kind) * a->cols;
    ready_weights w;
    w.first = w.count = 0;
    for (int64_t group = begin; group < end; group++) {
        float *const sums = a->partials ? a->partials + group * group_sums : NULL;
        if (sums)
            memset(sums, 0, (size_t)group_sums * sizeof *sums);
        const int64_t last = (group + 1) * size < a->rows ? (group + 1) * size : a->rows;
        for (int64_t row = group * size; row < last; row++)
            backward_row(a, row, &w, sums);
    }
    rows_streamed();
}

/* Adds the groups of some columns, always from the first group to the last. */
HR_INLINE void add_groups(void *context, int64_t begin, int64_t end)
{
    const norm_args *const a = (const norm_args *)context;
    const int64_t groups = groups_of(a->rows), sums = norm_sums(a->config.kind);
    double total[TILE];
    for (int64_t j = begin; j < end; j += TILE) {
        const int n = end - j < TILE ? (int)(end - j) : TILE;
        for (int64_t s = 0; s < sums; s++) {
            void *const out = s ? a->dbias : a->dweight;
            if (!out)
                continue;
            for (int i = 0; i < n; i++)
                total[i] = 0.0;
            for (int64_t group = 0; group < groups; group++) {
                const float *const partial = a->partials + (group * sums + s) * a->cols + j;
                for (int i = 0; i < n; i++)
                    total[i] += (double)partial[i];
            }
            for (int i = 0; i < n; i++)
                hr_store(out, j + i, (float)total[i], a->config.weight_dtype);
        }
    }
}

CPU_VARIANTS(add_groups)

hr_status norm_backward_cpu(const norm_args *args)
{
    const int64_t size = group_rows(args->rows) * args->cols;
    hr_parallel_for(0, groups_of(args->rows), size < CPU_GRAIN ? CPU_GRAIN / size : 1,
                    backward_groups, (void *)args);
    if (args->dweight || args->dbias)
        hr_parallel_for(0, args->cols, TILE, CPU_BEST(add_groups), (void *)args);
    return HR_OK;
}
