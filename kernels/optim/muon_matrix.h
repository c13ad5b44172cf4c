/*
 * muon_matrix.h: where the elements of an update of Muon lie: see hr_muon_matrix in headroom.h.
 * Gradients, moments and params are dense; an update is a matrix of a batch of products, whose rows
 * may be the columns of the parameter.
 */
#ifndef HR_MUON_MATRIX_H
#define HR_MUON_MATRIX_H

#include "kernels/core/dtype.h"

/* Whether the elements of the update lie together in the order of the parameter's. */
HR_INLINE int muon_is_dense(const hr_muon_matrix *m)
{
    const int64_t lines = m->transposed ? m->cols : m->rows;
    const int64_t length = m->transposed ? m->rows : m->cols;
    return (!m->transposed || m->rows <= 1 || m->cols <= 1) && (lines <= 1 || m->stride == length);
}

/* The offset of element (row, col) of an update. */
HR_INLINE int64_t muon_offset(const hr_muon_matrix *m, int64_t row, int64_t col)
{
    return m->transposed ? col * m->stride + row : row * m->stride + col;
}

/* ---- Sums ------------------------------------------------------------------------------------ */

/* A chunk is the elements of a matrix whose squares are added to one number. On the CPU it is a run
 * of elements, longer where these are rows that become columns, so that a column gets several
 * elements at a time. On CUDA it is a run or a tile. */
#define MUON_CHUNK      16384
#define MUON_MOST_CHUNK 65536
#define MUON_TILE_ROWS  32
#define MUON_TILE_COLS  256

HR_INLINE int64_t muon_chunk(const hr_muon_matrix *m)
{
    const int64_t most = MUON_MOST_CHUNK / MUON_CHUNK;
    const int64_t chunks = m->cols >= MUON_CHUNK ? most : m->cols * 16 / MUON_CHUNK;
    if (!m->transposed || chunks < 1)
        return MUON_CHUNK;
    return MUON_CHUNK * (chunks < most ? chunks : most);
}

HR_INLINE int64_t muon_parts(int64_t size, int64_t part)
{
    return size / part + (size % part != 0);
}

HR_INLINE int64_t muon_runs(const hr_muon_matrix *m, int64_t chunk)
{
    return muon_parts(m->rows * m->cols, chunk);
}

HR_INLINE int64_t muon_tiles(const hr_muon_matrix *m)
{
    return muon_parts(m->rows, MUON_TILE_ROWS) * muon_parts(m->cols, MUON_TILE_COLS);
}

/* The most chunks of a matrix on any device. */
HR_INLINE int64_t muon_most_chunks(const hr_muon_matrix *m)
{
    const int64_t runs = muon_runs(m, MUON_CHUNK), tiles = muon_tiles(m);
    return runs > tiles ? runs : tiles;
}

#endif
