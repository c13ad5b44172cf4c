#include "tests/c/loss/made.h"

#include <cmath>

double garbage(size_t, size_t)
{
    return 77.0;
}

double made_logit(uint64_t seed, size_t i, double size, bool special)
{
    constexpr double kSpecial[] = {NAN, INFINITY, -INFINITY, 3e38, -3e38, 1e-40, 0, -0.0};
    if (special && noise(seed + 6, i) < -0.999)
        return kSpecial[i % 8];
    return noise(seed, i) * size;
}

int64_t made_target(int64_t row, int64_t classes, int64_t ignored)
{
    if (ignored && row % ignored == ignored - 1)
        return -100;
    const int64_t ends[] = {0, classes - 1};
    return row < 2 ? ends[row] : int64_t(uint64_t(row) * 7919 % uint64_t(classes));
}

std::vector<uint8_t> bytes_of_targets(int64_t rows, int64_t classes, int64_t ignored, bool int32)
{
    const size_t bytes = int32 ? 4 : 8;
    std::vector<uint8_t> all(size_t(rows) * bytes);
    for (int64_t row = 0; row < rows; row++) {
        const int64_t target = made_target(row, classes, ignored); // its low half comes first
        std::memcpy(&all[size_t(row) * bytes], &target, bytes);
    }
    return all;
}

void put_target(Backend &backend, const Buffer &targets, int64_t row, int64_t value, bool int32)
{
    const size_t bytes = int32 ? 4 : 8;
    backend.upload(static_cast<uint8_t *>(targets.data()) + size_t(row) * bytes, &value, bytes);
}
