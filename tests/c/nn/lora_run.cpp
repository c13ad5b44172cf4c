#include "tests/c/nn/lora_run.h"

#include <cmath>

#include "kernels/core/random.h"

namespace
{

enum { DENSE = 11, A, B, T, X };

Tensors::Value noise_of(int role)
{
    return [=](size_t, size_t i) { return noise(uint64_t(role), i); };
}

hr_dtype adapter_of(const LoraCase &c)
{
    return c.own ? c.linear.dtype : HR_F32;
}

// So that its bits are those of any signed number.
constexpr uint64_t kSeed = 0xC0FFEE0123456789;

} // namespace

std::ostream &operator<<(std::ostream &out, const LoraCase &c)
{
    return out << c.linear << (c.dense ? ", dense" : "") << ", rank " << c.rank
               << (c.own ? ", adapters of x" : "") << ", dropout " << c.dropout << ", "
               << (c.dx ? "dx " : "") << (c.da ? "da " : "") << (c.db ? "db" : "");
}

LoraRun::LoraRun(Backend &backend, const LoraCase &c)
    : shape(c), linear(backend, c.linear),
      dense(backend, {c.dense ? c.linear.rows * (c.linear.cols + 2) : 0}, {c.linear.dtype}, 0,
            noise_of(DENSE)),
      a(backend, {c.rank * (c.linear.cols + c.linear.gap)}, {adapter_of(c)}, c.linear.shift,
        noise_of(A)),
      b(backend, {c.linear.rows * (c.rank + c.linear.gap)}, {adapter_of(c)}, c.linear.shift,
        noise_of(B)),
      t(backend, {c.linear.m * (c.rank + c.linear.gap)}, {c.linear.dtype}, c.linear.shift,
        c.linear.backward ? noise_of(T) : Tensors::Value(garbage)),
      x(backend, {c.linear.backward ? c.linear.m * (c.linear.cols + c.linear.gap) : 0},
        {c.linear.dtype}, c.linear.shift, noise_of(X)),
      da(backend, {c.linear.backward ? a.numel[0] : 0}, {adapter_of(c)}, 0, garbage),
      db(backend, {c.linear.backward ? b.numel[0] : 0}, {adapter_of(c)}, 0, garbage),
      seed(backend, {2}, {HR_F32}, 0,
           [](size_t, size_t i) { return double(hr_float(uint32_t(kSeed >> 32 * i))); }),
      workspace(backend, std::vector<uint8_t>(allowance() + 256, 0x77)), exec(backend.exec()),
      m(c.linear.m)
{
    const int64_t gap = c.linear.gap;
    in_rows = linear.in_rows, out_rows = linear.out_rows;
    a_rows = {a.data[0], c.linear.cols + gap}, b_rows = {b.data[0], c.rank + gap};
    t_rows = {t.data[0], c.rank + gap}, x_rows = {x.data[0], c.linear.cols + gap};
    da_rows = {da.data[0], c.linear.cols + gap}, db_rows = {db.data[0], c.rank + gap};
    if (c.linear.backward) {
        out_argument = c.dx ? &out_rows : nullptr;
        da_argument = c.da ? &da_rows : nullptr, db_argument = c.db ? &db_rows : nullptr;
        x_argument = c.da ? &x_rows : nullptr, t_argument = c.db ? &t_rows : nullptr;
    }
    bias_argument = linear.bias_argument;
    workspace_argument =
        reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(workspace.data()) + 255) / 256 * 256);
}

size_t LoraRun::allowance()
{
    matrix = linear.matrix;
    if (shape.dense) {
        matrix = HR_MATRIX_INIT;
        matrix.dtype = shape.linear.dtype;
        matrix.rows = shape.linear.rows, matrix.cols = shape.linear.cols;
        matrix.data = dense.data[0], matrix.stride = shape.linear.cols + 2;
    }
    config.rank = shape.rank;
    config.scale = 0.75;
    config.dropout = shape.dropout;
    config.seed = shape.dropout > 0 ? static_cast<int64_t *>(seed.data[0]) : nullptr;
    config.adapter_dtype = adapter_of(shape);
    EXPECT_EQ(hr_lora_workspace(&workspace_bytes, shape.linear.m, &matrix, shape.linear.backward,
                                &config, &linear.exec),
              HR_OK)
        << hr_last_error();
    return workspace_bytes;
}

hr_status LoraRun::call() const
{
    if (shape.linear.backward)
        return hr_lora_backward(out_argument, da_argument, db_argument, in_argument, x_argument,
                                t_argument, matrix_argument, a_argument, b_argument, m,
                                config_argument, workspace_argument, workspace_bytes,
                                exec_argument);
    return hr_lora_forward(out_argument, t_argument, in_argument, matrix_argument, a_argument,
                           b_argument, bias_argument, m, config_argument, workspace_argument,
                           workspace_bytes, exec_argument);
}

std::vector<const std::vector<Buffer> *> LoraRun::buffers() const
{
    return {&dense.buffers, &a.buffers,  &b.buffers,  &t.buffers,
            &x.buffers,     &da.buffers, &db.buffers, &seed.buffers};
}

std::vector<uint8_t> LoraRun::image() const
{
    std::vector<uint8_t> all = linear.image();
    for (const std::vector<Buffer> *group : buffers()) {
        const std::vector<uint8_t> own = image_of({group});
        all.insert(all.end(), own.begin(), own.end());
    }
    return all;
}

bool LoraRun::whole() const
{
    bool is_whole = linear.whole() && workspace.intact();
    for (const std::vector<Buffer> *group : buffers())
        is_whole = is_whole && intact({group});
    return is_whole;
}

std::vector<double> LoraRun::weight() const
{
    if (!shape.dense)
        return linear.weight();
    const std::vector<double> all = dense.values(0);
    std::vector<double> w;
    for (int64_t r = 0; r < matrix.rows; r++)
        w.insert(w.end(), all.begin() + r * matrix.stride,
                 all.begin() + r * matrix.stride + matrix.cols);
    return w;
}

double LoraRun::kept(int64_t row, int64_t col) const
{
    const int64_t group = col / 8;
    const hr_random4 counter = {{uint32_t(group), uint32_t(group >> 32), uint32_t(row), 0}};
    const uint32_t word = hr_philox(counter, kSeed).word[col % 8 / 2];
    const double threshold = std::floor(shape.dropout * 65536 + 0.5);
    const double random = double(col % 2 ? word >> 16 : word & 0xFFFF);
    return random < threshold ? 0 : 65536 / (65536 - threshold);
}
