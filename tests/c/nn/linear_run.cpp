#include "tests/c/nn/linear_run.h"

#include <cmath>

namespace
{

enum { IN = 1, BIAS, CODES, ABSMAX, ABSMAX_CODES, ABSMAX_SCALES };

int64_t blocks_of(const LinearCase &c)
{
    return hr_block_count(c.rows * c.cols, c.block_size);
}

bool is_int8(const LinearCase &c)
{
    return c.format == HR_INT8_ROWS;
}

// Whole numbers below `count`.
Tensors::Value whole_numbers(int role, int count)
{
    return [=](size_t, size_t i) { return std::floor((noise(uint64_t(role), i) + 1) / 2 * count); };
}

Tensors::Value noise_of(int role)
{
    return [=](size_t, size_t i) { return noise(uint64_t(role), i); };
}

// Scales that differ much, and one of zero.
double scale(int role, size_t i)
{
    return i == 2 ? 0 : std::exp2(3 * noise(uint64_t(role), i));
}

Tensors::Value scales(int role)
{
    return [=](size_t, size_t i) { return scale(role, i); };
}

std::vector<int64_t> stored(int64_t m, int64_t cols, int64_t gap)
{
    return {m * (cols + gap)};
}

constexpr double kNf4[] = {-1,
                           -.6961928009986877,
                           -.5250730514526367,
                           -.39491748809814453,
                           -.28444138169288635,
                           -.18477343022823334,
                           -.09105003625154495,
                           0,
                           .07958029955625534,
                           .16093020141124725,
                           .24611230194568634,
                           .33791524171829224,
                           .44070982933044434,
                           .5626170039176941,
                           .7229568362236023,
                           1};

double fp4(int code)
{
    constexpr int kUnits[] = {0, 1, 128, 192, 64, 96, 32, 48};
    const double size = float(kUnits[code & 7] / 192.0);
    return code & 8 ? -size : size;
}

} // namespace

std::ostream &operator<<(std::ostream &out, const LinearCase &c)
{
    const char *const formats[] = {"dense", "nf4", "fp4", "int8"};
    const char *const spaces[] = {"least", "odd", "best", "whole"};
    return out << (c.backward ? "backward " : "forward ") << formats[c.format] << ' '
               << name_of(c.dtype) << ", m " << c.m << ", " << c.rows << " x " << c.cols
               << ", blocks of " << c.block_size << (c.nested ? ", nested" : "")
               << (c.bias ? ", bias" : "") << ", gap " << c.gap << ", shift " << c.shift
               << ", codes + " << c.codes << ", workspace " << spaces[int(c.space)]
               << (c.adds ? ", added" : "");
}

LinearRun::LinearRun(Backend &backend, const LinearCase &c)
    : shape(c), in(backend, stored(c.m, in_cols(), c.gap), {c.dtype}, c.shift, noise_of(IN)),
      out(backend, stored(c.m, out_cols(), c.gap), {c.dtype}, c.shift, garbage),
      bias(backend, {c.bias ? c.rows : 0}, {c.dtype}, c.shift, noise_of(BIAS)),
      codes(backend, {is_int8(c) ? c.rows * c.cols : (c.rows * c.cols + 1) / 2}, {HR_U8}, c.codes,
            whole_numbers(CODES, 256)),
      absmax(backend,
             {c.nested     ? 0
              : is_int8(c) ? c.rows
                           : blocks_of(c)},
             {HR_F32}, 0, scales(ABSMAX)),
      absmax_codes(backend, {c.nested ? blocks_of(c) : 0}, {HR_U8}, 0,
                   whole_numbers(ABSMAX_CODES, 256)),
      absmax_scales(backend, {c.nested ? hr_block_count(blocks_of(c), 256) : 0}, {HR_F32}, 0,
                    scales(ABSMAX_SCALES)),
      offset(backend, {c.nested}, {HR_F32}, 0, [](size_t, size_t) { return 1.0625; }),
      workspace(backend, std::vector<uint8_t>(allowance(backend) + 256, 0x77)),
      exec(backend.exec()), m(c.m)
{
    in_rows = {in.data[0], in_cols() + c.gap}, out_rows = {out.data[0], out_cols() + c.gap};
    if (c.adds)
        config.addend = out_rows;
    bias_argument = c.bias ? bias.data[0] : nullptr;
    workspace_argument =
        reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(workspace.data()) + 255) / 256 * 256);
}

