/*
 * gemm_cpu.c: the lent product, or the blocked loop. A task computes tiles of C, those below each
 * other together: it packs the parts of A and B that it needs as binary32, KC of the k terms at a
 * time, into slivers that the innermost loop reads from end to end, and keeps the sums in the
 * caches. Rows of binary32 of A are read where they lie. An element's terms are added in an order
 * that depends on k alone, each with one rounding: so neither the number of threads nor the shape of
 * the innermost block, which follows the instruction set, changes a bit.
 */
#include <pthread.h>

#include "kernels/core/rows_cpu.h"
#include "kernels/nn/gemm.h"

#define SIDE  128 /* of a tile of C */
#define STACK 4   /* tiles below each other, at most, for which B is packed once */
#define KC    256

/* Of a block whose rows of A may be read where they lie. The compiler leaves sums of fewer in memory
 * then. */
#define ROWS_READ 8

#define LINE 16 /* binary32 of a cache line */

/* Where the sliver begins that holds column s of a packed factor: with a line to spare behind each,
 * or those of KC terms would lie a power of two apart, and share few places of the cache. */
HR_INLINE int sliver_at(int s, int width, int kc)
{
    return s / width * (width * kc + LINE);
}

/* At multiples of a cache line: a vector across two lines takes twice as long to load. */
typedef struct gemm_tiles {
    _Alignas(64) float a[SIDE * KC + SIDE / 4 * LINE]; /* slivers of MR rows, [k][MR] each */
    _Alignas(64) float b[SIDE * KC + SIDE / 4 * LINE]; /* slivers of NR columns, [k][NR] each */
    _Alignas(64) float sums[STACK * SIDE * SIDE];
} gemm_tiles;

/* Packs `count` columns of rows [k0, k0 + kc) of x. Columns that a sliver lacks are zeros. */
HR_INLINE void pack_columns(float *restrict packed, const hr_rows *x, int64_t k0, int64_t j0,
                            int kc, int count, int width, hr_dtype dtype)
{
    float buffer[SIDE];
    for (int p = 0; p < kc; p++) {
        const float *const row = tile_in(buffer, row_at(x, k0 + p, dtype), j0, count, dtype);
        for (int s = 0; s < count; s += width) {
            float *const restrict to = packed + sliver_at(s, width, kc) + p * width;
            if (count - s >= width)
                for (int j = 0; j < width; j++)
                    to[j] = row[s + j];
            else
                for (int j = 0; j < width; j++)
                    to[j] = j < count - s ? row[s + j] : 0.0f;
        }
    }
}

/* Packs `count` rows from j0 on, columns [k0, k0 + kc), of x: the rows become columns. */
HR_INLINE void pack_rows(float *restrict packed, const hr_rows *x, int64_t k0, int64_t j0, int kc,
                         int count, int width, hr_dtype dtype)
{
    enum { ROWS = 4 };
    float buffers[ROWS][KC];
    static const float zeros[KC];
    for (int s = 0; s < count; s += ROWS) {
        const float *rows[ROWS];
        for (int j = 0; j < ROWS; j++)
            rows[j] = s + j < count
                          ? tile_in(buffers[j], row_at(x, j0 + s + j, dtype), k0, kc, dtype)
                          : zeros;
        float *const restrict to = packed + sliver_at(s, width, kc) + s % width;
        const float *const r0 = rows[0], *const r1 = rows[1], *const r2 = rows[2],
                           *const r3 = rows[3];
        for (int p = 0; p < kc; p++) {
            to[p * width] = r0[p];
            to[p * width + 1] = r1[p];
            to[p * width + 2] = r2[p];
            to[p * width + 3] = r3[p];
        }
    }
    for (int j = (count + ROWS - 1) / ROWS * ROWS; j % width != 0; j++)
        for (int p = 0; p < kc; p++)
            packed[sliver_at(j, width, kc) + p * width + j % width] = 0.0f;
}

/* Rows of A that the innermost loop reads: element p of row i is data[i * row + p * term]. */
typedef struct gemm_side {
    const float *data;
    int64_t row, term;
} gemm_side;

/* Adds the products of kc terms to ROWS x COLS sums. The size of the block must be a constant of the
 * source, or the compiler leaves it in memory. */
#define MICRO(ROWS, COLS)                                                                   \
    HR_INLINE void micro_##ROWS##x##COLS(float *restrict sums, gemm_side a,                 \
                                         const float *restrict b, int kc)                   \
    {                                                                                       \
        float block[ROWS][COLS];                                                            \
        for (int i = 0; i < ROWS; i++)                                                      \
            for (int j = 0; j < COLS; j++)                                                  \
                block[i][j] = 0.0f;                                                         \
        for (int p = 0; p < kc; p++)                                                        \
            for (int i = 0; i < ROWS; i++)                                                  \
                for (int j = 0; j < COLS; j++)                                              \
                    block[i][j] =                                                           \
                        fmaf(a.data[i * a.row + p * a.term], b[p * COLS + j], block[i][j]); \
        for (int i = 0; i < ROWS; i++)                                                      \
            for (int j = 0; j < COLS; j++)                                                  \
                sums[i * SIDE + j] += block[i][j];                                          \
    }
