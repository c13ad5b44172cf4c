/*
 * weights_cpu.c: loads and stores tiles of weights, compiled once per instruction set for all loops
 * that use them; and the loop of hr_join_weights and hr_split_weights.
 */
#include "kernels/weights/weights_cpu.h"

#define WEIGHTS_COUNTERS (WEIGHTS_TILE / 8 + 1) /* most Philox counters that a tile needs */

/* Computes hr_philox() of `count` counters from j on. Each round runs over all counters before the
 * next, so that a compiler can vectorize it. */
HR_INLINE void weights_philox(const weights_tensor *t, uint64_t j, int count, uint32_t *restrict a,
                              uint32_t *restrict b, uint32_t *restrict c, uint32_t *restrict d)
{
    for (int i = 0; i < count; i++) {
        const hr_random4 x = weights_counter(t->step, j + (uint64_t)i);
        a[i] = x.word[0], b[i] = x.word[1], c[i] = x.word[2], d[i] = x.word[3];
    }
    hr_philox_key key = hr_philox_first(t->seed);
    for (int round = 0; round < HR_PHILOX_ROUNDS; round++, key = hr_philox_next(key))
        for (int i = 0; i < count; i++) {
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

/* Writes the random bits of the elements [begin, end), which lie together in the whole. */
HR_INLINE void weights_random_range(void *context, int64_t begin, int64_t end)
{
    const weights_move *const move = (const weights_move *)context;
    const weights_tensor *const t = move->tensor;
    const int64_t e = weights_element(t->place, weights_start_of(t->place, begin), 0);
    const int count = (int)(end - begin), skipped = (int)(e % 8);
    const int counters = (skipped + count + 7) / 8;
    uint32_t a[WEIGHTS_COUNTERS], b[WEIGHTS_COUNTERS], c[WEIGHTS_COUNTERS], d[WEIGHTS_COUNTERS];
    uint32_t words[WEIGHTS_COUNTERS * 4];
    weights_philox(t, (uint64_t)(e / 8), counters, a, b, c, d);
    for (int j = 0; j < counters; j++)
        words[4 * j] = a[j], words[4 * j + 1] = b[j], words[4 * j + 2] = c[j],
                  words[4 * j + 3] = d[j];
    uint16_t random[WEIGHTS_COUNTERS * 8]; /* the lower half of a word comes first */
    for (int j = 0; j < 4 * counters; j++) {
        random[2 * j] = (uint16_t)words[j];
        random[2 * j + 1] = (uint16_t)(words[j] >> 16);
    }
    memcpy(move->random, random + skipped, (size_t)count * sizeof random[0]);
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

/* hr_philox() in vectors of 64-bit words, which are what the multiplication takes: a word holds a
 * below b, or c below d, and a round is
 *
 *     ab = rotate(c * 0xCD9E8D57) ^ b ^ key.low,   cd = rotate(a * 0xD2511F53) ^ d ^ key.high
 *
 * with rotations by 32 bits. A compiler keeps each of the four in vectors of its own, and half of
 * its instructions move words. In memory ab and cd of a counter are its random bits. */
CPU_AVX2 static void weights_random_range_avx2(void *context, int64_t begin, int64_t end)
{
    enum { AT_A_TIME = 4 }; /* vectors, so that one round need not wait for the last */
    const weights_move *const move = (const weights_move *)context;
    const weights_tensor *const t = move->tensor;
    const int64_t e = weights_element(t->place, weights_start_of(t->place, begin), 0);
    const int count = (int)(end - begin), skipped = (int)(e % 8);
    const hr_random4 first = weights_counter(t->step, 0);
    const uint64_t step = (uint64_t)first.word[3] << 32 | first.word[2];
    const __m256i m0 = _mm256_set1_epi64x(0xD2511F53), m1 = _mm256_set1_epi64x(0xCD9E8D57);
    uint16_t random[(WEIGHTS_TILE / (32 * AT_A_TIME) + 1) * 32 * AT_A_TIME];
    for (int done = 0; done < skipped + count; done += 32 * AT_A_TIME) {
        __m256i ab[AT_A_TIME], cd[AT_A_TIME];
        for (int k = 0; k < AT_A_TIME; k++) {
            ab[k] = _mm256_add_epi64(_mm256_set1_epi64x(e / 8 + done / 8 + 4 * k),
                                     _mm256_setr_epi64x(0, 1, 2, 3));
            cd[k] = _mm256_set1_epi64x((int64_t)step);
        }
        hr_philox_key key = hr_philox_first(t->seed);
        for (int round = 0; round < HR_PHILOX_ROUNDS; round++, key = hr_philox_next(key)) {
            const __m256i low = _mm256_set1_epi64x(key.low), high = _mm256_set1_epi64x(key.high);
            for (int k = 0; k < AT_A_TIME; k++) {
                const __m256i p0 = _mm256_shuffle_epi32(_mm256_mul_epu32(ab[k], m0), 0xB1);
                const __m256i p1 = _mm256_shuffle_epi32(_mm256_mul_epu32(cd[k], m1), 0xB1);
                ab[k] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(ab[k], 32), low), p1);
                cd[k] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(cd[k], 32), high), p0);
            }
        }
        for (int k = 0; k < AT_A_TIME; k++) {
            const __m256i even = _mm256_unpacklo_epi64(ab[k], cd[k]);
            const __m256i odd = _mm256_unpackhi_epi64(ab[k], cd[k]);
            __m256i *const to = (__m256i *)(random + done + 32 * k);
            _mm256_storeu_si256(to, _mm256_permute2x128_si256(even, odd, 0x20));
            _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(even, odd, 0x31));
        }
    }
    memcpy(move->random, random + skipped, (size_t)count * sizeof random[0]);
}

static const hr_range_fn weights_random_range_variants[] = {
    weights_random_range, weights_random_range_avx2, weights_random_range_avx2,
    weights_random_range_avx2};
#else
CPU_VARIANTS(weights_random_range)
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
