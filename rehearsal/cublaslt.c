/* libcublasLt: every product has an algorithm, which needs no workspace and does nothing. */
#include "export.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

EXPORT int cublasLtCreate(void **handle)
{
    *handle = (void *)1;
    return 0;
}
CALL(size_t cublasLtGetVersion(void), return 130400;)
CALL(size_t cublasLtGetCudartVersion(void), return 13020;)
CALL(const char *cublasLtGetStatusString(int status), return status ? "failed" : "success";)
CALL(const char *cublasLtGetStatusName(int status), return cublasLtGetStatusString(status);)

#define DESCRIPTOR(name)                           \
    EXPORT int cublasLt##name##Create(void **made) \
    {                                              \
        *made = calloc(1, 512);                    \
        return *made ? 0 : 3;                      \
    }                                              \
    EXPORT int cublasLt##name##Destroy(void *made) \
    {                                              \
        free(made);                                \
        return 0;                                  \
    }
DESCRIPTOR(MatmulDesc)
DESCRIPTOR(MatrixLayout)
DESCRIPTOR(MatmulPreference)
DESCRIPTOR(MatrixTransformDesc)

typedef struct { /* cublasLtMatmulHeuristicResult_t */
    unsigned long algorithm[8];
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
} heuristic;

EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c,
                                          void *d, void *preference, int wanted, heuristic *results,
                                          int *found)
{
    memset(results, 0, sizeof *results);
    *found = 1;
    return 0;
}
EXPORT int cublasLtMatmulAlgoCheck(void *handle, void *product, void *a, void *b, void *c, void *d,
                                   const void *algorithm, heuristic *result)
{
    memset(result, 0, sizeof *result);
    return 0;
}
