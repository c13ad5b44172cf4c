/*
 * pack.cuh: N consecutive elements of a thread, 4 or 8, as they lie in memory: a word each of f32,
 * half a word of a 16-bit type. Loads are kept apart from conversions so that all loads of a thread
 * are in flight before the first use.
 */
#ifndef HR_PACK_CUH
#define HR_PACK_CUH

#include "kernels/core/cuda.cuh"

template <int N> struct pack;

/* Eight are two vectors and four are an array: with the other form of either, kernels of some GPUs
 * take more registers, or spill. */
template <> struct pack<4> {
    uint32_t words[4];
};

template <> struct pack<8> {
    uint4 low, high;
};

/* Word w. The words are copied out, so that w unrolls to registers. */
template <int N> static __device__ __forceinline__ uint32_t pack_word(const pack<N> &p, int w)
{
    if constexpr (N == 8) {
        const uint32_t words[8] = {p.low.x,  p.low.y,  p.low.z,  p.low.w,
                                   p.high.x, p.high.y, p.high.z, p.high.w};
        return words[w];
    } else {
        return p.words[w];
    }
}

template <int N> static __device__ __forceinline__ pack<N> pack_from(const uint32_t (&words)[N])
{
    pack<N> p;
    if constexpr (N == 8) {
        p.low = make_uint4(words[0], words[1], words[2], words[3]);
        p.high = make_uint4(words[4], words[5], words[6], words[7]);
    } else {
#pragma unroll
        for (int w = 0; w < 4; w++)
            p.words[w] = words[w];
    }
    return p;
}

/* At an address that is a multiple of the size of N 16-bit elements. */
template <int N, typename Index>
static __device__ __forceinline__ pack<N> pack_load(const void *base, Index i, hr_dtype dtype)
{
    if constexpr (N == 8) {
        pack<8> p;
        if (dtype == HR_F32) {
            const uint4 *const vectors = (const uint4 *)((const float *)base + i);
            p.low = vectors[0];
            p.high = vectors[1];
        } else {
            p.low = *(const uint4 *)((const uint16_t *)base + i);
            p.high = p.low;
        }
        return p;
    } else {
        pack<4> p = {{0, 0, 0, 0}};
        if (dtype == HR_F32) {
            const uint4 x = *(const uint4 *)((const float *)base + i);
            p = {{x.x, x.y, x.z, x.w}};
        } else {
            const uint2 x = *(const uint2 *)((const uint16_t *)base + i);
            p = {{x.x, x.y, 0, 0}};
        }
        return p;
    }
}

/* Comes between the loads of a turn and the first use: the compiler would move the loads of a later
 * group down to its use, where each waits for memory alone. */
static __device__ __forceinline__ void pack_all_loaded(void)
{
    asm volatile("" ::: "memory");
}

/* The same number, of which the compiler knows nothing: it then computes the addresses of a turn from
 * it, and does not keep a register pair per array and use from one turn to the next. */
static __device__ __forceinline__ int pack_opaque(int i)
{
    asm("" : "+r"(i));
    return i;
}

/* The same for an address, in the global memory. */
template <typename T> static __device__ __forceinline__ T *pack_opaque(T *p)
{
#if defined(__CUDA_ARCH__)
    size_t address = __cvta_generic_to_global(p);
    asm("" : "+l"(address));
    return (T *)__cvta_global_to_generic(address);
#else
    return p;
#endif
}

/* __stcs, because plain stores of a vector that was put together from words come out of the
 * compiler as scalar ones; and what an optimizer writes is not read again soon. */
template <typename Index>
static __device__ __forceinline__ void pack_store(void *base, Index i, pack<8> p, hr_dtype dtype)
{
    if (dtype == HR_F32) {
        uint4 *const vectors = (uint4 *)((float *)base + i);
        __stcs(vectors, p.low);
        __stcs(vectors + 1, p.high);
    } else {
        __stcs((uint4 *)((uint16_t *)base + i), p.low);
    }
}

