/* gemm.c: hr_gemm, the size of its workspace, and products that a host lends: checks, then the
 * product of the device. */
#include "kernels/nn/gemm.h"

#include <inttypes.h>
#include <math.h>

#include "capi/check/rows.h"

#define MOST (INT64_C(1) << 59) /* elements, so that their bytes fit 64 bits */

static hr_status check_config(const char *function, hr_gemm_config *own,
                              const hr_gemm_config *config)
{
    HR_REQUIRE(config, "%s: config is NULL", function);
    HR_TRY(hr_copy_config(function, "config->", own, sizeof *own, config,
                          offsetof(hr_gemm_config, bias_gradient) + sizeof own->bias_gradient,
                          "HR_GEMM_CONFIG_INIT"));
    HR_TRY(hr_check_float(function, "config->dtype", own->dtype));
    HR_REQUIRE(own->out_dtype == HR_F32 || own->out_dtype == own->dtype,
               "%s: config->out_dtype is %s, wanted f32 or config->dtype (%s)", function,
               hr_dtype_name(own->out_dtype), hr_dtype_name(own->dtype));
    HR_TRY(hr_check_flag(function, "transpose_a", own->transpose_a));
    HR_TRY(hr_check_flag(function, "transpose_b", own->transpose_b));
    HR_TRY(hr_check_flag(function, "allow_tf32", own->allow_tf32));
    HR_TRY(hr_check_flag(function, "allow_reduced_precision_reduction",
                         own->allow_reduced_precision_reduction));
    HR_TRY(hr_check_flag(function, "deterministic", own->deterministic));
    HR_REQUIRE(isfinite((float)own->alpha), "%s: config->alpha is %g, wanted a finite binary32",
               function, own->alpha);
    HR_REQUIRE(isfinite((float)own->beta), "%s: config->beta is %g, wanted a finite binary32",
               function, own->beta);
    HR_REQUIRE(own->batch >= 0, "%s: config->batch is %" PRId64 ", wanted 0 or more", function,
               own->batch);
    HR_REQUIRE(own->epilogue >= HR_GEMM_NONE && own->epilogue <= HR_GEMM_BGRADB,
               "%s: config->epilogue is %d, wanted 0 to 4", function, (int)own->epilogue);
    HR_REQUIRE(own->epilogue == HR_GEMM_NONE || own->batch == 1,
               "%s: config->batch is %" PRId64 ", wanted 1 with an epilogue", function, own->batch);
    return HR_OK;
}

static int fits(int64_t rows, int64_t cols)
{
    return rows == 0 || cols <= MOST / rows;
}

static hr_status check_gemm_sizes(const char *function, int64_t m, int64_t n, int64_t k)
{
    HR_REQUIRE(m >= 0, "%s: m is %" PRId64 ", wanted 0 or more", function, m);
    HR_REQUIRE(n >= 0, "%s: n is %" PRId64 ", wanted 0 or more", function, n);
    HR_REQUIRE(k >= 0, "%s: k is %" PRId64 ", wanted 0 or more", function, k);
    HR_REQUIRE(fits(m, n) && fits(m, k) && fits(n, k),
               "%s: m is %" PRId64 ", n %" PRId64 " and k %" PRId64
               ", wanted at most 2^59 elements in each matrix",
               function, m, n, k);
    return HR_OK;
}

/* Where a matrix, or a batch of them, lies. */
typedef struct extent {
    const char *name;
    uintptr_t begin;
    int64_t rows, cols, pitch, batch, batch_pitch; /* cols and pitches in bytes */
} extent;

static extent extent_of(const char *name, const hr_rows *x, int64_t rows, int64_t cols,
                        hr_dtype dtype, int64_t batch, int64_t batch_stride)
{
    const int64_t bytes = hr_element_size(dtype);
    return (extent){name,
                    (uintptr_t)x->data,
                    rows,
                    cols * bytes,
                    rows > 1 ? x->stride * bytes : 0,
                    batch,
                    batch > 1 ? batch_stride * bytes : 0};
}

static uintptr_t end_of(const extent *x)
{
    return x->begin +
           (uintptr_t)((x->batch - 1) * x->batch_pitch + (x->rows - 1) * x->pitch + x->cols);
}

/* Whether no byte between its first and its last belongs to something else. */
static int is_dense(const extent *x)
{
    const int64_t whole = x->rows * x->cols;
    return (x->rows == 1 || x->pitch == x->cols) &&
           (x->batch == 1 || x->batch_pitch == 0 || x->batch_pitch == whole);
}

