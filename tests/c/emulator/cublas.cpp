// cuBLASLt on the host: the library as it is found and opened, and its descriptors. The products are
// in cublas_product.cpp.
#include "tests/c/emulator/cublas_objects.h"

using hr_emu::cublas;
using hr_emu::invalid;
using Layout = cublasLtMatrixLayoutOpaque_t;

hr_emu::Cublas hr_emu::cublas;

namespace
{
template <class Value> cublasStatus_t take(Value &member, const void *value, size_t bytes)
{
    if (!value || bytes != sizeof member)
        return invalid("an attribute has " + std::to_string(bytes) + " bytes, wanted " +
                       std::to_string(sizeof member));
    std::memcpy(&member, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

struct Entry {
    const char *name;
    void *address;
};

template <class Function> Entry entry(const char *name, Function *function)
{
    return {name, reinterpret_cast<void *>(function)};
}
} // namespace

// ---- The library --------------------------------------------------------------------------------

void *hr_emu::open_library(const char *name)
{
    return cublas.is_there && std::strcmp(name, "libcublasLt.so.13") == 0 ? &cublas : nullptr;
}

void *hr_emu::find_function(void *library, const char *name)
{
#define ENTRY(function) entry(#function, function)
    static const Entry functions[] = {
        ENTRY(cublasLtCreate),
        ENTRY(cublasLtGetStatusString),
        ENTRY(cublasLtMatmul),
        ENTRY(cublasLtMatmulAlgoGetHeuristic),
        ENTRY(cublasLtMatmulDescCreate),
        ENTRY(cublasLtMatmulDescDestroy),
        ENTRY(cublasLtMatmulDescSetAttribute),
        ENTRY(cublasLtMatmulPreferenceCreate),
        ENTRY(cublasLtMatmulPreferenceDestroy),
        ENTRY(cublasLtMatmulPreferenceSetAttribute),
        ENTRY(cublasLtMatrixLayoutCreate),
        ENTRY(cublasLtMatrixLayoutDestroy),
        ENTRY(cublasLtMatrixLayoutSetAttribute),
    };
    if (library != &cublas || (cublas.missing && std::strcmp(cublas.missing, name) == 0))
        return nullptr;
    for (const Entry &function : functions)
        if (std::strcmp(function.name, name) == 0)
            return function.address;
    return nullptr;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    FAIL_IF_WANTED;
    if (hr_emu::refused_in_capture("cublasLtCreate")) // it allocates
        return CUBLAS_STATUS_ALLOC_FAILED;
    static cublasLtContext context;
    *handle = &context;
    return CUBLAS_STATUS_SUCCESS;
}

const char *cublasLtGetStatusString(cublasStatus_t status)
{
    switch (status) {
    case CUBLAS_STATUS_SUCCESS:
        return "success";
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return "not supported";
    case CUBLAS_STATUS_ALLOC_FAILED:
        return "allocation failed";
    default:
        return "another error";
    }
}

// ---- Descriptors --------------------------------------------------------------------------------

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute,
                                        cudaDataType_t scale)
{
    FAIL_IF_WANTED;
    if (scale != CUDA_R_32F)
        return invalid("the scale type is not binary32");
    *desc = new cublasLtMatmulDescOpaque_t{compute, 0, 0, -1, CUBLASLT_EPILOGUE_DEFAULT, nullptr};
    cublas.descriptors++;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc)
{
    delete desc;
    cublas.descriptors--;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes)
{
    FAIL_IF_WANTED;
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
        return take(desc->transpose_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB:
        return take(desc->transpose_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
        return take(desc->epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
        return take(desc->bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
        return take(desc->bias_type, value, bytes);
    }
    return invalid("an attribute of an operation that it does not have");
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType_t type,
                                          uint64_t rows, uint64_t cols, int64_t ld)
{
    FAIL_IF_WANTED;
    *layout = new Layout{type, rows, cols, ld, 0, 1};
    cublas.descriptors++;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout)
{
    delete layout;
    cublas.descriptors--;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void *value, size_t bytes)
{
    FAIL_IF_WANTED;
    if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT)
        return take(layout->batch, value, bytes);
    return take(layout->offset, value, bytes);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference)
{
    FAIL_IF_WANTED;
    *preference =
        new cublasLtMatmulPreferenceOpaque_t{0, CUBLASLT_REDUCTION_SCHEME_MASK, 256, 256, 256, 256};
    cublas.descriptors++;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference)
{
    delete preference;
    cublas.descriptors--;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void *value, size_t bytes)
{
    FAIL_IF_WANTED;
    switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
        return take(preference->workspace, value, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
        return take(preference->reductions, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
        return take(preference->align_a, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
        return take(preference->align_b, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
        return take(preference->align_c, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
        return take(preference->align_d, value, bytes);
    }
    return invalid("an attribute of a preference that it does not have");
}
