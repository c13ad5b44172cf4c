/*
 * gemm_cuda.cu: products by cuBLASLt, which speaks of matrices in column-major order. A row-major
 * matrix is its transpose there, so it is asked for the transpose of C:
 *
 *     C^T[n, m] = op(B)^T[n, k] op(A)^T[k, m]
 *
 * Its first factor is our B, and its first size our n. Its choice of an algorithm takes longer than
 * a small product, so choices are kept, in a table of fixed size.
 *
 * Of its epilogues only the bias is used. What it may refuse, or compute with fewer bits than we
 * promise, is done here instead: sums of products in binary32 are left in the workspace, a part of C
 * at a time, and a kernel of our own makes C of them while they are in the caches.
 */
#include "kernels/core/copy.h"
#include "kernels/core/cublas.cuh"
#include "kernels/nn/gemm.h"

/* ---- What becomes of a sum ------------------------------------------------------------------- */

#define THREADS   256
#define MOST_ROWS 65535 /* of a grid */

/* `sums`: dense [m, n]; NULL: zeros, of every product of the batch. */
static __global__ void __launch_bounds__(THREADS)
    gemm_finish_kernel(const gemm_args __grid_constant__ a, const float *sums)
{
    const hr_gemm_config &config = a.config;
    const hr_dtype dtype = config.out_dtype;
    const int64_t j = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const float alpha = (float)config.alpha, beta = (float)config.beta;
    if (j >= a.n)
        return;
    const float bias = a.bias ? hr_load(a.bias, j, dtype) : GEMM_NO_BIAS;
    for (int64_t row = blockIdx.y; row < config.batch * a.m; row += gridDim.y) {
        const int64_t index = row / a.m, i = row % a.m;
        const int64_t at = index * config.batch_stride_c + i * a.c.stride + j;
        const int64_t added_at = index * config.batch_stride_c + i * config.addend.stride + j;
        const float added = beta != 0.0f ? hr_load(config.addend.data, added_at, dtype) : 0.0f;
        float x = gemm_value(sums ? sums[i * a.n + j] : 0.0f, alpha, beta, added, bias);
        const int64_t aux_at = i * config.aux.stride + j;
        if (config.epilogue == HR_GEMM_GELU) {
            if (config.aux.data)
                hr_store(config.aux.data, aux_at, x, dtype);
            x = gemm_gelu(x);
        } else if (config.epilogue == HR_GEMM_DGELU) {
            x *= gemm_gelu_slope(hr_load(config.aux.data, aux_at, dtype));
        }
        hr_store(a.c.data, at, x, dtype);
    }
}

static hr_status finish(const gemm_args *a, const float *sums, const hr_exec *exec)
{
    const int64_t blocks = (a->n + THREADS - 1) / THREADS, rows = a->config.batch * a->m;
    if (blocks > INT32_MAX)
        return hr_fail(HR_UNSUPPORTED, "hr_gemm: n is more than a grid of CUDA can take");
    if (blocks > 0 && rows > 0)
        HR_LAUNCH(gemm_finish_kernel,
                  dim3((uint32_t)blocks, (uint32_t)(rows < MOST_ROWS ? rows : MOST_ROWS)), THREADS,
                  0, exec->stream, *a, sums);
    return cuda_launch_status("hr_gemm");
}

#if !HR_WITH_CUBLAS
static hr_status multiply(const gemm_args *, const hr_exec *)
{
    return hr_fail(HR_UNSUPPORTED,
                   "hr_gemm: this build has no products on CUDA, for want of cublasLt.h; install a "
                   "CUDA toolkit or the package nvidia-cublas, and build again");
}
#else

#include <pthread.h>

/* ---- The algorithms chosen so far ------------------------------------------------------------ */

