// Matrices of few bits: codes against a search of the table in binary64, elements against their
// formula, parts against the whole, and the same bits wherever they run.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <numeric>

#include "tests/c/harness/bits.h"
#include "tests/c/harness/refused.h"
#include "tests/c/quant/quantize_matrix_run.h"

using QuantizeMatrix = OnBackend;
ON_EVERY_BACKEND(QuantizeMatrix);

namespace
{

constexpr hr_dtype kTypes[] = {HR_F32, HR_BF16, HR_F16};
constexpr hr_format kFormats[] = {HR_NF4, HR_FP4, HR_INT8_ROWS};
constexpr float kUnit = 7.874015718698502e-3f;

// The values of codes of 4 bits: as bitsandbytes prints them, and by the bits of a tiny float.
float value_of(int code, hr_format format)
{
    static const double nf4[] = {-1.0,
                                 -0.6961928009986877,
                                 -0.5250730514526367,
                                 -0.39491748809814453,
                                 -0.28444138169288635,
                                 -0.18477343022823334,
                                 -0.09105003625154495,
                                 0.0,
                                 0.07958029955625534,
                                 0.16093020141124725,
                                 0.24611230194568634,
                                 0.33791524171829224,
                                 0.44070982933044434,
                                 0.5626170039176941,
                                 0.7229568362236023,
                                 1.0};
    if (format == HR_NF4)
        return float(nf4[code]);
    const int exponent = code >> 1 & 3, mantissa = code & 1;
    // The third of a small float, whose exponents 01, 10 and 11 stand for 1, 1/2 and 1/4.
    const double magnitude =
        exponent == 0 ? mantissa / 64.0 : (2 + mantissa) * std::ldexp(2.0, -exponent);
    return float((code & 8 && magnitude != 0 ? -magnitude : magnitude) / 3);
}

// An element of MXFP4 in binary64: the value of a tiny float, of which code 8 is -0, times a power of two.
double mxfp4(int code, int power)
{
    const int exponent = code >> 1 & 3, mantissa = code & 1;
    const double magnitude =
        exponent == 0 ? mantissa / 2.0 : std::ldexp(2 + mantissa, exponent - 2);
    return power == 255 ? NAN : std::ldexp(code & 8 ? -magnitude : magnitude, power - 127);
}

// The code of the value nearest to y: up to the middle, rounded to binary32, the lower of two. FP4 has
// a second zero for what is positive.
int nearest_code(float y, hr_format format)
{
    int codes[16];
    std::iota(codes, codes + 16, 0);
    std::stable_sort(codes, codes + 16,
                     [=](int a, int b) { return value_of(a, format) < value_of(b, format); });
    for (int k = 0; k < 15; k++)
        if (y <= (value_of(codes[k], format) + value_of(codes[k + 1], format)) / 2)
            return codes[k];
    return codes[15];
}

int code_at(const std::vector<double> &codes, int64_t i)
{
    const int byte = int(codes[size_t(i / 2)]);
    return i % 2 ? byte & 15 : byte >> 4;
}

int int8_at(const std::vector<double> &codes, int64_t i)
{
    return int8_t(codes[size_t(i)]);
}

std::vector<MatrixCase> cases()
{
    std::vector<MatrixCase> all;
    const int64_t shapes[][2] = {{1, 1}, {3, 5}, {5, 77}, {2, 256}, {9, 64}, {1, 4099}, {3, 1368}};
    constexpr int32_t kSizes[] = {32, 64, 128, 256, 1024, 4096};
    int k = 0;
    for (const auto &[rows, cols] : shapes)
        for (const hr_format format : kFormats)
            for (int i = 0; i < 4; i++, k++)
                all.push_back({rows, cols, format, kSizes[k % 6],
                               k % 2 == 0 && format != HR_INT8_ROWS, k % 5 == 0, kTypes[k % 3],
                               kTypes[k / 3 % 3],
                               k % 4 == 1   ? 8
                               : k % 4 == 2 ? 3
                                            : 0,
                               size_t(k % 7 == 3)});
    all.push_back({.rows = 0, .cols = 9});
    return all;
}

// The scale of block b, as the decoder sees it.
float scale_of(const MatrixRun &run, int64_t b)
{
    if (!run.shape.nested)
        return float(run.absmax.values(0)[size_t(b)]);
    std::vector<float> map(256);
    EXPECT_EQ(hr_dynamic_map(map.data(), 1), HR_OK);
    const float product = map[size_t(run.absmax_codes.values(0)[size_t(b)])] *
                          float(run.absmax_scales.values(0)[size_t(b / 256)]);
    return product + float(run.offset.values(0)[0]);
}

bool same(double a, double b)
{
    return a == b ? std::signbit(a) == std::signbit(b) : std::isnan(a) && std::isnan(b);
}

} // namespace

