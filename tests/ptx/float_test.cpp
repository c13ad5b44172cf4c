// Floating-point instructions and conversions against other statements of what they are.
#include <cmath>
#include <limits>
#include <random>

#include "tests/ptx/try.h"

namespace
{
constexpr uint64_t kNan32 = 0x7FFFFFFF;
const float kSpecial[] = {0.0f,
                          -0.0f,
                          1.0f,
                          -1.0f,
                          0x1p-149f,
                          -0x1p-149f,
                          0x1.fffffep-127f,
                          0x1p-126f,
                          0x1.fffffep127f,
                          -0x1.fffffep127f,
                          INFINITY,
                          -INFINITY,
                          NAN,
                          1.5f,
                          3.0f};

std::vector<float> samples(size_t count)
{
    std::vector<float> all(std::begin(kSpecial), std::end(kSpecial));
    std::mt19937_64 random(7);
    while (all.size() < count)
        all.push_back(number32(random()));
    return all;
}

uint64_t wanted(double exact) // rounding twice is right: 53 bits are twice 24 and two more
{
    return std::isnan(exact) ? kNan32 : bits(float(exact));
}
} // namespace

// In binary64 a product of two is exact, and what is rounded twice there is as if it were once.
TEST(Float, Binary32IsRoundedOnce)
{
    const Instruction add("add.rn.f32", 2), sub("sub.rn.f32", 2), mul("mul.rn.f32", 2),
        div("div.rn.f32", 2), root("sqrt.rn.f32", 1), rcp("rcp.rn.f32", 1);
    const std::vector<float> all = samples(700);
    for (const float a : all)
        for (size_t k = 0; k < 60; k++) {
            const float b = all[(k * 37 + size_t(bits(a))) % all.size()];
            const double x = a, y = b;
            ASSERT_EQ(add(bits(a), bits(b)), wanted(x + y)) << a << " + " << b;
            ASSERT_EQ(sub(bits(a), bits(b)), wanted(x - y)) << a << " - " << b;
            ASSERT_EQ(mul(bits(a), bits(b)), wanted(x * y)) << a << " * " << b;
            ASSERT_EQ(div(bits(a), bits(b)), wanted(x / y)) << a << " / " << b;
        }
    for (const float a : all) {
        ASSERT_EQ(root(bits(a)), wanted(std::sqrt(double(a)))) << a;
        ASSERT_EQ(rcp(bits(a)), wanted(1 / double(a))) << a;
    }
}

// A product and a sum in 128 bits, for exponents of which all bits have room there.
TEST(Float, AFusedProductIsRoundedOnce)
{
    const Instruction fma32("fma.rn.f32", 3), fma64("fma.rn.f64", 3);
    std::mt19937_64 random(3);
    const auto made = [&](int range) {
        return std::ldexp(double(int64_t(random())) * 0x1p-63, int(random() % range));
    };
    for (int k = 0; k < 20000; k++) {
        const float a = float(made(8)), b = float(made(8)), c = float(made(12));
        ASSERT_EQ(fma32(bits(a), bits(b), bits(c)), bits(float(__float128(a) * b + c)));
        // Of 26 bits each, so that a product and a sum fit 113 bits.
        const double x = double(random() >> 38), y = double(random() >> 38), z = made(3);
        ASSERT_EQ(fma64(bits(x), bits(y), bits(z)), bits(double(__float128(x) * y + z)));
    }
    EXPECT_EQ(fma32(bits(INFINITY), bits(0.0f), bits(1.0f)), kNan32);
}

TEST(Float, DirectedRoundingsBracket)
{
    for (const char *const name : {"add", "mul", "div"}) {
        const std::string op = name;
        const Instruction zero(op + ".rz.f32", 2), down(op + ".rm.f32", 2), up(op + ".rp.f32", 2);
        std::mt19937_64 random(5);
        for (int k = 0; k < 3000; k++) {
            const float a = float(int64_t(random())) * 0x1p-60f,
                        b = float(int64_t(random())) * 0x1p-60f;
            const long double x = a, y = b;
            const long double exact = op == "add" ? x + y : op == "mul" ? x * y : x / y;
            const float low = number32(down(bits(a), bits(b))),
                        high = number32(up(bits(a), bits(b)));
            ASSERT_TRUE(low <= exact && exact <= high) << op << " " << a << " " << b;
            ASSERT_TRUE(low == high || std::nextafter(low, INFINITY) == high);
            ASSERT_EQ(number32(zero(bits(a), bits(b))), exact < 0 ? high : low);
        }
    }
}

