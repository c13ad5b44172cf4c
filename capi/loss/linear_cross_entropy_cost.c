/*
 * linear_cross_entropy_cost.c: how long a GPU takes for the loss of a linear layer in either order.
 * It depends on sizes and on the rates of an architecture alone, so that a plan for a GPU that is not
 * there is the plan on it.
 *
 * A product takes as long as its operations, or as its matrices in memory where that is longer; what
 * lies between products takes as long as its bytes. Launches, and what caches hold from one kernel to
 * the next, are left out.
 */
#include "capi/core/gpus.h"
#include "capi/loss/linear_cross_entropy_call.h"

/* A GPU of no row has the rates of the newest architecture before it. */
lce_rates lce_rates_of(int32_t capability, const hr_linear_cross_entropy_config *config)
{
    const gpu_rates *gpu = gpus;
    for (size_t i = 1; i < sizeof gpus / sizeof *gpus; i++)
        if (gpus[i].capability <= capability)
            gpu = &gpus[i];
    const double product = config->dtype != HR_F32 ? gpu->half
                           : config->allow_tf32    ? gpu->tf32
                                                   : gpu->single;
    return (lce_rates){product * 1e12 * GPU_OF_PRODUCTS, gpu->bandwidth * 1e9 * GPU_OF_COPIES};
}

static double product_seconds(const lce_rates *rates, double operations, double bytes)
{
    const double computed = operations / rates->product, moved = bytes / rates->bandwidth;
    return computed > moved ? computed : moved;
}

double lce_seconds(const lce_sizes *s, uint32_t wanted,
                   const hr_linear_cross_entropy_config *config, const lce_rates *rates)
{
    if (s->rows == 0)
        return 0.0;
    const double chunks = (double)(s->rows / s->chunk + (s->rows % s->chunk != 0));
    const double tiles = (double)(s->classes / s->tile + (s->classes % s->tile != 0));
    /* Of a part: a chunk of rows and a tile of classes. */
    const double rows = (double)s->rows / chunks, classes = (double)s->classes / tiles;
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
