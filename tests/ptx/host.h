/* host.h: before kernels/core/cublas.cu, as nvcc compiles it for these tests: products are the
 * emulator's, in place of a cuBLASLt that wants a driver. */
#ifndef PTX_HOST_H
#define PTX_HOST_H

namespace hr_emu
{
void *open_library(const char *name);
void *find_function(void *library, const char *name);
} // namespace hr_emu

#define HR_OPEN_LIBRARY(name, flags)    hr_emu::open_library(name)
#define HR_FIND_FUNCTION(library, name) hr_emu::find_function(library, name)

#endif
