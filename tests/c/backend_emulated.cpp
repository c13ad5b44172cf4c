// The same calls, on the emulator's runtime.
#include "backend_cuda.cu"
