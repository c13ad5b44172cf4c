// row_op.h: what the tests of ops on rows share.
#pragma once

#include "tests/c/harness/tensors.h"

// What outputs hold before a call.
inline double garbage(size_t, size_t)
{
    return 77;
}

// A run whose call is backward alone.
template <class Run> class BackwardOf : public Run
{
  public:
    using Run::Run;
    hr_status call() const
    {
        return this->backward();
    }
};
