/*
 * gemm_cuda.cu: products by cuBLASLt, which speaks of matrices in column-major order. A row-major
 * matrix is its transpose there, so it is asked for the transpose of C:
 *
 *     C^T[n, m] = op(B)^T[n, k] op(A)^T[k, m]
 *
 * Its first factor is our B, and its first size our n. Its choice of an algorithm takes longer than
 * a small product, so choices are kept, in a table of fixed size.
 */
#include "kernels/core/cublas.cuh"
#include "kernels/nn/gemm.h"

#define THREADS 256

/* ---- Without a product: k is 0 --------------------------------------------------------------- */

/* A thread takes a column, whose gradient of the bias it also sums. */
static __global__ void __launch_bounds__(THREADS)
    gemm_without_product_kernel(const gemm_args __grid_constant__ a)
{
    const hr_gemm_config &config = a.config;
    const hr_dtype dtype = config.out_dtype;
    const int64_t j = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const float beta = (float)config.beta;
    if (j >= a.n)
        return;
    const float bias = a.bias ? hr_load(a.bias, j, dtype) : GEMM_NO_BIAS;
    double total = 0.0;
    for (int64_t index = 0; index < config.batch; index++)
        for (int64_t i = 0; i < a.m; i++) {
            const int64_t at = index * config.batch_stride_c + i * a.c.stride + j;
            const float c = beta != 0.0f ? hr_load(a.c.data, at, dtype) : 0.0f;
            float x = gemm_value(0.0f, 1.0f, beta, c, bias);
            const int64_t aux_at = i * config.aux.stride + j;
            if (config.epilogue == HR_GEMM_GELU) {
                if (config.aux.data)
                    hr_store(config.aux.data, aux_at, x, dtype);
                x = gemm_gelu(x);
            } else if (config.epilogue == HR_GEMM_DGELU) {
                x *= gemm_gelu_slope(hr_load(config.aux.data, aux_at, dtype));
                total += (double)x;
            }
            hr_store(a.c.data, at, x, dtype);
        }
    if (config.bias_gradient && config.epilogue != HR_GEMM_BGRADA)
        hr_store(config.bias_gradient, j, (float)total, dtype);
    if (config.epilogue == HR_GEMM_BGRADA && j == 0)
        for (int64_t i = 0; i < a.m; i++)
            hr_store(config.bias_gradient, i, 0.0f, dtype);
}

static hr_status without_product(const gemm_args *a, const hr_exec *exec)
{
    if (a->n == 0 || ((a->m == 0 || a->config.batch == 0) && !a->config.bias_gradient))
        return HR_OK;
    const int64_t blocks = (a->n + THREADS - 1) / THREADS;
    if (blocks > INT32_MAX)
        return hr_fail(HR_UNSUPPORTED, "hr_gemm: n is more than a grid of CUDA can take");
    HR_LAUNCH(gemm_without_product_kernel, (uint32_t)blocks, THREADS, 0, exec->stream, *a);
    return cuda_launch_status("hr_gemm");
}

hr_status gemm_workspace_cuda(size_t *bytes)
{
    int device = 0, major = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error != cudaSuccess)
        return hr_fail(HR_CUDA_ERROR, "hr_gemm_workspace: %s", cudaGetErrorString(error));
    *bytes = (size_t)(major >= 9 ? 32768 : 8320) << 10; /* what PyTorch gives it */
    return HR_OK;
}

#if !HR_WITH_CUBLAS
hr_status gemm_cuda(const gemm_args *args, const hr_exec *exec)
{
    if (args->m == 0 || args->n == 0 || args->k == 0 || args->config.batch == 0)
        return without_product(args, exec);
    return hr_fail(HR_UNSUPPORTED,
                   "hr_gemm: this build has no products on CUDA, for want of cublasLt.h; install a "
                   "CUDA toolkit or the package nvidia-cublas, and build again");
}
#else

#include <pthread.h>

/* ---- The algorithms chosen so far ------------------------------------------------------------ */

/* All that the choice depends on. Padding is zero. */
struct choice_key {
    int64_t m, n, k, lda, ldb, ldc, ldaux, batch, stride_a, stride_b, stride_c;
    size_t workspace_bytes;
    int32_t device, dtype, out_dtype, transpose_a, transpose_b, epilogue, tf32, reductions;
    int32_t align_a, align_b, align_c, align_vector;
};