template <typename Index>
static __device__ __forceinline__ void pack_store(void *base, Index i, const pack<4> &p,
                                                  hr_dtype dtype)
{
    if (dtype == HR_F32)
        __stcs((uint4 *)((float *)base + i),
               make_uint4(p.words[0], p.words[1], p.words[2], p.words[3]));
    else
        __stcs((uint2 *)((uint16_t *)base + i), make_uint2(p.words[0], p.words[1]));
}

/* The bits of element e, of a type of 8, 16 or 32 bits. */
template <int N>
static __device__ __forceinline__ uint32_t pack_bits(const pack<N> &p, int e, hr_dtype dtype)
{
    return dtype == HR_F32  ? pack_word(p, e)
           : dtype == HR_I8 ? (pack_word(p, e / 4) >> (8 * (e % 4))) & 0xFFu
                            : (pack_word(p, e / 2) >> (16 * (e % 2))) & 0xFFFFu;
}

/* Puts them into words that were zeros. */
template <int N>
static __device__ __forceinline__ void pack_put_bits(uint32_t (&words)[N], int e, hr_dtype dtype,
                                                     uint32_t bits)
{
    if (dtype == HR_F32)
        words[e] = bits;
    else if (dtype == HR_I8)
        words[e / 4] |= bits << (8 * (e % 4));
    else
        words[e / 2] |= bits << (16 * (e % 2));
}

/* Element e as binary32. */
template <int N>
static __device__ __forceinline__ float pack_get(const pack<N> &p, int e, hr_dtype dtype)
{
    if (dtype == HR_F32)
        return hr_float(pack_word(p, e));
    return hr_from_half((uint16_t)(pack_word(p, e / 2) >> (16 * (e % 2))), dtype);
}

/* All elements as binary32. The type is looked at once, not per element. */
template <int N>
static __device__ __forceinline__ void pack_floats(const pack<N> &p, hr_dtype dtype, float (&x)[N])
{
    if (dtype == HR_F32) {
#pragma unroll
        for (int e = 0; e < N; e++)
            x[e] = pack_get(p, e, HR_F32);
    } else if (dtype == HR_BF16) {
#pragma unroll
        for (int e = 0; e < N; e++)
            x[e] = pack_get(p, e, HR_BF16);
    } else {
#pragma unroll
        for (int e = 0; e < N; e++)
            x[e] = pack_get(p, e, HR_F16);
    }
}

/* Two numbers rounded to a type of 16 bits, the first in the low half of the word. */
static __device__ __forceinline__ uint32_t pack_two(float low, float high, hr_dtype dtype)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t word;
    if (dtype == HR_BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return hr_to_half(low, dtype) | (uint32_t)hr_to_half(high, dtype) << 16;
#endif
}

/* N numbers, rounded to their type. */
template <int N>
static __device__ __forceinline__ pack<N> pack_of(const float (&x)[N], hr_dtype dtype)
{
    uint32_t words[N] = {0};
    if (dtype == HR_F32) {
#pragma unroll
        for (int e = 0; e < N; e++)
            hr_store(words, e, x[e], HR_F32);
    } else if (dtype == HR_BF16) {
#pragma unroll
        for (int e = 0; e < N; e += 2)
            words[e / 2] = pack_two(x[e], x[e + 1], HR_BF16);
    } else {
#pragma unroll
        for (int e = 0; e < N; e += 2)
            words[e / 2] = pack_two(x[e], x[e + 1], HR_F16);
    }
    return pack_from(words);
}

/* ---- What addresses or the tensor's end forbid to do in one access --------------------------- */

/* Element by element, in functions of their own: inlined, their loads would take the registers that
 * all others need. */
#define PACK_SLOW static __device__ __attribute__((noinline, unused))

