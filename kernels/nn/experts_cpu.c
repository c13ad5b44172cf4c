/* experts_cpu.c: the loops between the products of experts: rows of a tile on the lent threads. */
#include "kernels/core/rows_cpu.h"
#include "kernels/nn/experts.h"

#define UNIT_TILE 256 /* elements of h: about ten of these, in binary32, fit the fastest cache */

/* ---- Routing --------------------------------------------------------------------------------- */

/* A counting sort, on one thread: it reads 8 bytes for each row, of which the products read
 * thousands. */
hr_status experts_route_cpu(const experts_route_args *a)
{
    int32_t *const offsets = a->offsets;
    memset(offsets, 0, sizeof *offsets * (size_t)(a->experts + 1));
    for (int64_t row = 0; row < a->rows; row++) {
        const int64_t e = experts_of(a, row);
        if (e < a->experts)
            offsets[e + 1]++;
    }
    for (int64_t e = 0; e < a->experts; e++)
        offsets[e + 1] += offsets[e];
    int32_t dropped = offsets[a->experts];
    for (int64_t row = 0; row < a->rows; row++) {
        const int64_t e = experts_of(a, row);
        a->order[e < a->experts ? offsets[e]++ : dropped++] = (int32_t)row;
    }
    for (int64_t e = a->experts; e > 0; e--) /* each has become the next one */
        offsets[e] = offsets[e - 1];
    offsets[0] = 0;
    return HR_OK;
}

/* ---- Rows of tokens -------------------------------------------------------------------------- */

static void gather_range(void *context, int64_t begin, int64_t end)
{
    const experts_gather_args *const a = (const experts_gather_args *)context;
    for (int64_t r = begin; r < end; r++)
        memcpy((char *)a->to + r * a->bytes,
               (const char *)a->from + experts_token(&a->tile, r) * a->from_pitch,
               (size_t)a->bytes);
}

hr_status experts_gather_cpu(const experts_gather_args *a)
{
    hr_parallel_for(0, a->tile.count, (1 << 18) / a->bytes + 1, gather_range, (void *)a);
    return HR_OK;
}

HR_INLINE void add_row(const experts_add_args *a, int64_t r, float *restrict to)
{
    const float *const restrict from = a->from + r * a->cols;
    const float w = a->weight ? hr_load(a->weight, a->tile.order[r], a->weight_dtype) : 1.0f;
    float buffer[TILE];
    if (!a->bias) {
        for (int64_t j = 0; j < a->cols; j++)
            to[j] = experts_added(to[j], w, from[j], 0.0f);
        return;
    }
    for (int64_t j0 = 0; j0 < a->cols; j0 += TILE) {
        const int n = a->cols - j0 < TILE ? (int)(a->cols - j0) : TILE;
        const float *const bias = tile_in(buffer, a->bias, j0, n, a->bias_dtype);
        for (int j = 0; j < n; j++)
            to[j0 + j] = experts_added(to[j0 + j], w, from[j0 + j], bias[j]);
    }
}

/* The first row of a token adds those behind it, too. */
HR_INLINE void add_range(void *context, int64_t begin, int64_t end)
{
    const experts_add_args *const a = (const experts_add_args *)context;
    for (int64_t r = begin; r < end; r++) {
        const int64_t token = experts_token(&a->tile, r);
        if (r > 0 && experts_token(&a->tile, r - 1) == token)
            continue;
        for (int64_t s = r; s < a->tile.count && experts_token(&a->tile, s) == token; s++)
            add_row(a, s, a->to + token * a->cols);
    }
}
CPU_VARIANTS(add_range)

hr_status experts_add_cpu(const experts_add_args *a)
{
    hr_parallel_for(0, a->tile.count, rows_per_task(a->cols, 1), CPU_BEST(add_range), (void *)a);
    return HR_OK;
}

hr_status experts_zero_cpu(void *memory, size_t bytes)
{
    memset(memory, 0, bytes);
    return HR_OK;
}

hr_status experts_capture_cpu(int *captured)
{
    *captured = 0;
    return HR_OK;
}

/* ---- The activation -------------------------------------------------------------------------- */