TEST_P(QuantizeMatrix, CodesAreTheNearestAndScalesTheLargest)
{
    for (MatrixCase c : cases()) {
        c.nested = c.search = false;
        const MatrixRun run(*backend, c);
        ASSERT_EQ(run.quantize(), HR_OK) << hr_last_error();
        EXPECT_TRUE(run.whole()) << c;
        const std::vector<double> codes = run.codes.values(0), absmax = run.absmax.values(0);
        const std::vector<double> x = run.x.values(0);
        const int64_t n = c.rows * c.cols, size = c.four_bits() ? c.block_size : c.cols;
        for (int64_t b = 0; b < c.blocks(); b++) {
            const int64_t begin = b * size, end = std::min(n, begin + size);
            const auto at = [&](int64_t i) {
                return float(x[size_t(i / c.cols * (c.cols + c.gap) + i % c.cols)]);
            };
            float largest = 0;
            for (int64_t i = begin; i < end; i++)
                largest = std::max(largest, std::fabs(at(i)));
            ASSERT_EQ(float(absmax[size_t(b)]), largest) << c;
            for (int64_t i = begin; i < end; i++) {
                const int code = c.four_bits() ? nearest_code(at(i) * (1.0f / largest), c.format)
                                               : int(std::nearbyint(at(i) * (127.0f / largest)));
                ASSERT_EQ(c.four_bits() ? code_at(codes, i) : int8_at(codes, i), code)
                    << c << ", element " << i;
            }
        }
        if (c.four_bits() && n % 2) {
            EXPECT_EQ(code_at(codes, n), c.format == HR_NF4 ? 7 : 0) << c;
        }
    }
}

// On either side of each border between two codes. Blocks begin with 1.
TEST_P(QuantizeMatrix, EveryBorder)
{
    for (const hr_format format : {HR_NF4, HR_FP4}) {
        std::vector<float> values, numbers;
        for (int code = 0; code < 16; code++)
            values.push_back(value_of(code, format));
        std::sort(values.begin(), values.end());
        for (size_t k = 0; k + 1 < values.size(); k++) {
            const float border = (values[k] + values[k + 1]) / 2;
            for (const float y :
                 {std::nextafter(border, -2.0f), border, std::nextafter(border, 2.0f), values[k]})
                numbers.push_back(y);
        }
        const MatrixCase c = {1, int64_t(numbers.size()) + 1, format, 4096};
        const MatrixRun run(*backend, c);
        std::vector<double> row = {1};
        row.insert(row.end(), numbers.begin(), numbers.end());
        run.x.put(0, row);
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        const std::vector<double> codes = run.codes.values(0);
        for (size_t i = 0; i < row.size(); i++)
            ASSERT_EQ(code_at(codes, int64_t(i)), nearest_code(float(row[i]), format))
                << c << ": " << row[i];
    }
}

