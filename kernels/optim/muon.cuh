/*
 * muon.cuh: what the grids of both passes of Muon share. A thread block takes a run of consecutive
 * elements of a matrix; or where rows of the parameter are columns of the update, a tile of rows and
 * columns, which goes through shared memory, so that both sides are accessed in runs of memory. A
 * warp takes a span of 256 elements of a run, or of a row of a tile.
 */
#ifndef HR_MUON_CUH
#define HR_MUON_CUH

#include "kernels/core/list.cuh"
#include "kernels/core/pack.cuh"
#include "kernels/core/reduce.cuh"
#include "kernels/optim/muon_matrix.h"

#define THREADS 256
#define WARP    32
#define WARPS   (THREADS / WARP)
#define SPAN    256 /* elements of a warp at a time */
#define GROUP   4   /* of a thread that lie together; a span has two groups of each thread */
#define GROUPS  (SPAN / WARP / GROUP)

static_assert(SPAN == MUON_TILE_COLS, "a span is a row of a tile");
static_assert(CUDA_CHUNK == MUON_CHUNK, "the workspace has a sum for each block");

/* A tile in binary32, with a column to spare, so that the elements of a column are in banks of their
 * own. */
typedef struct muon_turned {
    float rows[MUON_TILE_ROWS][MUON_TILE_COLS + 1];
} muon_turned;

/* Whether a matrix is cut into tiles. Blocks of codes must not go beyond the columns of a tile. */
static inline bool muon_is_tiled(const hr_muon_matrix &m, bool has_codes, int block_size)
{
    return m.transposed && !muon_is_dense(&m) &&
           (!has_codes || (m.cols % SPAN == 0 && block_size <= SPAN));
}

/* Where a thread block's elements are. */
struct muon_block {
    int64_t begin;    /* of a run, or of a tile: its first element in the order of the parameter */
    int64_t row, col; /* of that element */
    int rows, cols;   /* of a tile */
    int count;        /* of a run */
};

template <bool turned>
static __device__ __forceinline__ muon_block muon_block_of(const hr_muon_matrix &m, uint32_t index)
{
    muon_block b;
    if (turned) {
        const int64_t across = muon_parts(m.cols, MUON_TILE_COLS);
        b.row = index / across * MUON_TILE_ROWS;
        b.col = index % across * MUON_TILE_COLS;
        b.begin = b.row * m.cols + b.col;
        b.rows = m.rows - b.row < MUON_TILE_ROWS ? (int)(m.rows - b.row) : MUON_TILE_ROWS;
        b.cols = m.cols - b.col < MUON_TILE_COLS ? (int)(m.cols - b.col) : MUON_TILE_COLS;
        b.count = 0;
    } else {
        const int64_t numel = m.rows * m.cols;
        b.begin = (int64_t)index * CUDA_CHUNK;
        b.row = b.begin / m.cols;
        b.col = b.begin % m.cols;
        b.rows = b.cols = 0;
        b.count = numel - b.begin < CUDA_CHUNK ? (int)(numel - b.begin) : CUDA_CHUNK;
    }
    return b;
}

/* The row of element i of a run, and where the update has it. */
static __device__ __forceinline__ int64_t muon_row_of(const hr_muon_matrix &m, const muon_block &b,
                                                      int i)
{
    const int64_t x = b.col + i;
    return b.row +
           (m.cols < INT32_MAX / 2 ? (int64_t)((uint32_t)x / (uint32_t)m.cols) : x / m.cols);
}

static __device__ __forceinline__ int64_t muon_offset_of(const hr_muon_matrix &m,
                                                         const muon_block &b, int i)
{
    const int64_t row = muon_row_of(m, b, i);
    return muon_offset(&m, row, b.begin + i - row * m.cols);
}

/* Calls span(first, left, row) for the spans of the block that are the warp's: from element `first`
 * after the beginning, with `left` elements in all; `row` of a tile. */
template <bool turned, typename Span>
static __device__ __forceinline__ void muon_spans(const muon_block &b, int64_t cols, Span span)
{
    const int warp = (int)threadIdx.x / WARP;
    if (turned) {
#pragma unroll 1
        for (int row = warp; row < b.rows; row += WARPS)
            span(row * cols, b.cols, row);
    } else {
#pragma unroll 1
        for (int first = warp * SPAN; first < b.count; first += WARPS * SPAN)
            span((int64_t)first, b.count - first, 0);
    }
}

#endif
