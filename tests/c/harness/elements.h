// Element types for tests, by their definition: independent of the conversions in kernels/.
#pragma once

#include <cstdint>
#include <vector>

#include "capi/headroom.h"

size_t bytes_of(hr_dtype dtype);
const char *name_of(hr_dtype dtype); // such as "f32"
double epsilon_of(hr_dtype dtype);   // distance from 1 to the next number
// How far a stored sum may be from `exact`, whose terms have a sum of magnitudes of `size`.
double error_of_sum(double exact, double size, hr_dtype dtype);

double decode(const uint8_t *bytes, hr_dtype dtype);
void encode(double value, uint8_t *bytes, hr_dtype dtype); // to nearest even

std::vector<double> decode(const std::vector<uint8_t> &bytes, hr_dtype dtype);
std::vector<uint8_t> encode(const std::vector<double> &values, hr_dtype dtype);