TEST_P(QuantizeMatrix, ElementsAreTheValueTimesTheScale)
{
    for (const MatrixCase &c : cases()) {
        const MatrixRun run(*backend, c);
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        EXPECT_TRUE(run.whole()) << c;
        const std::vector<double> codes = run.codes.values(0), out = run.out.values(0);
        std::vector<float> scales;
        for (int64_t b = 0; b < c.blocks(); b++)
            scales.push_back(scale_of(run, b));
        for (int64_t row = 0; row < c.rows; row++)
            for (int64_t col = 0; col < c.cols + c.gap; col++) {
                const double got = out[size_t(row * (c.cols + c.gap) + col)];
                const int64_t i = row * c.cols + col;
                if (col >= c.cols) {
                    ASSERT_EQ(got, 77) << c;
                    continue;
                }
                const float exact =
                    c.four_bits()
                        ? value_of(code_at(codes, i), c.format) * scales[size_t(i / c.block_size)]
                        : float(int8_at(codes, i)) * scales[size_t(row)] * kUnit;
                ASSERT_TRUE(same(got, decode(encode({double(exact)}, c.to), c.to)[0]))
                    << c << ", element " << i << ": " << got << ", wanted " << exact;
            }
    }
}

// Every code with scales at the ends of each type.
TEST_P(QuantizeMatrix, EveryCodeAndScalesOfEverySize)
{
    constexpr double kScales[] = {0,   1e-45, 1e-40, 0x1p-128, 0x1p-126, 3e-8,
                                  0.7, 65504, 65536, 3.4e38,   INFINITY, NAN};
    for (const hr_format format : kFormats)
        for (const hr_dtype dtype : kTypes)
            for (const int32_t size : {32, 64}) {
                const MatrixCase c = {int64_t(std::size(kScales)),
                                      format == HR_INT8_ROWS ? 256 : size,
                                      format,
                                      size,
                                      false,
                                      false,
                                      HR_F32,
                                      dtype};
                const MatrixRun run(*backend, c);
                std::vector<double> codes;
                for (size_t i = 0; i < run.codes.values(0).size(); i++)
                    codes.push_back(format == HR_INT8_ROWS ? double(i % 256)
                                                           : double(i * 7 % 16 * 16 + i % 16));
                run.codes.put(0, codes);
                run.absmax.put(0, {std::begin(kScales), std::end(kScales)});
                ASSERT_EQ(run.decode(), HR_OK) << hr_last_error();
                const std::vector<double> out = run.out.values(0);
                for (size_t i = 0; i < out.size(); i++) {
                    const float scale = float(kScales[i / size_t(c.cols)]);
                    const float exact = format == HR_INT8_ROWS
                                            ? float(int8_at(codes, int64_t(i))) * scale * kUnit
                                            : value_of(code_at(codes, int64_t(i)), format) * scale;
                    ASSERT_TRUE(same(out[i], decode(encode({double(exact)}, dtype), dtype)[0]))
                        << c << ", element " << i << ": " << out[i] << ", wanted " << exact;
                }
            }
}

// Every code with every exponent, which all decode exactly but into f16.
TEST_P(QuantizeMatrix, ElementsOfMxfp4AreTheValueTimesThePower)
{
    for (const hr_dtype dtype : kTypes)
        for (const int64_t cols : {32, 96}) {
            const MatrixCase c = {
                256 * 32 / cols + 1, cols, HR_MXFP4, 32, false, false, HR_F32, dtype};
            const MatrixRun run(*backend, c);
            std::vector<double> codes, powers;
            for (int64_t i = 0; i < c.rows * cols / 2; i++) // each code in both places of a block
                codes.push_back(double((i + i / 16 * 3) % 16 + (i * 7 + 2) % 16 * 16));
            for (int64_t b = 0; b < c.blocks(); b++)
                powers.push_back(double(b % 256));
            run.codes.put(0, codes);
            run.absmax_codes.put(0, powers);
            ASSERT_EQ(run.decode(), HR_OK) << hr_last_error();
            EXPECT_TRUE(run.whole()) << c;
            const std::vector<double> out = run.out.values(0);
            for (size_t i = 0; i < out.size(); i++) {
                const int code = int(codes[i / 2]) >> (i % 2 ? 4 : 0) & 15;
                const int power = int(powers[i / 32]);
                const double exact = mxfp4(code, power);
                const double wanted = std::fabs(exact) >= 0x1p128 ? std::copysign(INFINITY, exact)
                                      : dtype != HR_F16           ? exact
                                                        : decode(encode({exact}, dtype), dtype)[0];
                ASSERT_TRUE(same(out[i], wanted))
                    << c << ", code " << code << ", exponent " << power << ": " << out[i]
                    << ", wanted " << wanted;
            }
        }
}

