/*
 * cublas.cuh: cuBLASLt, found at run time. Its header gives the types of the functions; nothing
 * links to the library. A toolkit has the header, and so has the package nvidia-cublas of PyPI,
 * which every torch with CUDA brings (setup.py says where it is). A build without it works, but for
 * the products.
 */
#ifndef HR_CUBLAS_CUH
#define HR_CUBLAS_CUH

#include "kernels/core/cuda.cuh"

#if HR_WITH_CUBLAS /* set by CMake, where it found the header */
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

/* While one exists, this thread may do what the capture of a stream refuses: the first product of a
 * device makes a handle, and loads code. What it puts into the stream is captured as before. */
class capture_pause
{
  public:
    capture_pause()
    {
        (void)cudaThreadExchangeStreamCaptureMode(&mode_);
    }
    ~capture_pause()
    {
        (void)cudaThreadExchangeStreamCaptureMode(&mode_);
    }
    capture_pause(const capture_pause &) = delete;

  private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

#endif
#endif