/* All that the choice depends on, without padding. */
struct choice_key {
    int64_t m, n, k, lda, ldb, ldc, ld_addend, stride_a, stride_b, stride_c;
    size_t workspace_bytes;
    int32_t device, dtype, out_dtype, transposes, bias, tf32, reductions, batch;
    int32_t align_a, align_b, align_c, align_addend;
};
static_assert(sizeof(choice_key) == 11 * 8 + 12 * 4, "keys are compared byte by byte");

struct choice {
    choice_key key;
    cublasLtMatmulAlgo_t algorithm;
    bool is_made, is_refused; /* refused: there is no algorithm */
};

#define CHOICES 512
static choice choices[CHOICES];
static pthread_mutex_t choices_mutex = PTHREAD_MUTEX_INITIALIZER;

static choice *place_of(const choice_key *key)
{
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (size_t i = 0; i < sizeof *key; i++)
        hash = (hash ^ ((const unsigned char *)key)[i]) * 1099511628211u;
    return &choices[(hash ^ hash >> 32) % CHOICES];
}

static bool recall(const choice_key *key, choice *found)
{
    pthread_mutex_lock(&choices_mutex);
    *found = *place_of(key);
    pthread_mutex_unlock(&choices_mutex);
    return found->is_made && memcmp(&found->key, key, sizeof *key) == 0;
}

/* In place of what another key had there. */
static void remember(const choice *made)
{
    pthread_mutex_lock(&choices_mutex);
    *place_of(&made->key) = *made;
    pthread_mutex_unlock(&choices_mutex);
}

/* ---- One product ----------------------------------------------------------------------------- */

/* What a call computes with. */
struct cublas_call {
    const cublas_api *api;
    cublasLtHandle_t handle;
    const hr_exec *exec;
};

/* The descriptors of a call, in the terms of cuBLASLt. */
struct product {
    const cublas_api *api;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, c, d;
    cublasLtMatmulPreference_t preference;

    explicit product(const cublas_api *api)
        : api(api), operation(nullptr), a(nullptr), b(nullptr), c(nullptr), d(nullptr),
          preference(nullptr)
    {
    }
    product(const product &) = delete;
    ~product()
    {
        if (operation)
            api->cublasLtMatmulDescDestroy(operation);
        if (preference)
            api->cublasLtMatmulPreferenceDestroy(preference);
        for (cublasLtMatrixLayout_t layout : {a, b, c, d})
            if (layout)
                api->cublasLtMatrixLayoutDestroy(layout);
    }
};

static hr_status failed(const cublas_api *api, const char *call, cublasStatus_t status)
{
    return hr_fail(status == CUBLAS_STATUS_NOT_SUPPORTED ? HR_UNSUPPORTED : HR_CUDA_ERROR,
                   "hr_gemm: %s failed: %s", call, api->cublasLtGetStatusString(status));
}