TEST_P(QuantizeMatrix, PartsAreThoseOfTheWhole)
{
    for (const hr_format format : {HR_DENSE, HR_NF4, HR_FP4, HR_INT8_ROWS, HR_MXFP4})
        for (const hr_dtype dtype : kTypes)
            for (int64_t cols : {75, 200, 256}) {
                if (format == HR_MXFP4)
                    cols = (cols + 31) / 32 * 32;
                const bool nested = format == HR_NF4 || format == HR_FP4;
                MatrixCase c = {9, cols, format, 32, nested, false, HR_F32, dtype};
                MatrixRun whole(*backend, c);
                if (format == HR_DENSE) {
                    whole.matrix = HR_MATRIX_INIT;
                    whole.matrix.rows = 9;
                    whole.matrix.cols = whole.matrix.stride = cols;
                    whole.matrix.data = whole.x.data[0];
                    whole.matrix.dtype = HR_F32;
                } else if (format != HR_MXFP4) {
                    ASSERT_EQ(whole.quantize(), HR_OK) << hr_last_error();
                }
                c.to = whole.matrix.dtype;
                ASSERT_TRUE(format == HR_DENSE || whole.decode() == HR_OK) << hr_last_error();
                const std::vector<double> all =
                    (format == HR_DENSE ? whole.x : whole.out).values(0);
                const int64_t parts[][4] = {{0, 9, 0, cols}, {2, 5, 0, cols}, {8, 1, 1, cols - 1},
                                            {1, 7, 8, 64},   {3, 2, 33, 40},  {0, 9, 64, 8},
                                            {4, 0, 0, 5},    {5, 3, cols, 0}, {0, 1, 7, 1}};
                for (const auto &[row, rows, col, some] : parts)
                    for (const int64_t gap : {0, 8, 3}) {
                        c.row = row, c.some_rows = rows, c.col = col, c.some_cols = some;
                        c.gap = gap;
                        MatrixRun part(*backend, c);
                        part.matrix_argument = &whole.matrix;
                        ASSERT_EQ(part.decode(), HR_OK) << hr_last_error();
                        EXPECT_TRUE(part.whole()) << c;
                        const std::vector<double> out = part.out.values(0);
                        for (int64_t i = 0; i < int64_t(out.size()); i++) {
                            const int64_t r = i / (some + gap), k = i % (some + gap);
                            const double wanted =
                                k < some ? all[size_t((row + r) * cols + col + k)] : 77;
                            ASSERT_TRUE(same(out[size_t(i)], wanted)) << c << ", element " << i;
                        }
                    }
            }
}

// The mean is the offset, and the rest is quantized as any blocks.
TEST_P(QuantizeMatrix, NestedScales)
{
    for (const int64_t rows : {1, 4, 64, 300}) {
        const MatrixCase plain = {rows, 160, HR_NF4, 32};
        MatrixCase c = plain;
        c.nested = true;
        const MatrixRun run(*backend, c), before(*backend, plain);
        ASSERT_EQ(run.quantize(), HR_OK) << hr_last_error();
        ASSERT_EQ(before.quantize(), HR_OK) << hr_last_error();
        EXPECT_EQ(run.codes.values(0), before.codes.values(0));
        std::vector<double> absmax = before.absmax.values(0);
        double sum = 0, worst = 0;
        for (const double a : absmax)
            sum += a;
        const float offset = float(run.offset.values(0)[0]);
        EXPECT_LE(std::fabs(offset - sum / double(absmax.size())), offset * 0x1p-24);
        for (double &a : absmax)
            a = float(a) - offset;
        const Tensors left(*backend, {c.blocks()}, {HR_F32}, 0,
                           [&](size_t, size_t i) { return absmax[i]; });
        const Tensors codes(*backend, {c.blocks()}, {HR_U8}, 0, garbage);
        const Tensors scales(*backend, {hr_block_count(c.blocks(), 256)}, {HR_F32}, 0, garbage);
        const hr_quantize_config config = HR_QUANTIZE_CONFIG_INIT;
        ASSERT_EQ(
            hr_quantize_blocks(codes.argument, scales.argument, left.argument, &config, &run.exec),
            HR_OK);
        EXPECT_EQ(codes.values(0), run.absmax_codes.values(0));
        EXPECT_EQ(scales.values(0), run.absmax_scales.values(0));
        for (int64_t b = 0; b < c.blocks(); b++)
            worst =
                std::max(worst, std::fabs(double(scale_of(run, b)) - offset - absmax[size_t(b)]));
        EXPECT_LT(worst, 0.02 * *std::max_element(absmax.begin(), absmax.end()) + 1e-6);
    }
}

