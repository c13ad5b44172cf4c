// The kernels that the program registered, as PTX.
#pragma once

#include "tests/ptx/machine.h"

namespace ptx_registration
{
int arch(); // 75, 90: of the PTX that runs

// Whether a fault was asked for, and nothing that was launched has its place.
bool lacks_fault();

// "Suite.case", "" outside of tests; whoever links this says it.
std::string running_test();

// All of them, those that were not launched too.
std::vector<const ptx_function *> entries();
} // namespace ptx_registration
