// A launch of PTX on the emulator's fibers, and the modules that the program's kernels come from.
#pragma once

#include <string>
#include <vector>

#include "tests/c/emulator/cuda_runtime.h"
#include "tests/ptx/ptx.h"

namespace ptx_machine
{
// `parameters` is as the entry's layout has them, at an address that is a multiple of 16.
void launch(const ptx_function *entry, dim3 grid, dim3 block, char *parameters,
            size_t dynamic_bytes);

// "module:line: text  in function".
std::string name(const ptx_instruction *instruction);

// The function that the instruction, or the address of one of its bytes, is in; or that is at the
// address; nullptr: none of the modules that add_module() has been told of.
const ptx_function *find_function(const void *address);
void add_module(const ptx_module *module);
void forget_module(const ptx_module *module);
const std::vector<const ptx_module *> &modules();
} // namespace ptx_machine