MICRO(4, 8)
MICRO(4, 16)
MICRO(8, 32)

typedef void (*gemm_micro)(float *, gemm_side, const float *, int);

/* How many tiles a product has. */
typedef struct gemm_grid {
    int64_t rows, cols;
} gemm_grid;

HR_INLINE gemm_grid grid_of(const gemm_args *a)
{
    return (gemm_grid){(a->m + SIDE - 1) / SIDE, (a->n + SIDE - 1) / SIDE};
}

HR_INLINE int part(int64_t begin, int64_t end, int side)
{
    return end - begin < side ? (int)(end - begin) : side;
}

/* The matrix `index` of a batch. */
HR_INLINE hr_rows in_batch(const hr_rows *x, int64_t index, int64_t batch_stride, hr_dtype dtype)
{
    return (hr_rows){(char *)x->data + index * batch_stride * hr_element_size(dtype), x->stride};
}

/* Adds kc terms from k0 on to the sums of a tile at [i0, j0) of [rows, cols] elements, for which B is
 * packed. */
HR_INLINE void add_terms(gemm_tiles *tiles, float *sums, const hr_rows *a, const gemm_args *args,
                         int64_t k0, int64_t i0, int kc, int rows, int cols, const int MR,
                         const int NR, const gemm_micro micro)
{
    const hr_gemm_config *const config = &args->config;
    const float *const lying = (const float *)a->data + i0 * a->stride + k0;
    const int is_read =
        MR == ROWS_READ && config->dtype == HR_F32 && !config->transpose_a && rows % MR == 0;
    if (config->transpose_a)
        pack_columns(tiles->a, a, k0, i0, kc, rows, MR, config->dtype);
    else if (!is_read)
        pack_rows(tiles->a, a, k0, i0, kc, rows, MR, config->dtype);
    for (int j = 0; j < cols; j += NR)
        for (int i = 0; i < rows; i += MR) {
            float *const to = sums + i * SIDE + j;
            const float *const b = tiles->b + sliver_at(j, NR, kc);
            if (is_read)
                micro(to, (gemm_side){lying + i * a->stride, a->stride, 1}, b, kc);
            else
                micro(to, (gemm_side){tiles->a + sliver_at(i, MR, kc), 1, MR}, b, kc);
        }
}

/* Multiplies, for tiles below each other, the first at [i0, j0), of [rows, cols] elements in all. */
HR_INLINE void sums_of_tiles(gemm_tiles *tiles, const hr_rows *a, const hr_rows *b,
                             const gemm_args *args, int64_t i0, int64_t j0, int rows, int cols,
                             const int MR, const int NR, const gemm_micro micro)
{
    const hr_gemm_config *const config = &args->config;
    memset(tiles->sums, 0, sizeof(float) * SIDE * (size_t)cpu_round_up(rows, MR));
    for (int64_t k0 = 0; k0 < args->k; k0 += KC) {
        const int kc = part(k0, args->k, KC);
        if (config->transpose_b)
            pack_rows(tiles->b, b, k0, j0, kc, cols, NR, config->dtype);
        else
            pack_columns(tiles->b, b, k0, j0, kc, cols, NR, config->dtype);
        for (int i = 0; i < rows; i += SIDE)
            add_terms(tiles, tiles->sums + i * SIDE, a, args, k0, i0 + i, kc, part(i, rows, SIDE),
                      cols, MR, NR, micro);
    }
}

/* Turns a row of sums into a row of C, whose first element is at j0. */
HR_INLINE void finish_row(const gemm_args *args, const hr_rows *c, const hr_rows *addend,
                          const float *sums, int64_t i, int64_t j0, int cols)
{
    const hr_gemm_config *const config = &args->config;
    const hr_dtype dtype = config->out_dtype;
    const float alpha = (float)config->alpha, beta = (float)config->beta;
    void *const row = row_at(c, i, dtype);
    float before[SIDE], bias_in[SIDE], out[SIDE];
    const float *const old =
        beta != 0.0f ? tile_in(before, row_at(addend, i, dtype), j0, cols, dtype) : sums;
    const float *const bias = args->bias ? tile_in(bias_in, args->bias, j0, cols, dtype) : NULL;
    if (bias)
        for (int j = 0; j < cols; j++)
            out[j] = gemm_value(sums[j], alpha, beta, old[j], bias[j]);
    else
        for (int j = 0; j < cols; j++)
            out[j] = gemm_value(sums[j], alpha, beta, old[j], GEMM_NO_BIAS);
    if (config->epilogue == HR_GEMM_GELU) {
        if (config->aux.data)
            tile_out(row_at(&config->aux, i, dtype), out, j0, cols, dtype);
        for (int j = 0; j < cols; j++)
            out[j] = gemm_gelu(out[j]);
    } else if (config->epilogue == HR_GEMM_DGELU) {
        const float *const aux = tile_in(before, row_at(&config->aux, i, dtype), j0, cols, dtype);
        for (int j = 0; j < cols; j++)
            out[j] *= gemm_gelu_slope(aux[j]);
    }
    tile_out(row, out, j0, cols, dtype);
}

