// describe.h: writes tables of tensors; see describe.cpp.
#pragma once

#include <cstdint>

#include <pybind11/pybind11.h>

namespace headroom
{

namespace py = pybind11;

// Writes the table (table.h) of `lists` and of states. The parameters are lists[0]. `state` is a
// dict from parameters to their states, or None; `param_like` and `extra` are names of states.
//
// Returns false, with the table unfinished, if a tensor is missing, its Python type is not among
// `types`, no kernel takes its dtype (or it is in `lists` and not floating-point), it has gaps in
// memory, it is on another device than the first parameter, or it does not have the shape and the
// memory order of its parameter, which the states in `extra` need not have.
bool describe(uintptr_t table, const py::capsule &exchange, const py::tuple &types,
              const py::tuple &lists, const py::object &state, const py::tuple &param_like,
              const py::tuple &extra);

} // namespace headroom