TEST(Float, Binary64IsRoundedOnce)
{
    const Instruction add("add.rn.f64", 2), mul("mul.rn.f64", 2), div("div.rn.f64", 2),
        sub("sub.rn.f64", 2), root("sqrt.rn.f64", 1), rcp("rcp.rn.f64", 1), abs("abs.f64", 1),
        neg("neg.f64", 1), max("max.f64", 2), min("min.f64", 2);
    std::mt19937_64 random(9);
    for (int k = 0; k < 20000; k++) {
        const double a = double(int64_t(random())) * 0x1p-40,
                     b = double(int64_t(random())) * 0x1p-50;
        ASSERT_EQ(add(bits(a), bits(b)), bits(double(__float128(a) + b)));
        ASSERT_EQ(sub(bits(a), bits(b)), bits(double(__float128(a) - b)));
        ASSERT_EQ(mul(bits(a), bits(b)), bits(double(__float128(a) * b)));
        // A quotient or a root is right if it is within half a unit, which 113 bits can say.
        const double q = number64(div(bits(a), bits(b))), r = number64(root(bits(std::fabs(a))));
        const __float128 error = __float128(q) * b - a,
                         unit = std::fabs(std::nextafter(q, INFINITY) - q);
        ASSERT_TRUE((error < 0 ? -error : error) * 2 <= unit * std::fabs(b));
        const __float128 below = (__float128(std::nextafter(r, 0)) + r) / 2,
                         above = (__float128(std::nextafter(r, INFINITY)) + r) / 2;
        ASSERT_TRUE(below * below <= std::fabs(a) && std::fabs(a) <= above * above);
        ASSERT_EQ(rcp(bits(b)), div(bits(1.0), bits(b)));
        ASSERT_EQ(abs(bits(a)), bits(a) & ~(uint64_t(1) << 63));
        ASSERT_EQ(neg(bits(a)), bits(a) ^ uint64_t(1) << 63);
        ASSERT_EQ(max(bits(a), bits(b)), bits(a > b ? a : b));
        ASSERT_EQ(min(bits(a), bits(b)), bits(a > b ? b : a));
    }
    EXPECT_EQ(max(bits(double(NAN)), bits(2.0)), bits(2.0));
    EXPECT_EQ(min(bits(-0.0), bits(0.0)), bits(-0.0));
}

TEST(Float, ExtremesTakeTheNumber)
{
    const Instruction max("max.f32", 2), min("min.f32", 2), nan("max.NaN.f32", 2);
    const float a = 2, b = -3, n = NAN;
    EXPECT_EQ(max(bits(a), bits(b)), bits(a));
    EXPECT_EQ(min(bits(a), bits(b)), bits(b));
    EXPECT_EQ(max(bits(n), bits(b)), bits(b));
    EXPECT_EQ(min(bits(a), bits(n)), bits(a));
    EXPECT_EQ(max(bits(n), bits(n)), kNan32);
    EXPECT_EQ(nan(bits(n), bits(b)), kNan32);
    EXPECT_EQ(max(bits(-0.0f), bits(0.0f)), bits(0.0f));
    EXPECT_EQ(min(bits(0.0f), bits(-0.0f)), bits(-0.0f));
}

