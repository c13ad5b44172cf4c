// What the two files of the emulated cuBLASLt share: its objects, and how a call fails.
#pragma once

#include <cstring>
#include <string>

#include "tests/c/emulator/cublasLt.h"
#include "tests/c/emulator/machine.h"

struct cublasLtContext {
    int device;
};

struct cublasLtMatmulDescOpaque_t {
    cublasComputeType_t compute;
    int32_t transpose_a, transpose_b, bias_type;
    uint32_t epilogue;
    void *bias;
};

struct cublasLtMatrixLayoutOpaque_t {
    cudaDataType_t type;
    uint64_t rows, cols;
    int64_t ld, offset;
    int32_t batch;
};

struct cublasLtMatmulPreferenceOpaque_t {
    size_t workspace;
    uint32_t reductions, align_a, align_b, align_c, align_d;
};

namespace hr_emu
{
inline cublasStatus_t invalid(const std::string &problem)
{
    report_host("cuBLASLt: " + problem, cudaErrorInvalidValue);
    return CUBLAS_STATUS_INVALID_VALUE;
}

// Whether a test wants the function to fail.
inline bool fails(const char *function)
{
    return cublas.fails && std::strcmp(cublas.fails, function) == 0;
}
} // namespace hr_emu

#define FAIL_IF_WANTED           \
    if (hr_emu::fails(__func__)) \
    return hr_emu::cublas.status