/* Returns from the function if the call of cuBLASLt fails. */
#define LT_TRY(api, function, ...)                                     \
    do {                                                               \
        const cublasStatus_t lt_status = (api)->function(__VA_ARGS__); \
        if (lt_status != CUBLAS_STATUS_SUCCESS)                        \
            return failed(api, #function, lt_status);                  \
    } while (0)

#define LT_TRY_STATUS(call)              \
    do {                                 \
        const hr_status status = (call); \
        if (status != HR_OK)             \
            return status;               \
    } while (0)

template <typename Value>
static hr_status set(const product &p, cublasLtMatmulDescAttributes_t attribute, Value value)
{
    LT_TRY(p.api, cublasLtMatmulDescSetAttribute, p.operation, attribute, &value, sizeof value);
    return HR_OK;
}

template <typename Value>
static hr_status set(const product &p, cublasLtMatmulPreferenceAttributes_t attribute, Value value)
{
    LT_TRY(p.api, cublasLtMatmulPreferenceSetAttribute, p.preference, attribute, &value,
           sizeof value);
    return HR_OK;
}

static cudaDataType_t type_of(hr_dtype dtype)
{
    return dtype == HR_F32 ? CUDA_R_32F : dtype == HR_BF16 ? CUDA_R_16BF : CUDA_R_16F;
}

/* The leading dimension: the stride of a single row may be anything. */
static int64_t leading(const hr_rows *x, int64_t cols)
{
    return x->stride > cols ? x->stride : cols;
}

/* A row-major matrix [rows, cols] is a column-major one [cols, rows]. */
static hr_status set_layout(const product &p, cublasLtMatrixLayout_t *layout, const hr_rows *x,
                            int64_t rows, int64_t cols, hr_dtype dtype, int64_t batch,
                            int64_t batch_stride)
{
    LT_TRY(p.api, cublasLtMatrixLayoutCreate, layout, type_of(dtype), (uint64_t)cols,
           (uint64_t)rows, leading(x, cols));
    if (batch == 1)
        return HR_OK;
    const int32_t count = (int32_t)batch;
    LT_TRY(p.api, cublasLtMatrixLayoutSetAttribute, *layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
           &count, sizeof count);
    LT_TRY(p.api, cublasLtMatrixLayoutSetAttribute, *layout,
           CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &batch_stride, sizeof batch_stride);
    return HR_OK;
}

/* How the parts of a long sum may be added, where it is split. Never in place: there they are added
 * as they come, in an order that changes. */
static uint32_t reductions_of(const hr_gemm_config &config)
{
    if (config.deterministic)
        return CUBLASLT_REDUCTION_SCHEME_NONE;
    return CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE |
           (config.allow_reduced_precision_reduction ? CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE : 0);
}

/* The largest power of two, up to 256, that divides an address. */
static int32_t alignment(const void *address)
{
    int32_t power = 256;
    while ((uintptr_t)address % (uintptr_t)power != 0)
        power /= 2;
    return power;
}

static choice_key key_of(const gemm_args *args, int32_t device)
{
    const hr_gemm_config &config = args->config;
    const bool many = config.batch > 1;
    choice_key key;
    key.m = args->m, key.n = args->n, key.k = args->k;
    key.lda = leading(&args->a, config.transpose_a ? args->m : args->k);
    key.ldb = leading(&args->b, config.transpose_b ? args->k : args->n);
    key.ldc = leading(&args->c, args->n);
    key.ld_addend = leading(&config.addend, args->n);
    key.batch = (int32_t)config.batch;
    key.stride_a = many ? config.batch_stride_a : 0;
    key.stride_b = many ? config.batch_stride_b : 0;
    key.stride_c = many ? config.batch_stride_c : 0;
    key.workspace_bytes = args->workspace_bytes;
    key.device = device;
    key.dtype = config.dtype, key.out_dtype = config.out_dtype;
    key.transposes = config.transpose_a + 2 * config.transpose_b;
    key.bias = args->bias != nullptr;
    key.tf32 = config.dtype == HR_F32 && config.allow_tf32;
    key.reductions = (int32_t)reductions_of(config);
    key.align_a = alignment(args->a.data), key.align_b = alignment(args->b.data);
    key.align_c = alignment(args->c.data);
    key.align_addend = alignment(config.addend.data);
    return key;
}

static hr_status describe(product *p, const gemm_args *args, const choice_key &key)
{
    const hr_gemm_config &config = args->config;
    const bool turn_a = config.transpose_a, turn_b = config.transpose_b;
    LT_TRY(p->api, cublasLtMatmulDescCreate, &p->operation,
           key.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F);
    LT_TRY_STATUS(
        set(*p, CUBLASLT_MATMUL_DESC_TRANSA, (int32_t)(turn_b ? CUBLAS_OP_T : CUBLAS_OP_N)));
    LT_TRY_STATUS(
        set(*p, CUBLASLT_MATMUL_DESC_TRANSB, (int32_t)(turn_a ? CUBLAS_OP_T : CUBLAS_OP_N)));
    if (args->bias) {
        LT_TRY_STATUS(set(*p, CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)CUBLASLT_EPILOGUE_BIAS));
        LT_TRY_STATUS(set(*p, CUBLASLT_MATMUL_DESC_BIAS_POINTER, args->bias));
        LT_TRY_STATUS(
            set(*p, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, (int32_t)type_of(config.out_dtype)));
    }
    LT_TRY_STATUS(set_layout(*p, &p->a, &args->b, turn_b ? args->n : args->k,
                             turn_b ? args->k : args->n, config.dtype, config.batch,
                             config.batch_stride_b));
    LT_TRY_STATUS(set_layout(*p, &p->b, &args->a, turn_a ? args->k : args->m,
                             turn_a ? args->m : args->k, config.dtype, config.batch,
                             config.batch_stride_a));
    LT_TRY_STATUS(set_layout(*p, &p->c, &config.addend, args->m, args->n, config.out_dtype,
                             config.batch, config.batch_stride_c));
    return set_layout(*p, &p->d, &args->c, args->m, args->n, config.out_dtype, config.batch,
                      config.batch_stride_c);
}