// The scale is one of the multiples, and none has a smaller error; codes are the nearest.
TEST_P(QuantizeMatrix, SearchFindsTheBestMultiple)
{
    constexpr double kMultiples[] = {32, 34, 31, 30, 29, 28, 27, 26};
    for (const hr_format format : {HR_NF4, HR_FP4})
        for (const int32_t size : {32, 64, 512}) {
            MatrixCase c = {6, 512, format, size};
            c.search = true;
            const MatrixRun run(*backend, c);
            ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
            const std::vector<double> x = run.x.values(0), out = run.out.values(0);
            const std::vector<double> codes = run.codes.values(0), absmax = run.absmax.values(0);
            size_t others = 0;
            for (size_t b = 0; b < absmax.size(); b++) {
                const size_t begin = b * size_t(size), end = begin + size_t(size);
                double largest = 0, got = 0, best = INFINITY;
                for (size_t i = begin; i < end; i++)
                    largest = std::max(largest, std::fabs(x[i]));
                bool known = false;
                for (const double multiple : kMultiples) {
                    const float scale = float(largest) * float(multiple / 32);
                    known = known || scale == float(absmax[b]);
                    double sum = 0;
                    for (size_t i = begin; i < end; i++) {
                        const int code = nearest_code(float(x[i] / double(scale)), format);
                        sum += std::pow(x[i] - double(value_of(code, format)) * scale, 2);
                    }
                    best = std::min(best, sum);
                }
                for (size_t i = begin; i < end; i++) {
                    got += std::pow(x[i] - out[i], 2);
                    ASSERT_EQ(code_at(codes, int64_t(i)),
                              nearest_code(float(x[i]) * (1.0f / float(absmax[b])), format));
                }
                EXPECT_TRUE(known) << c << ", block " << b;
                // Each square is known to 2^-22 of the largest.
                EXPECT_LE(got, best + size * largest * largest * 0x1p-22) << c << ", block " << b;
                others += float(absmax[b]) != float(largest);
            }
            EXPECT_GT(others, absmax.size() / 4) << c;
        }
}

