/* newton_schulz_cpu.c: the loops of orthogonalization that are not products. */
#include "kernels/core/halves_cpu.h"
#include "kernels/optim/newton_schulz.h"

#define TILE 512 /* elements */

HR_INLINE void scale_range(void *context, int64_t begin, int64_t end, half_conversions halves)
{
    const newton_schulz_scale *const a = (const newton_schulz_scale *)context;
    for (int64_t i = begin, to; i < end; i = to) {
        const int64_t index = i / a->numel, stop = (index + 1) * a->numel;
        to = stop < end ? stop : end;
        const float factor = newton_schulz_factor(a->squares[index], a->eps);
        for (int64_t j = i; j < to; j += TILE) {
            _Alignas(64) float x[TILE];
            const int count = to - j < TILE ? (int)(to - j) : TILE;
            halves_to_tile(a->in, j, count, a->dtype, x, halves);
            for (int e = 0; e < count; e++)
                hr_store(x, e, x[e] * factor, HR_F32);
            halves_from_tile(a->out, j, count, a->dtype, x, halves);
        }
    }
}

CPU_HALVES_VARIANTS(scale_range)

hr_status newton_schulz_scale_cpu(const newton_schulz_scale *args)
{
    hr_parallel_for(0, args->batch * args->numel, CPU_GRAIN, CPU_BEST(scale_range), (void *)args);
    return HR_OK;
}

/* Over the rows of all matrices. */
static void shift_range(void *context, int64_t begin, int64_t end)
{
    const newton_schulz_shift *const a = (const newton_schulz_shift *)context;
    const int64_t element = hr_element_size(a->dtype);
    for (int64_t row = begin; row < end; row++) {
        const int64_t i = row * a->m + row % a->m;
        memcpy((char *)a->out + row * a->m * element, (const char *)a->in + row * a->m * element,
               (size_t)(a->m * element));
        hr_store(a->out, i, hr_load(a->in, i, a->dtype) + a->a, a->dtype);
    }
}

hr_status newton_schulz_shift_cpu(const newton_schulz_shift *args)
{
    hr_parallel_for(0, args->batch * args->m, CPU_GRAIN / args->m + 1, shift_range, (void *)args);
    return HR_OK;
}

/* ---- Halves of symmetric matrices ------------------------------------------------------------ */

#define SIDE 32 /* of a tile, which the first-level cache holds; blocks have several */

/* Rows [row, row + rows) of a matrix, from column `first` on, from what is below the diagonal. */
#define MIRROR(NAME, WORD)                                                              \
    static void mirror_##NAME(WORD *x, int64_t m, int64_t row, int rows, int64_t first) \
    {                                                                                   \
        for (int64_t col = first; col < m; col += SIDE) {                               \
            WORD tile[SIDE][SIDE];                                                      \
            const int cols = m - col < SIDE ? (int)(m - col) : SIDE;                    \
            for (int j = 0; j < cols; j++)                                              \
                for (int i = 0; i < rows; i++)                                          \
                    tile[i][j] = x[(col + j) * m + row + i];                            \
            for (int i = 0; i < rows; i++)                                              \
                memcpy(x + (row + i) * m + col, tile[i], (size_t)cols * sizeof(WORD));  \
        }                                                                               \
    }
MIRROR(halves, uint16_t)
MIRROR(words, uint32_t)

/* Over the strips of SIDE rows of all matrices. */
static void mirror_range(void *context, int64_t begin, int64_t end)
{
    const newton_schulz_mirror *const a = (const newton_schulz_mirror *)context;
    const int64_t strips = (a->m + SIDE - 1) / SIDE;
    for (int64_t strip = begin; strip < end; strip++) {
        const int64_t offset = strip / strips * a->m * a->m, row = strip % strips * SIDE;
        const int64_t first = (row / a->block + 1) * a->block;
        const int rows = a->m - row < SIDE ? (int)(a->m - row) : SIDE;
        if (a->dtype == HR_F32)
            mirror_words((uint32_t *)a->x + offset, a->m, row, rows, first);
        else
            mirror_halves((uint16_t *)a->x + offset, a->m, row, rows, first);
    }
}

hr_status newton_schulz_mirror_cpu(const newton_schulz_mirror *args)
{
    const int64_t strips = (args->m + SIDE - 1) / SIDE * args->batch;
    hr_parallel_for(0, strips, CPU_GRAIN / (SIDE * args->m) + 1, mirror_range, (void *)args);
    return HR_OK;
}
