// The same calls, on the emulator's runtime.
#include "tests/c/harness/backend_cuda.cu"
