/*
 * adamw8bit_cpu.c: the CPU step of 8-bit Adam: the loop over the tensors of a list, the choice of
 * the loop over blocks, and the baseline of that loop. One parallel region covers the blocks of the
 * whole list, so ten thousand small tensors are handed to threads as often as one large tensor.
 */
#include "kernels/optim/adamw8bit_cpu.h"

#include <pthread.h>

void adamw8bit_encode_each(const adamw8bit_tensor *t, const adamw8bit_pending *p, int i, int count)
{
    const quant_maps *const maps = &t->call->tables->maps;
    uint8_t *const exp_avg = t->exp_avg + p->begin + i;
    uint8_t *const exp_avg_sq = t->exp_avg_sq + p->begin + i;
    const float *const m = p->m + i, *const v = p->v + i;
    if (t->call->rule == ADAMW8BIT_BNB) {
        for (int lane = 0; lane < count; lane++) {
            exp_avg[lane] = adamw8bit_bnb_encode(maps, m[lane], p->absmax_m, 1);
            exp_avg_sq[lane] = adamw8bit_bnb_encode(maps, v[lane], p->absmax_v, 0);
        }
    } else if (t->call->args->config->seeds) {
        hr_random4 random[LANES / 2];
        for (int pair = 0; pair < LANES / 2; pair++)
            random[pair] = adamw8bit_random(t->seed, t->step, t->first + p->begin + i + 2 * pair);
        for (int lane = 0; lane < count; lane++) {
            const uint32_t *const words = &random[lane / 2].word[lane % 2 * 2];
            exp_avg[lane] = quant_encode_randomly(maps, m[lane], p->scale_m, 1, words[0]);
            exp_avg_sq[lane] = quant_encode_randomly(maps, v[lane], p->scale_v, 0, words[1]);
        }
    } else {
        for (int lane = 0; lane < count; lane++) {
            exp_avg[lane] = quant_encode(maps, m[lane], p->scale_m, 1);
            exp_avg_sq[lane] = quant_encode(maps, v[lane], p->scale_v, 0);
        }
    }
}

HR_INLINE void adamw8bit_decode_baseline(const adamw8bit_call *call, const uint8_t *codes,
                                         float absmax, int is_signed, float *x)
{
    for (int lane = 0; lane < LANES; lane++)
        x[lane] = quant_decode(&call->tables->maps, codes[lane], absmax, is_signed);
}

HR_INLINE void adamw8bit_encode_baseline(const adamw8bit_tensor *t, const adamw8bit_pending *p,
                                         int i, int count)
{
    adamw8bit_encode_each(t, p, i, count);
}

#define LOOP_TARGET
#define LOOP_NAME(name) adamw8bit_##name##_baseline
#define LOOP_LITERAL    1
#include "kernels/optim/adamw8bit_loop.h"

/* Elements that are joined and updated at a time if weights have a mode: few enough for the
 * first-level cache, and so many that few blocks are the last of a run, whose encoding overlaps
 * with nothing. */
#define ADAMW8BIT_UNPACKED 4096

/* Updates the blocks of [from, to) of a tensor with any mode of weights. */
static void adamw8bit_run_weights(const adamw8bit_tensor *t, const weights_tensor *weights,
                                  int64_t from, int64_t to, hr_dtype grad_dtype)
{
    const int block_size = t->call->args->config->block_size;
    _Alignas(64) float unpacked[ADAMW8BIT_UNPACKED], before[ADAMW8BIT_UNPACKED];
    for (int64_t i = from; i < to; i += ADAMW8BIT_UNPACKED) {
        const int count = to - i < ADAMW8BIT_UNPACKED ? (int)(to - i) : ADAMW8BIT_UNPACKED;
        for (int j = 0; j < count; j += WEIGHTS_TILE)
            weights_load(weights, i + j, count - j < WEIGHTS_TILE ? count - j : WEIGHTS_TILE,
                         unpacked + j);
        if (weights->stalled)
            memcpy(before, unpacked, (size_t)count * sizeof before[0]);
        adamw8bit_tensor part = *t;
        part.first = i;
        part.param = unpacked;
        part.grad = (const char *)t->grad + i * hr_element_size(grad_dtype);
        part.exp_avg += i;
        part.exp_avg_sq += i;
        part.exp_avg_absmax += i / block_size;
        part.exp_avg_sq_absmax += i / block_size;
        t->call->run(&part, 0, count, HR_F32, grad_dtype);
        for (int j = 0; j < count; j += WEIGHTS_TILE)
            weights_store(weights, i + j, count - j < WEIGHTS_TILE ? count - j : WEIGHTS_TILE,
                          unpacked + j, weights->stalled ? before + j : NULL);
    }
}

