// Calls of hr_rope() on made-up queries and keys.
#pragma once

#include <cmath>

#include "tests/c/harness/refused.h"
#include "tests/c/harness/row_op.h"

enum Layout { BY_TOKEN, BY_HEAD, PACKED }; // PACKED: [tokens, q heads | k heads | v heads]
enum Positions { OFFSET, PER_BATCH, SHARED };

struct RopeCase {
    int64_t batch = 2, tokens = 5, q_heads = 3, k_heads = 2, head_dim = 32, rotary_dim = 0;
    Layout layout = BY_TOKEN;
    hr_dtype dtype = HR_F32, table_dtype = HR_F32;
    bool interleaved = false, inverse = false, wide = false; // wide: tables of both halves
    Positions positions = OFFSET;
    bool in_place = false, special = false;
    size_t shift = 0; // elements past an aligned address
};

inline std::ostream &operator<<(std::ostream &out, const RopeCase &c)
{
    return out << c.batch << " x " << c.tokens << " tokens, heads " << c.q_heads << " + "
               << c.k_heads << ", dim " << c.rotary_dim << " of " << c.head_dim << ", layout "
               << c.layout << ", " << name_of(c.dtype) << ", tables " << name_of(c.table_dtype)
               << (c.wide ? ", wide" : "") << (c.interleaved ? ", interleaved" : "")
               << (c.inverse ? ", inverse" : "") << ", positions " << c.positions
               << (c.in_place ? ", in place" : "") << ", shift " << c.shift;
}

constexpr int64_t kRows = 23, kOffset = 4;

class RopeRun
{
  public:
    RopeRun(Backend &backend, const RopeCase &c)
        : c(c), rotary(c.rotary_dim ? c.rotary_dim : c.head_dim), rows(rows_of(c)),
          in(backend, {numel(c)}, {c.dtype}, c.shift, values(1, c.special)),
          out(backend, {numel(c)}, {c.dtype}, c.shift, garbage),
          cos(backend, {rows * cols()}, {c.table_dtype}, c.shift, values(2, false)),
          sin(backend, {rows * cols()}, {c.table_dtype}, c.shift, values(3, false)),
          ids(backend, made_ids()), exec(backend.exec())
    {
        config.dtype = c.dtype;
        config.table_dtype = c.table_dtype;
        config.interleaved = c.interleaved;
        config.inverse = c.inverse;
        config.rotary_dim = c.rotary_dim;
        config.offset = c.positions == OFFSET ? kOffset : 0;
        config.batch_step = c.positions == OFFSET ? c.tokens : 0;
        shape = {c.batch, c.tokens, c.q_heads, c.k_heads, c.head_dim, rows};
        const int64_t per_token = c.layout == PACKED ? c.q_heads + 2 * c.k_heads : 0;
        const int64_t k_from = c.layout == PACKED ? c.q_heads : c.batch * c.tokens * c.q_heads;
        q = heads_of(c.q_heads, per_token, 0), k = heads_of(c.k_heads, per_token, k_from);
        q_out = q, k_out = k;
        if (!c.in_place)
            q_out.data = at(out, 0), k_out.data = at(out, k_from);
        cos_rows = {cos.data[0], cols()}, sin_rows = {sin.data[0], cols()};
        position_rows = {ids.data(), c.positions == SHARED ? 0 : c.tokens};
    }
    RopeRun(const RopeRun &) = delete;

    hr_status call() const
    {
        return hr_rope(q_out_argument, k_out_argument, q_argument, k_argument, cos_argument,
                       sin_argument, c.positions == OFFSET ? nullptr : &position_rows,
                       shape_argument, config_argument, exec_argument);
    }

    std::vector<uint8_t> image() const
    {
        return image_of({&in.buffers, &out.buffers, &cos.buffers, &sin.buffers});
    }

    bool whole() const
    {
        return intact({&in.buffers, &out.buffers, &cos.buffers, &sin.buffers}) && ids.intact();
    }

    int64_t cols() const
    {
        return c.wide ? rotary : rotary / 2;
    }

    int64_t position(int64_t b, int64_t t) const
    {
        if (c.positions == OFFSET)
            return kOffset + b * c.tokens + t;
        return id(c.positions == SHARED ? 0 : b, t);
    }

    const RopeCase c;
    const int64_t rotary, rows;
    Tensors in, out, cos, sin;
    Buffer ids;
    // Arguments, for a test to spoil.
    hr_heads q, k, q_out, k_out;
    const hr_heads *q_argument = &q, *k_argument = &k, *q_out_argument = &q_out,
                   *k_out_argument = &k_out;
    hr_rows cos_rows, sin_rows, position_rows;
    const hr_rows *cos_argument = &cos_rows, *sin_argument = &sin_rows;
    hr_rope_shape shape;
    const hr_rope_shape *shape_argument = &shape;
    hr_rope_config config = HR_ROPE_CONFIG_INIT;
    const hr_rope_config *config_argument = &config;
    hr_exec exec;
    const hr_exec *exec_argument = &exec;

  private:
    static int64_t numel(const RopeCase &c)
    {
        return c.batch * c.tokens * (c.q_heads + 2 * c.k_heads) * c.head_dim;
    }

    static int64_t rows_of(const RopeCase &c)
    {
        return c.positions == OFFSET ? kOffset + c.batch * c.tokens : kRows;
    }

    static int64_t id(int64_t b, int64_t t)
    {
        return (b * 7 + t * 5 + 3) % kRows;
    }

    std::vector<uint8_t> made_ids() const
    {
        std::vector<uint8_t> bytes;
        for (int64_t b = 0; b < c.batch; b++)
            for (int64_t t = 0; t < c.tokens; t++)
                for (int byte = 0; byte < 8; byte++)
                    bytes.push_back(uint8_t(uint64_t(id(b, t)) >> (8 * byte)));
        return bytes;
    }

    static Tensors::Value values(uint64_t role, bool special)
    {
        return [=](size_t, size_t i) {
            constexpr double kSpecial[] = {NAN, INFINITY, -INFINITY, 3e38, -3e38, 1e-40, 0, -0.0};
            const double value = noise(role, i) * 1.5;
            return special && noise(role + 50, i) < -0.9 ? kSpecial[i % 8] : value;
        };
    }

    void *at(const Tensors &tensor, int64_t vector) const
    {
        return moved(tensor.data[0], size_t(vector * c.head_dim) * bytes_of(c.dtype));
    }

    hr_heads heads_of(int64_t heads, int64_t per_token, int64_t from) const
    {
        const int64_t d = c.head_dim;
        if (c.layout == BY_HEAD)
            return {at(in, from), heads * c.tokens * d, d, c.tokens * d};
        const int64_t token = (per_token ? per_token : heads) * d;
        return {at(in, from), c.tokens * token, token, d};
    }
};
