/*
 * count.cuh: counts the step in the counters of a list, which lie in device memory. A launch of its
 * own, after the update: every block of a tensor reads its counter.
 */
#ifndef HR_COUNT_CUH
#define HR_COUNT_CUH

#include "kernels/core/list.cuh"
#include "kernels/core/step.h"

typedef struct list_counter {
    void *step;
    uint32_t dtype;
} list_counter;

template <uint32_t capacity> struct list_counters {
    hr_step_config step;
    uint32_t count;
    list_counter counters[capacity];
};

template <uint32_t capacity>
static __global__ void list_count_kernel(const list_counters<capacity> __grid_constant__ args)
{
    const uint32_t k = blockIdx.x * blockDim.x + threadIdx.x;
    if (k < args.count && !step_is_skipped(&args.step))
        step_count(args.counters[k].step, (hr_dtype)args.counters[k].dtype);
}

template <uint32_t capacity>
static inline void list_count_few(const hr_step_config *step, const hr_tensor_list *counters,
                                  int64_t first, int64_t end, hr_stream stream)
{
    list_counters<capacity> args;
    args.step = *step;
    for (; first < end; first += args.count) {
        args.count = (uint32_t)(end - first < capacity ? end - first : capacity);
        for (uint32_t k = 0; k < args.count; k++)
            args.counters[k] = {counters->data[first + k], (uint32_t)counters->dtype[first + k]};
        HR_LAUNCH(list_count_kernel<capacity>, (args.count + 63) / 64, 64, 0, stream, args);
    }
}

/* Counts the step for tensors `first` to `end`, if there are counters. */
static inline void list_count(const hr_step_config *step, const hr_tensor_list *counters,
                              int64_t first, int64_t end, hr_stream stream)
{
    if (counters && end - first <= LIST_FEW)
        list_count_few<LIST_FEW>(step, counters, first, end, stream);
    else if (counters)
        list_count_few<512>(step, counters, first, end, stream);
}

#endif