// What bitsandbytes leaves to the device.
TEST_P(QuantizeMatrix, SpecialBlocks)
{
    for (const hr_format format : {HR_NF4, HR_FP4})
        for (const bool search : {false, true}) {
            MatrixCase c = {1, 6 * 32 + 3, format, 32};
            c.search = search;
            const MatrixRun run(*backend, c);
            const int zero = format == HR_NF4 ? 7 : 0, one = format == HR_NF4 ? 15 : 3;
            std::vector<double> x(size_t(c.cols), 0.0);
            x[32 + 5] = NAN, x[32 + 6] = 1;
            x[64] = INFINITY, x[65] = -INFINITY, x[66] = 5;
            x[96] = -1e-45, x[97] = 1e-45;
            x[128] = 3e38, x[129] = -3e38;
            x[160] = 4e-39, x[161] = -4e-39, x[162] = 2e-39;
            run.x.put(0, x); // the tail is zeros
            ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
            const std::vector<double> codes = run.codes.values(0), out = run.out.values(0);
            const std::vector<double> absmax = run.absmax.values(0);
            EXPECT_EQ(absmax[0], 0);
            EXPECT_TRUE(std::isnan(absmax[1]));
            EXPECT_EQ(absmax[2], INFINITY);
            EXPECT_EQ(absmax[3], 0x1p-149);
            EXPECT_EQ(absmax[4], float(3e38));
            EXPECT_EQ(absmax[6], 0);
            for (int64_t i = 0; i < 32; i++) {
                EXPECT_EQ(code_at(codes, i), zero);
                EXPECT_EQ(code_at(codes, 32 + i), one);
                EXPECT_EQ(code_at(codes, 64 + i), i < 2 ? one : zero);
                EXPECT_TRUE(std::isnan(out[size_t(32 + i)]));
                EXPECT_TRUE(i < 2 ? out[size_t(64 + i)] == INFINITY
                                  : std::isnan(out[size_t(64 + i)]));
                EXPECT_TRUE(same(out[size_t(i)], 0.0));
            }
            EXPECT_EQ(out[96], float(-1e-45));
            EXPECT_EQ(out[97], float(1e-45));
            EXPECT_EQ(out[128], float(3e38));
            EXPECT_EQ(out[129], float(-3e38));
            EXPECT_NEAR(out[160], float(4e-39), search ? 1e-39 : 0);
            EXPECT_NEAR(out[162], 2e-39, 1e-39);
            for (int64_t i = 192; i <= c.cols; i++) // and the half byte after the last
                EXPECT_EQ(code_at(codes, i), zero);
        }
    const MatrixRun run(*backend, {5, 3, HR_INT8_ROWS});
    run.x.put(0,
              {0, 0, 0, NAN, 1, 2, INFINITY, 3, -INFINITY, 1e-45, -1e-45, 0, 4e-39, 2e-39, -4e-39});
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    EXPECT_EQ(run.codes.values(0),
              (std::vector<double>{0, 0, 0, 0, 0, 0, 0, 0, 0, 127, 129, 0, 127, 64, 129}));
    const std::vector<double> out = run.out.values(0);
    for (size_t i = 3; i < 9; i++)
        EXPECT_TRUE(std::isnan(out[i])) << i;
}

// Memory that nobody touches takes none, so that numbers of elements and bytes may pass 2^31 and 2^32.
TEST(QuantizeMatrixOnTheCpu, ElementsBeyond32Bits)
{
    const int64_t rows = (int64_t(1) << 20) + 1, cols = 4100, n = rows * cols;
    std::unique_ptr<void, void (*)(void *)> codes(calloc(size_t(n / 2), 1), free);
    std::unique_ptr<void, void (*)(void *)> absmax(calloc(size_t(n / 64 + 1), 4), free);
    ASSERT_TRUE(codes && absmax);
    for (const int64_t i : {n - 3, n - cols + 5, int64_t(1) << 32})
        static_cast<uint8_t *>(codes.get())[i / 2] = 0xF1;
    for (const int64_t i : {n - 3, n - cols + 5, int64_t(1) << 32})
        static_cast<float *>(absmax.get())[i / 64] = float(i % 97 + 1);
    hr_matrix matrix = HR_MATRIX_INIT;
    matrix.format = HR_NF4;
    matrix.rows = rows;
    matrix.cols = cols;
    matrix.data = codes.get();
    matrix.absmax = static_cast<float *>(absmax.get());
    const hr_exec exec = cpu_backend().exec();
    for (const int64_t i : {n - 3, n - cols + 5, int64_t(1) << 32}) {
        float two[2] = {7, 7};
        const hr_rows out = {two, 2};
        const int64_t first = i / 2 * 2;
        ASSERT_EQ(hr_dequantize_matrix(&out, &matrix, first / cols, 1, first % cols, 2, &exec),
                  HR_OK)
            << hr_last_error();
        EXPECT_EQ(two[0], float(i % 97 + 1));
        EXPECT_EQ(two[1], value_of(1, HR_NF4) * float(i % 97 + 1));
    }
}