/* Two rows of the same pitch meet where their columns do. */
static int have_common_columns(const extent *x, const extent *y)
{
    if (x->pitch != y->pitch || x->pitch == 0 || x->batch > 1 || y->batch > 1)
        return 0;
    const uintptr_t pitch = (uintptr_t)x->pitch;
    const uintptr_t apart =
        x->begin < y->begin ? (y->begin - x->begin) % pitch : pitch - (x->begin - y->begin) % pitch;
    return apart % pitch < (uintptr_t)x->cols || apart + (uintptr_t)y->cols > pitch;
}

static int certainly_overlap(const extent *x, const extent *y)
{
    if (x->begin >= end_of(y) || y->begin >= end_of(x))
        return 0;
    return x->begin == y->begin || (is_dense(x) && is_dense(y)) || have_common_columns(x, y);
}

int gemm_overlap(const hr_rows *x, const hr_rows *y, int64_t m, int64_t n, hr_dtype dtype)
{
    const extent of_x = extent_of("x", x, m, n, dtype, 1, 0);
    const extent of_y = extent_of("y", y, m, n, dtype, 1, 0);
    return certainly_overlap(&of_x, &of_y);
}

/* One of A and B. */
static hr_status check_factor(const char *function, const char *name, const hr_rows *x,
                              int64_t rows, int64_t cols, int64_t batch_stride,
                              const hr_gemm_config *own, const extent *c)
{
    HR_TRY(hr_check_rows(function, name, x, rows, cols, own->dtype));
    HR_REQUIRE(own->batch <= 1 || (batch_stride >= 0 && batch_stride <= MOST / own->batch),
               "%s: config->batch_stride_%s is %" PRId64
               ", wanted 0 or more, and at most 2^59 elements in all",
               function, name, batch_stride);
    const extent own_extent = extent_of(name, x, rows, cols, own->dtype, own->batch, batch_stride);
    HR_REQUIRE(!certainly_overlap(c, &own_extent), "%s: %s overlaps c", function, name);
    return HR_OK;
}

/* C and what has its sizes. They are not empty. */
static hr_status check_output(const char *function, const hr_rows *c, int64_t m, int64_t n,
                              const hr_gemm_config *own)
{
    HR_TRY(hr_check_rows(function, "c", c, m, n, own->out_dtype));
    const int64_t row = m > 1 ? c->stride : n, stride = own->batch_stride_c;
    HR_REQUIRE(own->batch <= 1 || (stride >= n && stride <= MOST / own->batch),
               "%s: config->batch_stride_c is %" PRId64 ", wanted n (%" PRId64
               ") or more, and at most 2^59 elements in all",
               function, stride, n);
    HR_REQUIRE(own->batch <= 1 || stride >= (m - 1) * row + n ||
                   (own->batch - 1) * stride + n <= row || m == 1,
               "%s: config->batch_stride_c is %" PRId64
               ", with which the matrices of the batch overlap",
               function, stride);
    return HR_OK;
}

/* What is added in place of C. */
static hr_status check_addend(const char *function, const hr_rows *c, int64_t m, int64_t n,
                              const hr_gemm_config *own)
{
    const hr_rows *const addend = &own->addend;
    if (!addend->data)
        return HR_OK;
    HR_TRY(hr_check_rows(function, "config->addend", addend, m, n, own->out_dtype));
    const int is_c = addend->data == c->data && (m == 1 || addend->stride == c->stride);
    const extent of_c = extent_of("c", c, m, n, own->out_dtype, own->batch, own->batch_stride_c);
    const extent of_addend =
        extent_of("addend", addend, m, n, own->out_dtype, own->batch, own->batch_stride_c);
    HR_REQUIRE(is_c || !certainly_overlap(&of_c, &of_addend), "%s: config->addend overlaps c",
               function);
    return HR_OK;
}

