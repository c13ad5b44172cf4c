/*
 * muon_momentum_cpu.c: the CPU loop of Muon's first pass. One parallel region covers the chunks of
 * the whole list. A chunk is computed a tile at a time, which stays in the first-level cache, in the
 * order of the parameter, and then copied to where the update has it, unless that is the same order.
 */
#include "kernels/core/halves_cpu.h"
#include "kernels/optim/muon_matrix_cpu.h"
#include "kernels/optim/muon_momentum.h"
#include "kernels/quant/quantize_blocks_cpu_signed.h"

#define MUON_TILE 512 /* elements: whole blocks of codes */
#define LANES     32  /* interleaved sums */

/* The tensors of one matrix. */
typedef struct muon_part {
    muon_momentum_constants constants;
    const hr_muon_matrix *matrix;
    void *update, *moment;
    const void *grad;
    float *absmax;  /* NULL: moments are numbers */
    int block_size; /* of codes */
    hr_dtype update_dtype, moment_dtype, grad_dtype;
} muon_part;

HR_INLINE void muon_loop(muon_momentum_constants c, const float *restrict grad,
                         float *restrict moment, float *restrict update, int count)
{
    for (int i = 0; i < count; i++) {
        const muon_momentum_values x = muon_momentum_element(c, grad[i], moment[i]);
        hr_store(moment, i, x.moment, HR_F32);
        hr_store(update, i, x.update, HR_F32);
    }
}

/* The sum of the squares of a tile. */
HR_INLINE double muon_squares(const float *restrict x, int count)
{
    float lanes[LANES] = {0};
    int i = 0;
    for (; count - i >= LANES; i += LANES)
        for (int lane = 0; lane < LANES; lane++)
            lanes[lane] += x[i + lane] * x[i + lane];
    for (int lane = 0; lane < count - i; lane++)
        lanes[lane] += x[i + lane] * x[i + lane];
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++)
            lanes[lane] += lanes[lane + width];
    return (double)lanes[0];
}

HR_INLINE int muon_block_of(int count, int j, int size)
{
    return count - j < size ? count - j : size;
}

/* Updates the moments of the elements [i, i + count) of a matrix whose chunk ends at `end`, and writes
 * their update to `update`, whose elements begin at `at`. Returns the sum of its squares. */
HR_INLINE double muon_tile(const muon_part *p, int64_t i, int count, int64_t end, void *update,
                           int64_t at, half_conversions halves)
{
    enum { GRAD, MOMENT, UPDATE, TILES };
    _Alignas(64) float tiles[TILES][MUON_TILE];
    const float *const grad =
        halves_floats(p->grad, i, count, end, p->grad_dtype, tiles[GRAD], halves);
    float *moment = tiles[MOMENT];
    uint8_t *const codes = (uint8_t *)p->moment + i;
    if (p->absmax) {
        cpu_prefetch(p->moment, i, count, end, HR_U8);
        for (int j = 0; j < count; j += p->block_size)
            quant_decode_signed(codes + j, muon_block_of(count, j, p->block_size),
                                p->absmax[(i + j) / p->block_size], moment + j);
    } else {
        moment = halves_floats(p->moment, i, count, end, p->moment_dtype, moment, halves);
    }
    muon_loop(p->constants, grad, moment, tiles[UPDATE], count);
    for (int j = 0; p->absmax && j < count; j += p->block_size)
        p->absmax[(i + j) / p->block_size] =
            quant_encode_signed(moment + j, muon_block_of(count, j, p->block_size), codes + j);
    if (!p->absmax && p->moment_dtype != HR_F32)
        halves_from_tile(p->moment, i, count, p->moment_dtype, moment, halves);
    halves_from_tile(update, at, count, p->update_dtype, tiles[UPDATE], halves);
    return muon_squares(tiles[UPDATE], count);
}

/* The chunk that begins at element i. */
HR_INLINE double muon_run(const muon_part *p, int64_t i, int64_t end, half_conversions halves)
{
    _Alignas(64) float dense[MUON_MOST_CHUNK]; /* of any type */
    const int lies_dense = muon_is_dense(p->matrix);
    double sum = 0.0;
    for (int64_t j = i; j < end; j += MUON_TILE)
        sum += muon_tile(p, j, end - j < MUON_TILE ? (int)(end - j) : MUON_TILE, end,
                         lies_dense ? p->update : dense, lies_dense ? j : j - i, halves);
    if (!lies_dense)
        muon_copy(p->matrix, p->update, i, end - i, dense, p->update_dtype, 1);
    return sum;
}

/* Runs over the chunks whose first element is in [begin, end), with the matrices laid end to end. */
HR_INLINE void muon_momentum_range(void *context, int64_t begin, int64_t end,
                                   half_conversions halves)
{
    const muon_momentum_args *const a = (const muon_momentum_args *)context;
    muon_part part = {0};
    double *sums = a->sums;
    int64_t known = 0; /* matrices before the chunks at `sums` */
    part.constants = muon_momentum_fold(a->config);
    part.block_size = a->absmaxs ? a->config->block_size : 1;
    CPU_FOR_EACH_TENSOR_IN_BLOCKS(a->updates, begin, end, muon_chunk(&a->matrices[k]), k, from, to)
    {
        part.matrix = &a->matrices[k];
        const int64_t chunk = muon_chunk(part.matrix);
        part.update = a->updates->data[k];
        part.update_dtype = a->updates->dtype[k];
        part.moment = a->moments->data[k];
        part.moment_dtype = a->moments->dtype[k];
        part.grad = a->grads->data[k];
        part.grad_dtype = a->grads->dtype[k];
        part.absmax = a->absmaxs ? (float *)a->absmaxs->data[k] : NULL;
        for (; known < k; known++)
            sums += muon_runs(&a->matrices[known], muon_chunk(&a->matrices[known]));
        for (int64_t i = from; i < to; i += chunk)
            sums[i / chunk] = muon_run(&part, i, to - i < chunk ? to : i + chunk, halves);
    }
}

CPU_HALVES_VARIANTS(muon_momentum_range)

hr_status muon_momentum_cpu(const muon_momentum_args *args)
{
    if (step_is_skipped(&args->config->step))
        return HR_OK;
    hr_parallel_for(0, cpu_total(args->updates), CPU_GRAIN, CPU_BEST(muon_momentum_range),
                    (void *)args);
    const double *sums = args->sums;
    for (int64_t k = 0; k < args->updates->count; k++) {
        const int64_t chunks = muon_runs(&args->matrices[k], muon_chunk(&args->matrices[k]));
        double total = 0.0;
        for (int64_t c = 0; c < chunks; c++)
            total += *sums++;
        hr_store(args->squares, k, (float)total, HR_F32);
    }
    return HR_OK;
}
