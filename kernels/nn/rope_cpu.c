/*
 * rope_cpu.c: the loops. The rows of the tables that a few tokens need are converted to binary32
 * once, and stay in the fastest cache for all heads of these tokens. Tokens and heads are walked in
 * the order in which they lie in memory.
 */
#include "kernels/core/cpu.h"
#include "kernels/nn/rope.h"

#define TOKENS 16  /* at a time */
#define PAIRS  128 /* of a vector at a time */

typedef struct table_tile {
    float cos[TOKENS][PAIRS], sin[TOKENS][PAIRS];
} table_tile;

HR_INLINE void read_row(float *restrict to, const hr_rows *table, int64_t row, int64_t i0, int n,
                        float sign, hr_dtype dtype)
{
    const char *const base =
        (const char *)table->data + row * table->stride * (dtype == HR_F32 ? 4 : 2);
    FOR_DTYPE(dtype, D, for (int i = 0; i < n; i++) to[i] = sign * hr_load(base, i0 + i, D))
}

/* Iterations are independent, also where `out` is `in`: pair i is read before it is written, and no
 * other iteration touches it. The compiler cannot know. */
#define INDEPENDENT _Pragma("GCC ivdep")

/* Rotates n pairs, where pair i is (first[i], second[i]). */
HR_INLINE void rotate_halves(void *first_out, void *second_out, const void *first,
                             const void *second, const float *cos, const float *sin, int n,
                             hr_dtype dtype)
{
    INDEPENDENT
    for (int i = 0; i < n; i++) {
        const float x = hr_load(first, i, dtype), y = hr_load(second, i, dtype);
        hr_store(first_out, i, rope_first(x, y, cos[i], sin[i]), dtype);
        hr_store(second_out, i, rope_second(x, y, cos[i], sin[i]), dtype);
    }
}

/* Rotates n pairs of neighbors. Two elements of 16 bits are one word, so that a vector of words has
 * all first elements in its low halves and all second ones in the high halves. */
HR_INLINE void rotate_neighbors(void *out, const void *in, const float *cos, const float *sin,
                                int n, hr_dtype dtype)
{
    INDEPENDENT
    for (int i = 0; i < n; i++) {
        if (dtype == HR_F32) {
            const float x = hr_load(in, 2 * i, HR_F32), y = hr_load(in, 2 * i + 1, HR_F32);
            hr_store(out, 2 * i, rope_first(x, y, cos[i], sin[i]), HR_F32);
            hr_store(out, 2 * i + 1, rope_second(x, y, cos[i], sin[i]), HR_F32);
            continue;
        }
        uint32_t word;
        memcpy(&word, (const char *)in + 4 * (int64_t)i, sizeof word);
        const float x = hr_from_half((uint16_t)word, dtype);
        const float y = hr_from_half((uint16_t)(word >> 16), dtype);
        word = hr_to_half(rope_first(x, y, cos[i], sin[i]), dtype) |
               (uint32_t)hr_to_half(rope_second(x, y, cos[i], sin[i]), dtype) << 16;
        memcpy((char *)out + 4 * (int64_t)i, &word, sizeof word);
    }
}

/* Rotates the pairs [i0, i0 + n) of a vector. */
HR_INLINE void rotate(const rope_args *a, char *out, const char *in, const float *cos,
                      const float *sin, int64_t i0, int n, hr_dtype dtype, int interleaved)
{
    const int64_t size = dtype == HR_F32 ? 4 : 2;
    if (interleaved) {
        rotate_neighbors(out + 2 * i0 * size, in + 2 * i0 * size, cos, sin, n, dtype);
        return;
    }
    const int64_t first = i0 * size, second = (a->pairs + i0) * size;
    rotate_halves(out + first, out + second, in + first, in + second, cos, sin, n, dtype);
}

/* Prefetches as many bytes as a vector has, up to 1 KiB, 2 KiB ahead: see cpu_prefetch(). */
HR_INLINE void prefetch_ahead(char *out, const char *in, int64_t bytes)
{
    const int64_t most = bytes < 1024 ? bytes : 1024;
    for (int64_t byte = 2048; byte < 2048 + most; byte += 64) {
        __builtin_prefetch(in + byte);
        __builtin_prefetch(out + byte, 1);
    }
}

/* Rotates all heads of `count` tokens; the table tile has the pairs [i0, i0 + n). */
HR_INLINE void rotate_part(const rope_args *a, const rope_part *part, const table_tile *table,
                           int64_t batch, int64_t token, int count, int64_t i0, int n,
                           hr_dtype dtype, int interleaved)
{
    const int by_head = part->in.head_stride > part->in.token_stride;
    const int64_t vector = a->head_dim * (dtype == HR_F32 ? 4 : 2);
    const int64_t outer = by_head ? part->heads : count, inner = by_head ? count : part->heads;
    for (int64_t o = 0; o < outer; o++)
        for (int64_t i = 0; i < inner; i++) {
            const int64_t t = by_head ? i : o, head = by_head ? o : i;
            char *const out = (char *)rope_vector(&part->out, batch, token + t, head, dtype);
            const char *const in =
                (const char *)rope_vector(&part->in, batch, token + t, head, dtype);
            prefetch_ahead(out, in, vector);
            rotate(a, out, in, table->cos[t], table->sin[t], i0, n, dtype, interleaved);
            const int64_t rotated = 2 * a->pairs, size = dtype == HR_F32 ? 4 : 2;
            if (i0 == 0 && rotated < a->head_dim && out != in)
                memcpy(out + rotated * size, in + rotated * size,
                       (size_t)((a->head_dim - rotated) * size));
        }
}

HR_INLINE void rope_blocks(void *context, int64_t begin, int64_t end)
{
    const rope_args *const a = (const rope_args *)context;
    const int64_t blocks = (a->tokens + TOKENS - 1) / TOKENS;
    table_tile table;
    for (int64_t block = begin; block < end; block++) {
        const int64_t batch = block / blocks, token = block % blocks * TOKENS;
        const int count = a->tokens - token < TOKENS ? (int)(a->tokens - token) : TOKENS;
        for (int64_t i0 = 0; i0 < a->pairs; i0 += PAIRS) {
            const int n = a->pairs - i0 < PAIRS ? (int)(a->pairs - i0) : PAIRS;
            for (int t = 0; t < count; t++) {
                const int64_t row = rope_position(a, batch, token + t);
                read_row(table.cos[t], &a->cos, row, i0, n, 1.0f, a->config.table_dtype);
                read_row(table.sin[t], &a->sin, row, i0, n, a->config.inverse ? -1.0f : 1.0f,
                         a->config.table_dtype);
            }
            for (int k = 0; k < 2; k++)
                FOR_DTYPE(a->config.dtype, D,
                          FOR_FLAG(a->config.interleaved, I,
                                   rotate_part(a, k ? &a->k : &a->q, &table, batch, token, count,
                                               i0, n, D, I)))
        }
    }
}

CPU_VARIANTS(rope_blocks)

hr_status rope_cpu(const rope_args *args)
{
    const int64_t blocks = (args->tokens + TOKENS - 1) / TOKENS;
    const int64_t elements = TOKENS * (args->q.heads + args->k.heads) * args->head_dim;
    const int64_t grain = elements > 0 && elements < CPU_GRAIN ? CPU_GRAIN / elements : 1;
    hr_parallel_for(0, args->batch * blocks, grain, CPU_BEST(rope_blocks), (void *)args);
    return HR_OK;
}
