/*
 * math.h: exponential, logarithm, tanh, erf and the normal distribution in binary32, on the host
 * and on the device. They are made of additions, multiplications, fmaf and integer operations
 * alone, without branches and tables, so that compilers vectorize them and every device and
 * instruction set gives the same bits, which libraries do not. Errors of hr_exp, hr_log, hr_tanh and
 * hr_erf are at most 1.5 ulp.
 *
 * The polynomials are minimax fits by Remez's exchange algorithm in 40 digits to functions that have
 * no root on the interval; the weight of the fit is what turns its error into the relative error of
 * the result. Coefficients were then rounded to binary32.
 */
#ifndef HR_MATH_H
#define HR_MATH_H

#include <math.h>

#include "kernels/core/dtype.h"

/* A NaN stays one, because it fails the comparison. */
HR_INLINE float hr_at_most(float x, float bound)
{
    return x > bound ? bound : x;
}

HR_INLINE float hr_at_least(float x, float bound)
{
    return x < bound ? bound : x;
}

HR_INLINE float hr_with_sign_of(float magnitude, float x)
{
    return hr_float((hr_bits(magnitude) & 0x7FFFFFFFu) | (hr_bits(x) & 0x80000000u));
}

/* x = n ln 2 + r, |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds to an integer, which is then in the low
 * bits of `shifted`. */
typedef struct hr_exp_parts {
    float r, n;
    uint32_t shifted;
} hr_exp_parts;

HR_INLINE hr_exp_parts hr_exp_split(float x)
{
    const float shifted = fmaf(x, 0x1.715476p+0f, 0x1.8p+23f);
    const float n = shifted - 0x1.8p+23f;
    const float high = fmaf(n, -0x1.62e400p-1f, x); /* exact: the factor has 15 bits */
    return (hr_exp_parts){fmaf(n, -0x1.7f7d1cp-20f, high), n, hr_bits(shifted)};
}

/* e^r - 1. */
HR_INLINE float hr_expm1_near_0(float r)
{
    float p = fmaf(0x1.6ab0a8p-10f, r, 0x1.122c7ap-7f);
    p = fmaf(p, r, 0x1.55579ep-5f);
    p = fmaf(p, r, 0x1.5554aap-3f);
    p = fmaf(p, r, 0x1.fffffep-2f);
    return fmaf(p, r * r, r);
}

HR_INLINE float hr_exp(float x)
{
    /* Beyond the bounds the result is an infinity or 0. 2^n is applied in two halves, of which only
     * the second can leave the normal numbers, and rounds once. */
    const hr_exp_parts s = hr_exp_split(hr_at_least(hr_at_most(x, 89.0f), -104.0f));
    const uint32_t half = (s.shifted << 22) & 0xFF800000u, rest = (s.shifted << 23) - half;
    const float p = 1.0f + hr_expm1_near_0(s.r);
    return p * hr_float(0x3F800000u + half) * hr_float(0x3F800000u + rest);
}

/* e^x for -88 <= x <= 0, in half the instructions: 2^n is one factor. It is 0 where n is -127, for
 * the bits of 2^-127 would be those of 0: where the result is below the normal numbers. */
HR_INLINE float hr_exp_to_1(float x)
{
    const float shifted = fmaf(x, 0x1.715476p+0f, 0x1.8p+23f);
    const float r = fmaf(shifted - 0x1.8p+23f, -0x1.62e430p-1f, x);
    float p = fmaf(0x1.6ab0a8p-10f, r, 0x1.122c7ap-7f);
    p = fmaf(p, r, 0x1.55579ep-5f);
    p = fmaf(p, r, 0x1.5554aap-3f);
    p = fmaf(p, r, 0x1.fffffep-2f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    return p * hr_float(0x3F800000u + (hr_bits(shifted) << 23));
}

/* 1 / b for 1 <= b <= 32, rounded to nearest even. For such numbers the compiler's own division is
 * these three instructions, too, behind a branch for others. */
HR_INLINE float hr_inverse(float b)
{
#if defined(__CUDA_ARCH__)
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(b));
    return fmaf(y, -fmaf(b, y, -1.0f), y);
#else
    return 1.0f / b;
#endif
}

/* With m = e^(-2 |x|) - 1, tanh |x| = -m / (2 + m). The low parts are what rounding took off; they
 * come back with the remainder of the quotient. */
HR_INLINE float hr_tanh(float x)
{
    const float magnitude = hr_at_most(hr_float(hr_bits(x) & 0x7FFFFFFFu), 16.0f);
    const hr_exp_parts s = hr_exp_split(-2.0f * magnitude);
    const float power = hr_float(0x3F800000u + (s.shifted << 23));
    const float e = hr_expm1_near_0(s.r);
    const float m = fmaf(power, e, power - 1.0f), m_low = fmaf(power, e, power - 1.0f - m);
    const float b = 2.0f + m, b_low = m - (b - 2.0f) + m_low;
    const float inverse = hr_inverse(b), q = -m * inverse;
    const float remainder = fmaf(-b_low, q, fmaf(-b, q, -m) - m_low);
    return hr_with_sign_of(fmaf(remainder, inverse, q), x);
}

