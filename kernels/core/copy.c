/* copy.c: copies and adds rows on the host, on the threads that it lends. */
#include "kernels/core/copy.h"

#include <string.h>

#include "kernels/core/dtype.h"
#include "kernels/core/runtime.h"

typedef struct copied_rows {
    char *to;
    const char *from;
    int64_t to_pitch, from_pitch, bytes;
} copied_rows;

static void copy_range(void *context, int64_t begin, int64_t end)
{
    const copied_rows *const c = (const copied_rows *)context;
    for (int64_t i = begin; i < end; i++)
        memcpy(c->to + i * c->to_pitch, c->from + i * c->from_pitch, (size_t)c->bytes);
}

hr_status copy_rows_cpu(void *to, int64_t to_pitch, const void *from, int64_t from_pitch,
                        int64_t bytes, int64_t rows)
{
    copied_rows copied = {(char *)to, (const char *)from, to_pitch, from_pitch, bytes};
    const int64_t grain = (1 << 18) / (bytes + 1) + 1;
    hr_parallel_for(0, rows, grain, copy_range, &copied);
    return HR_OK;
}

typedef struct added_rows {
    hr_rows to, from;
    const void *vector;
    int64_t cols;
    hr_dtype dtype;
} added_rows;

static inline void add_range_of(const added_rows *a, int64_t begin, int64_t end, hr_dtype dtype)
{
    for (int64_t i = begin; i < end; i++)
        for (int64_t j = 0; j < a->cols; j++) {
            const int64_t at = i * a->to.stride + j, from = i * a->from.stride + j;
            if (dtype == HR_F32)
                ((float *)a->to.data)[at] =
                    ((const float *)a->from.data)[from] + ((const float *)a->vector)[j];
            else
                ((uint16_t *)a->to.data)[at] =
                    hr_to_half(hr_from_half(((const uint16_t *)a->from.data)[from], dtype) +
                                   hr_from_half(((const uint16_t *)a->vector)[j], dtype),
                               dtype);
        }
}

static void add_range(void *context, int64_t begin, int64_t end)
{
    const added_rows *const a = (const added_rows *)context;
    if (a->dtype == HR_F32)
        add_range_of(a, begin, end, HR_F32);
    else if (a->dtype == HR_BF16)
        add_range_of(a, begin, end, HR_BF16);
    else
        add_range_of(a, begin, end, HR_F16);
}

hr_status add_to_rows_host(const hr_rows *to, const hr_rows *from, const void *vector, int64_t rows,
                           int64_t cols, hr_dtype dtype)
{
    added_rows added = {*to, *from, vector, cols, dtype};
    hr_parallel_for(0, rows, (1 << 15) / cols + 1, add_range, &added);
    return HR_OK;
}
