/*
 * dynamic_map_cpu_vbmi.h: decodes and encodes 64 codes at a time, with AVX-512 VBMI's byte
 * permutes.
 *
 * Decoding looks a value up byte by byte. Encoding is that of dynamic_map_cpu.h; which codes are not
 * sure is collected for many elements, because a branch for each vector would cost more than the
 * codes.
 *
 * The codes are those of quant_encode() in quantize_blocks.h, which names the tests that compare
 * them.
 */
#ifndef HR_DYNAMIC_MAP_CPU_VBMI_H
#define HR_DYNAMIC_MAP_CPU_VBMI_H

#include "kernels/core/cpu_vbmi.h"
#include "kernels/quant/dynamic_map_cpu.h"

/* The tables of one map. */
typedef struct dynamic_bytes {
    _Alignas(64) uint8_t planes[4][256]; /* byte k of the value of a code */
    /* Constants. Loading them costs less than an instruction that broadcasts a byte. */
    uint8_t
        unpacking[2][64]; /* by order: the elements in the order that unpacking their bytes needs */
    uint8_t packing[2][64];  /* by order: the place of byte 0 of each element's word */
    uint8_t repeated[5][64]; /* bytes 64, 126, 127, 128 and 192 */
} dynamic_bytes;

enum { DYNAMIC_64, DYNAMIC_126, DYNAMIC_127, DYNAMIC_128, DYNAMIC_192 };

static inline void dynamic_bytes_fill(dynamic_bytes *b, const dynamic_map *map)
{
    static const uint8_t bytes[5] = {64, 126, 127, 128, 192};
    for (int i = 0; i < 5; i++)
        memset(b->repeated[i], bytes[i], sizeof b->repeated[i]);
    for (int order = 0; order < 2; order++)
        for (int k = 0; k < 4; k++)
            for (int lane = 0; lane < 16; lane++) {
                const int element = cpu_element((cpu_order)order, k, lane);
                b->unpacking[order][lane / 4 * 16 + k * 4 + lane % 4] = (uint8_t)element;
                b->packing[order][element] = (uint8_t)(4 * lane);
            }
    for (int code = 0; code < 256; code++)
        for (int k = 0; k < 4; k++)
            b->planes[k][code] = (uint8_t)(hr_bits(map->values[code]) >> (8 * k));
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

CPU_AVX512_VBMI_BF16 HR_INLINE __m512i dynamic_repeated(const dynamic_bytes *b, int which)
{
    return _mm512_load_si512(b->repeated[which]);
}

/* 64 values that are being decoded, one byte of each at a time, so that other work fits in
 * between. */
typedef struct dynamic_decoding {
    __m512i code, planes[4];
    __mmask64 negative, other; /* signed: codes below 127, codes other than 127 */
    __mmask64 upper;           /* signed: in the upper half of a table; unsigned: from 64 */
    __mmask64 from_128, from_192;
} dynamic_decoding;

CPU_AVX512_VBMI_BF16 HR_INLINE void dynamic_decode_vbmi(dynamic_decoding *d, const dynamic_bytes *b,
                                                        const uint8_t *codes, int is_signed,
                                                        cpu_order order)
{
    const __m512i elements = _mm512_load_si512(b->unpacking[order]);
    const __m512i code = _mm512_permutexvar_epi8(elements, _mm512_loadu_si512(codes));
    if (is_signed) {
        /* A negative value is the value of code 254 - code with the sign bit; code 127 is 0. */
        d->negative = _mm512_cmplt_epu8_mask(code, dynamic_repeated(b, DYNAMIC_127));
        d->other = _mm512_cmpneq_epu8_mask(code, dynamic_repeated(b, DYNAMIC_127));
        d->code = _mm512_mask_sub_epi8(code, d->negative, dynamic_repeated(b, DYNAMIC_126), code);
        d->upper = _mm512_mask_test_epi8_mask(d->other, d->code, dynamic_repeated(b, DYNAMIC_64));
    } else {
        d->code = code;
        d->upper = _mm512_cmpge_epu8_mask(code, dynamic_repeated(b, DYNAMIC_64));
        d->from_128 = _mm512_movepi8_mask(code);
        d->from_192 = _mm512_cmpge_epu8_mask(code, dynamic_repeated(b, DYNAMIC_192));
    }
}

/* Byte k. */
CPU_AVX512_VBMI_BF16 HR_INLINE void
dynamic_decode_byte_vbmi(dynamic_decoding *d, const dynamic_bytes *b, int k, int is_signed)
{
    const __m512i t0 = _mm512_load_si512(b->planes[k]);
    const __m512i t64 = _mm512_load_si512(b->planes[k] + 64);
    const __m512i t128 = _mm512_load_si512(b->planes[k] + 128);
    const __m512i t192 = _mm512_load_si512(b->planes[k] + 192);
    __m512i plane;
    if (is_signed) {
        plane = _mm512_maskz_permutexvar_epi8(d->other, d->code, t128);
        plane = _mm512_mask_permutexvar_epi8(plane, d->upper, d->code, t192);
        if (k == 3)
            plane =
                _mm512_mask_add_epi8(plane, d->negative, plane, dynamic_repeated(b, DYNAMIC_128));
    } else {
        plane = _mm512_permutexvar_epi8(d->code, t0);
        plane = _mm512_mask_permutexvar_epi8(plane, d->upper, d->code, t64);
        plane = _mm512_mask_permutexvar_epi8(plane, d->from_128, d->code, t128);
        plane = _mm512_mask_permutexvar_epi8(plane, d->from_192, d->code, t192);
    }
    d->planes[k] = plane;
}

CPU_AVX512_VBMI_BF16 HR_INLINE void dynamic_decoded_vbmi(const dynamic_decoding *d,
                                                         __m512 values[4])
{
    const __m512i low0 = _mm512_unpacklo_epi8(d->planes[0], d->planes[1]);
    const __m512i low1 = _mm512_unpackhi_epi8(d->planes[0], d->planes[1]);
    const __m512i high0 = _mm512_unpacklo_epi8(d->planes[2], d->planes[3]);
    const __m512i high1 = _mm512_unpackhi_epi8(d->planes[2], d->planes[3]);
    values[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(low0, high0));
    values[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(low0, high0));
    values[2] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(low1, high1));
    values[3] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(low1, high1));
}

/* Encodes vector k of numbers y = x * scale and puts the codes in their places among 64. Begin with
 * k = 0. Adds to `unsure` the lanes whose codes are not sure: bit 16 * k + lane. */
CPU_AVX512_VBMI_BF16 HR_INLINE __m512i dynamic_encode_vbmi(__m512i codes, uint64_t *unsure,
                                                           const dynamic_bytes *b,
                                                           const dynamic_vectors *v, int k,
                                                           __m512 x, __m512 scale, int is_signed,
                                                           cpu_order order)
{
    __mmask16 sure;
    const __m512i words = dynamic_codes_avx512(v, _mm512_mul_ps(x, scale), x, is_signed, &sure);
    const __m512i places = _mm512_load_si512(b->packing[order]);
    *unsure |= (uint64_t)(uint16_t)~sure << (16 * k);
    if (k == 0)
        return _mm512_permutexvar_epi8(places, words);
    const __mmask64 elements =
        order == CPU_IN_ROW ? 0xFFFFull << (16 * k) : 0x55555555ull << (k / 2 * 32 + k % 2);
    return _mm512_mask_permutexvar_epi8(codes, elements, places, words);
}
#endif

#endif