HR_INLINE void multiply_tiles(void *context, int64_t begin, int64_t end, const int MR, const int NR,
                              const gemm_micro micro)
{
    const gemm_args *const args = (const gemm_args *)context;
    const hr_gemm_config *const config = &args->config;
    const gemm_grid grid = grid_of(args);
    gemm_tiles tiles;
    for (int64_t t = begin, count; t < end; t += count) {
        const int64_t index = t / (grid.rows * grid.cols), i = t % grid.rows;
        const int64_t i0 = i * SIDE, j0 = t / grid.rows % grid.cols * SIDE;
        count = part(i, grid.rows, STACK);
        count = part(t, end, (int)count);
        const int rows = part(i0, args->m, (int)count * SIDE), cols = part(j0, args->n, SIDE);
        const hr_rows a = in_batch(&args->a, index, config->batch_stride_a, config->dtype);
        const hr_rows b = in_batch(&args->b, index, config->batch_stride_b, config->dtype);
        const hr_rows c = in_batch(&args->c, index, config->batch_stride_c, config->out_dtype);
        const hr_rows addend =
            config->addend.data
                ? in_batch(&config->addend, index, config->batch_stride_c, config->out_dtype)
                : c;
        sums_of_tiles(&tiles, &a, &b, args, i0, j0, rows, cols, MR, NR, micro);
        for (int row = 0; row < rows; row++)
            finish_row(args, &c, &addend, tiles.sums + row * SIDE, i0 + row, j0, cols);
    }
}

/* Blocks that the registers of each instruction set hold: 16 of its vectors, or 8. */
static void multiply_baseline(void *context, int64_t begin, int64_t end)
{
    multiply_tiles(context, begin, end, 4, 8, micro_4x8);
}
#if defined(__x86_64__) && defined(__GNUC__)
CPU_AVX2 static void multiply_avx2(void *context, int64_t begin, int64_t end)
{
    multiply_tiles(context, begin, end, 4, 16, micro_4x16);
}
CPU_AVX512 static void multiply_avx512(void *context, int64_t begin, int64_t end)
{
    multiply_tiles(context, begin, end, 8, 32, micro_8x32);
}
static const hr_range_fn multiply_variants[] = {multiply_baseline, multiply_avx2, multiply_avx512,
                                                multiply_avx512};
#else
static const hr_range_fn multiply_variants[] = {multiply_baseline};
#endif

/* ---- The lent product ------------------------------------------------------------------------ */

typedef struct lent_product {
    hr_gemm_fn gemm;
    void *context;
} lent_product;

static lent_product lent;
static pthread_mutex_t lent_mutex = PTHREAD_MUTEX_INITIALIZER;

void gemm_lend(hr_gemm_fn gemm, void *context)
{
    pthread_mutex_lock(&lent_mutex);
    lent = (lent_product){gemm, context};
    pthread_mutex_unlock(&lent_mutex);
}

static lent_product lent_now(void)
{
    pthread_mutex_lock(&lent_mutex);
    const lent_product now = lent;
    pthread_mutex_unlock(&lent_mutex);
    return now;
}

/* Whether the host computed the product. Sums of a factor are then still to be written. */
static hr_status ask_host(const gemm_args *args)
{
    hr_gemm_config config = args->config;
    if (config.epilogue == HR_GEMM_BGRADA || config.epilogue == HR_GEMM_BGRADB) {
        config.epilogue = HR_GEMM_NONE;
        config.bias_gradient = NULL;
    }
    const lent_product now = lent_now();
    if (!now.gemm || config.epilogue != HR_GEMM_NONE)
        return HR_UNSUPPORTED;
    return now.gemm(now.context, &args->c, &args->a, &args->b, args->bias, args->m, args->n,
                    args->k, &config);
}

hr_status gemm_workspace_cpu(size_t *bytes)
{
    *bytes = 0;
    return HR_OK;
}

hr_status gemm_cpu(const gemm_args *args)
{
    const gemm_grid grid = grid_of(args);
    const int64_t tiles = grid.rows * grid.cols * args->config.batch;
    const hr_status status = tiles > 0 && args->k > 0 ? ask_host(args) : HR_UNSUPPORTED;
    if (status != HR_OK && status != HR_UNSUPPORTED)
        return status;
    if (status == HR_UNSUPPORTED)
        hr_parallel_for(0, tiles, 1, CPU_BEST(multiply), (void *)args);
    if (!args->config.bias_gradient)
        return HR_OK;
    const column_sums sums = gemm_bias_gradient(args);
    return sum_columns_cpu(&sums);
}
