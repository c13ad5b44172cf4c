// describe.h: see describe.cpp.
#pragma once

#include <cstdint>

#include <pybind11/pybind11.h>

namespace headroom
{

namespace py = pybind11;

// Writes the table (table.h) of `lists` and of the states `alike` and `others`, which are keys of
// the entries of `state`, a dict by parameter, or None. The parameters are lists[0]. False, and the
// table unfinished, if a tensor is not plain: its type is not among `types`; its dtype is none of
// the kernels', or in `lists` no float; it has gaps in memory; it is on another device than the
// first; it is missing; or it has not the shape and memory order of its parameter, which the states
// `others` need not have.
bool describe(uintptr_t table, const py::capsule &exchange, const py::tuple &types,
              const py::tuple &lists, const py::object &state, const py::tuple &alike,
              const py::tuple &others);

} // namespace headroom