namespace
{
std::vector<MatrixCase> cases_for_bits()
{
    std::vector<MatrixCase> all = cases();
    for (const hr_format format : kFormats)
        for (const hr_dtype dtype : kTypes)
            for (const int64_t cols : {99, 352}) {
                MatrixCase c = {
                    7,           cols,  format, 32, format != HR_INT8_ROWS && cols == 99,
                    cols == 352, dtype, dtype};
                c.special = true;
                all.push_back(c);
            }
    for (const hr_dtype dtype : kTypes)
        for (const int64_t gap : {0, 3, 8})
            all.push_back({.rows = 7,
                           .cols = 352,
                           .format = HR_MXFP4,
                           .block_size = 32,
                           .to = dtype,
                           .gap = gap,
                           .shift = size_t(gap == 3)});
    return all;
}
} // namespace

TEST(QuantizeMatrixBits, AreTheSameOnEveryInstructionSetAndThreadCount)
{
    std::vector<MatrixCase> all = cases_for_bits();
    for (const hr_format format : kFormats) // several tasks
        all.push_back({17, 8003, format, 64, format == HR_NF4, false, HR_BF16, HR_BF16});
    all.push_back({17, 8000, HR_MXFP4, 32, false, false, HR_BF16, HR_BF16});
    expect_bits_on_the_cpu<MatrixRun>(all);
}

TEST(QuantizeMatrixBits, AreThoseOfTheCpuOnCuda)
{
    expect_bits_of_the_cpu<MatrixRun>(cases_for_bits());
}

TEST(QuantizeMatrixBits, CanBeCaptured)
{
    MatrixCase c;
    c.nested = c.search = true;
    expect_capturable<MatrixRun>(std::vector<MatrixCase>{c});
}

TEST_P(QuantizeMatrix, BadInputs)
{
    MatrixCase good;
    good.nested = true;
    BadInputs<MatrixRun> bad = {
        {"hr_quantize_matrix: matrix is NULL", [](MatrixRun &r) { r.matrix_argument = nullptr; }},
        {"matrix->size is 8, wanted", [](MatrixRun &r) { r.matrix.size = 8; }},
        {"matrix->format is 0, wanted 1 to 3", [](MatrixRun &r) { r.matrix.format = HR_DENSE; }},
        {"matrix->format is 5, wanted 1 to 3",
         [](MatrixRun &r) { r.matrix.format = hr_format(5); }},
        {"matrix->format is HR_MXFP4 \\(4\\), which is only read: give hr_dequantize_matrix",
         [](MatrixRun &r) { r.matrix.format = HR_MXFP4; }, HR_UNSUPPORTED},
        {"matrix->dtype is f64", [](MatrixRun &r) { r.matrix.dtype = HR_F64; }},
        {"rows is -1, wanted 0 or more", [](MatrixRun &r) { r.matrix.rows = -1; }},
        {"cols is 0, wanted 1 or more", [](MatrixRun &r) { r.matrix.cols = 0; }},
        {"wanted at most 2\\^59 elements", [](MatrixRun &r) { r.matrix.rows = INT64_MAX; }},
        {"matrix->data is NULL", [](MatrixRun &r) { r.matrix.data = nullptr; }},
        {"matrix->absmax_codes is given, but matrix->format is 3",
         [](MatrixRun &r) { r.matrix.format = HR_INT8_ROWS; }},
        {"matrix->absmax is NULL", [](MatrixRun &r) { r.matrix.absmax = nullptr; }},
        {"matrix->absmax_scales is NULL", [](MatrixRun &r) { r.matrix.absmax_scales = nullptr; }},
        {"matrix->offset is NULL", [](MatrixRun &r) { r.matrix.offset = nullptr; }},
        {"matrix->absmax is at .* not a multiple of 4",
         [](MatrixRun &r) { r.matrix.absmax = moved(r.matrix.absmax, 1); }},
        {"matrix->absmax_scales is at .* not a multiple of 4",
         [](MatrixRun &r) { r.matrix.absmax_scales = moved(r.matrix.absmax_scales, 2); }},
        {"matrix->offset is at .* not a multiple of 4",
         [](MatrixRun &r) { r.matrix.offset = moved(r.matrix.offset, 3); }},
        {": x is NULL", [](MatrixRun &r) { r.x_argument = nullptr; }},
        {"dtype is u8", [](MatrixRun &r) { r.from = HR_U8; }},
        {"x->stride is 76, wanted cols \\(77\\)", [](MatrixRun &r) { r.x_rows.stride = 76; }},
        {"config->search is 2, wanted 0 or 1", [](MatrixRun &r) { r.config.search = 2; }},
    };
    for (const int32_t size : {0, 16, 48, 8192, -64, INT32_MIN})
        bad.push_back({"matrix->block_size is " + std::to_string(size) + ", wanted a power of two",
                       [=](MatrixRun &r) { r.matrix.block_size = size; }});
    expect_all_refused(*backend, good, joined({bad_config_or_exec<MatrixRun>(), bad}));
    MatrixRun run(*backend, good);
    expect_no_such_device(run);
}

