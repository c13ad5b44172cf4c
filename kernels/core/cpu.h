/*
 * cpu.h: turns a C loop into a CPU kernel, and walks the elements of a list.
 *
 * CPU_VARIANTS(loop) compiles an always-inline function once per instruction set, and
 * CPU_BEST(loop) is the variant for the level in use. __attribute__((target_clones)) does the same,
 * but chooses when the library is loaded, so that a test could not run every variant that the CPU
 * has.
 */
#ifndef HR_CPU_H
#define HR_CPU_H

#include "kernels/core/dtype.h"
#include "kernels/core/runtime.h"

/* Elements per task: enough to hide the cost of handing it to a thread, and few enough to balance
 * the threads. */
#define CPU_GRAIN 32768

#if defined(__x86_64__) && defined(__GNUC__)
#define CPU_AVX2 __attribute__((target("avx2,fma,f16c,bmi,bmi2")))
#if defined(__clang__)
#define CPU_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,bmi,bmi2")))
#else
#define CPU_AVX512                                                                \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,bmi,bmi2," \
                          "prefer-vector-width=512")))
#endif
/* For HR_CPU_AVX512_VBMI. CPU_VARIANTS has no such variant, so a kernel that uses it has its own
 * file. */
#define CPU_AVX512_VBMI_BF16                                                                       \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,fma,f16c,bmi," \
                          "bmi2")))
#define CPU_VARIANTS(loop)                                                                     \
    static void loop##_baseline(void *context, int64_t begin, int64_t end)                     \
    {                                                                                          \
        loop(context, begin, end);                                                             \
    }                                                                                          \
    CPU_AVX2 static void loop##_avx2(void *context, int64_t begin, int64_t end)                \
    {                                                                                          \
        loop(context, begin, end);                                                             \
    }                                                                                          \
    CPU_AVX512 static void loop##_avx512(void *context, int64_t begin, int64_t end)            \
    {                                                                                          \
        loop(context, begin, end);                                                             \
    }                                                                                          \
    static const hr_range_fn loop##_variants[] = {loop##_baseline, loop##_avx2, loop##_avx512, \
                                                  loop##_avx512};
#else
#define CPU_VARIANTS(loop)                                                          \
    static void loop##_baseline(void *context, int64_t begin, int64_t end)          \
    {                                                                               \
        loop(context, begin, end);                                                  \
    }                                                                               \
    static const hr_range_fn loop##_variants[] = {loop##_baseline, loop##_baseline, \
                                                  loop##_baseline};
#endif

#define CPU_BEST(loop) (loop##_variants[runtime_cpu_level()])

/* Prefetches `count` elements 2 KiB ahead of element i of a run that ends at `end`. A core that
 * converts, adds or divides between its loads does not look that far ahead by itself, and would
 * wait for memory. */
HR_INLINE void cpu_prefetch(const void *base, int64_t i, int count, int64_t end, hr_dtype dtype)
{
    const int size = hr_element_size(dtype);
    if ((end - i) * size <= 2048)
        return;
    const char *const ahead = (const char *)base + i * size + 2048;
    for (int byte = 0; byte < count * size; byte += 64)
        __builtin_prefetch(ahead + byte, 1);
}

/* Elements between prefetches. */
#define CPU_STEP 64

/* Runs `loop` on the elements [from, to) of [begin, end), CPU_STEP at a time: a whole step after
 * `fetch`, then what remains. */
#define CPU_IN_STEPS(begin, end, from, to, fetch, loop)    \
    int64_t from = (begin);                                \
    for (; (end) - (from) >= CPU_STEP; from += CPU_STEP) { \
        const int64_t to = (from) + CPU_STEP;              \
        fetch;                                             \
        loop;                                              \
    }                                                      \
    const int64_t to = (end);                              \
    loop

/* The number of elements in all tensors of a list. */
static inline int64_t cpu_total(const hr_tensor_list *list)
{
    int64_t total = 0;
    for (int64_t k = 0; k < list->count; k++)
        total += list->numel[k];
    return total;
}

/* With the tensors of a list laid end to end: runs the body for each tensor k that has elements in
 * [begin, end). [from, to) are these elements, counted within the tensor. */
#define CPU_FOR_EACH_TENSOR(list, begin, end, k, from, to)                         \
    for (int64_t k = 0, first_ = 0, from, to; k < (list)->count && first_ < (end); \
         first_ += (list)->numel[k++])                                             \
        if (from = (begin) > first_ ? (begin)-first_ : 0,                          \
            to = (end)-first_ < (list)->numel[k] ? (end)-first_ : (list)->numel[k], from < to)

/* Defines op_cpu(args): op_tensor(args, k, from, to) for every tensor k of args->list, in one parallel
 * region for the whole list. */
#define CPU_LIST_OP(op, list)                                                                     \
    HR_INLINE void op##_range(void *context, int64_t begin, int64_t end)                          \
    {                                                                                             \
        const op##_args *const args = (const op##_args *)context;                                 \
        CPU_FOR_EACH_TENSOR(args->list, begin, end, k, from, to)                                  \
        {                                                                                         \
            op##_tensor(args, k, from, to);                                                       \
        }                                                                                         \
    }                                                                                             \
    CPU_VARIANTS(op##_range)                                                                      \
    hr_status op##_cpu(const op##_args *args)                                                     \
    {                                                                                             \
        hr_parallel_for(0, cpu_total(args->list), CPU_GRAIN, CPU_BEST(op##_range), (void *)args); \
        return HR_OK;                                                                             \
    }

/* Like CPU_FOR_EACH_TENSOR, but [from, to) are whole blocks of block_size elements, counted within
 * each tensor: the blocks whose first element is in [begin, end), so that every block belongs to
 * exactly one range. */
#define CPU_FOR_EACH_TENSOR_IN_BLOCKS(list, begin, end, block_size, k, from, to)      \
    for (int64_t k = 0, first_ = 0, from, to; k < (list)->count && first_ < (end);    \
         first_ += (list)->numel[k++])                                                \
        if (from = cpu_round_up((begin) > first_ ? (begin)-first_ : 0, (block_size)), \
            to = cpu_round_up((end)-first_, (block_size)),                            \
            to = to < (list)->numel[k] ? to : (list)->numel[k], from < to)

static inline int64_t cpu_round_up(int64_t n, int64_t step)
{
    return (n + step - 1) / step * step;
}

/* Like FOR_DTYPE, for loops that take no f16. */
#define FOR_F32_OR_BF16(dtype, name, body) \
    if ((dtype) == HR_F32) {               \
        const hr_dtype name = HR_F32;      \
        body;                              \
    } else {                               \
        const hr_dtype name = HR_BF16;     \
        body;                              \
    }

#endif
