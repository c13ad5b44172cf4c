// Calls of hr_glu_forward() and hr_glu_backward() on made-up rows.
#pragma once

#include <cmath>

#include "tests/c/harness/row_op.h"

struct GluCase {
    int64_t rows = 5, cols = 7;
    int64_t gap = 0; // elements between rows
    hr_activation activation = HR_SILU;
    hr_dtype dtype = HR_F32;
    bool up = true, again = true; // again: backward writes h as well
    size_t shift = 0;             // elements past an aligned address
    bool special = false;         // NaN, infinities, denormals and huge values
};

inline std::ostream &operator<<(std::ostream &out, const GluCase &c)
{
    const char *const names[] = {"silu", "gelu", "gelu_tanh", "relu", "relu_squared"};
    return out << names[c.activation] << ' ' << c.rows << " x " << c.cols << ", gap " << c.gap
               << ", shift " << c.shift << ", " << name_of(c.dtype) << (c.up ? "" : ", no up")
               << (c.again ? ", h again" : "") << (c.special ? ", special values" : "");
}

class GluRun
{
  public:
    GluRun(Backend &backend, const GluCase &c)
        : shape(c), gate(backend, of(c), {c.dtype}, c.shift, values(GATE, c, 6)),
          up(backend, of(c, c.up), {c.dtype}, c.shift, values(UP, c, 2)),
          dh(backend, of(c), {c.dtype}, c.shift, values(DH, c, 1)),
          h(backend, of(c), {c.dtype}, c.shift, garbage),
          dgate(backend, of(c), {c.dtype}, c.shift, garbage),
          dup(backend, of(c, c.up), {c.dtype}, c.shift, garbage),
          again(backend, of(c, c.again), {c.dtype}, c.shift, garbage), exec(backend.exec()),
          rows(c.rows), cols(c.cols)
    {
        config.activation = c.activation;
        config.dtype = c.dtype;
        gate_rows = at(gate), dh_rows = at(dh), h_rows = at(h), dgate_rows = at(dgate);
        up_rows = at(up), dup_rows = at(dup), again_rows = at(again);
        up_argument = c.up ? &up_rows : nullptr;
        dup_argument = c.up ? &dup_rows : nullptr;
        again_argument = c.again ? &again_rows : nullptr;
    }
    GluRun(const GluRun &) = delete;

    hr_status forward() const
    {
        return hr_glu_forward(h_argument, gate_argument, up_argument, rows, cols, config_argument,
                              exec_argument);
    }
    hr_status backward() const
    {
        return hr_glu_backward(dgate_argument, dup_argument, again_argument, dh_argument,
                               gate_argument, up_argument, rows, cols, config_argument,
                               exec_argument);
    }
    hr_status call() const
    {
        const hr_status status = forward();
        return status == HR_OK ? backward() : status;
    }
    std::vector<uint8_t> image() const
    {
        return image_of({&gate.buffers, &up.buffers, &dh.buffers, &h.buffers, &dgate.buffers,
                         &dup.buffers, &again.buffers});
    }
    bool whole() const
    {
        return intact({&gate.buffers, &up.buffers, &dh.buffers, &h.buffers, &dgate.buffers,
                       &dup.buffers, &again.buffers});
    }
    hr_rows at(const Tensors &tensor) const
    {
        return {tensor.data[0], shape.cols + shape.gap};
    }

    GluCase shape;
    Tensors gate, up, dh, h, dgate, dup, again;
    // Arguments, for a test to spoil.
    hr_rows gate_rows, up_rows, dh_rows, h_rows, dgate_rows, dup_rows, again_rows;
    const hr_rows *gate_argument = &gate_rows, *dh_argument = &dh_rows, *h_argument = &h_rows;
    const hr_rows *dgate_argument = &dgate_rows, *up_argument, *dup_argument, *again_argument;
    hr_glu_config config = HR_GLU_CONFIG_INIT;
    const hr_glu_config *config_argument = &config;
    hr_exec exec;
    const hr_exec *exec_argument = &exec;
    int64_t rows, cols;

  private:
    enum { GATE = 1, UP, DH };

    static Tensors::Value values(int role, const GluCase &c, double size)
    {
        return [=](size_t, size_t i) {
            constexpr double kSpecial[] = {NAN,   INFINITY, -INFINITY, 3e38, -3e38, 1e-40,
                                           -0.0,  -87.5,    -100.0,    95.0, -14.2, 0x1p-126,
                                           -1e30, 6e4,      -6e4,      0.0};
            const bool special = c.special && noise(uint64_t(role) + 50, i) < -0.5;
            return special ? kSpecial[i * uint64_t(role) % 16] : noise(uint64_t(role), i) * size;
        };
    }

    static std::vector<int64_t> of(const GluCase &c, bool wanted = true)
    {
        return {wanted ? c.rows * (c.cols + c.gap) : 0};
    }
};