static void adamw8bit_range(void *context, int64_t begin, int64_t end)
{
    const adamw8bit_call *const call = (const adamw8bit_call *)context;
    const adamw8bit_args *const a = call->args;
    const hr_adamw8bit_config *const config = a->config;
    adamw8bit_tensor t = {0};
    t.call = call;
    t.step = NAN; /* equal to no step */
    CPU_FOR_EACH_TENSOR_IN_BLOCKS(a->params, begin, end, config->block_size, k, from, to)
    {
        const double step = step_number_of(&config->adamw.step, a->steps, k);
        if (step != t.step) {
            t.constants = adamw_fold(&config->adamw, step);
            t.bnb = adamw8bit_bnb_fold(&config->adamw, step);
        }
        t.step = step;
        t.seed = config->seeds ? config->seeds[k] : 0;
        t.param = a->params->data[k];
        t.grad = a->grads->data[k];
        t.exp_avg = (uint8_t *)a->exp_avgs->data[k];
        t.exp_avg_sq = (uint8_t *)a->exp_avg_sqs->data[k];
        t.exp_avg_absmax = (float *)a->exp_avg_absmaxs->data[k];
        t.exp_avg_sq_absmax = (float *)a->exp_avg_sq_absmaxs->data[k];
        if (config->adamw.step.weights) {
            const weights_tensor weights =
                weights_of(config->adamw.step.weights, a->params, k, step);
            const hr_dtype grad_dtype = a->grads->dtype[k];
            if (!call->run_weights || !call->run_weights(&t, &weights, from, to, grad_dtype))
                adamw8bit_run_weights(&t, &weights, from, to, grad_dtype);
        } else {
            call->run(&t, from, to, a->params->dtype[k], a->grads->dtype[k]);
        }
    }
}

/* The tables, [1] with bitsandbytes' thresholds. They are static, so that no call can run out of
 * memory. */
static adamw8bit_tables adamw8bit_kept[2];

static void adamw8bit_fill(int bnb)
{
    adamw8bit_tables *const tables = &adamw8bit_kept[bnb];
    quant_maps_fill(&tables->maps, bnb);
    for (int is_signed = 0; is_signed < 2; is_signed++) {
        const dynamic_map *const map = &tables->maps.map[is_signed];
        dynamic_vectors_fill(&tables->vectors[is_signed], map, is_signed);
        dynamic_lines_fill(&tables->lines[is_signed], map, is_signed);
        dynamic_bytes_fill(&tables->bytes[is_signed], map);
    }
}

static void adamw8bit_fill_plain(void)
{
    adamw8bit_fill(0);
}

static void adamw8bit_fill_bnb(void)
{
    adamw8bit_fill(1);
}

static const adamw8bit_tables *adamw8bit_get_tables(int bnb)
{
    static pthread_once_t plain = PTHREAD_ONCE_INIT, exact = PTHREAD_ONCE_INIT;
    if (bnb)
        pthread_once(&exact, adamw8bit_fill_bnb);
    else
        pthread_once(&plain, adamw8bit_fill_plain);
    return &adamw8bit_kept[bnb];
}

hr_status adamw8bit_cpu(const adamw8bit_args *args)
{
#if defined(__x86_64__) && defined(__GNUC__)
    static const adamw8bit_run_fn runs[] = {adamw8bit_run_baseline, adamw8bit_run_plain_avx2,
                                            adamw8bit_run_avx512, adamw8bit_run_vbmi};
    static const adamw8bit_run_weights_fn run_weights[] = {NULL, NULL, NULL,
                                                           adamw8bit_run_weights_vbmi};
#else
    static const adamw8bit_run_fn runs[] = {adamw8bit_run_baseline};
    static const adamw8bit_run_weights_fn run_weights[] = {NULL};
#endif
    const hr_adamw8bit_config *const config = args->config;
    if (step_is_skipped(&config->adamw.step))
        return HR_OK;
    adamw8bit_call call;
    call.args = args;
    const hr_adamw_config *const adamw = &config->adamw;
    const int plain =
        !adamw->step.skip_nonfinite && (adamw->decoupled || adamw->weight_decay == 0.0);
    call.rule = config->bnb_exact ? ADAMW8BIT_BNB : plain ? ADAMW8BIT_PLAIN : ADAMW8BIT_ANY;
    const hr_cpu_level level = runtime_cpu_level();
    call.run = runs[level];
    call.run_weights = run_weights[level];
    call.tables = adamw8bit_get_tables(config->bnb_exact != 0);
    hr_parallel_for(0, cpu_total(args->params), CPU_GRAIN, adamw8bit_range, &call);
    step_count_all(args->steps);
    return HR_OK;
}
