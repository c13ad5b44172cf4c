// Instructions on integers and bits against other statements of what they are.
#include <random>

#include "tests/ptx/try.h"

namespace
{
uint64_t word(std::mt19937_64 &random) // of few bits at times, and of ends
{
    const uint64_t x = random() >> (random() % 64);
    return random() % 4 == 0 ? ~x : x;
}
} // namespace

// 32 bits by 64, and 64 by halves.
TEST(Integer, Products)
{
    const Instruction lo("mul.lo.s32", 2), hi("mul.hi.u32", 2), wide("mul.wide.s32", 2),
        lo64("mul.lo.s64", 2), hi64("mul.hi.u64", 2), mad("mad.lo.s32", 3),
        wide16("mul.wide.u16", 2);
    std::mt19937_64 random(1);
    for (int k = 0; k < 20000; k++) {
        const uint64_t a = word(random), b = word(random), c = word(random);
        const uint64_t u = (a & 0xFFFFFFFF) * (b & 0xFFFFFFFF);
        ASSERT_EQ(lo(a, b), u & 0xFFFFFFFF);
        ASSERT_EQ(hi(a, b), u >> 32);
        ASSERT_EQ(wide(a, b), uint64_t(int64_t(int32_t(a)) * int32_t(b)));
        ASSERT_EQ(mad(a, b, c), uint32_t(u + c));
        ASSERT_EQ(wide16(a, b), (a & 0xFFFF) * (b & 0xFFFF));
        ASSERT_EQ(lo64(a, b), a * b);
        const uint64_t al = uint32_t(a), ah = a >> 32, bl = uint32_t(b), bh = b >> 32;
        const uint64_t carry = ((al * bl >> 32) + uint32_t(ah * bl) + uint32_t(al * bh)) >> 32;
        ASSERT_EQ(hi64(a, b), ah * bh + (ah * bl >> 32) + (al * bh >> 32) + carry);
    }
}

TEST(Integer, QuotientsAndRemaindersMakeTheWhole)
{
    const Instruction div("div.s32", 2), rem("rem.s32", 2), udiv("div.u64", 2), urem("rem.u64", 2),
        sdiv("div.s64", 2), srem("rem.s64", 2), div32("div.u32", 2), rem32("rem.u32", 2);
    std::mt19937_64 random(2);
    for (int k = 0; k < 20000; k++) {
        const uint64_t a = word(random), b = word(random);
        if (uint32_t(b) == 0)
            continue;
        const int64_t x = int32_t(a), y = int32_t(b), q = int32_t(div(a, b)),
                      r = int32_t(rem(a, b));
        if (!(x == INT32_MIN && y == -1)) {
            ASSERT_EQ(q * y + r, x);
            ASSERT_TRUE(std::abs(r) < std::abs(y) && (r == 0 || (r < 0) == (x < 0)));
        }
        ASSERT_EQ(udiv(a, b) * b + urem(a, b), a);
        ASSERT_LT(urem(a, b), b);
        ASSERT_EQ(sdiv(a, b) * b + srem(a, b), a);
        ASSERT_EQ(div32(a, b) * uint32_t(b) + rem32(a, b), uint32_t(a));
    }
}

TEST(Integer, SumsAndExtremesWrapAtTheWidth)
{
    EXPECT_EQ(Instruction("add.s32", 2)(0xFFFFFFFF, 1), 0u);
    EXPECT_EQ(Instruction("add.s64", 2)(~uint64_t(0), 2), 1u);
    EXPECT_EQ(Instruction("sub.s16", 2)(0, 1), 0xFFFFu);
    EXPECT_EQ(Instruction("sub.u32", 2)(1, 2), 0xFFFFFFFFu);
    EXPECT_EQ(Instruction("neg.s32", 1)(5), 0xFFFFFFFBu);
    EXPECT_EQ(Instruction("abs.s32", 1)(0xFFFFFFFB), 5u);
    EXPECT_EQ(Instruction("min.s32", 2)(0xFFFFFFFF, 1), 0xFFFFFFFFu);
    EXPECT_EQ(Instruction("max.u32", 2)(0xFFFFFFFF, 1), 0xFFFFFFFFu);
    EXPECT_EQ(Instruction("min.s64", 2)(~uint64_t(0), 1), ~uint64_t(0));
    EXPECT_EQ(Instruction("max.s64", 2)(~uint64_t(0), 1), 1u);
    EXPECT_EQ(Instruction("popc.b32", 1)(0x1F0000000F), 4u);
    EXPECT_EQ(Instruction("clz.b32", 1)(1), 31u);
    EXPECT_EQ(Instruction("clz.b32", 1)(0), 32u);
    EXPECT_EQ(Instruction("clz.b64", 1)(1), 63u);
}

