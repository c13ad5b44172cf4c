// Matrices as large as those of models: more than 2^31 elements, 65,535 rows or 128,000 classes, with
// a stride that fits no vector. Only a GPU gets them; the CPU and the emulator make the same calls on
// small ones. The rows repeat, and so must the results, which are those of the CPU.
#include <algorithm>
#include <cmath>

#include "tests/c/harness/tensors.h"

using LargeMatrices = OnBackend;
ON_EVERY_BACKEND(LargeMatrices);

namespace
{
constexpr int64_t kPeriod = 7; // rows

struct Size {
    int64_t rows, cols;
};

bool is_gpu(const Backend &backend)
{
    return backend.exec().device != HR_CPU && !backend.is_emulated();
}

class Repeated
{
  public:
    // `role` 0: of garbage that is never read.
    Repeated(Backend &backend, Size size, hr_dtype dtype, uint64_t role)
        : rows{nullptr, size.cols + 1 + size.cols % 2}, backend_(backend), size_(size),
          dtype_(dtype)
    {
        const size_t pitch = size_t(rows.stride) * bytes_of(dtype);
        rows.data = backend.allocate(size_t(size.rows) * pitch);
        std::vector<double> values(size_t(kPeriod * rows.stride));
        for (size_t i = 0; i < values.size(); i++)
            values[i] = role ? 3 * noise(role, i) : NAN;
        const std::vector<uint8_t> period = encode(values, dtype);
        std::vector<uint8_t> piece;
        while (piece.size() < std::min(size_t(size.rows) * pitch, size_t{64} << 20))
            piece.insert(piece.end(), period.begin(), period.end());
        const int64_t at_once = int64_t(piece.size() / pitch);
        for (int64_t i = 0; i < size.rows; i += at_once)
            backend.upload(at(i), piece.data(), size_t(std::min(at_once, size.rows - i)) * pitch);
    }
    ~Repeated()
    {
        backend_.release(rows.data);
    }
    Repeated(const Repeated &) = delete;

    std::vector<double> row(int64_t i) const
    {
        std::vector<uint8_t> bytes(size_t(size_.cols) * bytes_of(dtype_));
        backend_.download(bytes.data(), at(i), bytes.size());
        return decode(bytes, dtype_);
    }
    // Rows of the beginning, of where offsets leave 31 bits, and of the end.
    std::vector<int64_t> some() const
    {
        std::vector<int64_t> all;
        const int64_t edge = std::min((INT64_C(1) << 31) / rows.stride, size_.rows - kPeriod);
        for (int64_t i = 0; i < kPeriod; i++)
            for (const int64_t begin : {INT64_C(0), edge, size_.rows - kPeriod})
                all.push_back(begin + i);
        return all;
    }

    hr_rows rows;

  private:
    char *at(int64_t i) const
    {
        return static_cast<char *>(rows.data) + i * rows.stride * int64_t(bytes_of(dtype_));
    }
    Backend &backend_;
    Size size_;
    hr_dtype dtype_;
};

// Each row is that of the CPU, within `units` roundings of the largest.
void expect_rows(const Repeated &got, const Repeated &wanted, hr_dtype dtype, double units)
{
    for (const int64_t i : got.some()) {
        const std::vector<double> row = got.row(i), exact = wanted.row(i % kPeriod);
        double most = 0;
        for (const double x : exact)
            most = std::fmax(most, std::fabs(x));
        for (size_t j = 0; j < row.size(); j++)
            ASSERT_NEAR(row[j], exact[j], units * epsilon_of(dtype) * most)
                << "row " << i << ", column " << j;
    }
}

Size rows_for(const Backend &backend)
{
    return is_gpu(backend) ? Size{(1 << 20) + 8, 2049} : Size{23, 33};
}

struct Vectors {
    Vectors(Backend &backend, int64_t rows)
        : floats(backend, {rows, rows, rows}, {HR_F32}, 0,
                 [](size_t k, size_t) { return k == 2 ? 1 : NAN; }),
          targets(backend, made(rows))
    {
    }
    static std::vector<uint8_t> made(int64_t rows)
    {
        std::vector<uint8_t> bytes(size_t(rows) * 4);
        for (size_t i = 0; i < size_t(rows); i++)
            bytes[4 * i] = uint8_t(i % kPeriod * 5);
        return bytes;
    }
    float *at(size_t k) const
    {
        return static_cast<float *>(floats.data[k]);
    }
    Tensors floats; // lse, lse_low or loss, dloss
    Buffer targets;
};

} // namespace

