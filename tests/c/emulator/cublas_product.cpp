// Products of cuBLASLt on the host: its checks of arguments, and more, and products in column-major
// order, on device memory whose bounds are checked. An algorithm remembers what it was chosen for, so
// that one that is used for another problem is noticed.
#include <algorithm>
#include <vector>

#include "kernels/core/dtype.h"
#include "tests/c/emulator/cublas_objects.h"

using hr_emu::always_open;
using hr_emu::cublas;
using hr_emu::invalid;
using Layout = cublasLtMatrixLayoutOpaque_t;

namespace
{
hr_dtype dtype_of(cudaDataType_t type)
{
    return type == CUDA_R_32F ? HR_F32 : type == CUDA_R_16BF ? HR_BF16 : HR_F16;
}

size_t size_of(cudaDataType_t type)
{
    return type == CUDA_R_32F ? 4 : 2;
}

// A vector of elements in device memory, all of them allocated.
cublasStatus_t touch(const char *name, const void *begin, size_t count, size_t size, bool write)
{
    if (count == 0)
        return CUBLAS_STATUS_SUCCESS;
    if (reinterpret_cast<uintptr_t>(begin) % size != 0)
        return invalid(std::string(name) + " is not aligned");
    if (const char *const problem = hr_emu::use_device_memory(begin, count * size, write))
        return invalid(std::string(name) + " " + problem);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t touch(const char *name, const void *data, const Layout &x, bool write)
{
    const size_t size = size_of(x.type);
    const bool is_dense = uint64_t(x.ld) == x.rows; // its columns are one vector
    const uint64_t vectors = is_dense ? x.cols > 0 : x.cols;
    for (int32_t index = 0; index < x.batch; index++)
        for (uint64_t j = 0; j < vectors; j++) {
            const int64_t at = index * x.offset + int64_t(j) * x.ld;
            const cublasStatus_t status =
                touch(name, static_cast<const char *>(data) + at * int64_t(size),
                      is_dense ? x.rows * x.cols : x.rows, size, write);
            if (status != CUBLAS_STATUS_SUCCESS)
                return status;
        }
    return CUBLAS_STATUS_SUCCESS;
}

float load(const void *data, int64_t at, cudaDataType_t type)
{
    return hr_load(always_open(data), at, dtype_of(type));
}

void store(void *data, int64_t at, float x, cudaDataType_t type)
{
    hr_store(always_open(data), at, x, dtype_of(type));
}

// A product may write all of its workspace, before it reads and after it has written.
void use_workspace(void *workspace, size_t bytes)
{
    if (bytes > 0)
        std::memset(always_open(workspace), 0xA5, std::min(bytes, size_t{256}));
}

uint64_t hash_of(const void *data, size_t bytes, uint64_t hash = 14695981039346656037u)
{
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ static_cast<const unsigned char *>(data)[i]) * 1099511628211u;
    return hash;
}

// Of all that a choice may depend on, but for addresses.
uint64_t problem_of(const cublasLtMatmulDescOpaque_t &desc, const Layout &a, const Layout &b,
                    const Layout &c, const Layout &d)
{
    const int64_t numbers[] = {desc.compute, desc.transpose_a, desc.transpose_b,
                               int64_t(desc.epilogue)};
    uint64_t hash = hash_of(numbers, sizeof numbers);
    for (const Layout *x : {&a, &b, &c, &d}) {
        const int64_t more[] = {x->type, int64_t(x->rows), int64_t(x->cols),
                                x->ld,   x->offset,        x->batch};
        hash = hash_of(more, sizeof more, hash);
    }
    return hash;
}

// Whether cuBLASLt has no algorithm. What it refuses depends on the GPU and its own version, so that
// a caller has to have another way for all but the plainest products, given some workspace.
bool is_refused(const cublasLtMatmulDescOpaque_t &desc, const Layout &d, size_t workspace,
                uint64_t problem)
{
    if (cublas.refuses_one_in == 0 || workspace < 512 ||
        (desc.epilogue == CUBLASLT_EPILOGUE_DEFAULT && d.type == CUDA_R_32F))
        return false;
    const uint64_t seed = hr_emu::default_seed();
    return (hash_of(&seed, sizeof seed, problem) >> 32) % cublas.refuses_one_in == 0;
}

// What both the choice and the product refuse.
cublasStatus_t check(const cublasLtMatmulDescOpaque_t &desc, const Layout &a, const Layout &b,
                     const Layout &c, const Layout &d)
{
    for (const Layout *x : {&a, &b, &c, &d})
        if (x->rows == 0 || x->cols == 0 || x->ld < int64_t(x->rows) || x->batch < 1 ||
            x->batch != d.batch)
            return invalid("a layout has no elements, a leading dimension below its rows, or "
                           "another batch count");
    const uint64_t m = desc.transpose_a ? a.cols : a.rows, k = desc.transpose_a ? a.rows : a.cols;
    const uint64_t n = desc.transpose_b ? b.rows : b.cols;
    if (k != (desc.transpose_b ? b.cols : b.rows) || m != d.rows || n != d.cols ||
        c.rows != d.rows || c.cols != d.cols)
        return invalid("the sizes of the matrices do not match");
    if (a.type != b.type || c.type != d.type || (d.type != a.type && d.type != CUDA_R_32F))
        return invalid("no product of these types");
    if (desc.compute == CUBLAS_COMPUTE_32F_FAST_TF32 && a.type != CUDA_R_32F)
        return invalid("TF32 is for binary32");
    const bool has_bias = desc.epilogue == CUBLASLT_EPILOGUE_BIAS;
    if (has_bias != (desc.bias != nullptr) || (has_bias && desc.bias_type != int32_t(d.type)))
        return invalid("the epilogue and the bias do not match");
    // On a GPU this is a misaligned address, after which no call of the process works.
    if (reinterpret_cast<uintptr_t>(desc.bias) % 16 != 0)
        return invalid("the bias is not at a multiple of 16 bytes");
    return CUBLAS_STATUS_SUCCESS;
}
} // namespace

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[], int *found)
{
    cublas.heuristics++;
    cublas.most_workspace = preference->workspace;
    cublas.reductions = preference->reductions;
    FAIL_IF_WANTED;
    if (!handle || wanted < 1)
        return invalid("no handle, or no results wanted");
    const cublasStatus_t status = check(*desc, *a, *b, *c, *d);
    if (status != CUBLAS_STATUS_SUCCESS)
        return status;
    const uint64_t problem = problem_of(*desc, *a, *b, *c, *d);
    *found = 1;
    results[0] = {};
    if (is_refused(*desc, *d, preference->workspace,
                   problem)) { // in one of the three ways to say so
        *found = problem % 3 != 0;
        results[0].state = CUBLAS_STATUS_NOT_SUPPORTED;
        return problem % 3 == 1 ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
    }
    results[0].workspaceSize = preference->workspace;
    results[0].algo = {{problem, preference->workspace, preference->align_a, preference->align_b,
                        preference->align_c, preference->align_d}};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *A, cublasLtMatrixLayout_t a, const void *B,
                              cublasLtMatrixLayout_t b, const void *beta, const void *C,
                              cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t *algorithm, void *workspace,
                              size_t workspace_bytes, cudaStream_t stream)
{
    FAIL_IF_WANTED;
    cublas.compute = desc->compute;
    cublas.stream = stream;
    if (!handle || !alpha || !beta || !algorithm)
        return invalid("a pointer is NULL");
    const cublasStatus_t problem = check(*desc, *a, *b, *c, *d);
    if (problem != CUBLAS_STATUS_SUCCESS)
        return problem;
    if (algorithm->data[0] != problem_of(*desc, *a, *b, *c, *d))
        return invalid("the algorithm was chosen for another problem");
    if (workspace_bytes < algorithm->data[1])
        return invalid("the workspace is smaller than what the algorithm was chosen for");
    if (C == D && c->ld != d->ld)
        return invalid("C is D, but has another leading dimension");
    const void *const addresses[] = {A, B, C, D};
    for (int i = 0; i < 4; i++)
        if (reinterpret_cast<uintptr_t>(addresses[i]) % algorithm->data[2 + i] != 0)
            return invalid("an address is less aligned than the algorithm was chosen for");
    if (workspace_bytes > 0 && (reinterpret_cast<uintptr_t>(workspace) % 256 != 0 ||
                                !hr_emu::find_allocation(workspace, workspace_bytes)))
        return invalid("the workspace is not in device memory, or not aligned");
    const float scale = *static_cast<const float *>(alpha), add = *static_cast<const float *>(beta);
    const int64_t m = int64_t(d->rows), n = int64_t(d->cols);
    const int64_t k = int64_t(desc->transpose_a ? a->rows : a->cols);
    for (const cublasStatus_t status :
         {touch("A", A, *a, false), touch("B", B, *b, false),
          add != 0 ? touch("C", C, *c, false) : CUBLAS_STATUS_SUCCESS, touch("D", D, *d, true),
          desc->bias ? touch("the bias", desc->bias, size_t(m), size_of(d->type), false)
                     : CUBLAS_STATUS_SUCCESS})
        if (status != CUBLAS_STATUS_SUCCESS)
            return status;

    hr_emu::submit(stream, [=, desc = *desc, a = *a, b = *b, c = *c, d = *d] {
        use_workspace(workspace, workspace_bytes);
        std::vector<float> row(size_t(n), 0.0F), right(size_t(k * n));
        for (int64_t index = 0; index < d.batch; index++) {
            for (int64_t p = 0; p < k; p++)
                for (int64_t j = 0; j < n; j++)
                    right[size_t(p * n + j)] =
                        load(B, index * b.offset + (desc.transpose_b ? p * b.ld + j : j * b.ld + p),
                             b.type);
            for (int64_t i = 0; i < m; i++) {
                std::fill(row.begin(), row.end(), 0.0F);
                for (int64_t p = 0; p < k; p++) {
                    const int64_t at = desc.transpose_a ? i * a.ld + p : p * a.ld + i;
                    const float left = load(A, index * a.offset + at, a.type);
                    const float *const other = &right[size_t(p * n)];
                    for (int64_t j = 0; j < n; j++)
                        row[size_t(j)] += left * other[j];
                }
                for (int64_t j = 0; j < n; j++) {
                    double x = double(scale) * row[size_t(j)];
                    if (add != 0)
                        x += double(add) * load(C, index * c.offset + j * c.ld + i, c.type);
                    if (desc.bias)
                        x += load(desc.bias, i, d.type);
                    store(D, index * d.offset + j * d.ld + i, float(x), d.type);
                }
            }
        }
        use_workspace(workspace, workspace_bytes);
    });
    return CUBLAS_STATUS_SUCCESS;
}
