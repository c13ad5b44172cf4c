/* quantize_matrix_cuda.cu: the grids of hr_quantize_matrix and hr_dequantize_matrix. */
#include "kernels/core/cuda.cuh"
#include "kernels/quant/quantize_matrix.h"
