/*
 * cublas.cuh: cuBLASLt, found at run time. Its header gives the types of the functions; nothing
 * links to the library. A toolkit has the header, and so has the package nvidia-cublas of PyPI,
 * which every torch with CUDA brings (setup.py shows it to a compiler from PyPI). A build without it
 * works, but for the products.
 */
#ifndef HR_CUBLAS_CUH
#define HR_CUBLAS_CUH

#include "kernels/core/cuda.cuh"

#if __has_include(<cublasLt.h>)
#define HR_WITH_CUBLAS 1
#include <cublasLt.h>

#if !defined(HR_OPEN_LIBRARY)
#include <dlfcn.h>
#define HR_OPEN_LIBRARY(name, flags)    dlopen(name, flags)
#define HR_FIND_FUNCTION(library, name) dlsym(library, name)
#endif

/* Calls X(name) for each function that we use. */
#define CUBLAS_FUNCTIONS(X)                 \
    X(cublasLtCreate)                       \
    X(cublasLtGetStatusString)              \
    X(cublasLtMatmul)                       \
    X(cublasLtMatmulAlgoGetHeuristic)       \
    X(cublasLtMatmulDescCreate)             \
    X(cublasLtMatmulDescDestroy)            \
    X(cublasLtMatmulDescSetAttribute)       \
    X(cublasLtMatmulPreferenceCreate)       \
    X(cublasLtMatmulPreferenceDestroy)      \
    X(cublasLtMatmulPreferenceSetAttribute) \
    X(cublasLtMatrixLayoutCreate)           \
    X(cublasLtMatrixLayoutDestroy)          \
    X(cublasLtMatrixLayoutSetAttribute)

#define CUBLAS_MEMBER(name) decltype(&::name) name;
struct cublas_api {
    CUBLAS_FUNCTIONS(CUBLAS_MEMBER)
};

/* Looks for the library and fills the table. */
hr_status cublas_find(cublas_api *api);

/* The table, found at the first call that succeeds. */
hr_status cublas_load(const cublas_api **api);

/* The handle of the current device, created by the first call for it. */
hr_status cublas_handle(const cublas_api *api, int32_t device, cublasLtHandle_t *handle);

#else
#define HR_WITH_CUBLAS 0
#endif
#endif