size_t LinearRun::allowance(Backend &backend)
{
    const LinearCase &c = shape;
    matrix.format = c.format, matrix.dtype = c.dtype;
    matrix.rows = c.rows, matrix.cols = c.cols;
    matrix.data = codes.data[0];
    matrix.block_size = c.block_size;
    if (c.nested) {
        matrix.absmax_codes = static_cast<uint8_t *>(absmax_codes.data[0]);
        matrix.absmax_scales = static_cast<float *>(absmax_scales.data[0]);
        matrix.offset = static_cast<float *>(offset.data[0]);
    } else {
        matrix.absmax = static_cast<float *>(absmax.data[0]);
    }
    const hr_exec exec = backend.exec();
    EXPECT_EQ(hr_linear_query(&needs, c.m, &matrix, c.backward, &config, &exec), HR_OK)
        << hr_last_error();
    const size_t line = size_t(c.backward ? c.rows : c.cols) * bytes_of(c.dtype);
    const size_t bytes[] = {needs.least, std::min(needs.least + 3 * line + 2, needs.best),
                            needs.best, needs.whole};
    return workspace_bytes = bytes[int(c.space)];
}

hr_status LinearRun::call() const
{
    if (shape.backward)
        return hr_linear_backward(out_argument, in_argument, matrix_argument, m, config_argument,
                                  workspace_argument, workspace_bytes, exec_argument);
    return hr_linear_forward(out_argument, in_argument, matrix_argument, bias_argument, m,
                             config_argument, workspace_argument, workspace_bytes, exec_argument);
}

std::vector<uint8_t> LinearRun::image() const
{
    return image_of({&in.buffers, &out.buffers, &bias.buffers, &codes.buffers, &absmax.buffers,
                     &absmax_codes.buffers, &absmax_scales.buffers, &offset.buffers});
}

bool LinearRun::whole() const
{
    return intact({&in.buffers, &out.buffers, &bias.buffers, &codes.buffers, &absmax.buffers,
                   &absmax_codes.buffers, &absmax_scales.buffers, &offset.buffers}) &&
           workspace.intact();
}

int64_t LinearRun::in_cols() const
{
    return shape.backward ? shape.rows : shape.cols;
}

int64_t LinearRun::out_cols() const
{
    return shape.backward ? shape.cols : shape.rows;
}

std::vector<double> LinearRun::weight() const
{
    const std::vector<double> own = codes.values(0), large = absmax.values(0);
    const std::vector<double> nested = absmax_codes.values(0), factors = absmax_scales.values(0);
    std::vector<float> map(256);
    EXPECT_EQ(hr_dynamic_map(map.data(), 1), HR_OK);
    std::vector<double> all(size_t(shape.rows * shape.cols));
    for (size_t i = 0; i < all.size(); i++) {
        float value;
        if (is_int8(shape)) {
            value = float(int8_t(uint8_t(own[i]))) * float(large[i / size_t(shape.cols)]) *
                    7.874015718698502e-3f;
        } else {
            const size_t block = i / size_t(shape.block_size);
            const int byte = int(own[i / 2]), code = i % 2 ? byte & 15 : byte >> 4;
            float scale;
            if (shape.nested) {
                scale = map[size_t(nested[block])] * float(factors[block / 256]);
                scale = scale + 1.0625f;
            } else {
                scale = float(large[block]);
            }
            value = float(shape.format == HR_FP4 ? fp4(code) : kNf4[code]) * scale;
        }
        uint8_t bytes[8];
        encode(double(value), bytes, shape.dtype);
        all[i] = decode(bytes, shape.dtype);
    }
    return all;
}