/* Of 2^shift times a normal number, which is above 0 and finite. */
HR_INLINE float hr_log_shifted(float normal, float shift)
{
    /* normal = 2^n (1 + f), 1 + f from sqrt(1/2) to sqrt(2). */
    const uint32_t above = hr_bits(normal) - 0x3F3504F3u;
    const float n = (float)((int32_t)above >> 23) + shift;
    const float f = hr_float((above & 0x007FFFFFu) + 0x3F3504F3u) - 1.0f;
    float p = -0x1.38b608p-4f;
    p = fmaf(p, f, 0x1.055ba6p-3f);
    p = fmaf(p, f, -0x1.0d8544p-3f);
    p = fmaf(p, f, 0x1.22da14p-3f);
    p = fmaf(p, f, -0x1.547244p-3f);
    p = fmaf(p, f, 0x1.99a008p-3f);
    p = fmaf(p, f, -0x1.000228p-2f);
    p = fmaf(p, f, 0x1.555554p-2f);
    p = fmaf(p, f, -0.5f);
    const float low = fmaf(n, 0x1.7f7d1cp-20f, f * f * p);
    return fmaf(n, 0x1.62e400p-1f, f + low);
}

HR_INLINE float hr_log(float x)
{
    const int denormal = x < 0x1p-126f;
    const float result = hr_log_shifted(denormal ? x * 0x1p+23f : x, denormal ? -23.0f : 0.0f);
    const float special = x == 0.0f ? -HUGE_VALF : x < 0.0f ? hr_float(0x7FC00000u) : x;
    return x > 0.0f && x < HUGE_VALF ? result : special;
}

HR_INLINE float hr_erf(float x)
{
    /* x + x p(x^2) up to 1, and 1 - e^-p(|x|) above. */
    const float magnitude = hr_at_most(hr_float(hr_bits(x) & 0x7FFFFFFFu), 4.0f);
    const float square = magnitude * magnitude;
    float small = fmaf(0x1.4771fep-14f, square, -0x1.a3515ep-11f);
    small = fmaf(small, square, 0x1.53f224p-8f);
    small = fmaf(small, square, -0x1.b7f71ap-6f);
    small = fmaf(small, square, 0x1.ce2ce6p-4f);
    small = fmaf(small, square, -0x1.81273ep-2f);
    small = fmaf(small, square, 0x1.06eba8p-3f);
    float large = fmaf(-0x1.86d9f6p-13f, magnitude, 0x1.825964p-9f);
    large = fmaf(large, magnitude, -0x1.65caeap-6f);
    large = fmaf(large, magnitude, 0x1.a65312p-4f);
    large = fmaf(large, magnitude, 0x1.46baf0p-1f);
    large = fmaf(large, magnitude, 0x1.2088eap+0f);
    large = fmaf(large, magnitude, 0x1.661e4ep-12f);
    const float result =
        magnitude < 1.0f ? fmaf(magnitude, small, magnitude) : 1.0f - hr_exp(-large);
    return hr_with_sign_of(result, x);
}

/* The standard normal distribution: its density and the probability of less than x, with a small
 * relative error in the lower tail too, down to the smallest normal numbers. */
typedef struct hr_normal_at {
    float density, below;
} hr_normal_at;

HR_INLINE hr_normal_at hr_normal(float x)
{
    /* e^(-z^2 / 2) m(z) is the probability of less than -z; m is a polynomial in
     * (z - 3.5) / (z + 3.5), fitted up to 15; at 13.27 the exponential is 0. What rounding took off
     * z^2 is put back. */
    const float z = hr_at_most(hr_float(hr_bits(x) & 0x7FFFFFFFu), 13.27f);
    const float square = z * z, lost = fmaf(z, z, -square);
    const float rounded = hr_exp_to_1(-0.5f * square);
    const float e = fmaf(rounded, -0.5f * lost, rounded);
    const float t = (z - 3.5f) * hr_inverse(z + 3.5f);
    float p = fmaf(-0x1.8f4f74p-16f, t, 0x1.eac236p-14f);
    p = fmaf(p, t, 0x1.7adc44p-12f);
    p = fmaf(p, t, -0x1.68ce42p-10f);
    p = fmaf(p, t, -0x1.96a9a6p-10f);
    p = fmaf(p, t, 0x1.385b06p-6f);
    p = fmaf(p, t, -0x1.f8f60cp-5f);
    p = fmaf(p, t, 0x1.01c074p-3f);
    p = fmaf(p, t, -0x1.7f4314p-3f);
    p = fmaf(p, t, 0x1.b396fap-4f);
    const float tail = e * p;
    return (hr_normal_at){e * 0x1.988454p-2f, hr_bits(x) >> 31 ? tail : 1.0f - tail};
}

#endif
