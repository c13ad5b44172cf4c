/*
 * weights_cpu.c: loads and stores tiles of weights, compiled once per instruction set for all loops
 * that use them; and the loop of hr_join_weights and hr_split_weights.
 */
#include "kernels/weights/weights_cpu.h"

#define WEIGHTS_COUNTERS (WEIGHTS_TILE / 8)

/* Computes hr_philox() of the counters of a tile, from j on. Each round runs over all counters before
 * the next, so that a compiler can vectorize it. */
HR_INLINE void weights_philox(const weights_tensor *t, uint64_t j, uint32_t *restrict a,
                              uint32_t *restrict b, uint32_t *restrict c, uint32_t *restrict d)
{
    for (int i = 0; i < WEIGHTS_COUNTERS; i++) {
        const hr_random4 x = weights_counter(t->step, j + (uint64_t)i);
        a[i] = x.word[0], b[i] = x.word[1], c[i] = x.word[2], d[i] = x.word[3];
    }
    hr_philox_key key = hr_philox_first(t->seed);
    for (int round = 0; round < HR_PHILOX_ROUNDS; round++, key = hr_philox_next(key))
        for (int i = 0; i < WEIGHTS_COUNTERS; i++) {
            hr_philox_state x = {a[i], b[i], c[i], d[i]};
            x = hr_philox_round(x, key);
            a[i] = x.a, b[i] = x.b, c[i] = x.c, d[i] = x.d;
        }
}

/* The context of the loops below, which run over the elements [begin, end). */
typedef struct weights_move {
    const weights_tensor *tensor;
    float *tile;
    uint16_t *random;
} weights_move;

/* Copies from the random bits of `size` elements from `first` on, which may be negative, those of the
 * elements [0, count). */
HR_INLINE void weights_copy_random(uint16_t *restrict to, const uint16_t *restrict random,
                                   int first, int size, int count)
{
    const int begin = first < 0 ? 0 : first, end = count - first < size ? count : first + size;
    memcpy(to + begin, random + (begin - first), (size_t)(end - begin) * sizeof to[0]);
}

