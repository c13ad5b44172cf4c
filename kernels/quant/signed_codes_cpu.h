/*
 * signed_codes_cpu.h: blocks of codes of the signed map to numbers and back, for loops that work on a
 * tile of binary32 in between.
 */
#ifndef HR_SIGNED_CODES_CPU_H
#define HR_SIGNED_CODES_CPU_H

#include "kernels/quant/quantize_blocks.h"

/* The numbers of `count` codes of a block. */
void signed_codes_decode(const uint8_t *codes, int count, float absmax, float *x);

/* Writes the codes of a block of `count` numbers, and returns its absmax. */
float signed_codes_encode(const float *x, int count, uint8_t *codes);

#endif