namespace
{
struct Decoded : MatrixRun {
    using MatrixRun::MatrixRun;
    hr_status call() const
    {
        return decode();
    }
};
} // namespace

TEST_P(QuantizeMatrix, BadInputsOfDecoding)
{
    const BadInputs<Decoded> bad = {
        {"hr_dequantize_matrix: matrix is NULL", [](Decoded &r) { r.matrix_argument = nullptr; }},
        {"matrix->format is -1, wanted 0 to 4",
         [](Decoded &r) { r.matrix.format = hr_format(-1); }},
        {"matrix->format is 5, wanted 0 to 4", [](Decoded &r) { r.matrix.format = hr_format(5); }},
        {"matrix->cols is 77, wanted a multiple of 32 in MXFP4",
         [](Decoded &r) { r.matrix.format = HR_MXFP4; }},
        {"matrix->absmax_codes is NULL",
         [](Decoded &r) { r.matrix.format = HR_MXFP4, r.matrix.cols = 64; }},
        {"matrix->absmax is NULL", [](Decoded &r) { r.matrix.absmax = nullptr; }},
        {"matrix->absmax_codes is given, but matrix->format is 0",
         [](Decoded &r) {
             r.matrix.format = HR_DENSE;
             r.matrix.stride = 77;
             r.matrix.data = r.x.data[0];
             r.matrix.absmax_codes = static_cast<uint8_t *>(r.codes.data[0]);
         }},
        {"matrix->stride is 76, wanted cols",
         [](Decoded &r) {
             r.matrix.format = HR_DENSE;
             r.matrix.stride = 76;
         }},
        {"row is -1 and rows 5, wanted a part of the matrix's 5", [](Decoded &r) { r.row = -1; }},
        {"row is 1 and rows 5, wanted a part of the matrix's 5", [](Decoded &r) { r.row = 1; }},
        {"row is 0 and rows -1", [](Decoded &r) { r.rows = -1; }},
        {"col is 1 and cols 77, wanted a part of the matrix's 77", [](Decoded &r) { r.col = 1; }},
        {"col is -2 and cols 77", [](Decoded &r) { r.col = -2; }},
        {"col is 0 and cols -3", [](Decoded &r) { r.cols = -3; }},
        {"row is .* wanted a part", [](Decoded &r) { r.row = r.rows = INT64_MAX; }},
        {": out is NULL", [](Decoded &r) { r.out_argument = nullptr; }},
        {"out->stride is 76", [](Decoded &r) { r.out_rows.stride = 76; }},
        {"out->data is NULL", [](Decoded &r) { r.out_rows.data = nullptr; }},
        {": exec is NULL", [](Decoded &r) { r.exec_argument = nullptr; }},
    };
    expect_all_refused(*backend, MatrixCase{}, bad);
    for (const bool dense : {false, true}) {
        Decoded run(*backend, MatrixCase{});
        if (dense) {
            run.matrix.format = HR_DENSE;
            run.matrix.stride = 77;
            run.matrix.data = run.x.data[0];
        }
        expect_no_such_device(run);
    }
}
