/*
 * mlp_cuda.c: mlp.c on a CUDA device. Returns 77, which means "skipped", if there is none.
 *
 *     cc -std=c99 mlp_cuda.c $(pkg-config --cflags --libs headroom) -lcudart -lm -o mlp_cuda
 */
#define EXAMPLE_CUDA
#include "mlp.c"
