// lists.h: an op on lists of tensors of the same shapes, as a call of the C interface.
#pragma once

#include "torch_ext/core/members.h"

namespace headroom
{

// One list of an op whose tensors k all have one shape.
struct ListArgument {
    const char *name;
    const Tensors &tensors;
    bool written;
    bool may_be_empty = false; // then the C interface gets NULL
};

// A call of an op on lists. The first list must have tensors; the others are measured against it.
class ListCall
{
  public:
    explicit ListCall(const std::vector<ListArgument> &arguments)
        : like(arguments[0].tensors[0]), lists_(arguments.size()), views_(arguments.size())
    {
        const size_t count = arguments[0].tensors.size();
        for (const ListArgument &a : arguments)
            if (!a.tensors.empty() || !a.may_be_empty)
                check_count(a.tensors, a.name, count);
        std::vector<Member> members;
        for (size_t k = 0; k < count; k++) {
            members.clear();
            for (size_t l = 0; l < arguments.size(); l++)
                if (const ListArgument &a = arguments[l]; !a.tensors.empty())
                    members.push_back({View(a.tensors[k]), lists_[l], a.name, a.written});
            add_members(members, like, staging_, k);
        }
        for (size_t l = 0; l < arguments.size(); l++)
            views_[l] = lists_[l].view();
    }

    // The argument of the C interface.
    const hr_tensor_list *operator[](size_t list) const
    {
        return views_[list].count > 0 ? &views_[list] : nullptr;
    }

    // Calls `function` with an hr_exec, and writes its results back to tensors that were copied.
    template <class Function> void run(Function function)
    {
        const Exec exec(like);
        check(function(&exec.exec));
        staging_.write_back();
    }

    const View like; // the first tensor: where to run

  private:
    NoGrad no_grad_;
    std::vector<List> lists_;
    std::vector<hr_tensor_list> views_;
    Staging staging_;
};

} // namespace headroom
