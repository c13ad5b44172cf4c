/* rope.c: hr_rope: checks, then the kernel of the device. */
#include "kernels/nn/rope.h"

#include <inttypes.h>

#include "capi/check/rows.h"

#define LARGEST (INT64_C(1) << 59) /* elements */

static hr_status check_config(const char *function, hr_rope_config *own,
                              const hr_rope_config *config)
{
    HR_REQUIRE(config, "%s: config is NULL", function);
    HR_TRY(hr_copy_config(function, "config->", own, sizeof *own, config,
                          offsetof(hr_rope_config, batch_step) + sizeof own->batch_step,
                          "HR_ROPE_CONFIG_INIT"));
    HR_TRY(hr_check_float(function, "config->dtype", own->dtype));
    HR_TRY(hr_check_float(function, "config->table_dtype", own->table_dtype));
    HR_REQUIRE(own->offset >= 0 && own->offset <= LARGEST,
               "%s: config->offset is %" PRId64 ", wanted 0 or more, at most 2^59", function,
               own->offset);
    HR_REQUIRE(own->batch_step >= 0 && own->batch_step <= LARGEST,
               "%s: config->batch_step is %" PRId64 ", wanted 0 or more, at most 2^59", function,
               own->batch_step);
    return HR_OK;
}

static hr_status check_shape(const char *function, const hr_rope_shape *shape,
                             hr_rope_config *config)
{
    HR_REQUIRE(shape, "%s: shape is NULL", function);
    const struct {
        const char *name;
        int64_t size, least;
    } sizes[] = {{"batch", shape->batch, 0},       {"tokens", shape->tokens, 0},
                 {"q_heads", shape->q_heads, 0},   {"k_heads", shape->k_heads, 0},
                 {"head_dim", shape->head_dim, 1}, {"table_rows", shape->table_rows, 0}};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
        HR_REQUIRE(sizes[k].size >= sizes[k].least && sizes[k].size <= LARGEST,
                   "%s: shape->%s is %" PRId64 ", wanted %" PRId64 " or more, at most 2^59",
                   function, sizes[k].name, sizes[k].size, sizes[k].least);
    if (config->rotary_dim == 0)
        config->rotary_dim = shape->head_dim;
    HR_REQUIRE(config->rotary_dim >= 2 && config->rotary_dim <= shape->head_dim &&
                   config->rotary_dim % 2 == 0,
               "%s: config->rotary_dim is %" PRId64
               ", wanted an even number from 2 to head_dim (%" PRId64 ")",
               function, config->rotary_dim, shape->head_dim);
    return HR_OK;
}

/* Multiplies, or gives LARGEST + 1 if the product is larger. */
static int64_t product(int64_t a, int64_t b)
{
    return b > 0 && a > LARGEST / b ? LARGEST + 1 : a * b;
}

/* Every element has an address, and of an output one of its own. */
static hr_status check_heads(const char *function, const char *name, const hr_heads *heads,
                             int64_t count, const hr_rope_shape *shape, hr_dtype dtype,
                             int is_output)
{
    struct {
        int64_t size, stride;
    } dims[] = {{shape->batch, heads->batch_stride},
                {shape->tokens, heads->token_stride},
                {count, heads->head_stride}};
    int64_t numel = shape->head_dim, extent = shape->head_dim;
    for (int k = 0; k < 3; k++) {
        HR_REQUIRE(dims[k].stride >= 0, "%s: %s has stride %" PRId64 ", wanted 0 or more", function,
                   name, dims[k].stride);
        numel = product(numel, dims[k].size);
        const int64_t steps = dims[k].size > 0 ? dims[k].size - 1 : 0;
        const int64_t reach = product(steps, dims[k].stride);
        extent = extent > LARGEST || reach > LARGEST ? LARGEST + 1 : extent + reach;
    }
    HR_REQUIRE(numel <= LARGEST && extent <= LARGEST,
               "%s: %s has more than 2^59 elements, or as much from its first to its last",
               function, name);
    if (numel == 0)
        return HR_OK;
    HR_REQUIRE(heads->data, "%s: %s->data is NULL", function, name);
    const size_t bytes = hr_dtype_size(dtype);
    HR_REQUIRE((uintptr_t)heads->data % bytes == 0,
               "%s: %s->data is at %p, which is not a multiple of %zu bytes", function, name,
               heads->data, bytes);
    int64_t least = shape->head_dim; /* the least stride of the next dimension outwards */
    for (int done = 0; is_output && done < 3; done++) {
        int next = -1;
        for (int k = 0; k < 3; k++)
            if (dims[k].size > 1 && (next < 0 || dims[k].stride < dims[next].stride))
                next = k;
        if (next < 0)
            break;
        HR_REQUIRE(dims[next].stride >= least,
                   "%s: %s has vectors that share memory: a stride is %" PRId64 ", wanted %" PRId64
                   " or more",
                   function, name, dims[next].stride, least);
        least += (dims[next].size - 1) * dims[next].stride;
        dims[next].size = 1;
    }
    return HR_OK;
}

