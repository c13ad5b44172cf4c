/*
 * list.cuh: a list of tensors on a grid. The list travels in the launch parameters, as a record per
 * tensor; each thread block takes CUDA_CHUNK consecutive elements of one tensor.
 *
 * A record is a struct of the op with the members `numel` and `first_block`, and whatever else the
 * kernel needs of a tensor. list_launch_all() fills those two, asks the op for the rest, and queues
 * a launch for as many tensors as the parameters hold.
 */
#ifndef HR_LIST_CUH
#define HR_LIST_CUH

#include "kernels/core/cuda.cuh"

/* Launch parameters hold this many bytes (CUDA 12.1 and later). */
#define CUDA_PARAMETER_BYTES 32764

/* How many elements one block takes. */
#define CUDA_CHUNK 16384

/* As many tensors as launch parameters hold; and a number for a launch of few tensors, such as one
 * per parameter while a backward pass goes on, which then passes hundreds of bytes and not 32 KB.
 * More numbers would each be another instance of a kernel, for a part of a microsecond: instances
 * share no code, because ptxas copies even a function that is not inlined into each of them. */
#define LIST_MOST 0
#define LIST_FEW  8

/* What a kernel over a list is given: `Shared`, what all tensors have in common, and the records. */
template <typename Shared, typename Record, uint32_t number = LIST_MOST>
struct list_launch : Shared {
    static constexpr uint32_t capacity =
        number == LIST_MOST ? (CUDA_PARAMETER_BYTES - sizeof(Shared) - 8) / sizeof(Record) : number;
    uint32_t count;
    Record tensors[capacity];
};

static inline uint32_t list_blocks(int64_t numel)
{
    return (uint32_t)((numel + CUDA_CHUNK - 1) / CUDA_CHUNK);
}

/* Which record's tensor a block works on: the last one that starts at or before it. Records of
 * empty tensors start where the next one does, so they are never the last. An index, because from a
 * reference the compiler makes code that spills. */
template <typename Record>
static __device__ __forceinline__ uint32_t list_find(const Record *records, uint32_t count,
                                                     uint32_t block)
{
    uint32_t low = 0, high = count;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (records[middle].first_block <= block)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* The block's elements of a tensor: the first, and the one after the last. */
template <typename Record> static __device__ __forceinline__ int64_t list_begin(const Record &t)
{
    return (int64_t)(blockIdx.x - t.first_block) * CUDA_CHUNK;
}

template <typename Record>
static __device__ __forceinline__ int64_t list_end(const Record &t, int64_t begin)
{
    return t.numel - begin < CUDA_CHUNK ? t.numel : begin + CUDA_CHUNK;
}

/* The address of element i; NULL if there is no tensor. */
static __device__ __forceinline__ void *list_address(const void *base, int64_t i, hr_dtype dtype)
{
    const int size = dtype == HR_F32 ? 4 : dtype == HR_I8 ? 1 : 2;
    return base ? (char *)base + i * size : nullptr;
}

/* Calls few(first) for each of the thread's groups of four elements below `end`, a block's groups lying
 * side by side, and many(first) for `in_flight` groups at once where there are as many; then one(i) for
 * the elements from `end` to `count`. */
template <int threads, int in_flight, typename Many, typename Few, typename One>
static __device__ __forceinline__ void list_in_groups(int end, int count, Many many, Few few,
                                                      One one)
{
    constexpr int group = 4 * threads;
    int i = (int)threadIdx.x * 4;
#pragma unroll 1
    for (; i + (in_flight - 1) * group < end; i += in_flight * group)
        many(i);
#pragma unroll 1
    for (; i < end; i += group)
        few(i);
#pragma unroll 1
    for (i = end + (int)threadIdx.x; i < count; i += threads)
        one(i);
}

/* For every tensor k of the list calls fill(record, k), and for each group of tensors that fit in a
 * launch queue(blocks, k) with the first of them; `blocks` may be 0. blocks_of(record) thread blocks
 * work on a tensor. */
template <typename Launch, typename Fill, typename Queue, typename Blocks>
static inline hr_status list_launch_all(Launch *launch, const hr_tensor_list *list,
                                        const char *function, Fill fill, Queue queue,
                                        Blocks blocks_of)
{
    static_assert(sizeof(Launch) <= CUDA_PARAMETER_BYTES, "must fit in a launch");
    hr_status status = HR_OK;
    for (int64_t k = 0; k < list->count && status == HR_OK;) {
        const int64_t first = k;
        uint32_t blocks = 0;
        launch->count = 0;
        for (; k < list->count && launch->count < Launch::capacity; k++) {
            auto &record = launch->tensors[launch->count++];
            record.numel = list->numel[k];
            record.first_block = blocks;
            fill(record, k);
            blocks += blocks_of(record);
        }
        queue(blocks, first);
        status = cuda_launch_status(function);
    }
    return status;
}

/* With a block for each CUDA_CHUNK elements. */
template <typename Launch, typename Fill, typename Queue>
static inline hr_status list_launch_all(Launch *launch, const hr_tensor_list *list,
                                        const char *function, Fill fill, Queue queue)
{
    return list_launch_all(launch, list, function, fill, queue,
                           [](const auto &record) { return list_blocks(record.numel); });
}

#endif
