/*
 * linear_cross_entropy_cost.c: how long a GPU takes for the loss of a linear layer in either order.
 * It depends on sizes and on the rates of an architecture alone, so that a plan for a GPU that is not
 * there is the plan on it.
 *
 * A product takes as long as its operations, or as its matrices in memory where that is longer; what
 * lies between products takes as long as its bytes. Launches, and what caches hold from one kernel to
 * the next, are left out.
 */
#include "capi/loss/linear_cross_entropy_call.h"

/* What the maker publishes, without sparsity: 10^12 operations/s with sums in binary32, by the type
 * of the factors, and 10^9 bytes/s. */
typedef struct architecture {
    int32_t capability;
    double half, tf32, single, bandwidth;
} architecture;

static const architecture architectures[] = {
    {75, 65, 8.1, 8.1, 320},          /* T4, which has no TF32: NVIDIA T4 data sheet */
    {80, 312, 156, 19.5, 2039},       /* A100 SXM, 80 GB: NVIDIA A100 data sheet */
    {86, 71, 35.6, 35.6, 936},        /* RTX 3090: NVIDIA Ampere GA102 whitepaper, appendix A */
    {89, 165.2, 82.6, 82.6, 1008},    /* RTX 4090: NVIDIA Ada architecture whitepaper, appendix A */
    {90, 989.4, 494.7, 66.9, 3350},   /* H100 SXM: NVIDIA H100 data sheet, halved */
    {100, 2250, 1100, 75, 7700},      /* B200: NVIDIA HGX B200 data sheet, an eighth, halved */
    {120, 209.5, 104.8, 104.8, 1792}, /* RTX 5090: NVIDIA RTX Blackwell whitepaper, appendix A */
};

/* What is reached of it: large products get 620 to 680 * 10^12 on an H100 whose power is limited. */
#define OF_PRODUCTS 0.65
#define OF_COPIES   0.9

/* A GPU of no row has the rates of the newest architecture before it. */
lce_rates lce_rates_of(int32_t capability, const hr_linear_cross_entropy_config *config)
{
    const architecture *a = architectures;
    for (size_t i = 1; i < sizeof architectures / sizeof *architectures; i++)
        if (architectures[i].capability <= capability)
            a = &architectures[i];
    const double product = config->dtype != HR_F32 ? a->half
                           : config->allow_tf32    ? a->tf32
                                                   : a->single;
    return (lce_rates){product * 1e12 * OF_PRODUCTS, a->bandwidth * 1e9 * OF_COPIES};
}

static double product_seconds(const lce_rates *rates, double operations, double bytes)
{
    const double computed = operations / rates->product, moved = bytes / rates->bandwidth;
    return computed > moved ? computed : moved;
}

double lce_seconds(const lce_sizes *s, uint32_t wanted,
                   const hr_linear_cross_entropy_config *config, const lce_rates *rates)
{
    if (s->capacity == 0)
        return 0.0;
    const double chunks = (double)(s->capacity / s->chunk + (s->capacity % s->chunk != 0));
    const double tiles = (double)(s->classes / s->tile + (s->classes % s->tile != 0));
    /* Of a part: a chunk of rows and a tile of classes. */
    const double rows = (double)s->capacity / chunks, classes = (double)s->classes / tiles;
    const double element = (double)hr_dtype_size(s->computed);
    const double grad = (double)hr_dtype_size(config->grad_dtype);
    const double logits = rows * classes;
    const double hidden = rows * (double)s->features, weight = classes * (double)s->features;
    const double operations = 2.0 * logits * (double)s->features;
    /* Gradients need the logits once more, but for the tile that is still there. */
    const double times = wanted ? 2.0 - 1.0 / tiles : 1.0;
    double seconds =
        times * product_seconds(rates, operations, element * (hidden + weight) + 4.0 * logits);
    double between = 4.0 * logits; /* bytes: logits are read */
    if (wanted)
        between += (4.0 + element) * logits; /* and become gradients */
    if (wanted & HR_LINEAR_CROSS_ENTROPY_HIDDEN) {
        const double sums = 4.0 * hidden * (tiles > 1.0 ? 2.0 : 1.0);
        seconds += product_seconds(rates, operations, element * (logits + weight) + sums);
    }
    if (wanted & HR_LINEAR_CROSS_ENTROPY_WEIGHT) {
        const int in_halves = lce_sums_in_halves(s, config);
        const double written = in_halves ? 4.0 : grad * (chunks > 1.0 ? 2.0 : 1.0);
        seconds +=
            product_seconds(rates, operations, element * (logits + hidden) + written * weight);
        if (in_halves) /* which all chunks but the first read, and all write */
            between += (4.0 + 4.0 * (1.0 - 1.0 / chunks) + 4.0) * weight;
    }
    return chunks * tiles * (seconds + between / rates->bandwidth);
}