/* The first `left` elements, and zeros. */
template <int N>
PACK_SLOW pack<N> pack_load_slowly(const void *base, int i, hr_dtype dtype, int left)
{
    uint32_t words[N] = {0};
#pragma unroll
    for (int e = 0; e < N; e++) {
        if (e >= left)
            break;
        if (dtype == HR_F32)
            words[e] = ((const uint32_t *)base)[i + e];
        else
            words[e / 2] |= (uint32_t)((const uint16_t *)base)[i + e] << (16 * (e % 2));
    }
    return pack_from(words);
}

template <int N>
PACK_SLOW void pack_store_slowly(void *base, int i, hr_dtype dtype, int left, pack<N> p)
{
#pragma unroll
    for (int e = 0; e < N; e++) {
        if (e >= left)
            break;
        if (dtype == HR_F32)
            ((uint32_t *)base)[i + e] = pack_word(p, e);
        else
            ((uint16_t *)base)[i + e] = (uint16_t)(pack_word(p, e / 2) >> (16 * (e % 2)));
    }
}

/* Four bytes, the first in the lowest of the word; `absent` past the end. */
PACK_SLOW uint32_t pack_load_bytes_slowly(const uint8_t *base, int i, int left, uint32_t absent)
{
    uint32_t bytes = 0;
#pragma unroll
    for (int e = 0; e < 4; e++)
        bytes |= (e < left ? base[i + e] : absent) << (8 * e);
    return bytes;
}

PACK_SLOW void pack_store_bytes_slowly(uint8_t *base, int i, int left, uint32_t bytes)
{
#pragma unroll
    for (int e = 0; e < 4; e++)
        if (e < left)
            base[i + e] = (uint8_t)(bytes >> (8 * e));
}

/* `whole`: there are all N, at an address for one access; else there are `left`. */
template <int N>
static __device__ __forceinline__ pack<N> pack_load(const void *base, int i, hr_dtype dtype,
                                                    bool whole, int left)
{
    return whole ? pack_load<N>(base, i, dtype) : pack_load_slowly<N>(base, i, dtype, left);
}

template <int N>
static __device__ __forceinline__ void pack_store(void *base, int i, hr_dtype dtype, bool whole,
                                                  int left, const pack<N> &p)
{
    if (whole)
        pack_store(base, i, p, dtype);
    else
        pack_store_slowly(base, i, dtype, left, p);
}

/* Byte e of the words. */
template <int N>
static __device__ __forceinline__ uint32_t pack_byte(const uint32_t (&bytes)[N], int e)
{
#if defined(__CUDA_ARCH__)
    return __byte_perm(bytes[e / 4], 0, 0x4440 | e % 4);
#else
    return bytes[e / 4] >> (8 * (e % 4)) & 0xFFu;
#endif
}

/* N bytes, 4 or 8. */
template <int N>
static __device__ __forceinline__ void pack_load_bytes(const uint8_t *base, int i, bool whole,
                                                       int left, uint32_t absent,
                                                       uint32_t (&bytes)[N / 4])
{
    if (!whole) {
#pragma unroll
        for (int w = 0; w < N / 4; w++)
            bytes[w] = pack_load_bytes_slowly(base, i + 4 * w, left - 4 * w, absent);
    } else if constexpr (N == 8) {
        const uint2 two = *(const uint2 *)(base + i);
        bytes[0] = two.x;
        bytes[1] = two.y;
    } else {
        bytes[0] = *(const uint32_t *)(base + i);
    }
}

template <int N>
static __device__ __forceinline__ void pack_store_bytes(uint8_t *base, int i, bool whole, int left,
                                                        const uint32_t (&bytes)[N / 4])
{
    if (!whole) {
#pragma unroll
        for (int w = 0; w < N / 4; w++)
            pack_store_bytes_slowly(base, i + 4 * w, left - 4 * w, bytes[w]);
    } else if constexpr (N == 8) {
        __stcs((uint2 *)(base + i), make_uint2(bytes[0], bytes[1]));
    } else {
        __stcs((uint32_t *)(base + i), bytes[0]);
    }
}

#endif
