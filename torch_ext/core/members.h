// members.h: the lists of a call, from lists of tensors that belong to the same parameters: checks of
// their number, shape and device, and one memory order for all tensors of a parameter.
#pragma once

#include <type_traits>

#include "torch_ext/core/layout.h"

namespace headroom
{

// A list of tensors or of numbers.
template <typename T> void check_count(const std::vector<T> &list, const char *name, size_t count)
{
    if (list.size() != count)
        fail(std::string(name) + " has " + std::to_string(list.size()) +
             (std::is_same_v<T, Tensor> ? " tensors" : " numbers") + ", wanted " +
             std::to_string(count));
}

inline void check_device(const View &view, const View &first, const char *name, size_t k)
{
    if (!view.is_with(first))
        fail(entry(name, k) + " is on " + view.device_name() + ", but params[0] is on " +
             first.device_name());
}

inline void check_like(const View &view, const View &param, const View &first, const char *name,
                       size_t k)
{
    if (!view.has_sizes_of(param))
        fail(entry(name, k) + " has another shape than " + entry("params", k));
    check_device(view, first, name, k);
}

// A tensor of the parameter's shape on its way into the list that the kernel takes.
struct Member {
    View view;
    List &list;
    const char *name;
    bool written;
};

// Adds the tensors of parameter k, of which the first is the parameter, all in one memory order.
inline void add_members(const std::vector<Member> &members, const View &first, Staging &staging,
                        size_t k)
{
    const View &param = members[0].view;
    bool contiguous = true;
    for (const Member &member : members) {
        check_like(member.view, param, first, member.name, k);
        contiguous = contiguous && member.view.is_contiguous();
    }
    std::optional<Layout> layout;
    if (!contiguous)
        layout.emplace(param, "params", k);
    for (const Member &member : members)
        staging.add(member.list, member.view, layout ? &*layout : nullptr, member.name, k,
                    member.written);
}

inline void add_step(List &steps, const Tensor &step, const View &first, size_t k)
{
    const View view(step);
    check_device(view, first, "state_steps", k);
    steps.add(view, "state_steps", k);
}

} // namespace headroom
