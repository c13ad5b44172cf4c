// adamw_rule.h: the rule of AdamW as it is published, and the errors of what follows it. They are
// counted in units of the storage type's epsilon, at the size of the terms summed; the same rule in
// plain binary32 sets the bar: its root mean square error may be exceeded by a factor of 2.
#pragma once

#include <algorithm>
#include <cmath>

#include <gtest/gtest.h>

#include "capi/headroom.h"
#include "tests/c/harness/elements.h"

// A value and the size of the terms that it was summed from.
struct Sum {
    double value, size;
};

struct Updated {
    Sum param, exp_avg, exp_avg_sq, max_exp_avg_sq;
};

// Algorithm 2 of arXiv:1711.05101 in the precision of T, scalars in binary64. `v_max` counts with
// amsgrad alone.
template <class T, class Case>
Updated adamw_rule(const Case &c, const hr_adamw_config &h, double t, T p, T g, T m, T v,
                   T v_max = 0)
{
    const double lr = c.lr_on_device == HR_F32 ? double(float(c.lr)) : c.lr;
    const double factor =
        (c.maximize ? -1 : 1) * double(c.clip_coef.value_or(1)) / double(c.grad_scale.value_or(1));
    g = g * T(factor);
    T g_size = std::fabs(g);
    if (c.decoupled) {
        p = p - T(lr * h.weight_decay) * p;
    } else {
        g_size += std::fabs(T(h.weight_decay) * p);
        g = g + T(h.weight_decay) * p;
    }
    const T m_size = std::fabs(T(h.beta1) * m) + T(1 - h.beta1) * g_size;
    m = T(h.beta1) * m + T(1 - h.beta1) * g;
    const T v_size = T(h.beta2) * v + T(1 - h.beta2) * g_size * g_size;
    v = T(h.beta2) * v + T(1 - h.beta2) * g * g;
    v_max = std::max(v_max, v);
    const T root = std::sqrt(h.amsgrad ? v_max : v) / T(std::sqrt(1 - std::pow(h.beta2, t)));
    const T step_size = T(lr / (1 - std::pow(h.beta1, t)));
    const T new_p = p - step_size * (m / (root + T(h.eps)));
    const T p_size = std::fabs(p) + step_size * (m_size / (root + T(h.eps)));
    return {{new_p, p_size}, {m, m_size}, {v, v_size}, {v_max, v_max + v_size}};
}

class StorageError
{
  public:
    // `plain` is what binary32 gives before it is stored.
    void add(double got, double plain, Sum exact, hr_dtype dtype)
    {
        // Below `least` the format has no more bits to be precise with.
        const double least = dtype == HR_F16 ? 0x1p-14 : 0x1p-126;
        const double unit = epsilon_of(dtype) * std::max(exact.size, least);
        uint8_t stored[4];
        encode(plain, stored, dtype);
        const double error = std::fabs(got - exact.value) / unit;
        const double plain_error = std::fabs(decode(stored, dtype) - exact.value) / unit;
        largest_ = std::max(largest_, error);
        squares_ += error * error;
        plain_squares_ += plain_error * plain_error;
    }

    void expect_small(const char *list) const
    {
        EXPECT_LE(largest_, 3) << list;
        EXPECT_LE(std::sqrt(squares_), 2 * std::sqrt(plain_squares_)) << list;
    }

  private:
    double largest_ = 0, squares_ = 0, plain_squares_ = 0;
};