TEST(Float, FtzAndSatOnlyWhereTheyAreSaid)
{
    const float tiny = 0x1p-130f, least = 0x1p-126f, two = 2;
    EXPECT_EQ(Instruction("mul.rn.f32", 2)(bits(tiny), bits(two)), bits(0x1p-129f));
    EXPECT_EQ(Instruction("mul.rn.ftz.f32", 2)(bits(tiny), bits(0x1p20f)), bits(0.0f));
    EXPECT_EQ(Instruction("mul.rn.ftz.f32", 2)(bits(-least), bits(0.5f)), bits(-0.0f));
    EXPECT_EQ(Instruction("add.rn.sat.f32", 2)(bits(two), bits(two)), bits(1.0f));
    EXPECT_EQ(Instruction("add.rn.sat.f32", 2)(bits(-two), bits(-two)), bits(0.0f));
    EXPECT_EQ(Instruction("add.rn.sat.f32", 2)(bits(NAN), bits(two)), bits(0.0f));
    EXPECT_EQ(Instruction("abs.f32", 1)(bits(-tiny)), bits(tiny));
    EXPECT_EQ(Instruction("neg.f32", 1)(bits(tiny)), bits(-tiny));
    EXPECT_EQ(Instruction("copysign.f32", 2)(bits(-1.0f), bits(two)), bits(-two));
    EXPECT_EQ(Instruction("copysign.f32", 2)(bits(1.0f), bits(-two)), bits(two));
}

// A comparison is a set of what a pair of numbers can be to each other.
TEST(Float, ComparisonsOfEveryPair)
{
    enum { LESS = 1, EQUAL = 2, GREATER = 4, UNORDERED = 8 };
    const std::pair<const char *, int> all[] = {{"eq", EQUAL},
                                                {"ne", LESS | GREATER},
                                                {"lt", LESS},
                                                {"le", LESS | EQUAL},
                                                {"gt", GREATER},
                                                {"ge", GREATER | EQUAL},
                                                {"equ", EQUAL | UNORDERED},
                                                {"neu", LESS | GREATER | UNORDERED},
                                                {"ltu", LESS | UNORDERED},
                                                {"leu", LESS | EQUAL | UNORDERED},
                                                {"gtu", GREATER | UNORDERED},
                                                {"geu", GREATER | EQUAL | UNORDERED},
                                                {"num", LESS | EQUAL | GREATER},
                                                {"nan", UNORDERED}};
    for (const auto &[name, set] : all) {
        const Instruction single("setp." + std::string(name) + ".f32", 2, true),
            twice("setp." + std::string(name) + ".f64", 2, true);
        for (const float a : kSpecial)
            for (const float b : kSpecial) {
                const int is = std::isunordered(a, b) ? UNORDERED
                               : std::isless(a, b)    ? LESS
                               : std::isgreater(a, b) ? GREATER
                                                      : EQUAL;
                ASSERT_EQ(single(bits(a), bits(b)), uint64_t((set & is) != 0)) << name << a << b;
                ASSERT_EQ(twice(bits(double(a)), bits(double(b))), uint64_t((set & is) != 0));
            }
    }
}

// ---- Conversions --------------------------------------------------------------------------------

namespace
{
// To 16 bits by integers alone: the bits that are dropped, and the one that is kept, decide.
uint32_t rounded16(uint32_t x, bool brain)
{
    const uint32_t sign = x >> 16 & 0x8000, size = x & 0x7FFFFFFF;
    if (size > 0x7F800000)
        return 0x7FFF;
    if (brain)
        return sign | (size + 0x7FFF + (size >> 16 & 1)) >> 16;
    if (size >= 0x47800000) // 65536
        return sign | 0x7C00;
    uint64_t fraction = (size & 0x7FFFFF) | (size >= 0x800000 ? 0x800000 : 0);
    const int exponent = int(size >> 23) - 112; // of binary16
    const int drop = exponent > 0 ? 13 : std::min(14 - exponent, 40);
    const uint64_t half = uint64_t(1) << (drop - 1), kept = fraction >> drop;
    const uint64_t rest = fraction & ((uint64_t(1) << drop) - 1);
    const uint64_t up = rest > half || (rest == half && (kept & 1));
    const uint64_t base = exponent > 0 ? uint64_t(exponent - 1) << 10 : 0;
    return sign | uint32_t(base + kept + up);
}
} // namespace