struct choice {
    choice_key key;
    cublasLtMatmulAlgo_t algorithm;
    bool is_made;
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

static bool recall(const choice_key *key, cublasLtMatmulAlgo_t *algorithm)
{
    pthread_mutex_lock(&choices_mutex);
    const choice *const place = place_of(key);
    const bool is_known = place->is_made && memcmp(&place->key, key, sizeof *key) == 0;
    if (is_known)
        *algorithm = place->algorithm;
    pthread_mutex_unlock(&choices_mutex);
    return is_known;
}

/* In place of what another key had there. */
static void remember(const choice_key *key, const cublasLtMatmulAlgo_t *algorithm)
{
    pthread_mutex_lock(&choices_mutex);
    choice *const place = place_of(key);
    place->key = *key;
    place->algorithm = *algorithm;
    place->is_made = true;
    pthread_mutex_unlock(&choices_mutex);
}

/* ---- One product ----------------------------------------------------------------------------- */

/* The descriptors of a call, in the terms of cuBLASLt. */
struct product {
    const cublas_api *api;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulPreference_t preference;

    explicit product(const cublas_api *api)
        : api(api), operation(nullptr), a(nullptr), b(nullptr), c(nullptr), preference(nullptr)
    {
    }
    product(const product &) = delete;
    ~product()
    {
        if (operation)
            api->cublasLtMatmulDescDestroy(operation);
        if (preference)
            api->cublasLtMatmulPreferenceDestroy(preference);
        for (cublasLtMatrixLayout_t layout : {a, b, c})
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

/* Our A is its second factor, and ours are its rows. */
static cublasLtEpilogue_t epilogue_of(const gemm_args *args)
{
    const hr_gemm_config &config = args->config;
    switch (config.epilogue) {
    case HR_GEMM_GELU:
        if (config.aux.data)
            return args->bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
        return args->bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    case HR_GEMM_DGELU:
        return config.bias_gradient ? CUBLASLT_EPILOGUE_DGELU_BGRAD : CUBLASLT_EPILOGUE_DGELU;
    case HR_GEMM_BGRADA:
        return CUBLASLT_EPILOGUE_BGRADB;
    case HR_GEMM_BGRADB:
        return CUBLASLT_EPILOGUE_BGRADA;
    default:
        return args->bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    }
}

/* How the parts of a long sum may be added. */
static uint32_t reductions_of(const hr_gemm_config &config)
{
    uint32_t mask = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    if (config.allow_reduced_precision_reduction)
        mask = CUBLASLT_REDUCTION_SCHEME_MASK;
    if (config.deterministic)
        mask &= ~(uint32_t)CUBLASLT_REDUCTION_SCHEME_INPLACE;
    return mask;
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
    memset(&key, 0, sizeof key);
    key.m = args->m, key.n = args->n, key.k = args->k;
    key.lda = leading(&args->a, config.transpose_a ? args->m : args->k);
    key.ldb = leading(&args->b, config.transpose_b ? args->k : args->n);
    key.ldc = leading(&args->c, args->n);
    key.ldaux = config.aux.data ? config.aux.stride : 0;
    key.batch = config.batch;
    key.stride_a = many ? config.batch_stride_a : 0;
    key.stride_b = many ? config.batch_stride_b : 0;
    key.stride_c = many ? config.batch_stride_c : 0;
    key.workspace_bytes = args->workspace_bytes;
    key.device = device;
    key.dtype = config.dtype, key.out_dtype = config.out_dtype;
    key.transpose_a = config.transpose_a, key.transpose_b = config.transpose_b;
    key.epilogue = (int32_t)epilogue_of(args);
    key.tf32 = config.dtype == HR_F32 && config.allow_tf32;
    key.reductions = (int32_t)reductions_of(config);
    key.align_a = alignment(args->a.data), key.align_b = alignment(args->b.data);
    key.align_c = alignment(args->c.data);
    key.align_vector = alignment(args->bias ? args->bias : config.bias_gradient);
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
    LT_TRY_STATUS(set(*p, CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)key.epilogue));
    const void *const vector = args->bias ? args->bias : config.bias_gradient;
    if (vector) {
        LT_TRY_STATUS(set(*p, CUBLASLT_MATMUL_DESC_BIAS_POINTER, vector));
        LT_TRY_STATUS(
            set(*p, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, (int32_t)type_of(config.out_dtype)));
    }
    if (config.aux.data) {
        LT_TRY_STATUS(
            set(*p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, (const void *)config.aux.data));
        LT_TRY_STATUS(set(*p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, config.aux.stride));
    }
    LT_TRY_STATUS(set_layout(*p, &p->a, &args->b, turn_b ? args->n : args->k,
                             turn_b ? args->k : args->n, config.dtype, config.batch,
                             config.batch_stride_b));
    LT_TRY_STATUS(set_layout(*p, &p->b, &args->a, turn_a ? args->k : args->m,
                             turn_a ? args->m : args->k, config.dtype, config.batch,
                             config.batch_stride_a));
    return set_layout(*p, &p->c, &args->c, args->m, args->n, config.out_dtype, config.batch,
                      config.batch_stride_c);
}

static hr_status choose(product *p, cublasLtHandle_t handle, const gemm_args *args,
                        const choice_key &key, cublasLtMatmulAlgo_t *algorithm)
{
    LT_TRY(p->api, cublasLtMatmulPreferenceCreate, &p->preference);
    LT_TRY_STATUS(set(*p, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, args->workspace_bytes));
    LT_TRY_STATUS(set(*p, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (uint32_t)key.reductions));
    LT_TRY_STATUS(set(*p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (uint32_t)key.align_b));
    LT_TRY_STATUS(set(*p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (uint32_t)key.align_a));
    LT_TRY_STATUS(set(*p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (uint32_t)key.align_c));
    LT_TRY_STATUS(set(*p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (uint32_t)key.align_c));
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    const cublasStatus_t status = p->api->cublasLtMatmulAlgoGetHeuristic(
        handle, p->operation, p->a, p->b, p->c, p->c, p->preference, 1, &result, &found);
    if (status != CUBLAS_STATUS_SUCCESS && status != CUBLAS_STATUS_NOT_SUPPORTED)
        return failed(p->api, "cublasLtMatmulAlgoGetHeuristic", status);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || found == 0 ||
        result.state != CUBLAS_STATUS_SUCCESS)
        return hr_fail(HR_UNSUPPORTED,
                       "hr_gemm: cuBLASLt has no algorithm for m %lld, n %lld, k %lld, batch %lld, "
                       "epilogue %d and %zu bytes of workspace",
                       (long long)args->m, (long long)args->n, (long long)args->k,
                       (long long)args->config.batch, (int)args->config.epilogue,
                       args->workspace_bytes);
    *algorithm = result.algo;
    return HR_OK;
}

hr_status gemm_cuda(const gemm_args *args, const hr_exec *exec)
{
    const hr_gemm_config &config = args->config;
    if (args->m == 0 || args->n == 0 || args->k == 0 || config.batch == 0)
        return without_product(args, exec);
    if (config.batch > INT32_MAX)
        return hr_fail(HR_UNSUPPORTED, "hr_gemm: config->batch is more than cuBLASLt can take");
    if (config.aux.data && ((uintptr_t)config.aux.data % 16 != 0 || config.aux.stride % 8 != 0 ||
                            config.aux.stride < args->n))
        return hr_fail(HR_UNSUPPORTED,
                       "hr_gemm: config->aux is at %p with stride %lld, but cuBLASLt wants a "
                       "multiple of 16 bytes, and a multiple of 8 that is n or more",
                       config.aux.data, (long long)config.aux.stride);
    const cublas_api *api = nullptr;
    cublasLtHandle_t handle = nullptr;
    LT_TRY_STATUS(cublas_load(&api));
    LT_TRY_STATUS(cublas_handle(api, exec->device, &handle));
    const choice_key key = key_of(args, exec->device);
    product p(api);
    LT_TRY_STATUS(describe(&p, args, key));
    cublasLtMatmulAlgo_t algorithm;
    if (!recall(&key, &algorithm)) {
        LT_TRY_STATUS(choose(&p, handle, args, key, &algorithm));
        remember(&key, &algorithm);
    }
    const float alpha = (float)config.alpha, beta = (float)config.beta;
    LT_TRY(api, cublasLtMatmul, handle, p.operation, &alpha, args->b.data, p.a, args->a.data, p.b,
           &beta, args->c.data, p.c, args->c.data, p.c, &algorithm, args->workspace,
           args->workspace_bytes, exec->stream);
    return HR_OK;
}

#endif
