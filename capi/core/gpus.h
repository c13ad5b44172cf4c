/*
 * gpus.h: what makers of GPUs publish of them, the one table of it: costs are computed from it here,
 * and benchmarks/instructions/gpus.py reads its lines.
 */
#ifndef HR_GPUS_H
#define HR_GPUS_H

#include <stdint.h>

/* Rates without sparsity: 10^12 operations/s of products by the type of their factors, with sums in
 * binary32, and 10^9 bytes/s of the memory. */
typedef struct gpu_rates {
    const char *name;
    int32_t capability;
    double half, tf32, single, bandwidth;
} gpu_rates;

/* In the order of their capability; of several, the last stands for all of it. A T4 has no TF32. */
static const gpu_rates gpus[] = {
    {"T4", 75, 65, 8.1, 8.1, 320},             /* NVIDIA T4 data sheet */
    {"A100", 80, 312, 156, 19.5, 2039},        /* NVIDIA A100 data sheet, SXM 80 GB */
    {"RTX 3090", 86, 71, 35.6, 35.6, 936},     /* NVIDIA Ampere GA102 whitepaper, appendix A */
    {"RTX 4090", 89, 165.2, 82.6, 82.6, 1008}, /* NVIDIA Ada architecture whitepaper, appendix A */
    {"H200", 90, 989.5, 494.5, 67, 4800},      /* NVIDIA H200 data sheet, SXM, halved */
    {"H100", 90, 989.5, 494.5, 67, 3350},      /* NVIDIA H100 data sheet, SXM, halved */
    {"B200", 100, 2250, 1100, 75, 7700},       /* NVIDIA HGX B200 data sheet, an eighth, halved */
    {"RTX 5090", 120, 209.5, 104.8, 104.8, 1792}, /* NVIDIA RTX Blackwell whitepaper, appendix A */
};

/* What is reached of it: large products get 620 to 680 * 10^12 on an H100 whose power is limited. */
#define GPU_OF_PRODUCTS 0.65
#define GPU_OF_COPIES   0.9

#endif