TEST(Conversions, EveryNumberOf16BitsAndBack)
{
    const Instruction half("cvt.f32.f16", 1), brain("cvt.f32.bf16", 1),
        to_half("cvt.rn.f16.f32", 1), to_brain("cvt.rn.bf16.f32", 1);
    for (uint32_t x = 0; x < 1 << 16; x++) {
        const uint64_t h = half(x), b = brain(x);
        const bool half_nan = (x & 0x7FFF) > 0x7C00, brain_nan = (x & 0x7FFF) > 0x7F80;
        ASSERT_EQ(to_half(h), half_nan ? 0x7FFFu : x);
        ASSERT_EQ(to_brain(b), brain_nan ? 0x7FFFu : x);
        ASSERT_EQ(b, brain_nan ? kNan32 : uint64_t(x) << 16);
        // Between neighbors of binary16 the numbers of binary32 are as far apart.
        const int exponent = int(x >> 10 & 31);
        const double unit = std::ldexp(1.0, std::max(exponent, 1) - 25);
        if (exponent < 31 && !(x & 0x8000)) {
            ASSERT_EQ(double(number32(h)), ((x & 0x3FF) + (exponent ? 1024 : 0)) * unit);
        }
    }
}

TEST(Conversions, To16BitsByIntegers)
{
    const Instruction to_half("cvt.rn.f16.f32", 1), to_brain("cvt.rn.bf16.f32", 1),
        halves("cvt.rn.f16x2.f32", 2), brains("cvt.rn.bf16x2.f32", 2);
    const auto check = [&](uint32_t x) {
        ASSERT_EQ(to_half(x), rounded16(x, false)) << x;
        ASSERT_EQ(to_brain(x), rounded16(x, true)) << x;
    };
    std::mt19937_64 random(1);
    for (int k = 0; k < 100000; k++)
        check(uint32_t(random()));
    for (uint32_t top = 0; top < 1 << 16; top += 3) // ties, and their neighbors
        for (const uint32_t low : {0x0FFFu, 0x1000u, 0x1001u, 0x7FFFu, 0x8000u, 0x8001u})
            check(top << 16 | low);
    EXPECT_EQ(halves(bits(1.0f), bits(-2.0f)), 0x3C00C000u);
    EXPECT_EQ(brains(bits(1.0f), bits(-2.0f)), 0x3F80C000u);
}

TEST(Conversions, ToIntegers)
{
    const Instruction s32("cvt.rzi.s32.f32", 1), u32("cvt.rzi.u32.f32", 1),
        s64("cvt.rzi.s64.f64", 1), u64("cvt.rzi.u64.f64", 1), near("cvt.rni.s32.f32", 1),
        down("cvt.rmi.f64.f64", 1), trunc("cvt.rzi.f64.f64", 1), up("cvt.rpi.s32.f32", 1);
    for (const float x : {0.0f, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, 1e9f, -1e9f, 123456.78f}) {
        EXPECT_EQ(s32(bits(x)), uint32_t(int32_t(x))) << x;
        EXPECT_EQ(u32(bits(x)), x < 0 ? 0 : uint32_t(x)) << x;
        EXPECT_EQ(s64(bits(double(x))), uint64_t(int64_t(x))) << x;
        EXPECT_EQ(near(bits(x)), uint32_t(int32_t(std::nearbyint(x)))) << x;
        EXPECT_EQ(up(bits(x)), uint32_t(int32_t(std::ceil(x)))) << x;
        EXPECT_EQ(down(bits(double(x))), bits(std::floor(double(x))));
        EXPECT_EQ(trunc(bits(double(x))), bits(std::trunc(double(x))));
    }
    EXPECT_EQ(s32(bits(3e9f)), 0x7FFFFFFFu);
    EXPECT_EQ(s32(bits(-3e9f)), 0x80000000u);
    EXPECT_EQ(u32(bits(5e9f)), 0xFFFFFFFFu);
    EXPECT_EQ(s32(bits(float(NAN))), 0u);
    EXPECT_EQ(u32(bits(float(NAN))), 0u);
    EXPECT_EQ(s64(bits(double(NAN))), uint64_t(1) << 63);
    EXPECT_EQ(u64(bits(double(NAN))), uint64_t(1) << 63);
    EXPECT_EQ(u64(bits(1e30)), ~uint64_t(0));
    EXPECT_EQ(s64(bits(1e30)), ~uint64_t(0) >> 1);
    EXPECT_EQ(u64(bits(-1.0)), 0u);
}

