/*
 * cublas.cu: finds cuBLASLt, and keeps a handle per device for as long as the process lives.
 *
 * The numbers of its interface are the same in CUDA 12 and 13, so a library of either serves.
 */
#include "kernels/core/cublas.cuh"

#if HR_WITH_CUBLAS

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static cublas_api table;
static bool is_found;

#define MOST_DEVICES 64
static cublasLtHandle_t handles[MOST_DEVICES];

static const char *const names[] = {"libcublasLt.so.13", "libcublasLt.so.12"};

/* Opens one of the names in a folder, unless a library is open already. */
static void open_in(void **library, const char *folder, const char *subfolder)
{
    for (const char *name : names) {
        if (*library)
            return;
        char path[PATH_MAX];
        const int length = snprintf(path, sizeof path, "%s%s%s", folder, subfolder, name);
        if (length >= 0 && length < (int)sizeof path)
            *library = HR_OPEN_LIBRARY(path, RTLD_NOW | RTLD_LOCAL);
    }
}

/* The library that is loaded, else that of the system's search path, else one in a known place. */
static void *open_library(void)
{
    void *library = nullptr;
    for (const char *name : names)
        if (!library)
            library = HR_OPEN_LIBRARY(name, RTLD_NOW | RTLD_NOLOAD);
    open_in(&library, "", "");
    if (getenv("CUDA_HOME"))
        open_in(&library, getenv("CUDA_HOME"), "/lib64/");
    open_in(&library, "/usr/local/cuda", "/lib64/");
    /* This library may be .../site-packages/headroom/lib/libheadroom.so, beside NVIDIA's wheels. */
    Dl_info here;
    char folder[1024];
    if (dladdr((const void *)&table, &here) && here.dli_fname && strrchr(here.dli_fname, '/')) {
        const int length = (int)(strrchr(here.dli_fname, '/') - here.dli_fname);
        snprintf(folder, sizeof folder, "%.*s/../../nvidia/", length, here.dli_fname);
        open_in(&library, folder, "cu13/lib/");
        open_in(&library, folder, "cublas/lib/"); /* of CUDA 12 */
    }
    return library;
}

hr_status cublas_find(cublas_api *api)
{
    void *const library = open_library();
    if (!library)
        return hr_fail(
            HR_UNSUPPORTED,
            "hr_gemm: found no cuBLASLt: looked for libcublasLt.so.13 and .12 in the "
            "process, on the library search path (LD_LIBRARY_PATH), in CUDA_HOME/lib64 "
            "(%s), /usr/local/cuda/lib64 and the packages nvidia-cublas beside this one; "
            "install a CUDA toolkit, or import a torch with CUDA first",
            getenv("CUDA_HOME") ? getenv("CUDA_HOME") : "not set");
#define CUBLAS_LOOK_UP(name)                                           \
    api->name = (decltype(api->name))HR_FIND_FUNCTION(library, #name); \
    if (!api->name)                                                    \
        return hr_fail(HR_UNSUPPORTED, "hr_gemm: the cuBLASLt that was found has no " #name);
    CUBLAS_FUNCTIONS(CUBLAS_LOOK_UP)
    return HR_OK;
}

hr_status cublas_load(const cublas_api **api)
{
    pthread_mutex_lock(&mutex);
    const hr_status status = is_found ? HR_OK : cublas_find(&table);
    is_found = status == HR_OK;
    pthread_mutex_unlock(&mutex);
    *api = &table;
    return status;
}

hr_status cublas_handle(const cublas_api *api, int32_t device, cublasLtHandle_t *handle)
{
    if (device < 0 || device >= MOST_DEVICES)
        return hr_fail(HR_UNSUPPORTED, "hr_gemm: device %d has no handle; only %d devices do",
                       device, MOST_DEVICES);
    pthread_mutex_lock(&mutex);
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    if (!handles[device]) {
        cublasLtHandle_t fresh = nullptr;
        status = api->cublasLtCreate(&fresh);
        handles[device] = status == CUBLAS_STATUS_SUCCESS ? fresh : nullptr;
    }
    *handle = handles[device];
    pthread_mutex_unlock(&mutex);
    if (status != CUBLAS_STATUS_SUCCESS)
        return hr_fail(HR_CUDA_ERROR, "hr_gemm: cublasLtCreate failed: %s",
                       api->cublasLtGetStatusString(status));
    return HR_OK;
}

#endif
