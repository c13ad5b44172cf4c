/*
 * glu_cpu.c: the loop. Each tile of every input is converted to binary32 before the first output is
 * written, so that an output may be any input.
 */
#include "kernels/core/rows_cpu.h"
#include "kernels/nn/glu.h"

#define GLU_TILE 256 /* seven of them, in binary32, leave most of the fastest cache to the rows */

enum { GATE, UP, DH, INPUTS };
enum { H, DGATE, DUP, OUTPUTS };

/* A stretch of one row: addresses of its inputs and outputs, NULL where absent. */
typedef struct glu_row {
    const void *in[INPUTS];
    void *out[OUTPUTS];
} glu_row;

HR_INLINE glu_row row_of(const glu_args *a, int64_t row)
{
    const hr_rows *const in[INPUTS] = {&a->gate, &a->up, &a->dh};
    const hr_rows *const out[OUTPUTS] = {&a->h, &a->dgate, &a->dup};
    glu_row all;
    for (int k = 0; k < INPUTS; k++)
        all.in[k] = in[k]->data ? row_at(in[k], row, a->dtype) : NULL;
    for (int k = 0; k < OUTPUTS; k++)
        all.out[k] = out[k]->data ? row_at(out[k], row, a->dtype) : NULL;
    return all;
}

HR_INLINE void tile_values(float *restrict value, const float *restrict gate, int n,
                           hr_activation activation)
{
    FOR_ACTIVATION(activation, A, for (int j = 0; j < n; j++) value[j] = glu_at(gate[j], A).value)
}

/* `reached`: what reached the activation; becomes the gradient of the gate. */
HR_INLINE void tile_gradients(float *restrict value, float *restrict reached,
                              const float *restrict gate, int n, hr_activation activation)
{
    FOR_ACTIVATION(
        activation, A, for (int j = 0; j < n; j++) {
            const glu_point point = glu_at(gate[j], A);
            value[j] = point.value;
            reached[j] = glu_dgate(reached[j], point.slope, A);
        })
}

HR_INLINE void tile_multiply(float *restrict product, const float *restrict x,
                             const float *restrict y, int n)
{
    for (int j = 0; j < n; j++)
        product[j] = y ? x[j] * y[j] : x[j];
}

/* Elements [j0, j0 + n) of a row that goes on to `end`. */
HR_INLINE void glu_tile(const glu_args *a, const glu_row *row, int64_t j0, int n, int64_t end)
{
    float buffers[INPUTS][GLU_TILE], out[OUTPUTS][GLU_TILE];
    const float *in[INPUTS] = {NULL};
    for (int k = 0; k < INPUTS; k++)
        if (row->in[k]) {
            cpu_prefetch(row->in[k], j0, n, end, a->dtype);
            in[k] = tile_in(buffers[k], row->in[k], j0, n, a->dtype);
        }
    float value[GLU_TILE];
    if (in[DH]) {
        tile_multiply(out[DGATE], in[DH], in[UP], n);
        tile_gradients(value, out[DGATE], in[GATE], n, a->activation);
        if (row->out[DUP])
            tile_multiply(out[DUP], in[DH], value, n);
    } else {
        tile_values(value, in[GATE], n, a->activation);
    }
    if (row->out[H])
        tile_multiply(out[H], value, in[UP], n);
    for (int k = 0; k < OUTPUTS; k++)
        if (row->out[k]) {
            cpu_prefetch(row->out[k], j0, n, end, a->dtype);
            tile_out(row->out[k], out[k], j0, n, a->dtype);
        }
}

/* The elements of all rows, laid end to end. */
HR_INLINE void glu_range(void *context, int64_t begin, int64_t end)
{
    const glu_args *const a = (const glu_args *)context;
    while (begin < end) {
        const int64_t row = begin / a->cols, first = begin - row * a->cols;
        const int64_t last = end - begin < a->cols - first ? first + end - begin : a->cols;
        const glu_row at = row_of(a, row);
        for (int64_t j = first; j < last; j += GLU_TILE)
            glu_tile(a, &at, j, last - j < GLU_TILE ? (int)(last - j) : GLU_TILE, last);
        begin += last - first;
    }
}

CPU_VARIANTS(glu_range)

hr_status glu_cpu(const glu_args *args)
{
    hr_parallel_for(0, args->rows * args->cols, CPU_GRAIN, CPU_BEST(glu_range), (void *)args);
    return HR_OK;
}