TEST(Conversions, OfIntegersAndBetweenWidths)
{
    const Instruction from_u32("cvt.rn.f32.u32", 1), from_s64("cvt.rn.f32.s64", 1),
        wide("cvt.rn.f64.s64", 1), narrow("cvt.rn.f32.f64", 1), widen("cvt.f64.f32", 1);
    std::mt19937_64 random(2);
    for (int k = 0; k < 10000; k++) {
        const uint64_t x = random() >> (random() % 40);
        ASSERT_EQ(from_u32(x), bits(float(double(uint32_t(x)))));
        ASSERT_EQ(from_s64(x), bits(float(__float128(int64_t(x)))));
        ASSERT_EQ(wide(x), bits(double(__float128(int64_t(x)))));
        const float f = number32(x);
        if (!std::isnan(f)) {
            ASSERT_EQ(narrow(widen(bits(f))), bits(f));
        }
    }
    EXPECT_EQ(Instruction("cvt.s64.s32", 1)(0x80000000u), 0xFFFFFFFF80000000u);
    EXPECT_EQ(Instruction("cvt.u64.u32", 1)(0xF80000000u), 0x80000000u);
    EXPECT_EQ(Instruction("cvt.s32.s16", 1)(0xFFFF8000u), 0xFFFF8000u);
    EXPECT_EQ(Instruction("cvt.u16.u32", 1)(0x12345678u), 0x5678u);
    EXPECT_EQ(Instruction("cvt.s32.s8", 1)(0x80u), 0xFFFFFF80u);
    EXPECT_EQ(Instruction("cvt.s8.s32", 1)(0xFFFFFFE6u), 0xFFE6u);
    EXPECT_EQ(Instruction("cvt.s8.s32", 1)(0x17Fu), 0x7Fu);
}

// ---- Approximations -----------------------------------------------------------------------------

TEST(Approximate, StayWithinTheirBoundsAndDifferWithTheSeed)
{
    struct {
        const char *name;
        long double (*exact)(long double);
        double bound, from, to;
    } const all[] = {
        {"rcp.approx.ftz.f32", [](long double x) { return 1 / x; }, 0x1p-23, 0x1p-100, 0x1p100},
        {"sqrt.approx.f32", [](long double x) { return sqrtl(x); }, 0x1p-23, 0x1p-100, 0x1p100},
        {"ex2.approx.ftz.f32", [](long double x) { return exp2l(x); }, 0x1p-22, 0x1p-9, 100},
        {"lg2.approx.ftz.f32", [](long double x) { return log2l(x); }, 0x1p-22, 2.5, 0x1p100},
        {"tanh.approx.f32", [](long double x) { return tanhl(x); }, 0x1p-10, 0x1p-9, 10}};
    for (const auto &op : all) {
        Instruction first(op.name, 1), second(op.name, 1);
        second.seed = 2;
        std::mt19937_64 random(4);
        int differ = 0;
        for (int k = 0; k < 5000; k++) {
            const double u = double(random() >> 11) * 0x1p-53;
            const float x = float(op.from * std::pow(op.to / op.from, u));
            const long double exact = op.exact(x);
            const uint64_t got = first(bits(x));
            ASSERT_LE(fabsl(number32(got) - exact), op.bound * fabsl(exact)) << op.name << x;
            ASSERT_EQ(got, first(bits(x))) << "not the same twice";
            differ += got != second(bits(x));
        }
        EXPECT_GT(differ, 500) << op.name;
    }
    const Instruction rcp("rcp.approx.ftz.f32", 1), rcp64("rcp.approx.ftz.f64", 1);
    EXPECT_EQ(rcp(bits(-0.0f)), bits(-INFINITY));
    EXPECT_EQ(rcp(bits(0x1p-140f)), bits(INFINITY));
    EXPECT_EQ(rcp(bits(INFINITY)), 0u);
    EXPECT_EQ(rcp(bits(float(NAN))), kNan32);
    EXPECT_NEAR(number64(rcp64(bits(3.0))), 1 / 3.0, 0x1p-20);
    EXPECT_EQ(rcp64(bits(3.0)) & 0xFFFFFFFF, 0u);
}