static hr_status check_epilogue(const char *function, const void *bias, int64_t m, int64_t n,
                                const hr_gemm_config *own)
{
    const int gelu = own->epilogue == HR_GEMM_GELU, dgelu = own->epilogue == HR_GEMM_DGELU;
    const int sums = own->epilogue == HR_GEMM_BGRADA || own->epilogue == HR_GEMM_BGRADB;
    HR_TRY(hr_check_vector(function, "bias", bias, own->out_dtype));
    HR_REQUIRE(!bias || own->epilogue == HR_GEMM_NONE || gelu,
               "%s: bias is given, wanted NULL with config->epilogue %d", function,
               (int)own->epilogue);
    HR_REQUIRE(!own->aux.data || gelu || dgelu,
               "%s: config->aux is given, wanted none with config->epilogue %d", function,
               (int)own->epilogue);
    if (dgelu || own->aux.data)
        HR_TRY(hr_check_rows(function, "config->aux", &own->aux, n > 0 ? m : 0, n, own->out_dtype));
    HR_REQUIRE(!own->bias_gradient || dgelu || sums,
               "%s: config->bias_gradient is given, wanted NULL with config->epilogue %d", function,
               (int)own->epilogue);
    HR_REQUIRE(own->bias_gradient || !sums,
               "%s: config->bias_gradient is NULL, which config->epilogue %d writes", function,
               (int)own->epilogue);
    HR_TRY(hr_check_vector(function, "config->bias_gradient", own->bias_gradient, own->out_dtype));
    HR_REQUIRE(!sums || (m >= 1 && n >= 1 && own->alpha != 0.0),
               "%s: m, n or config->alpha is 0, which config->epilogue %d cannot take", function,
               (int)own->epilogue);
    return HR_OK;
}

hr_status hr_gemm(const hr_rows *c, const hr_rows *a, const hr_rows *b, const void *bias, int64_t m,
                  int64_t n, int64_t k, const hr_gemm_config *config, void *workspace,
                  size_t workspace_bytes, const hr_exec *exec)
{
    static const char function[] = "hr_gemm";
    hr_gemm_config own = HR_GEMM_CONFIG_INIT;
    HR_TRY(check_gemm_sizes(function, m, n, k));
    HR_TRY(check_config(function, &own, config));
    HR_TRY(hr_check_exec(function, exec));
    HR_REQUIRE(c, "%s: c is NULL", function);
    HR_REQUIRE(a, "%s: a is NULL", function);
    HR_REQUIRE(b, "%s: b is NULL", function);
    HR_TRY(check_epilogue(function, bias, m, n, &own));
    const int any = m > 0 && n > 0 && own.batch > 0;
    const int64_t terms = any && own.alpha != 0.0 ? k : 0;
    if (any) {
        HR_TRY(check_output(function, c, m, n, &own));
        HR_TRY(check_addend(function, c, m, n, &own));
    }
    if (terms > 0) {
        const extent out = extent_of("c", c, m, n, own.out_dtype, own.batch, own.batch_stride_c);
        const int turn_a = own.transpose_a, turn_b = own.transpose_b;
        HR_TRY(check_factor(function, "a", a, turn_a ? k : m, turn_a ? m : k, own.batch_stride_a,
                            &own, &out));
        HR_TRY(check_factor(function, "b", b, turn_b ? n : k, turn_b ? k : n, own.batch_stride_b,
                            &own, &out));
    }
    HR_REQUIRE(exec->device == HR_CPU || workspace_bytes == 0 ||
                   (workspace && (uintptr_t)workspace % 256 == 0),
               "%s: workspace is at %p, wanted a multiple of 256 bytes", function, workspace);
    const gemm_args args = {.c = *c,
                            .a = *a,
                            .b = *b,
                            .bias = bias,
                            .m = m,
                            .n = n,
                            .k = terms,
                            .config = own,
                            .workspace = workspace,
                            .workspace_bytes = workspace_bytes};
    if (exec->device == HR_CPU)
        return gemm_cpu(&args);
    HR_RETURN_CUDA(gemm_cuda(&args, exec), exec);
}

hr_status hr_gemm_workspace(size_t *bytes, int64_t m, int64_t n, int64_t k,
                            const hr_gemm_config *config, const hr_exec *exec)
{
    static const char function[] = "hr_gemm_workspace";
    hr_gemm_config own = HR_GEMM_CONFIG_INIT;
    HR_REQUIRE(bytes, "%s: bytes is NULL", function);
    HR_TRY(hr_check_vector(function, "bytes", bytes, HR_F64));
    HR_TRY(check_gemm_sizes(function, m, n, k));
    HR_TRY(check_config(function, &own, config));
    HR_TRY(hr_check_exec(function, exec));
    HR_ON_DEVICE(exec, gemm_workspace, bytes);
    return HR_OK;
}

hr_status hr_set_gemm(hr_gemm_fn gemm, void *context)
{
    gemm_lend(gemm, context);
    return HR_OK;
}
