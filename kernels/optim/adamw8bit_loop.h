/*
 * adamw8bit_loop.h: the loop over the blocks of a tensor, compiled once per instruction set. A file
 * that includes it defines LOOP_TARGET, the attribute that selects the instruction set, and
 * LOOP_NAME(name), which makes its functions' names unique, the functions LOOP_NAME(decode) and
 * LOOP_NAME(encode), and LOOP_LITERAL, 0 if the common mixes of types have a loop elsewhere.
 *
 * A block can be encoded only after all its elements are updated. So encoding a block alternates
 * with updating the next one, LANES elements at a time: the permutations of one overlap with the
 * divisions of the other.
 */

/* Updates LANES elements. Writes their new moments to m and v, and raises the largest magnitude of
 * each lane. `rounded_to` is the type that the parameters have in memory. */
LOOP_TARGET HR_INLINE void
LOOP_NAME(update)(const adamw8bit_tensor *t, void *restrict param, const void *restrict grad,
                  const uint8_t *exp_avg, const uint8_t *exp_avg_sq, float absmax_m, float absmax_v,
                  float *restrict m, float *restrict v, uint32_t *restrict largest_m,
                  uint32_t *restrict largest_v, hr_dtype param_dtype, hr_dtype grad_dtype,
                  hr_dtype rounded_to, adamw8bit_rule rule)
{
    const int bnb = rule == ADAMW8BIT_BNB;
    LOOP_NAME(decode)(t->call, exp_avg, absmax_m, 1, m);
    LOOP_NAME(decode)(t->call, exp_avg_sq, absmax_v, 0, v);
    /* Two loops for the common rule: with one a core would wait for each root and each division. */
    adamw_constants c = t->constants;
    c.l2 = 0.0f;
    float roots[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        adamw_values x = {rule == ADAMW8BIT_PLAIN ? 0.0f : hr_load(param, lane, param_dtype),
                          hr_load(grad, lane, grad_dtype), m[lane], v[lane], 0.0f};
        if (rule == ADAMW8BIT_PLAIN) {
            x = adamw_moments_of(c, x, 0, 0, adamw_is_slow(c));
            roots[lane] = sqrtf(x.exp_avg_sq);
        } else {
            x = adamw8bit_apply(t, x, rounded_to, rule);
            hr_store(param, lane, x.param, param_dtype);
        }
        m[lane] = x.exp_avg;
        v[lane] = x.exp_avg_sq;
        const uint32_t magnitude_m = quant_magnitude(x.exp_avg, bnb);
        const uint32_t magnitude_v = quant_magnitude(x.exp_avg_sq, bnb);
        largest_m[lane] = magnitude_m > largest_m[lane] ? magnitude_m : largest_m[lane];
        largest_v[lane] = magnitude_v > largest_v[lane] ? magnitude_v : largest_v[lane];
    }
    for (int lane = 0; rule == ADAMW8BIT_PLAIN && lane < LANES; lane++)
        hr_store(param, lane,
                 adamw_param_of(c, hr_load(param, lane, param_dtype), m[lane], roots[lane]),
                 param_dtype);
}

/* Like LOOP_NAME(update), for types that are not constants: converts LANES elements to binary32 and
 * back. */
LOOP_TARGET HR_INLINE void LOOP_NAME(update_any)(const adamw8bit_tensor *t, void *restrict param,
                                                 const void *restrict grad, const uint8_t *exp_avg,
                                                 const uint8_t *exp_avg_sq, float absmax_m,
                                                 float absmax_v, float *restrict m,
                                                 float *restrict v, uint32_t *restrict largest_m,
                                                 uint32_t *restrict largest_v, hr_dtype param_dtype,
                                                 hr_dtype grad_dtype, adamw8bit_rule rule)
{
    _Alignas(64) float params[LANES], grads[LANES];
    FOR_DTYPE(param_dtype, P,
              for (int lane = 0; lane < LANES; lane++) params[lane] = hr_load(param, lane, P))
    FOR_DTYPE(grad_dtype, G,
              for (int lane = 0; lane < LANES; lane++) grads[lane] = hr_load(grad, lane, G))
    LOOP_NAME(update)
    (t, params, grads, exp_avg, exp_avg_sq, absmax_m, absmax_v, m, v, largest_m, largest_v, HR_F32,
     HR_F32, param_dtype, rule);
    FOR_DTYPE(param_dtype, P,
              for (int lane = 0; lane < LANES; lane++) hr_store(param, lane, params[lane], P))
}

/* Updates the blocks of [from, to) of one tensor; `from` is the start of a block. `literal`: the
 * types are constants. */
