// In place of backend_cuda.cu where there is no CUDA compiler.
#include "tests/c/harness/backend.h"

Backend *cuda_backend()
{
    return nullptr;
}
