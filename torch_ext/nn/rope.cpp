// rope.cpp: headroom::rope, which is also its own gradient.
#include <tuple>

#include "torch_ext/core/rows.h"

namespace
{

using namespace headroom;

std::string list_of_sizes(const View &view)
{
    std::string text = "[";
    for (int64_t d = 0; d < view.dim; d++)
        text += (d ? ", " : "") + std::to_string(view.sizes[d]);
    return text + "]";
}

// Queries or keys. The elements of a head must be neighbors; if they are not, a copy is read.
class Heads
{
  public:
    Heads(const Tensor &tensor, const char *name, bool token_major)
        : tensor_(tensor), token_major_(token_major)
    {
        const View given(tensor_);
        if (given.dim != 3 && given.dim != 4)
            fail(std::string(name) + " has shape " + list_of_sizes(given) + ", wanted " +
                 (token_major ? "[batch, tokens, heads, head_dim]"
                              : "[batch, heads, tokens, head_dim]") +
                 ", or the same without a batch");
        const int64_t last = given.dim - 1;
        if (given.sizes[last] > 1 && given.strides[last] != 1)
            tensor_ = dense_of(tensor_, name);
        const View view(tensor_);
        require_memory(view, name);
        batch = view.dim == 4 ? view.sizes[0] : 1;
        tokens = view.sizes[token_dim(view)];
        heads = view.sizes[head_dim(view)];
        dim = view.sizes[view.dim - 1];
        memory = memory_of(view);
    }
    Heads(const Heads &) = delete;

    // A new tensor in the memory order of this one, and what the C interface calls it.
    std::pair<Tensor, hr_heads> empty_like() const
    {
        Tensor out = in_huge_pages(torch::stable::empty_like(tensor_));
        const View like(out);
        if (like.sizes[like.dim - 1] > 1 && like.strides[like.dim - 1] != 1)
            out = empty_rows(like, out);
        return {out, memory_of(View(out))};
    }

    int64_t batch, tokens, heads, dim;
    hr_heads memory;

  private:
    int64_t token_dim(const View &view) const
    {
        return view.dim - (token_major_ ? 3 : 2);
    }

    int64_t head_dim(const View &view) const
    {
        return view.dim - (token_major_ ? 2 : 3);
    }

    hr_heads memory_of(const View &view) const
    {
        return {view.data, view.dim == 4 ? view.strides[0] : 0, view.strides[token_dim(view)],
                view.strides[head_dim(view)]};
    }

    Tensor tensor_;
    bool token_major_;
};

// position_ids as the C interface wants them; the tensor keeps a copy alive.
hr_rows positions_of(Tensor &ids, const View &q, int64_t batch, int64_t tokens)
{
    const View given(ids);
    require_with(given, "position_ids", q, "q");
    const bool fits = given.dim >= 1 && given.dim <= 2 && given.sizes[given.dim - 1] == tokens &&
                      (given.dim == 1 || given.sizes[0] == 1 || given.sizes[0] == batch);
    if (given.torch_dtype != aoti_torch_dtype_int64() || !fits)
        fail("position_ids is " + std::string(torch::headeronly::toString(ids.scalar_type())) +
             " " + list_of_sizes(given) +
             ", wanted int64 [tokens], [1, tokens] or [batch, tokens] with " +
             std::to_string(batch) + " batches of " + std::to_string(tokens) + " tokens");
    const bool shared = given.dim == 1 || given.sizes[0] == 1 || given.strides[0] == 0;
    if ((tokens > 1 && given.strides[given.dim - 1] != 1) ||
        (!shared && given.strides[0] < tokens)) {
        ids = dense_of(ids, "position_ids");
        return {View(ids).data, given.dim == 2 && given.sizes[0] > 1 ? tokens : 0};
    }
    require_memory(given, "position_ids");
    return {given.data, shared ? 0 : given.strides[0]};
}

std::tuple<Tensor, Tensor> rope(const Tensor &q, const OptionalTensor &k, const Tensor &cos,
                                const Tensor &sin, const OptionalTensor &position_ids,
                                int64_t offset, int64_t rotary_dim, bool interleaved,
                                bool token_major, bool inverse)
{
    const View like(q);
    const Exec exec(like);
    const Heads queries(q, "q", token_major);
    hr_rope_config config = HR_ROPE_CONFIG_INIT;
    config.dtype = float_of(like, "q");
    config.interleaved = interleaved;
    config.inverse = inverse;
    config.rotary_dim = rotary_dim;
    config.offset = offset;
    std::optional<Heads> keys;
    if (k) {
        const View view(*k);
        require_with(view, "k", like, "q");
        require_dtype_of(view, "k", like, "q");
        keys.emplace(*k, "k", token_major);
        if (view.dim != like.dim || keys->batch != queries.batch ||
            keys->tokens != queries.tokens || keys->dim != queries.dim)
            fail("k has shape " + list_of_sizes(view) + ", which differs from that of q, " +
                 list_of_sizes(like) + ", in more than the heads");
    }
    const View table(cos), sines(sin);
    require_with(table, "cos", like, "q");
    require_with(sines, "sin", like, "q");
    config.table_dtype = float_of(table, "cos");
    if (!sines.has_sizes_of(table) || sines.torch_dtype != table.torch_dtype)
        fail("sin has another shape or dtype than cos");
    const bool per_token = table.dim == 3;
    if ((table.dim != 2 && !per_token) ||
        (per_token && ((table.sizes[0] != 1 && table.sizes[0] != queries.batch) ||
                       table.sizes[1] != queries.tokens)))
        fail("cos has shape " + list_of_sizes(table) +
             ", wanted [positions, columns], or [batch or 1, tokens, columns] with " +
             std::to_string(queries.batch) + " batches of " + std::to_string(queries.tokens) +
             " tokens");
    const int64_t columns = table.sizes[table.dim - 1];
    const int64_t rotated = rotary_dim ? rotary_dim : queries.dim;
    if (columns != rotated && 2 * columns != rotated)
        fail("cos has " + std::to_string(columns) + " columns, wanted rotary_dim (" +
             std::to_string(rotated) + ") or half of it");
    if (per_token && (position_ids || offset != 0))
        fail("cos and sin are given per token, which leaves no use for position_ids or offset");
    if (per_token && table.sizes[0] > 1)
        config.batch_step = queries.tokens;
    const RowsIn cosines(cos, "cos"), sine_rows(sin, "sin");
    Tensor ids = position_ids ? *position_ids : q;
    hr_rows positions = {nullptr, 0};
    if (position_ids)
        positions = positions_of(ids, like, queries.batch, queries.tokens);
    const auto [q_out, q_memory] = queries.empty_like();
    std::pair<Tensor, hr_heads> k_out = {nothing(q), {}};
    if (keys)
        k_out = keys->empty_like();
    const hr_rope_shape shape = {queries.batch, queries.tokens,
                                 queries.heads, keys ? keys->heads : 0,
                                 queries.dim,   matrix_of(table, "cos").rows};
    check(hr_rope(&q_memory, keys ? &k_out.second : nullptr, &queries.memory,
                  keys ? &keys->memory : nullptr, cosines.get(), sine_rows.get(),
                  position_ids ? &positions : nullptr, &shape, &config, &exec.exec));
    return {q_out, k_out.first};
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("rope(Tensor q, Tensor? k, Tensor cos, Tensor sin, Tensor? position_ids, SymInt offset, "
          "int rotary_dim, bool interleaved, bool token_major, bool inverse) -> "
          "(Tensor q_out, Tensor k_out)");
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("rope", TORCH_BOX(&rope));
}
