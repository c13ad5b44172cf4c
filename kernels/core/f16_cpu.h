/*
 * f16_cpu.h: f16 to binary32 and back, many elements at a time. Each gives the bits of hr_load() and
 * hr_store() in dtype.h, but for the payload of a NaN that is loaded. Compilers turn those into
 * eight instructions and more a vector, where x86 has one: so a loop over f16 is a loop over tiles
 * of binary32, between calls of these.
 */
#ifndef HR_F16_CPU_H
#define HR_F16_CPU_H

#include "kernels/core/cpu.h"

#define F16_TILE 256 /* elements: four tiles and more fit in the first-level cache */

void f16_load(float *tile, const void *base, int64_t i, int count);

/* Every NaN of the tile must be the one that hr_store() writes. */
void f16_store(void *base, int64_t i, const float *tile, int count);

#endif
