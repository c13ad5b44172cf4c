// muon.h: where the updates of Muon lie, and the workspace of its passes.
#pragma once

#include "torch_ext/core/members.h"

namespace headroom
{

using Matrices = std::vector<hr_muon_matrix>;

// Adds the update of matrix k, which has the sizes of `like` and lines of its own.
inline void add_update(List &list, Matrices &matrices, const Tensor &tensor, const View &like,
                       const View &first, const char *leader, size_t k)
{
    const View view(tensor);
    if (like.dim != 2)
        fail(entry(leader, k) + " has " + std::to_string(like.dim) + " dimensions, wanted 2");
    check_like(view, like, first, "updates", k, leader);
    require_memory(view, entry("updates", k).c_str());
    const int64_t rows = view.sizes[0], s = view.strides[0];
    const int64_t cols = view.sizes[1], t = view.strides[1];
    const bool by_rows = (cols <= 1 || t == 1) && (rows <= 1 || s >= cols);
    const bool by_columns = (rows <= 1 || s == 1) && (cols <= 1 || t >= rows);
    if (!by_rows && !by_columns)
        fail(entry("updates", k) + " has strides [" + std::to_string(s) + ", " + std::to_string(t) +
             "], wanted those of dense rows, or of dense columns");
    list.add(view, "updates", k);
    matrices.push_back({rows, cols, by_rows ? s : t, !by_rows});
}

// Workspace of both passes over these matrices.
inline Tensor muon_workspace(const Matrices &matrices, const Tensor &like, size_t *bytes)
{
    check(hr_muon_workspace(bytes, matrices.data(), static_cast<int64_t>(matrices.size())));
    return workspace_of(*bytes, like);
}

} // namespace headroom
