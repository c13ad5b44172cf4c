// members.h: builds the lists of a call from lists of tensors that belong to the same parameters:
// checks their number, shape and device, and gives the tensors of a parameter one memory order.
#pragma once

#include <type_traits>

#include "torch_ext/core/layout.h"

namespace headroom
{

// Fails unless a list of tensors or numbers has `count` entries.
template <typename T> void check_count(const std::vector<T> &list, const char *name, size_t count)
{
    if (list.size() != count)
        fail(std::string(name) + " has " + std::to_string(list.size()) +
             (std::is_same_v<T, Tensor> ? " tensors" : " numbers") + ", wanted " +
             std::to_string(count));
}

// Fails unless entry k of a list is on the device of `first`, the first tensor of the list `leader`
// that the others are compared with.
inline void check_device(const View &view, const View &first, const char *name, size_t k,
                         const char *leader = "params")
{
    if (!view.is_with(first))
        fail(entry(name, k) + " is on " + view.device_name() + ", but " + leader + "[0] is on " +
             first.device_name());
}

// Fails unless entry k of a list also has the shape of entry k of the leader.
inline void check_like(const View &view, const View &leading, const View &first, const char *name,
                       size_t k, const char *leader = "params")
{
    if (!view.has_sizes_of(leading))
        fail(entry(name, k) + " has another shape than " + entry(leader, k));
    check_device(view, first, name, k, leader);
}

// A tensor, and the list of the kernel's argument that it is added to.
struct Member {
    View view;
    List &list;
    const char *name;
    bool written;
};

// Adds tensor k of every list. All have the shape of the first, and are laid out in one memory order.
inline void add_members(const std::vector<Member> &members, const View &first, Staging &staging,
                        size_t k)
{
    const Member &leading = members[0];
    bool contiguous = true;
    for (const Member &member : members) {
        check_like(member.view, leading.view, first, member.name, k, leading.name);
        contiguous = contiguous && member.view.is_contiguous();
    }
    std::optional<Layout> layout;
    if (!contiguous)
        layout.emplace(leading.view, leading.name, k);
    for (const Member &member : members)
        staging.add(member.list, member.view, layout ? &*layout : nullptr, member.name, k,
                    member.written);
}

// Adds the step counter of parameter k.
inline void add_step(List &steps, const Tensor &step, const View &first, size_t k)
{
    const View view(step);
    check_device(view, first, "state_steps", k);
    steps.add(view, "state_steps", k);
}

} // namespace headroom
