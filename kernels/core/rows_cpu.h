/*
 * rows_cpu.h: what loops over matrices of rows share on the CPU. A row is computed on in tiles: a
 * tile is converted to binary32, computed on, and converted back, so that the computation is
 * compiled once for all dtypes, and outputs that are also inputs need no other loop.
 */
#ifndef HR_ROWS_CPU_H
#define HR_ROWS_CPU_H

#include "kernels/core/cpu.h"

#define TILE  1024 /* elements */
#define LANES 32   /* interleaved sums, so that additions need not wait for each other */

HR_INLINE void *row_at(const hr_rows *rows, int64_t row, hr_dtype dtype)
{
    return (char *)rows->data + row * rows->stride * (dtype == HR_F32 ? 4 : 2);
}

/* Elements [begin, end) of a row of bf16 or f16, into a tile; and of a tile into a row of any type.
 * Neither is inlined: the conversions are long, and are compiled once for all ops. */
void rows_load(float *tile, const void *row, int64_t begin, int64_t end, hr_dtype dtype);
void rows_store(void *row, const float *tile, int64_t begin, int64_t end, hr_dtype dtype);

/* Results of as many bytes, in rows of as many columns, are written past the caches: they would not
 * stay there until they are read, and a core would first read each line of memory that it writes.
 * Shorter rows gain nothing, because a core then turns from reads to writes too often. */
#define STREAMED_BYTES (16 << 20)
#define STREAMED_COLS  4096

/* Whether a result is streamed. `in` is what it may take the place of. */
HR_INLINE int rows_are_streamed(const hr_rows *out, const hr_rows *in, int64_t rows, int64_t cols,
                                hr_dtype dtype)
{
    return dtype == HR_F32 && cols >= STREAMED_COLS && rows * cols * 4 >= STREAMED_BYTES &&
           out->data && out->data != in->data &&
           ((uintptr_t)out->data | (uintptr_t)(out->stride * 4)) % 64 == 0;
}

/* Writes a tile of `n` elements past the caches, to an address that is a multiple of 64. A thread that
 * does so calls rows_streamed() before others read. */
void rows_stream(float *to, const float *tile, int64_t n);
void rows_streamed(void);

/* Asks for the tile after that at j0, of this row or of the next, so that it comes from memory while
 * this one is computed on. */
HR_INLINE void tile_prefetch(const void *row, int64_t j0, hr_dtype dtype)
{
    const int size = dtype == HR_F32 ? 4 : 2;
    const char *const next = (const char *)row + (j0 + TILE) * size;
    for (int byte = 0; byte < TILE * size; byte += 64)
        __builtin_prefetch(next + byte);
}

/* A tile of a row as binary32: the row itself if that is its type, else in `buffer`. */
HR_INLINE const float *tile_in(float *restrict buffer, const void *row, int64_t j0, int n,
                               hr_dtype dtype)
{
    if (dtype == HR_F32)
        return (const float *)row + j0;
    rows_load(buffer, row, j0, j0 + n, dtype);
    return buffer;
}

HR_INLINE void tile_out(void *restrict row, const float *restrict tile, int64_t j0, int n,
                        hr_dtype dtype)
{
    rows_store(row, tile, j0, j0 + n, dtype);
}

/* Adds LANES interleaved sums as a tree. */
HR_INLINE double lanes_total(float *lanes)
{
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++)
            lanes[lane] += lanes[lane + width];
    return lanes[0];
}

/* Rows per task: whole blocks of `block` rows, of CPU_GRAIN elements or more. */
HR_INLINE int64_t rows_per_task(int64_t cols, int64_t block)
{
    return cpu_round_up(cols < CPU_GRAIN ? CPU_GRAIN / cols : 1, block);
}

#endif