/* Elements [j0, j0 + n) of gate and up in binary32. */
HR_INLINE void load_unit(const experts_activate_args *a, const void *row, int64_t j0, int n,
                         float *restrict gate, float *restrict up)
{
    float both[2 * UNIT_TILE];
    if (!a->unit.gated) {
        memcpy(gate, tile_in(both, row, j0, n, a->dtype), sizeof *gate * (size_t)n);
        memset(up, 0, sizeof *up * (size_t)n);
    } else if (a->unit.interleaved) {
        const float *const from = tile_in(both, row, 2 * j0, 2 * n, a->dtype);
        for (int j = 0; j < n; j++)
            gate[j] = from[2 * j], up[j] = from[2 * j + 1];
    } else {
        memcpy(gate, tile_in(both, row, j0, n, a->dtype), sizeof *gate * (size_t)n);
        memcpy(up, tile_in(both, row, a->features + j0, n, a->dtype), sizeof *up * (size_t)n);
    }
}

HR_INLINE void store_unit(const experts_activate_args *a, void *row, int64_t j0, int n,
                          const float *restrict gate, const float *restrict up)
{
    float both[2 * UNIT_TILE];
    if (a->unit.gated && a->unit.interleaved) {
        for (int j = 0; j < n; j++)
            both[2 * j] = gate[j], both[2 * j + 1] = up[j];
        tile_out(row, both, 2 * j0, 2 * n, a->dtype);
        return;
    }
    tile_out(row, gate, j0, n, a->dtype);
    if (a->unit.gated)
        tile_out(row, up, a->features + j0, n, a->dtype);
}

HR_INLINE void unit_values(float *restrict h, const float *restrict gate, const float *restrict up,
                           int n, const experts_unit *given)
{
    const experts_unit unit = *given;
    if (unit.gated)
        FOR_EXPERTS_ACTIVATION(unit.activation, A,
                               for (int j = 0; j < n; j++) h[j] =
                                   experts_at(gate[j], up[j], &unit, A, 1).value)
    else
        FOR_EXPERTS_ACTIVATION(unit.activation, A,
                               for (int j = 0; j < n; j++) h[j] =
                                   experts_at(gate[j], 0.0f, &unit, A, 0).value)
}

/* gate and up become their gradients. */
HR_INLINE void unit_gradients(float *restrict h, float *restrict gate, float *restrict up,
                              const float *restrict q, float w, int n, const experts_unit *given)
{
    const experts_unit unit = *given;
    FOR_EXPERTS_ACTIVATION(
        unit.activation, A, for (int j = 0; j < n; j++) {
            const experts_point at = experts_at(gate[j], up[j], &unit, A, unit.gated);
            const float dh = w * q[j];
            h[j] = at.value;
            gate[j] = glu_dgate(dh, at.dgate, A);
            up[j] = dh * at.dup;
        })
}

HR_INLINE void add_products(float *restrict lanes, const float *restrict x, const float *restrict y,
                            int n)
{
    int j = 0;
    for (; j + LANES <= n; j += LANES)
        for (int lane = 0; lane < LANES; lane++)
            lanes[lane] = fmaf(x[j + lane], y[j + lane], lanes[lane]);
    for (int lane = 0; lane < n - j; lane++)
        lanes[lane] = fmaf(x[j + lane], y[j + lane], lanes[lane]);
}

/* The sum of a row's products with a vector, both of the tile's type. */
HR_INLINE double row_times(const void *row, const void *vector, int64_t cols, hr_dtype dtype)
{
    float of_row[UNIT_TILE], of_vector[UNIT_TILE];
    double total = 0.0;
    for (int64_t j0 = 0; j0 < cols; j0 += UNIT_TILE) {
        const int n = cols - j0 < UNIT_TILE ? (int)(cols - j0) : UNIT_TILE;
        float lanes[LANES] = {0.0f};
        add_products(lanes, tile_in(of_row, row, j0, n, dtype),
                     tile_in(of_vector, vector, j0, n, dtype), n);
        total += lanes_total(lanes);
    }
    return total;
}

HR_INLINE void activate_row(const experts_activate_args *a, int64_t r)
{
    const int64_t size = hr_element_size(a->dtype), width = a->features * (a->unit.gated ? 2 : 1);
    const char *const from = (const char *)a->gate_up + r * width * size;
    char *const kept = a->h ? (char *)a->h + r * a->features * size : NULL;
    for (int64_t j0 = 0; j0 < a->features; j0 += UNIT_TILE) {
        const int n = a->features - j0 < UNIT_TILE ? (int)(a->features - j0) : UNIT_TILE;
        float gate[UNIT_TILE], up[UNIT_TILE], h[UNIT_TILE];
        load_unit(a, from, j0, n, gate, up);
        unit_values(h, gate, up, n, &a->unit);
        tile_out(kept, h, j0, n, a->dtype);
    }
}

