// The way in to the checks of race.cpp.
#pragma once

#include "tests/c/emulator/machine.h"

namespace hr_emu
{
void watch_accesses(); // from now on every access of a kernel is noted
void note_access(const void *address, size_t bytes, bool write, const void *caller);
} // namespace hr_emu
