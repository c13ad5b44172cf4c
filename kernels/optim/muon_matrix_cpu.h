/*
 * muon_matrix_cpu.h: copies elements that follow one another in the order of a parameter to where an
 * update has them, and back. A block of rows and columns goes through the first-level cache, so that
 * both sides are read and written several elements at a time.
 */
#ifndef HR_MUON_MATRIX_CPU_H
#define HR_MUON_MATRIX_CPU_H

#include "kernels/core/cpu.h"
#include "kernels/optim/muon_matrix.h"

/* A block is 16 rows and a cache line of columns. */
#define MUON_BLOCK_ROWS 16
#define MUON_LINE       64

/* Elements at a place of the matrix: of 2 or of 4 bytes. */
#define MUON_COPIES(NAME, WORD)                                                                  \
    /* Whole rows [row, end), of which `dense` holds the first element. */                       \
    HR_INLINE void muon_turn_##NAME(WORD *restrict matrix, int64_t stride, WORD *restrict dense, \
                                    int64_t cols, int64_t row, int64_t end, int to_matrix)       \
    {                                                                                            \
        enum { COLS = MUON_LINE / sizeof(WORD) };                                                \
        for (int64_t r = row; r < end; r += MUON_BLOCK_ROWS)                                     \
            for (int64_t c = 0; c < cols; c += COLS) {                                           \
                _Alignas(64) WORD block[MUON_BLOCK_ROWS][COLS];                                  \
                const int rows = end - r < MUON_BLOCK_ROWS ? (int)(end - r) : MUON_BLOCK_ROWS;   \
                const int width = cols - c < COLS ? (int)(cols - c) : (int)COLS;                 \
                WORD *const from = dense + (r - row) * cols + c;                                 \
                WORD *const to = matrix + c * stride + r;                                        \
                for (int i = 0; to_matrix && i < rows; i++)                                      \
                    memcpy(block[i], from + i * cols, (size_t)width * sizeof(WORD));             \
                for (int j = 0; j < width; j++)                                                  \
                    if (to_matrix && rows == MUON_BLOCK_ROWS)                                    \
                        for (int i = 0; i < MUON_BLOCK_ROWS; i++)                                \
                            to[j * stride + i] = block[i][j];                                    \
                    else if (to_matrix)                                                          \
                        for (int i = 0; i < rows; i++)                                           \
                            to[j * stride + i] = block[i][j];                                    \
                    else                                                                         \
                        for (int i = 0; i < rows; i++)                                           \
                            block[i][j] = to[j * stride + i];                                    \
                for (int i = 0; !to_matrix && i < rows; i++)                                     \
                    memcpy(from + i * cols, block[i], (size_t)width * sizeof(WORD));             \
            }                                                                                    \
    }                                                                                            \
    /* A part of a row that becomes a column. */                                                 \
    HR_INLINE void muon_turn_part_##NAME(WORD *restrict matrix, int64_t stride,                  \
                                         WORD *restrict dense, int64_t row, int64_t col,         \
                                         int64_t end, int to_matrix)                             \
    {                                                                                            \
        for (int64_t c = col; c < end; c++)                                                      \
            if (to_matrix)                                                                       \
                matrix[c * stride + row] = dense[c - col];                                       \
            else                                                                                 \
                dense[c - col] = matrix[c * stride + row];                                       \
    }                                                                                            \
    HR_INLINE void muon_copy_##NAME(const hr_muon_matrix *m, WORD *restrict matrix, int64_t i,   \
                                    int64_t count, WORD *restrict dense, int to_matrix)          \
    {                                                                                            \
        while (count > 0) {                                                                      \
            const int64_t row = i / m->cols, col = i % m->cols;                                  \
            int64_t n = m->cols - col < count ? m->cols - col : count;                           \
            if (m->transposed && n == m->cols) {                                                 \
                n = count / m->cols * m->cols;                                                   \
                muon_turn_##NAME(matrix, m->stride, dense, m->cols, row, row + n / m->cols,      \
                                 to_matrix);                                                     \
            } else if (m->transposed) {                                                          \
                muon_turn_part_##NAME(matrix, m->stride, dense, row, col, col + n, to_matrix);   \
            } else {                                                                             \
                WORD *const line = matrix + row * m->stride + col;                               \
                memcpy(to_matrix ? line : dense, to_matrix ? dense : line,                       \
                       (size_t)n * sizeof(WORD));                                                \
            }                                                                                    \
            i += n, dense += n, count -= n;                                                      \
        }                                                                                        \
    }
MUON_COPIES(halves, uint16_t)
MUON_COPIES(words, uint32_t)

/* Copies the elements [i, i + count) of a matrix, in the order of the parameter, from `dense` to where
 * the update has them, or from there to `dense`. */
HR_INLINE void muon_copy(const hr_muon_matrix *m, void *matrix, int64_t i, int64_t count,
                         void *dense, hr_dtype dtype, int to_matrix)
{
    if (dtype == HR_F32)
        muon_copy_words(m, (uint32_t *)matrix, i, count, (uint32_t *)dense, to_matrix);
    else
        muon_copy_halves(m, (uint16_t *)matrix, i, count, (uint16_t *)dense, to_matrix);
}

#endif