// A shift by n is n shifts by one.
TEST(Integer, Shifts)
{
    const Instruction shl("shl.b32", 2), shl64("shl.b64", 2), shr("shr.u32", 2), sar("shr.s32", 2),
        sar64("shr.s64", 2), shr16("shr.u16", 2), left("shf.l.wrap.b32", 3),
        right("shf.r.clamp.b32", 3);
    std::mt19937_64 random(3);
    for (int k = 0; k < 300; k++) {
        const uint64_t a = word(random), b = word(random);
        uint32_t l = uint32_t(a), r = uint32_t(a), low = uint32_t(a), high = uint32_t(b);
        int32_t s = int32_t(a);
        uint64_t l64 = a;
        int64_t s64 = int64_t(a);
        uint16_t r16 = uint16_t(a);
        for (uint64_t n = 0; n < 70; n++) {
            ASSERT_EQ(shl(a, n), l);
            ASSERT_EQ(shl64(a, n), l64);
            ASSERT_EQ(shr(a, n), r);
            ASSERT_EQ(sar(a, n), uint32_t(s));
            ASSERT_EQ(sar64(a, n), uint64_t(s64));
            ASSERT_EQ(shr16(a, n), r16);
            ASSERT_EQ(right(a, b, n), low);
            if (n < 32) {
                ASSERT_EQ(left(a, b, n), uint32_t(n ? b << n | uint32_t(a) >> (32 - n) : b));
                low = low / 2 | (high & 1) << 31;
                high /= 2;
            }
            l *= 2, l64 *= 2, r /= 2, r16 /= 2;
            s = s < 0 ? ~(~s / 2) : s / 2;
            s64 = s64 < 0 ? ~(~s64 / 2) : s64 / 2;
        }
    }
}

TEST(Integer, Bits)
{
    const Instruction andb("and.b32", 2), orb("or.b64", 2), xorb("xor.b32", 2), notb("not.b32", 1),
        prmt("prmt.b32", 3), lop("lop3.b32", 4), bfe("bfe.u32", 3), sbfe("bfe.s32", 3),
        bfi("bfi.b32", 4);
    std::mt19937_64 random(4);
    for (int k = 0; k < 20000; k++) {
        const uint64_t a = word(random), b = word(random), c = word(random);
        const uint32_t x = uint32_t(a), y = uint32_t(b), z = uint32_t(c);
        ASSERT_EQ(andb(a, b), x - (x & ~y)); // and by subtraction, the others by it
        ASSERT_EQ(orb(a, b), a + b - (a & b));
        ASSERT_EQ(xorb(a, b), uint32_t((x | y) - (x & y)));
        ASSERT_EQ(notb(a), 0xFFFFFFFFu - x);
        ASSERT_EQ(lop(a, b, c, 0xE8), (x & y) | (x & z) | (y & z)); // the majority
        ASSERT_EQ(lop(a, b, c, 0x96), x ^ y ^ z);
        const unsigned from = unsigned(random() % 32),
                       length = 1 + unsigned(random() % (32 - from));
        const uint32_t mask = uint32_t((uint64_t(1) << length) - 1);
        ASSERT_EQ(bfe(a, from, length), x >> from & mask);
        ASSERT_EQ(sbfe(a, from, length),
                  uint32_t(int32_t(x << (32 - from - length)) >> (32 - length)));
        ASSERT_EQ(bfi(a, b, from, length), (y & ~(mask << from)) | (x & mask) << from);
        uint8_t bytes[8];
        memcpy(bytes, &x, 4);
        memcpy(bytes + 4, &y, 4);
        uint32_t wanted = 0;
        for (int n = 3; n >= 0; n--) {
            const uint8_t byte = bytes[z >> 4 * n & 7];
            wanted = wanted << 8 | (z >> 4 * n & 8 ? uint8_t(int8_t(byte) >> 7) : byte);
        }
        ASSERT_EQ(prmt(a, b, c), wanted);
    }
}

TEST(Integer, ComparisonsKnowTheSign)
{
    EXPECT_EQ(Instruction("setp.lt.s32", 2, true)(0xFFFFFFFF, 0), 1u);
    EXPECT_EQ(Instruction("setp.lt.u32", 2, true)(0xFFFFFFFF, 0), 0u);
    EXPECT_EQ(Instruction("setp.ge.s64", 2, true)(~uint64_t(0), 0), 0u);
    EXPECT_EQ(Instruction("setp.gt.u32", 2, true)(0x100000000, 0), 0u) << "the high half counts";
    EXPECT_EQ(Instruction("setp.eq.s16", 2, true)(0x70001, 1), 1u);
    EXPECT_EQ(Instruction("setp.ne.b64", 2, true)(1, 2), 1u);
    EXPECT_EQ(Instruction("selp.b32", 3)(7, 9, 1), 7u);
    EXPECT_EQ(Instruction("selp.f64", 3)(7, 9, 0), 9u);
}
