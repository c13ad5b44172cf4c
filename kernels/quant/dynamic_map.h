/*
 * dynamic_map.h: the dynamic map of 8 bits: the value of a code, and the code of a value.
 *
 * A map has 256 values in [-1, 1] (signed) or [0, 1] (unsigned). Seven decades, the first from 1e-7
 * to 1e-6 and the last from 0.1 to 1, are cut into n equal parts each, and the midpoints of the
 * parts are values; n is 1, 2, .. 64 in the signed map and 2, 4, .. 128 in the unsigned one. 0 and
 * 1 are values too. Codes number the values in ascending order, so 127 is the code of the signed 0.
 *
 * 8-bit optimizers via block-wise quantization, Dettmers et al., arXiv:2110.02861. The values equal
 * those of bitsandbytes' create_dynamic_map() to the bit, which fixes the roundings: torch.linspace
 * in binary32, counted from the nearer end, then the mean of neighbors, then the power of ten.
 */
#ifndef HR_DYNAMIC_MAP_H
#define HR_DYNAMIC_MAP_H

#include <math.h>

#include "kernels/core/dtype.h"

/* Border i, 0 to n, between the n parts of [0.1, 1]. Product and sum are exact in binary64, so that
 * the one rounding is that of fmaf(). */
HR_CONSTEXPR float dynamic_border(int i, int n)
{
    const double width = (1.0f - 0.1f) / (float)n; /* n is a power of 2 */
    return (float)(2 * i < n ? width * i + 0.1f : 1.0 - width * (n - i));
}

HR_CONSTEXPR float dynamic_power_of_10(int exponent)
{
    return exponent == 0    ? 1.0f
           : exponent == -1 ? 1e-1f
           : exponent == -2 ? 1e-2f
           : exponent == -3 ? 1e-3f
           : exponent == -4 ? 1e-4f
           : exponent == -5 ? 1e-5f
                            : 1e-6f;
}

/* The code of zero. */
HR_CONSTEXPR int dynamic_zero(int is_signed)
{
    return is_signed ? 127 : 0;
}

/* The value of a code, 0 to 255. */
HR_CONSTEXPR float dynamic_value(int code, int is_signed)
{
    const int distance = code - dynamic_zero(is_signed);
    const int magnitude =
        distance < 0 ? -distance : distance;                 /* 0 for the value 0, 1 for the next */
    const int place = is_signed ? magnitude : magnitude + 1; /* n + the number of the part */
    const int least = is_signed ? 1 : 2;
    if (place < least)
        return 0.0f;
    if (place == 128 * least)
        return 1.0f;
    int n = least, exponent = -6;
    for (; place >= 2 * n; n *= 2)
        exponent++;
    const float sum = dynamic_border(place - n, n) + dynamic_border(place - n + 1, n);
    const float value = sum / 2.0f * dynamic_power_of_10(exponent);
    return distance < 0 ? -value : value;
}

/* The largest number that gets `code` and not the next code, given the values of both: the midpoint
 * of the values, or the largest binary32 below it.
 *
 * With `bnb`, the threshold that bitsandbytes' search uses: it rounds the midpoint, and as its last
 * step starts from an even code, a number must be above the midpoint to move up and below to move
 * down.
 */
HR_CONSTEXPR float dynamic_threshold(int code, float low, float high, int bnb)
{
    const float sum = low + high, midpoint = sum / 2.0f;
    /* The exact error of the sum (Knuth) tells on which side of the midpoint its rounding lies. */
    const float part = sum - low;
    const float lost = (low - (sum - part)) + (high - part);
    const int before = bnb ? code % 2 != 0 : lost < 0.0f;
    const uint32_t bits = hr_bits(midpoint); /* never 0 */
    return before ? hr_float(midpoint > 0.0f ? bits - 1u : bits + 1u) : midpoint;
}

/* The tables of a map. Within a decade a code is a linear function of the value, so a
 * multiplication finds the code or its neighbor. There are 16 pairs of binades from 2^-32 to 1, and
 * at most one decade begins in each. */
#define DYNAMIC_DECADES 9 /* 0, the seven, and 1 */
typedef struct dynamic_map {
    float values[256];
    float thresholds[256];
    float begins[16];   /* by pair of binades: where a decade begins in it, or infinity */
    int32_t before[16]; /* by pair of binades: the decade before that */
    /* By decade: code - code of zero = min(|y| * slope + offset, last). */
    float slopes[16], offsets[16], lasts[16];
} dynamic_map;

/* The pair of binades of y, 2^-32 <= y < 2. */
HR_INLINE int dynamic_pair(float y)
{
    return (int)(hr_bits(y) >> 24) & 15;
}

