/*
 * random.h: Philox4x32-10, random numbers that are a function of a counter and a key, the same on
 * every device and in any order.
 *
 * Parallel random numbers: as easy as 1, 2, 3, Salmon et al., doi:10.1145/2063384.2063405.
 */
#ifndef HR_RANDOM_H
#define HR_RANDOM_H

#include "common.h"

typedef struct hr_random4 {
    uint32_t word[4];
} hr_random4;

HR_INLINE hr_random4 hr_philox(hr_random4 counter, uint64_t key)
{
    uint32_t key0 = (uint32_t)key, key1 = (uint32_t)(key >> 32);
    uint32_t a = counter.word[0], b = counter.word[1], c = counter.word[2], d = counter.word[3];
    for (int round = 0; round < 10; round++) {
        const uint64_t product0 = (uint64_t)0xD2511F53u * a;
        const uint64_t product1 = (uint64_t)0xCD9E8D57u * c;
        a = (uint32_t)(product1 >> 32) ^ b ^ key0;
        b = (uint32_t)product1;
        c = (uint32_t)(product0 >> 32) ^ d ^ key1;
        d = (uint32_t)product0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    hr_random4 random;
    random.word[0] = a;
    random.word[1] = b;
    random.word[2] = c;
    random.word[3] = d;
    return random;
}

#endif
