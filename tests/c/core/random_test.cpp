// Philox4x32-10 against the known answers that its authors publish with Random123
// (examples/kat_vectors, github.com/DEShawResearch/random123).
#include "kernels/core/random.h"

#include <gtest/gtest.h>

TEST(Random, KnownAnswers)
{
    struct Case {
        hr_random4 counter;
        uint64_t key;
        uint32_t wanted[4];
    };
    const Case cases[] = {
        {{{0, 0, 0, 0}}, 0, {0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8}},
        {{{~0u, ~0u, ~0u, ~0u}}, ~uint64_t(0), {0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD}},
        {{{0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344}},
         0x299F31D0A4093822,
         {0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1}},
    };
    for (const Case &c : cases) {
        const hr_random4 random = hr_philox(c.counter, c.key);
        for (int i = 0; i < 4; i++)
            EXPECT_EQ(random.word[i], c.wanted[i]);
    }
}