LOOP_TARGET HR_INLINE void LOOP_NAME(blocks)(const adamw8bit_tensor *t, int64_t from, int64_t to,
                                             hr_dtype param_dtype, hr_dtype grad_dtype, int literal,
                                             adamw8bit_rule rule)
{
    const int block_size = t->call->args->config->block_size;
    const int param_size = hr_element_size(param_dtype), grad_size = hr_element_size(grad_dtype);
    adamw8bit_moments moments;    /* of this block and of the previous one */
    adamw8bit_pending last = {0}; /* the previous block */
    int64_t block = from / block_size;
    for (int64_t begin = from; begin < to; begin += block_size, block++) {
        const int count = to - begin < block_size ? (int)(to - begin) : block_size;
        float *const m = block % 2 ? moments.m1 : moments.m0;
        float *const v = block % 2 ? moments.v1 : moments.v0;
        const float absmax_m = t->exp_avg_absmax[block], absmax_v = t->exp_avg_sq_absmax[block];
        const uint8_t *const exp_avg = t->exp_avg + begin, *const exp_avg_sq =
                                                               t->exp_avg_sq + begin;
        uint32_t largest_m[LANES] = {0}, largest_v[LANES] = {0};
        int i = 0, encoded = 0;
        for (; i < count; i += LANES) {
            adamw8bit_few few; /* fewer than LANES elements are padded with zeros */
            const int partial = count - i < LANES;
            if (partial)
                adamw8bit_pad(&few, t, begin + i, count - i, param_size, grad_size);
            else {
                cpu_prefetch(t->param, begin + i, LANES, to, param_dtype);
                cpu_prefetch(t->grad, begin + i, LANES, to, grad_dtype);
                cpu_prefetch(t->exp_avg, begin + i, LANES, to, HR_U8);
                cpu_prefetch(t->exp_avg_sq, begin + i, LANES, to, HR_U8);
            }
            void *const param = (char *)t->param + (begin + i) * param_size;
            const void *const grad = (const char *)t->grad + (begin + i) * grad_size;
            void *const params = partial ? few.param : param;
            const void *const grads = partial ? few.grad : grad;
            const uint8_t *const codes_m = partial ? few.exp_avg : exp_avg + i;
            const uint8_t *const codes_v = partial ? few.exp_avg_sq : exp_avg_sq + i;
            if (literal)
                LOOP_NAME(update)
            (t, params, grads, codes_m, codes_v, absmax_m, absmax_v, m + i, v + i, largest_m,
             largest_v, param_dtype, grad_dtype, param_dtype, rule);
            else LOOP_NAME(update_any)(t, params, grads, codes_m, codes_v, absmax_m, absmax_v,
                                       m + i, v + i, largest_m, largest_v, param_dtype, grad_dtype,
                                       rule);
            if (partial)
                memcpy(param, few.param, (size_t)((count - i) * param_size));
            if (encoded < last.count) {
                LOOP_NAME(encode)(t, &last, encoded, LANES);
                encoded += LANES;
            }
        }
        for (; encoded < last.count; encoded += LANES)
            LOOP_NAME(encode)(t, &last, encoded, LANES);
        last = adamw8bit_close(t, begin, count, block, m, v, adamw8bit_largest(largest_m),
                               adamw8bit_largest(largest_v));
    }
    for (int i = 0; i < last.count; i += LANES)
        LOOP_NAME(encode)(t, &last, i, last.count - i < LANES ? last.count - i : LANES);
}

/* The common mixes of types have a loop of their own. A loop for each of the 27 mixes and rules
 * would take a minute to compile. */
LOOP_TARGET void LOOP_NAME(run)(const adamw8bit_tensor *t, int64_t from, int64_t to,
                                hr_dtype param_dtype, hr_dtype grad_dtype)
{
    if (t->call->rule == ADAMW8BIT_BNB)
        LOOP_NAME(blocks)(t, from, to, param_dtype, grad_dtype, 0, ADAMW8BIT_BNB);
    else if (t->call->rule == ADAMW8BIT_ANY)
        LOOP_NAME(blocks)(t, from, to, param_dtype, grad_dtype, 0, ADAMW8BIT_ANY);
    else if (LOOP_LITERAL && param_dtype == HR_F32 && grad_dtype == HR_F32)
        LOOP_NAME(blocks)(t, from, to, HR_F32, HR_F32, 1, ADAMW8BIT_PLAIN);
    else if (LOOP_LITERAL && param_dtype == HR_F32 && grad_dtype == HR_BF16)
        LOOP_NAME(blocks)(t, from, to, HR_F32, HR_BF16, 1, ADAMW8BIT_PLAIN);
    else if (LOOP_LITERAL && param_dtype == HR_BF16 && grad_dtype == HR_BF16)
        LOOP_NAME(blocks)(t, from, to, HR_BF16, HR_BF16, 1, ADAMW8BIT_PLAIN);
    else
        LOOP_NAME(blocks)(t, from, to, param_dtype, grad_dtype, 0, ADAMW8BIT_PLAIN);
}