static hr_status choose(product *p, cublasLtHandle_t handle, const gemm_args *args, choice *made)
{
    const choice_key &key = made->key;
    LT_TRY(p->api, cublasLtMatmulPreferenceCreate, &p->preference);
    LT_TRY_STATUS(set(*p, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, args->workspace_bytes));
    LT_TRY_STATUS(set(*p, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (uint32_t)key.reductions));
    LT_TRY_STATUS(set(*p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (uint32_t)key.align_b));
    LT_TRY_STATUS(set(*p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (uint32_t)key.align_a));
    LT_TRY_STATUS(set(*p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (uint32_t)key.align_addend));
    LT_TRY_STATUS(set(*p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (uint32_t)key.align_c));
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    const cublasStatus_t status = p->api->cublasLtMatmulAlgoGetHeuristic(
        handle, p->operation, p->a, p->b, p->c, p->d, p->preference, 1, &result, &found);
    if (status != CUBLAS_STATUS_SUCCESS && status != CUBLAS_STATUS_NOT_SUPPORTED)
        return failed(p->api, "cublasLtMatmulAlgoGetHeuristic", status);
    made->is_made = true;
    made->is_refused = status == CUBLAS_STATUS_NOT_SUPPORTED || found == 0 ||
                       result.state != CUBLAS_STATUS_SUCCESS;
    if (!made->is_refused)
        made->algorithm = result.algo;
    return HR_OK;
}

/* Multiplies, and adds a bias, in one call of cuBLASLt; or, if `only_asks`, says whether it would. */
static hr_status multiply_at_once(const cublas_call *lt, const gemm_args *args, bool only_asks)
{
    const hr_gemm_config &config = args->config;
    choice made = {key_of(args, lt->exec->device), {}, false, false};
    product p(lt->api);
    LT_TRY_STATUS(describe(&p, args, made.key));
    if (choice known; recall(&made.key, &known)) {
        made = known;
    } else {
        LT_TRY_STATUS(choose(&p, lt->handle, args, &made));
        remember(&made);
    }
    if (made.is_refused)
        return hr_fail(HR_UNSUPPORTED,
                       "hr_gemm: cuBLASLt has no algorithm for m %lld, n %lld, k %lld, batch %lld, "
                       "%s a bias and with %zu bytes of workspace",
                       (long long)args->m, (long long)args->n, (long long)args->k,
                       (long long)config.batch, args->bias ? "with" : "without",
                       args->workspace_bytes);
    if (only_asks)
        return HR_OK;
    const float alpha = (float)config.alpha, beta = (float)config.beta;
    LT_TRY(lt->api, cublasLtMatmul, lt->handle, p.operation, &alpha, args->b.data, p.a,
           args->a.data, p.b, &beta, config.addend.data, p.c, args->c.data, p.d, &made.algorithm,
           args->workspace, args->workspace_bytes, lt->exec->stream);
    return HR_OK;
}