static hr_status check_part(const char *function, const char *names[2], const hr_heads *out,
                            const hr_heads *in, int64_t count, const hr_rope_shape *shape,
                            hr_dtype dtype)
{
    HR_REQUIRE(out, "%s: %s is NULL", function, names[0]);
    HR_REQUIRE(in, "%s: %s is NULL", function, names[1]);
    HR_TRY(check_heads(function, names[0], out, count, shape, dtype, 1));
    HR_TRY(check_heads(function, names[1], in, count, shape, dtype, 0));
    const int same_strides = (shape->batch <= 1 || out->batch_stride == in->batch_stride) &&
                             (shape->tokens <= 1 || out->token_stride == in->token_stride) &&
                             (count <= 1 || out->head_stride == in->head_stride);
    HR_REQUIRE(!out->data || out->data != in->data || same_strides,
               "%s: %s is in the place of %s, but has other strides", function, names[0], names[1]);
    return HR_OK;
}

static hr_status check_positions(const char *function, const rope_args *args, int on_host)
{
    const hr_rows *const positions = &args->positions;
    const int64_t batch = args->batch, tokens = args->tokens, rows = args->table_rows;
    if (batch == 0 || tokens == 0)
        return HR_OK;
    if (!positions->data) {
        const int64_t last = product(batch - 1, args->config.batch_step);
        HR_REQUIRE(
            last <= rows && args->config.offset <= rows - last &&
                tokens <= rows - last - args->config.offset,
            "%s: the last position is offset (%" PRId64 ") + %" PRId64 " * batch_step (%" PRId64
            ") + %" PRId64 ", but cos and sin have %" PRId64 " rows",
            function, args->config.offset, batch - 1, args->config.batch_step, tokens - 1, rows);
        return HR_OK;
    }
    for (int64_t b = 0; on_host && b < (positions->stride ? batch : 1); b++)
        for (int64_t t = 0; t < tokens; t++) {
            const int64_t position = rope_position(args, b, t);
            HR_REQUIRE(position >= 0 && position < rows,
                       "%s: positions[%" PRId64 "][%" PRId64 "] is %" PRId64
                       ", but cos and sin have rows for 0 to %" PRId64,
                       function, b, t, position, rows - 1);
        }
    return HR_OK;
}

hr_status hr_rope(const hr_heads *q_out, const hr_heads *k_out, const hr_heads *q,
                  const hr_heads *k, const hr_rows *cos, const hr_rows *sin,
                  const hr_rows *positions, const hr_rope_shape *shape,
                  const hr_rope_config *config, const hr_exec *exec)
{
    static const char function[] = "hr_rope";
    static const char *q_names[] = {"q_out", "q"}, *k_names[] = {"k_out", "k"};
    hr_rope_config own = HR_ROPE_CONFIG_INIT;
    HR_TRY(check_config(function, &own, config));
    HR_TRY(check_shape(function, shape, &own));
    HR_TRY(hr_check_exec(function, exec));
    HR_TRY(check_part(function, q_names, q_out, q, shape->q_heads, shape, own.dtype));
    HR_REQUIRE(!k == !k_out, "%s: %s is NULL, but %s is not; give both or neither", function,
               k ? "k_out" : "k", k ? "k" : "k_out");
    HR_REQUIRE(k || shape->k_heads == 0, "%s: k is NULL, but shape->k_heads is %" PRId64, function,
               shape->k_heads);
    if (k)
        HR_TRY(check_part(function, k_names, k_out, k, shape->k_heads, shape, own.dtype));
    const int64_t pairs = own.rotary_dim / 2;
    HR_REQUIRE(cos, "%s: cos is NULL", function);
    HR_REQUIRE(sin, "%s: sin is NULL", function);
    HR_TRY(hr_check_rows(function, "cos", cos, shape->table_rows, pairs, own.table_dtype));
    HR_TRY(hr_check_rows(function, "sin", sin, shape->table_rows, pairs, own.table_dtype));
    if (positions) {
        HR_REQUIRE(positions->stride == 0 || shape->batch <= 1 ||
                       (positions->stride >= shape->tokens &&
                        product(shape->batch, positions->stride) <= LARGEST),
                   "%s: positions->stride is %" PRId64 ", wanted 0 or tokens (%" PRId64 ") or more",
                   function, positions->stride, shape->tokens);
        HR_REQUIRE(positions->data || shape->batch == 0 || shape->tokens == 0,
                   "%s: positions->data is NULL", function);
        HR_REQUIRE((uintptr_t)positions->data % 8 == 0,
                   "%s: positions->data is at %p, which is not a multiple of 8 bytes", function,
                   positions->data);
    }
    const hr_heads none = {NULL, 0, 0, 0};
    const rope_args args = {.q = {*q_out, *q, shape->q_heads},
                            .k = {k ? *k_out : none, k ? *k : none, shape->k_heads},
                            .cos = *cos,
                            .sin = *sin,
                            .positions = positions ? *positions : (hr_rows){NULL, 0},
                            .batch = shape->batch,
                            .tokens = shape->tokens,
                            .head_dim = shape->head_dim,
                            .table_rows = shape->table_rows,
                            .pairs = pairs,
                            .config = own};
    HR_TRY(check_positions(function, &args, exec->device == HR_CPU));
    if (exec->device == HR_CPU)
        return rope_cpu(&args);
    HR_RETURN_CUDA(rope_cuda(&args, exec), exec);
}
