#include "tests/c/harness/elements.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace
{
// A binary format: `mantissa` bits below the leading one, exponents down to `lowest`, 16 bits in
// all.
struct Format {
    int mantissa, lowest, highest;
};

Format format_of(hr_dtype dtype)
{
    return dtype == HR_BF16 ? Format{7, -126, 127} : Format{10, -14, 15};
}

double decode16(uint16_t bits, Format f)
{
    const int exponent_bits = 15 - f.mantissa,
              field = bits >> f.mantissa & ((1 << exponent_bits) - 1);
    const int mantissa = bits & ((1 << f.mantissa) - 1);
    double magnitude;
    if (field == (1 << exponent_bits) - 1)
        magnitude = mantissa ? NAN : INFINITY;
    else if (field == 0)
        magnitude = std::ldexp(mantissa, f.lowest - f.mantissa);
    else
        magnitude = std::ldexp(mantissa + (1 << f.mantissa), field - 1 + f.lowest - f.mantissa);
    return bits >> 15 ? -magnitude : magnitude;
}

uint16_t encode16(double value, Format f)
{
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const uint16_t infinity = uint16_t(f.highest - f.lowest + 2) << f.mantissa;
    if (std::isnan(value))
        return 0x7FFF;
    if (std::isinf(value) || value == 0)
        return sign | (value == 0 ? 0 : infinity);
    const int exponent = std::max(std::ilogb(value), f.lowest);
    const double units = std::nearbyint(std::ldexp(std::fabs(value), f.mantissa - exponent));
    // A carry out of the mantissa moves into the exponent, as it should.
    const double bits = units + std::ldexp(exponent - f.lowest, f.mantissa);
    return sign | (bits >= infinity ? infinity : uint16_t(bits));
}

template <class T> T load(const uint8_t *bytes)
{
    T value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
}

template <class T> void store(T value, uint8_t *bytes)
{
    std::memcpy(bytes, &value, sizeof value);
}
} // namespace

size_t bytes_of(hr_dtype dtype)
{
    return dtype == HR_F64 ? 8 : dtype == HR_F32 ? 4 : dtype == HR_U8 ? 1 : 2;
}

const char *name_of(hr_dtype dtype)
{
    const char *const names[] = {"f32", "bf16", "f16", "u8", "i8", "i16", "f64"};
    return names[dtype];
}

double epsilon_of(hr_dtype dtype)
{
    return dtype == HR_F32 ? std::ldexp(1, -23) : std::ldexp(1, -format_of(dtype).mantissa);
}

double error_of_sum(double exact, double size, hr_dtype dtype)
{
    const double tiny = dtype == HR_F16 ? 0x1p-24 : 0;
    return std::fabs(exact) * epsilon_of(dtype) / 2 + size * 0x1p-20 + tiny;
}

double decode(const uint8_t *bytes, hr_dtype dtype)
{
    return dtype == HR_F64   ? load<double>(bytes)
           : dtype == HR_F32 ? load<float>(bytes)
           : dtype == HR_U8  ? *bytes
                             : decode16(load<uint16_t>(bytes), format_of(dtype));
}

void encode(double value, uint8_t *bytes, hr_dtype dtype)
{
    if (dtype == HR_F64)
        store(value, bytes);
    else if (dtype == HR_F32)
        store(float(value), bytes);
    else if (dtype == HR_U8)
        *bytes = uint8_t(value);
    else
        store(encode16(value, format_of(dtype)), bytes);
}

std::vector<double> decode(const std::vector<uint8_t> &bytes, hr_dtype dtype)
{
    std::vector<double> values;
    for (size_t i = 0; i < bytes.size(); i += bytes_of(dtype))
        values.push_back(decode(&bytes[i], dtype));
    return values;
}

std::vector<uint8_t> encode(const std::vector<double> &values, hr_dtype dtype)
{
    std::vector<uint8_t> bytes(values.size() * bytes_of(dtype));
    for (size_t i = 0; i < values.size(); i++)
        encode(values[i], &bytes[i * bytes_of(dtype)], dtype);
    return bytes;
}