/* ---- In parts -------------------------------------------------------------------------------- */

static void *moved(const void *data, int64_t elements, hr_dtype dtype)
{
    return data ? (char *)data + elements * hr_element_size(dtype) : nullptr;
}

/* Rows [i, i + rows) and columns [j, j + cols) of the product `index` of the batch. */
static gemm_args part_of(const gemm_args *args, int64_t index, int64_t i, int64_t j, int64_t rows,
                         int64_t cols)
{
    const hr_gemm_config &config = args->config;
    gemm_args part = *args;
    part.m = rows, part.n = cols;
    part.config.batch = 1;
    part.a.data = moved(
        args->a.data, index * config.batch_stride_a + (config.transpose_a ? i : i * args->a.stride),
        config.dtype);
    part.b.data = moved(
        args->b.data, index * config.batch_stride_b + (config.transpose_b ? j * args->b.stride : j),
        config.dtype);
    part.c.data = moved(args->c.data, index * config.batch_stride_c + i * args->c.stride + j,
                        config.out_dtype);
    part.bias = moved(args->bias, j, config.out_dtype);
    part.config.addend.data =
        moved(config.addend.data, index * config.batch_stride_c + i * config.addend.stride + j,
              config.out_dtype);
    part.config.aux.data = moved(config.aux.data, i * config.aux.stride + j, config.out_dtype);
    return part;
}

/* Multiplies a part into `sums`, and makes C of them. */
static hr_status multiply_part(const cublas_call *lt, const gemm_args *part, float *sums,
                               bool only_asks)
{
    gemm_args plain = *part;
    plain.c = plain.config.addend = {sums, part->n};
    plain.bias = nullptr;
    plain.config.out_dtype = HR_F32;
    plain.config.alpha = 1.0;
    plain.config.beta = 0.0;
    plain.config.epilogue = HR_GEMM_NONE;
    LT_TRY_STATUS(multiply_at_once(lt, &plain, only_asks));
    return only_asks ? HR_OK : finish(part, sums, lt->exec);
}

#define PART_ROWS 512 /* what a product needs to be fast */

/* Half of the workspace is for the sums of a part. All parts are asked for before the first write. */
static hr_status multiply_in_parts(const cublas_call *lt, const gemm_args *args)
{
    const size_t bytes = args->workspace_bytes / 512 * 256;
    if (bytes == 0)
        return hr_fail(HR_UNSUPPORTED,
                       "hr_gemm: workspace_bytes is %zu, but this product is one that cuBLASLt "
                       "cannot do at once: wanted 512 or more, and best what hr_gemm_workspace() "
                       "says",
                       args->workspace_bytes);
    const int64_t most = (int64_t)(bytes / sizeof(float));
    const int64_t few = args->m < PART_ROWS ? args->m : PART_ROWS;
    const int64_t fit = most / few > 0 ? most / few : 1;
    const int64_t cols = args->n <= fit ? args->n : fit >= 8 ? fit / 8 * 8 : fit;
    const int64_t rows = args->m < most / cols ? args->m : most / cols;
    gemm_args whole = *args;
    whole.workspace = (char *)args->workspace + bytes;
    whole.workspace_bytes -= bytes;
    for (const bool only_asks : {true, false})
        for (int64_t index = 0; index < args->config.batch; index++)
            for (int64_t i = 0; i < args->m; i += rows)
                for (int64_t j = 0; j < args->n; j += cols) {
                    const gemm_args part =
                        part_of(&whole, index, i, j, args->m - i < rows ? args->m - i : rows,
                                args->n - j < cols ? args->n - j : cols);
                    LT_TRY_STATUS(multiply_part(lt, &part, (float *)args->workspace, only_asks));
                }
    return HR_OK;
}

