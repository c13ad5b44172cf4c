/*
 * quantize_blocks_cpu_signed.h: blocks of codes of the signed map to numbers and back, for loops that work on a
 * tile of binary32 in between.
 */
#ifndef HR_QUANTIZE_BLOCKS_CPU_SIGNED_H
#define HR_QUANTIZE_BLOCKS_CPU_SIGNED_H

#include "kernels/quant/quantize_blocks.h"

/* The values of `count` codes, without their scale. */
void quant_values_signed(const uint8_t *codes, int count, float *x);

/* The numbers of `count` codes of a block. */
void quant_decode_signed(const uint8_t *codes, int count, float absmax, float *x);

/* Writes the codes of a block of `count` numbers, and returns its absmax. */
float quant_encode_signed(const float *x, int count, uint8_t *codes);

/* The same, given the largest quant_magnitude() of the block. */
float quant_codes_signed(const float *x, int count, uint32_t largest, uint8_t *codes);

#endif
