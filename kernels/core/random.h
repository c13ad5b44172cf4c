/*
 * random.h: the random numbers of Philox4x32-10. They are a function of a counter and a key alone,
 * so they are the same on every device and in any order.
 *
 * Parallel random numbers: as easy as 1, 2, 3, Salmon et al., doi:10.1145/2063384.2063405.
 */
#ifndef HR_RANDOM_H
#define HR_RANDOM_H

#include "kernels/core/dtype.h"

typedef struct hr_random4 {
    uint32_t word[4];
} hr_random4;

#define HR_PHILOX_ROUNDS 10

typedef struct hr_philox_key {
    uint32_t low, high;
} hr_philox_key;

HR_INLINE hr_philox_key hr_philox_first(uint64_t seed)
{
    hr_philox_key key;
    key.low = (uint32_t)seed;
    key.high = (uint32_t)(seed >> 32);
    return key;
}

HR_INLINE hr_philox_key hr_philox_next(hr_philox_key key)
{
    key.low += 0x9E3779B9u;
    key.high += 0xBB67AE85u;
    return key;
}

typedef struct hr_philox_state {
    uint32_t a, b, c, d;
} hr_philox_state;

HR_INLINE hr_philox_state hr_philox_round(hr_philox_state x, hr_philox_key key)
{
    const uint64_t product0 = (uint64_t)0xD2511F53u * x.a;
    const uint64_t product1 = (uint64_t)0xCD9E8D57u * x.c;
    x.a = (uint32_t)(product1 >> 32) ^ x.b ^ key.low;
    x.b = (uint32_t)product1;
    x.c = (uint32_t)(product0 >> 32) ^ x.d ^ key.high;
    x.d = (uint32_t)product0;
    return x;
}

HR_INLINE hr_random4 hr_philox(hr_random4 counter, uint64_t seed)
{
    hr_philox_state x;
    x.a = counter.word[0];
    x.b = counter.word[1];
    x.c = counter.word[2];
    x.d = counter.word[3];
    hr_philox_key key = hr_philox_first(seed);
    for (int round = 0; round < HR_PHILOX_ROUNDS; round++, key = hr_philox_next(key))
        x = hr_philox_round(x, key);
    hr_random4 random;
    random.word[0] = x.a;
    random.word[1] = x.b;
    random.word[2] = x.c;
    random.word[3] = x.d;
    return random;
}

#endif