/* ---- A bias ---------------------------------------------------------------------------------- */

/* cuBLASLt reads several elements of a bias at a time, so one that is not at a multiple of 16 bytes
 * is copied to the workspace. Returns whether it is where it can be read. */
static bool align_bias(gemm_args *args, const hr_exec *exec)
{
    if ((uintptr_t)args->bias % 16 == 0)
        return true;
    const size_t bytes = (size_t)(args->n * hr_element_size(args->config.out_dtype));
    const size_t taken = (bytes + 255) / 256 * 256;
    if (args->workspace_bytes < taken ||
        copy_rows_cuda(args->workspace, 0, args->bias, 0, (int64_t)bytes, 1, exec) != HR_OK)
        return false;
    args->bias = args->workspace;
    args->workspace = (char *)args->workspace + taken;
    args->workspace_bytes -= taken;
    return true;
}

/* Makes each row of C the bias, and adds the product to it, which rounds once all the same. */
static hr_status add_to_bias(const cublas_call *lt, const gemm_args *args)
{
    gemm_args plain = *args;
    plain.bias = nullptr;
    plain.config.beta = 1.0;
    LT_TRY_STATUS(multiply_at_once(lt, &plain, true));
    LT_TRY_STATUS(finish(args, nullptr, lt->exec));
    return multiply_at_once(lt, &plain, false);
}

static hr_status multiply(const gemm_args *args, const hr_exec *exec)
{
    if (args->config.batch > INT32_MAX)
        return hr_fail(HR_UNSUPPORTED, "hr_gemm: config->batch is more than cuBLASLt can take");
    const capture_pause pause;
    cublas_call lt = {nullptr, nullptr, exec};
    LT_TRY_STATUS(cublas_load(&lt.api));
    LT_TRY_STATUS(cublas_handle(lt.api, exec->device, &lt.handle));
    const hr_gemm_epilogue epilogue = args->config.epilogue;
    const bool has_gelu = epilogue == HR_GEMM_GELU || epilogue == HR_GEMM_DGELU;
    gemm_args whole = *args;
    hr_status status = HR_UNSUPPORTED;
    if (!has_gelu && align_bias(&whole, exec))
        status = multiply_at_once(&lt, &whole, false);
    if (status == HR_UNSUPPORTED && !has_gelu && args->bias && args->config.beta == 0.0)
        status = add_to_bias(&lt, args);
    if (status != HR_UNSUPPORTED)
        return status;
    return multiply_in_parts(&lt, args);
}
#endif

/* ---- Calls ----------------------------------------------------------------------------------- */

hr_status gemm_cuda(const gemm_args *args, const hr_exec *exec)
{
    const bool is_product = args->m > 0 && args->n > 0 && args->k > 0 && args->config.batch > 0;
    gemm_args whole = *args; /* whose addend is C where there is no other */
    if (!whole.config.addend.data || whole.config.beta == 0.0)
        whole.config.addend = whole.c;
    const hr_status status = is_product ? multiply(&whole, exec) : finish(&whole, nullptr, exec);
    if (status != HR_OK || !args->config.bias_gradient)
        return status;
    const column_sums sums = gemm_bias_gradient(args);
    return sum_columns_cuda(&sums, exec);
}

hr_status gemm_workspace_cuda(size_t *bytes, const hr_exec *exec)
{
    int32_t capability = 0;
    const hr_status status = hr_cuda_capability(exec->device, &capability);
    if (status != HR_OK)
        return status;
#if HR_WITH_CUBLAS
    /* Better here than in the first product, which a CUDA graph may capture. If it fails, so will that
     * product, with an error. */
    const cublas_api *api = nullptr;
    cublasLtHandle_t handle = nullptr;
    if (cublas_load(&api) == HR_OK)
        (void)cublas_handle(api, exec->device, &handle);
#endif
    *bytes = gemm_workspace_bytes(capability);
    return HR_OK;
}
