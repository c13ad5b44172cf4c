/* libcublas: what torch asks of it. The stubs beside it succeed, and a product does nothing: torch's
 * host code takes its workspace and goes on, and values come from elsewhere. */
#include "export.h"

#include <stddef.h>

EXPORT int cublasCreate_v2(void **handle)
{
    *handle = (void *)1;
    return 0;
}
EXPORT int cublasGetMathMode(void *handle, int *mode)
{
    *mode = 0;
    return 0;
}
CALL(int cublasGetPointerMode_v2(void *handle, int *mode), return cublasGetMathMode(handle, mode);)
CALL(int cublasGetSmCountTarget(void *handle, int *count), return cublasGetMathMode(handle, count);)
CALL(int cublasGetAtomicsMode(void *handle, int *mode), return cublasGetMathMode(handle, mode);)
EXPORT int cublasGetStream_v2(void *handle, void **stream)
{
    *stream = NULL;
    return 0;
}
EXPORT int cublasGetVersion_v2(void *handle, int *version)
{
    *version = 130400;
    return 0;
}
EXPORT int cublasGetProperty(int which, int *value)
{
    *value = which == 0 ? 13 : which == 1 ? 4 : 0;
    return 0;
}
CALL(const char *cublasGetStatusString(int status), return status ? "failed" : "success";)
EXPORT const char *cublasGetStatusName(int status)
{
    return status ? "CUBLAS_STATUS_INTERNAL_ERROR" : "CUBLAS_STATUS_SUCCESS";
}