/* Fills entries first, first + stride, .. of the tables of one phase, so that threads can share the
 * work. One thread passes first 0 and stride 1. Phases 0, 1 and 2 must follow one another. */
HR_INLINE void dynamic_map_fill(dynamic_map *map, int is_signed, int bnb, int phase, int first,
                                int stride)
{
    const int zero = dynamic_zero(is_signed), least = is_signed ? 1 : 2;
    for (int code = first; phase == 0 && code < 256; code += stride)
        map->values[code] = dynamic_value(code, is_signed);
    for (int code = first; phase == 1 && code < 256; code += stride)
        map->thresholds[code] =
            code == 255 ? INFINITY
                        : dynamic_threshold(code, map->values[code], map->values[code + 1], bnb);
    for (int d = first; phase == 1 && d < 16; d += stride) {
        const int inside = d >= 1 && d <= 7, n = least << (inside ? d - 1 : 0);
        const int start = n - (is_signed ? 0 : 1); /* the first code of the decade, from zero */
        const float tens = dynamic_power_of_10(inside ? d - 7 : 0);
        map->slopes[d] = inside ? (float)n / (0.9f * tens) : 0.0f;
        map->offsets[d] = inside   ? (float)start - (float)n / 9.0f - 0.5f
                          : d >= 8 ? (float)(255 - zero)
                                   : 0.0f;
        map->lasts[d] = inside ? (float)(start + n - 1) : d >= 8 ? (float)(255 - zero) : 0.0f;
    }
    for (int pair = first; phase == 2 && pair < 16; pair += stride) {
        map->begins[pair] = INFINITY;
        map->before[pair] = 0;
        for (int d = 1; d <= 8; d++) {
            const int start = (least << (d - 1)) - (is_signed ? 0 : 1);
            const float begin = map->thresholds[zero + start - 1];
            if (dynamic_pair(begin) < pair)
                map->before[pair] = d;
            if (dynamic_pair(begin) == pair)
                map->begins[pair] = begin;
        }
    }
}

/* A bound of the error of the multiplication, in codes. */
#define DYNAMIC_SLACK 0x1p-12f

/* The code nearest to y, -1 <= y < 2, as map->thresholds decides. A NaN gets the code of zero, and
 * so does a negative y in the unsigned map. */
HR_INLINE int dynamic_encode(const dynamic_map *map, float y, int is_signed)
{
    const int negative = is_signed && y < 0.0f;
    /* A midpoint gets the lower code, so a negative midpoint gets the greater magnitude. */
    const float magnitude = negative ? hr_float((hr_bits(y) & 0x7FFFFFFFu) + 1u) : y;
    const float clamped = magnitude > 0x1p-31f ? magnitude : 0x1p-31f;
    const int pair = dynamic_pair(clamped);
    const int decade = map->before[pair] + (clamped > map->begins[pair]);
    const float place = clamped * map->slopes[decade] + map->offsets[decade];
    const float distance = place < map->lasts[decade] ? place : map->lasts[decade];
    const float least = distance < 127.0f ? -distance : -127.0f; /* -1 is not in the map */
    /* The lower of the two codes that are possible: rounded up, by truncating a positive number. */
    const float lower = (negative ? least : distance) - (0.5f + DYNAMIC_SLACK);
    const int code = dynamic_zero(is_signed) + (int)(lower + 256.0f) - 255;
    return code + (y > map->thresholds[code]);
}

/* Rounds y to one of the two codes next to it: a < y < b gets b with probability (y - a) / (b - a),
 * to within 2^-24. `random` is uniform in all 32 bits. A y below the lowest value gets the lowest
 * code. */
HR_INLINE int dynamic_encode_randomly(const dynamic_map *map, float y, int is_signed,
                                      uint32_t random)
{
    const int nearest = dynamic_encode(map, y, is_signed);
    const int below = nearest - (map->values[nearest] > y);
    if (below < 0 || below == 255)
        return nearest;
    const float low = map->values[below], high = map->values[below + 1];
    const float uniform = (float)(random >> 8) * 0x1p-24f;
    return below + (uniform * (high - low) < y - low);
}

/* The two factors of y = (x * first) * second, which is x / absmax but for the roundings of
 * `second` and y. `first` keeps the reciprocal a normal number, even if absmax is denormal or
 * huge. */
typedef struct dynamic_scale {
    float first, second;
} dynamic_scale;

HR_INLINE dynamic_scale dynamic_scale_of(float absmax)
{
    dynamic_scale scale;
    scale.first = absmax < 0x1p-64f ? 0x1p64f : absmax > 0x1p64f ? 0x1p-64f : 1.0f;
    scale.second = absmax == 0.0f ? 0.0f : 1.0f / (absmax * scale.first);
    return scale;
}

#endif