HR_INLINE void activate_row_backward(const experts_activate_args *a, int64_t r)
{
    const int64_t size = hr_element_size(a->dtype), width = a->features * (a->unit.gated ? 2 : 1);
    const char *const from = (const char *)a->gate_up + r * width * size;
    char *const grads = (char *)a->grads + r * width * size;
    const char *const kept = a->h ? (const char *)a->h + r * a->features * size : NULL;
    char *const weighted = a->weighted ? (char *)a->weighted + r * a->features * size : NULL;
    const int64_t row = a->tile.order[r];
    const float w = hr_load(a->weight, row, a->weight_dtype);
    double total = 0.0;
    for (int64_t j0 = 0; j0 < a->features; j0 += UNIT_TILE) {
        const int n = a->features - j0 < UNIT_TILE ? (int)(a->features - j0) : UNIT_TILE;
        const float *const q = a->q + r * a->features + j0;
        float gate[UNIT_TILE], up[UNIT_TILE], h[UNIT_TILE], lanes[LANES] = {0.0f};
        load_unit(a, from, j0, n, gate, up);
        unit_gradients(h, gate, up, q, w, n, &a->unit);
        store_unit(a, grads, j0, n, gate, up);
        if (kept)
            memcpy(h, tile_in(gate, kept, j0, n, a->dtype), sizeof *h * (size_t)n);
        else if (a->dtype != HR_F32) { /* as forward rounded it */
            uint16_t rounded[UNIT_TILE];
            rows_store(rounded, h, 0, n, a->dtype);
            rows_load(h, rounded, 0, n, a->dtype);
        }
        add_products(lanes, h, q, n);
        total += lanes_total(lanes);
        if (weighted) {
            for (int j = 0; j < n; j++)
                h[j] *= w;
            tile_out(weighted, h, j0, n, a->dtype);
        }
    }
    if (!a->dweight)
        return;
    if (a->down_bias)
        total += row_times((const char *)a->dy + r * a->hidden * size, a->down_bias, a->hidden,
                           a->dtype);
    hr_store(a->dweight, row, (float)total, a->weight_dtype);
}

HR_INLINE void activate_range(void *context, int64_t begin, int64_t end)
{
    const experts_activate_args *const a = (const experts_activate_args *)context;
    for (int64_t r = begin; r < end; r++)
        if (a->q)
            activate_row_backward(a, r);
        else
            activate_row(a, r);
}
CPU_VARIANTS(activate_range)

hr_status experts_activate_cpu(const experts_activate_args *a)
{
    hr_parallel_for(0, a->tile.count, rows_per_task(2 * a->features, 1), CPU_BEST(activate_range),
                    (void *)a);
    return HR_OK;
}

/* ---- The gradient of a bias ------------------------------------------------------------------ */

HR_INLINE void bias_range(void *context, int64_t begin, int64_t end)
{
    const experts_bias_args *const a = (const experts_bias_args *)context;
    double totals[TILE];
    float buffer[TILE];
    for (int64_t j0 = begin; j0 < end; j0 += TILE) {
        const int n = end - j0 < TILE ? (int)(end - j0) : TILE;
        for (int j = 0; j < n; j++)
            totals[j] = 0.0;
        for (int64_t r = 0; r < a->tile.count; r++) {
            const double w = (double)hr_load(a->weight, a->tile.order[r], a->weight_dtype);
            const float *const row = tile_in(
                buffer, row_at(&a->dy, experts_token(&a->tile, r), a->dtype), j0, n, a->dtype);
            for (int j = 0; j < n; j++)
                totals[j] += w * (double)row[j];
        }
        for (int j = 0; j < n; j++)
            hr_store(a->out, j0 + j, (float)totals[j], a->dtype);
    }
}
CPU_VARIANTS(bias_range)

hr_status experts_bias_cpu(const experts_bias_args *a)
{
    hr_parallel_for(0, a->cols, 128, CPU_BEST(bias_range), (void *)a);
    return HR_OK;
}
