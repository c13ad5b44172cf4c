/*
 * dtype.h: reads and writes elements of every type, on the host and on the device. An element is
 * loaded as binary32 and rounded once when it is stored.
 *
 * The conversions use integer and binary32 arithmetic that compilers vectorize and that never meets
 * a denormal operand, so they give the same bits on every device and instruction set. Every NaN is
 * stored as the same NaN, because processors differ in the payloads that they propagate.
 */
#ifndef HR_DTYPE_H
#define HR_DTYPE_H

#include <stdint.h>
#include <string.h>

#include "capi/headroom.h"

#if defined(__CUDACC__)
#define HR_INLINE static __host__ __device__ __forceinline__
#else
#define HR_INLINE static inline __attribute__((always_inline, unused))
#endif

/* Sets of types, one bit each. */
#define HR_BIT(dtype) (1u << (dtype))
#define HR_FLOATS     (HR_BIT(HR_F32) | HR_BIT(HR_BF16) | HR_BIT(HR_F16))
#define HR_SCALARS    (HR_BIT(HR_F32) | HR_BIT(HR_F64))

/* Bytes of an element. */
HR_INLINE int hr_element_size(hr_dtype dtype)
{
    return dtype == HR_F64 ? 8 : dtype == HR_F32 ? 4 : dtype == HR_U8 || dtype == HR_I8 ? 1 : 2;
}

/* Marks functions that a table is made with which the compiler computes. */
#if defined(__cplusplus)
#define HR_CONSTEXPR constexpr HR_INLINE
#else
#define HR_CONSTEXPR HR_INLINE
#endif

HR_CONSTEXPR uint32_t hr_bits(float x)
{
#if defined(__cplusplus)
    return __builtin_bit_cast(uint32_t, x);
#else
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
#endif
}

HR_CONSTEXPR float hr_float(uint32_t bits)
{
#if defined(__cplusplus)
    return __builtin_bit_cast(float, bits);
#else
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
#endif
}

HR_INLINE float hr_from_bf16(uint16_t half)
{
    return hr_float((uint32_t)half << 16);
}

HR_INLINE uint16_t hr_to_bf16(float x)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint16_t half; /* rounds to nearest even, keeps denormals, and gives 0x7FFF for a NaN */
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(x));
    return half;
#else
    const uint32_t bits = hr_bits(x);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : (uint16_t)rounded;
#endif
}

HR_INLINE float hr_from_f16(uint16_t half)
{
#if defined(__CUDA_ARCH__)
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
    return x;
#else
    /* Moves exponent and mantissa into place and rebiases the exponent by 127 - 15. Infinity and
     * NaN are rebiased once more, to exponent 255; a denormal is normalized by a subtraction. */
    const uint32_t magnitude = (uint32_t)(half & 0x7FFFu) << 13;
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    const uint32_t rebiased = magnitude + (112u << 23);
    const uint32_t special = rebiased + (112u << 23);
    const uint32_t denormal = hr_bits(hr_float(rebiased + (1u << 23)) - hr_float(113u << 23));
    const uint32_t finite = magnitude < (1u << 23) ? denormal : rebiased;
    return hr_float(sign | (magnitude >= (31u << 23) ? special : finite));
#endif
}

HR_INLINE uint16_t hr_to_f16(float x)
{
#if defined(__CUDA_ARCH__)
    uint16_t half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
    return half;
#else
    /* Below 2^-14 the result is a denormal: adding 0.5 puts its last place at bit 0 of the
     * mantissa, and the addition rounds. Above, the mantissa is rounded by an integer addition. */
    const uint32_t bits = hr_bits(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    const uint32_t denormal = hr_bits(hr_float(magnitude) + 0.5f) - (126u << 23);
    const uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t finite = magnitude < (113u << 23) ? denormal : normal;
    const uint32_t bounded = magnitude >= (143u << 23) ? 0x7C00u : finite;
    return (uint16_t)(magnitude > 0x7F800000u ? 0x7FFFu : sign | bounded);
#endif
}

/* Conversions for both types of 16 bits. */
HR_INLINE float hr_from_half(uint16_t half, hr_dtype dtype)
{
    return dtype == HR_BF16 ? hr_from_bf16(half) : hr_from_f16(half);
}

HR_INLINE uint16_t hr_to_half(float x, hr_dtype dtype)
{
    return dtype == HR_BF16 ? hr_to_bf16(x) : hr_to_f16(x);
}

/* With a constant `dtype`, each of these compiles to one load or store and its conversion. */
HR_INLINE float hr_load(const void *base, int64_t i, hr_dtype dtype)
{
    switch (dtype) {
    case HR_BF16:
        return hr_from_bf16(((const uint16_t *)base)[i]);
    case HR_F16:
        return hr_from_f16(((const uint16_t *)base)[i]);
    default:
        return ((const float *)base)[i];
    }
}

HR_INLINE void hr_store(void *base, int64_t i, float x, hr_dtype dtype)
{
    switch (dtype) {
    case HR_BF16:
        ((uint16_t *)base)[i] = hr_to_bf16(x);
        break;
    case HR_F16:
        ((uint16_t *)base)[i] = hr_to_f16(x);
        break;
    default:
        ((float *)base)[i] = x != x ? hr_float(0x7FFFFFFFu) : x;
        break;
    }
}

/* Reads a scalar or counter of type f32 or f64 as binary64. */
HR_INLINE double hr_load_scalar(const void *scalar, hr_dtype dtype)
{
    return dtype == HR_F64 ? *(const double *)scalar : (double)*(const float *)scalar;
}

HR_INLINE void hr_store_scalar(void *scalar, double x, hr_dtype dtype)
{
    if (dtype == HR_F64)
        *(double *)scalar = x;
    else
        *(float *)scalar = (float)x;
}

/* Runs the body with the constant `name` equal to `dtype`, which is f32, bf16 or f16. */
#define FOR_DTYPE(dtype, name, body)   \
    switch (dtype) {                   \
    case HR_BF16: {                    \
        const hr_dtype name = HR_BF16; \
        body;                          \
        break;                         \
    }                                  \
    case HR_F16: {                     \
        const hr_dtype name = HR_F16;  \
        body;                          \
        break;                         \
    }                                  \
    default: {                         \
        const hr_dtype name = HR_F32;  \
        body;                          \
        break;                         \
    }                                  \
    }

/* Runs the body with the constant `name` equal to 1 or 0, as the condition is. */
#define FOR_FLAG(condition, name, body) \
    if (condition) {                    \
        const int name = 1;             \
        body;                           \
    } else {                            \
        const int name = 0;             \
        body;                           \
    }

#endif