TEST_P(LargeMatrices, GatedUnitsInPlace)
{
    hr_glu_config config = HR_GLU_CONFIG_INIT;
    config.dtype = HR_BF16;
    const auto run = [&](Backend &where, const Repeated &x, Size size) {
        const hr_exec exec = where.exec();
        ASSERT_EQ(hr_glu_forward(&x.rows, &x.rows, nullptr, size.rows, size.cols, &config, &exec),
                  HR_OK)
            << hr_last_error();
    };
    const Size size = rows_for(*backend), few = {kPeriod, size.cols};
    const Repeated x(*backend, size, HR_BF16, 1), wanted(cpu_backend(), few, HR_BF16, 1);
    run(*backend, x, size);
    run(cpu_backend(), wanted, few);
    expect_rows(x, wanted, HR_BF16, 0);
}

TEST_P(LargeMatrices, Norms)
{
    hr_norm_config config = HR_NORM_CONFIG_INIT;
    config.dtype = HR_BF16;
    const auto run = [&](Backend &where, const Repeated &y, const Repeated &x, Size size) {
        const hr_exec exec = where.exec();
        const Vectors v(where, size.rows);
        ASSERT_EQ(hr_norm_forward(&y.rows, nullptr, nullptr, v.at(0), &x.rows, nullptr, nullptr,
                                  nullptr, size.rows, size.cols, &config, &exec),
                  HR_OK)
            << hr_last_error();
    };
    const Size size = rows_for(*backend), few = {kPeriod, size.cols};
    const Repeated x(*backend, size, HR_BF16, 2), y(*backend, size, HR_BF16, 0);
    const Repeated few_x(cpu_backend(), few, HR_BF16, 2), wanted(cpu_backend(), few, HR_BF16, 0);
    run(*backend, y, x, size);
    run(cpu_backend(), wanted, few_x, few);
    expect_rows(y, wanted, HR_BF16, 1);
}

// Forward, and backward over the logits.
TEST_P(LargeMatrices, CrossEntropy)
{
    hr_cross_entropy_config config = HR_CROSS_ENTROPY_CONFIG_INIT;
    config.dtype = config.grad_dtype = HR_BF16;
    config.target_bytes = 4;
    const auto run = [&](Backend &where, const Repeated &x, Size size) {
        const hr_exec exec = where.exec();
        const Vectors v(where, size.rows);
        ASSERT_EQ(hr_cross_entropy_forward(v.at(1), v.at(0), nullptr, nullptr, &x.rows,
                                           v.targets.data(), nullptr, size.rows, size.cols, &config,
                                           &exec),
                  HR_OK)
            << hr_last_error();
        ASSERT_EQ(hr_cross_entropy_backward(&x.rows, v.at(2), 1, nullptr, &x.rows, v.targets.data(),
                                            nullptr, v.at(0), nullptr, size.rows, size.cols,
                                            &config, &exec),
                  HR_OK)
            << hr_last_error();
    };
    const Size size = is_gpu(*backend) ? Size{16768, 128256} : Size{23, 41};
    const Size few = {kPeriod, size.cols};
    const Repeated x(*backend, size, HR_BF16, 3), wanted(cpu_backend(), few, HR_BF16, 3);
    run(*backend, x, size);
    run(cpu_backend(), wanted, few);
    expect_rows(x, wanted, HR_BF16, 1);
}

TEST_P(LargeMatrices, Products)
{
    constexpr int64_t kTerms = 5;
    hr_gemm_config config = HR_GEMM_CONFIG_INIT;
    config.dtype = config.out_dtype = HR_BF16;
    const auto run = [&](Backend &where, const Repeated &c, Size size) {
        const hr_exec exec = where.exec();
        const Repeated a(where, {size.rows, kTerms}, HR_BF16, 4);
        const Repeated b(where, {kTerms, size.cols}, HR_BF16, 5);
        const Buffer workspace(where, std::vector<uint8_t>(1 << 20));
        ASSERT_EQ(hr_gemm(&c.rows, &a.rows, &b.rows, nullptr, size.rows, size.cols, kTerms, &config,
                          workspace.data(), 1 << 20, &exec),
                  HR_OK)
            << hr_last_error();
    };
    const Size size = rows_for(*backend), few = {kPeriod, size.cols};
    const Repeated c(*backend, size, HR_BF16, 0), wanted(cpu_backend(), few, HR_BF16, 0);
    run(*backend, c, size);
    run(cpu_backend(), wanted, few);
    expect_rows(c, wanted, HR_BF16, 1);
}