/* Writes the random bits of the elements [begin, end), which lie together in the whole. */
static void weights_random_range(void *context, int64_t begin, int64_t end)
{
    const weights_move *const move = (const weights_move *)context;
    const weights_tensor *const t = move->tensor;
    const int64_t e = weights_element(t->place, weights_start_of(t->place, begin), 0);
    const int count = (int)(end - begin), skipped = (int)(e % 8);
    for (int done = -skipped; done < count; done += WEIGHTS_TILE) {
        uint32_t word[4][WEIGHTS_COUNTERS];
        weights_philox(t, (uint64_t)((e + done) / 8), word[0], word[1], word[2], word[3]);
        uint16_t random[WEIGHTS_TILE]; /* the lower half of a word comes first */
        for (int j = 0; j < WEIGHTS_COUNTERS; j++)
            for (int k = 0; k < 4; k++) {
                random[8 * j + 2 * k] = (uint16_t)word[k][j];
                random[8 * j + 2 * k + 1] = (uint16_t)(word[k][j] >> 16);
            }
        weights_copy_random(move->random, random, done, WEIGHTS_TILE, count);
    }
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

/* Four states of Philox. A word is the low half of a lane of 64 bits, of which a multiplication
 * reads no more: so the low half of a product is a word of the next state as it is. A compiler packs
 * the words, and spends half of its instructions on that. */
typedef struct weights_lanes {
    __m256i a, b, c, d;
} weights_lanes;

CPU_AVX2 HR_INLINE __m256i weights_product0(__m256i a)
{
    return _mm256_mul_epu32(a, _mm256_set1_epi64x(0xD2511F53));
}

CPU_AVX2 HR_INLINE __m256i weights_product1(__m256i c)
{
    return _mm256_mul_epu32(c, _mm256_set1_epi64x(0xCD9E8D57));
}

CPU_AVX2 HR_INLINE __m256i weights_high(__m256i product)
{
    return _mm256_srli_epi64(product, 32);
}

/* The keys of all rounds, and what is left of the first rounds where counters differ in their first
 * word alone: all other words hold for every counter before the first round, a and b before the
 * second, and d before the third. */
typedef struct weights_keys {
    __m256i low[HR_PHILOX_ROUNDS], high[HR_PHILOX_ROUNDS];
    __m256i c1, a2, c2, c3; /* what a word is combined with in the round of that number */
} weights_keys;

CPU_AVX2 HR_INLINE void weights_fill_keys(weights_keys *k, uint64_t seed, hr_random4 counter)
{
    hr_philox_state x = {0, counter.word[1], counter.word[2], counter.word[3]};
    hr_philox_key key = hr_philox_first(seed);
    for (int round = 0; round < HR_PHILOX_ROUNDS; round++, key = hr_philox_next(key)) {
        k->low[round] = _mm256_set1_epi64x(key.low);
        k->high[round] = _mm256_set1_epi64x(key.high);
        if (round == 0)
            k->c1 = _mm256_set1_epi64x(x.d ^ key.high);
        if (round == 1)
            k->a2 = _mm256_set1_epi64x(x.b ^ key.low);
        if (round == 2)
            k->c3 = _mm256_set1_epi64x(x.d ^ key.high);
        x = hr_philox_round(x, key);
        if (round == 0)
            x.d = 0;
        if (round == 1)
            k->c2 = _mm256_set1_epi64x(x.c);
    }
}

/* The first three rounds. */
CPU_AVX2 HR_INLINE weights_lanes weights_begin(__m256i counters, const weights_keys *k)
{
    weights_lanes x;
    x.d = weights_product0(counters);
    x.b = weights_product1(weights_high(x.d) ^ k->c1);
    x.a = weights_high(x.b) ^ k->a2;
    x.c = x.d ^ k->c2;
    x.d = weights_product0(x.a);
    const __m256i product1 = weights_product1(x.c);
    x.a = x.b ^ k->low[2] ^ weights_high(product1);
    x.b = product1;
    x.c = weights_high(x.d) ^ k->c3;
    return x;
}

CPU_AVX2 HR_INLINE weights_lanes weights_round(weights_lanes x, __m256i low, __m256i high)
{
    const __m256i product0 = weights_product0(x.a), product1 = weights_product1(x.c);
    x.a = x.b ^ low ^ weights_high(product1);
    x.b = product1;
    x.c = x.d ^ high ^ weights_high(product0);
    x.d = product0;
    return x;
}

/* The last round, and the 32 elements: the words of a counter follow one another. */
CPU_AVX2 HR_INLINE void weights_end(weights_lanes x, __m256i low, __m256i high, uint16_t *random)
{
    const __m256i half = _mm256_set1_epi64x(0xFFFFFFFF);
    const __m256i ba = _mm256_shuffle_epi32(weights_product1(x.c), 0xB1) ^ ((x.b ^ low) & half);
    const __m256i dc = _mm256_shuffle_epi32(weights_product0(x.a), 0xB1) ^ ((x.d ^ high) & half);
    _mm256_storeu_si256((__m256i *)random, _mm256_unpacklo_epi64(ba, dc));
    _mm256_storeu_si256((__m256i *)random + 1, _mm256_unpackhi_epi64(ba, dc));
}

/* weights_random_range() in vectors. */
CPU_AVX2 HR_INLINE void weights_random_lanes(void *context, int64_t begin, int64_t end)
{
    enum { AT_A_TIME = 4, STEP = 32 * AT_A_TIME }; /* vectors, because a round waits for the last */
    const weights_move *const move = (const weights_move *)context;
    const weights_tensor *const t = move->tensor;
    const int64_t e = weights_element(t->place, weights_start_of(t->place, begin), 0);
    const int count = (int)(end - begin), skipped = (int)(e % 8);
    if (e >> 35 != (e + count - 1) >> 35) { /* counters differ in their second words */
        weights_random_range(context, begin, end);
        return;
    }
    const hr_random4 first = weights_counter(t->step, (uint64_t)(e / 8));
    weights_keys keys;
    weights_fill_keys(&keys, t->seed, first);
    __m256i counters = _mm256_setr_epi64x(0, 2, 1, 3); /* the order that unpacking wants */
    counters = _mm256_add_epi64(counters, _mm256_set1_epi64x(first.word[0]));
    for (int done = -skipped; done < count; done += STEP) {
        weights_lanes x[AT_A_TIME];
        for (int k = 0; k < AT_A_TIME; k++) {
            x[k] = weights_begin(counters, &keys);
            counters = _mm256_add_epi64(counters, _mm256_set1_epi64x(4));
        }
        for (int round = 3; round < HR_PHILOX_ROUNDS - 1; round++)
            for (int k = 0; k < AT_A_TIME; k++)
                x[k] = weights_round(x[k], keys.low[round], keys.high[round]);
        uint16_t cut[STEP];
        const int is_whole = done >= 0 && count - done >= STEP;
        uint16_t *const random = is_whole ? move->random + done : cut;
        for (int k = 0; k < AT_A_TIME; k++)
            weights_end(x[k], keys.low[HR_PHILOX_ROUNDS - 1], keys.high[HR_PHILOX_ROUNDS - 1],
                        random + 32 * k);
        if (!is_whole)
            weights_copy_random(move->random, cut, done, STEP, count);
    }
}

CPU_AVX2 static void weights_random_range_avx2(void *context, int64_t begin, int64_t end)
{
    weights_random_lanes(context, begin, end);
}

CPU_AVX512 static void weights_random_range_avx512(void *context, int64_t begin, int64_t end)
{
    weights_random_lanes(context, begin, end);
}

static const hr_range_fn weights_random_range_variants[] = {
    weights_random_range, weights_random_range_avx2, weights_random_range_avx512,
    weights_random_range_avx512};
#else
static const hr_range_fn weights_random_range_variants[] = {
    weights_random_range, weights_random_range, weights_random_range};
#endif

void weights_fill_random(const weights_tensor *t, int64_t i, int count, uint16_t *random)
{
    for (int64_t end = i + count; i < end;) {
        const int64_t rest = t->place.run - i % t->place.run;
        const int64_t next = end - i < rest ? end : i + rest;
        weights_move move = {t, NULL, random};
        CPU_BEST(weights_random_range)(&move, i, next);
        random += next - i;
        i = next;
    }
}

/* Runs the body with the constants `D` and `M` equal to the type and the mode of a tensor. */
#define WEIGHTS_FOR_TENSOR(t, body) \
    WEIGHTS_FOR_MODE((t)->mode, FOR_DTYPE((t)->dtype, D, if (weights_take(M, D)) body))

HR_INLINE void weights_load_as(const void *restrict param, const void *restrict residual, int64_t i,
                               int count, float *restrict tile, hr_dtype dtype,
                               hr_weights_mode mode)
{
    for (int lane = 0; lane < count; lane++)
        tile[lane] =
            weights_join(weights_bits_at(param, residual, i + lane, dtype, mode), dtype, mode);
}

HR_INLINE void weights_store_as(void *restrict param, void *restrict residual, int64_t i, int count,
                                const float *restrict tile, const uint16_t *restrict random,
                                hr_dtype dtype, hr_weights_mode mode)
{
    for (int lane = 0; lane < count; lane++) {
        const uint32_t word = weights_are_random(mode) ? random[lane] : 0;
        const weights_bits bits = weights_split(tile[lane], dtype, mode, word);
        weights_put_bits(param, residual, i + lane, bits, dtype, mode);
    }
}

/* Counts the weights whose value changed and whose stored bits will not. */
static inline int64_t weights_count_stalled(const weights_tensor *t, int64_t i, int count,
                                            const float *tile, const uint16_t *random,
                                            const float *before)
{
    int64_t stalled = 0;
    for (int lane = 0; lane < count; lane++) {
        const weights_bits old =
            weights_bits_at(t->param, t->residual, i + lane, t->dtype, t->mode);
        const uint32_t word = weights_are_random(t->mode) ? random[lane] : 0;
        const weights_bits bits = weights_split(tile[lane], t->dtype, t->mode, word);
        stalled +=
            tile[lane] != before[lane] && bits.param == old.param && bits.residual == old.residual;
    }
    return stalled;
}

HR_INLINE void weights_load_range(void *context, int64_t begin, int64_t end)
{
    const weights_move *const move = (const weights_move *)context;
    const weights_tensor *const t = move->tensor;
    WEIGHTS_FOR_TENSOR(
        t, weights_load_as(t->param, t->residual, begin, (int)(end - begin), move->tile, D, M))
}

HR_INLINE void weights_store_range(void *context, int64_t begin, int64_t end)
{
    const weights_move *const move = (const weights_move *)context;
    const weights_tensor *const t = move->tensor;
    WEIGHTS_FOR_TENSOR(t, weights_store_as(t->param, t->residual, begin, (int)(end - begin),
                                           move->tile, move->random, D, M))
}

CPU_VARIANTS(weights_load_range)
CPU_VARIANTS(weights_store_range)

void weights_load(const weights_tensor *t, int64_t i, int count, float *tile)
{
    weights_move move = {t, tile, NULL};
    CPU_BEST(weights_load_range)(&move, i, i + count);
}

void weights_store(const weights_tensor *t, int64_t i, int count, const float *tile,
                   const float *before)
{
    uint16_t random[WEIGHTS_TILE];
    weights_move move = {t, (float *)tile, random};
    if (weights_are_random(t->mode))
        weights_fill_random(t, i, count, random);
    if (before)
        __atomic_fetch_add(t->stalled, weights_count_stalled(t, i, count, tile, random, before),
                           __ATOMIC_RELAXED);
    CPU_BEST(weights_store_range)(&move, i, i + count);
}

static void weights_range(void *context, int64_t begin, int64_t end)
{
    const weights_args *const a = (const weights_args *)context;
    CPU_FOR_EACH_TENSOR(a->params, begin, end, k, from, to)
    {
        const weights_tensor weights = weights_of(a->weights, a->params, k, 0.0);
        float *const values = (float *)a->values->data[k];
        for (int64_t i = from; i < to; i += WEIGHTS_TILE) {
            const int count = to - i < WEIGHTS_TILE ? (int)(to - i) : WEIGHTS_TILE;
            if (a->split)
                weights_store(&weights, i, count, values + i, NULL);
            else
                weights_load(&weights, i, count, values + i);
            for (int64_t j = i; !a->split && j < i + count; j++)
                hr_store(values, j, values[j], HR_F32); /* writes every NaN as the same NaN */
        }
    }
}

hr_status weights_cpu(const weights_args *args)
{
    hr_parallel_for(0, cpu_total(args->params), CPU_GRAIN, weights_range, (void *)args);
    return HR_OK;
}
