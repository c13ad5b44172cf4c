// In place of backend_cuda.cu where there is no CUDA compiler.
#include "backend.h"

Backend *cuda_backend()
{
    return nullptr;
}
