/*
 * headroom.h: the C interface of Headroom, and its textbook.
 *
 * Headroom trains models in less memory. This header declares its kernels as C functions: optimizer
 * steps, 16-bit weights, gradient norms, loss scaling, gradient accumulation and the layers of
 * transformers, on the CPU and on CUDA devices. It needs neither PyTorch nor Python.
 *
 * Contents
 * --------
 * Part 1, simple: version, status, element types, where to run, lists of tensors, CPU threads and
 * instruction sets; then, each with its formula and its config,
 *
 *     Weights in 16 bits        hr_join_weights, hr_split_weights, hr_get_weights_mode_info
 *     Blocks of 8-bit codes     hr_quantize_blocks, hr_dequantize_blocks, hr_dynamic_map
 *     Scalars of a step         hr_step_config, a part of every optimizer's config
 *     Adam and AdamW            hr_adamw
 *       with 8-bit moments      hr_adamw8bit
 *     SGD and Lion              hr_momentum
 *
 * Part 2, advanced: calls with workspace, what a loop does around a step, and layers on rows.
 *
 *     Adafactor                 hr_adafactor, hr_adafactor_workspace
 *     Gradients: unscale, norm  hr_unscale_norm, hr_unscale_norm_workspace
 *     The loss scale            hr_update_scale
 *     Gradient accumulation     hr_accumulate
 *     Matrix products           hr_gemm, hr_gemm_workspace, hr_set_gemm
 *     Muon                      hr_muon_momentum, hr_newton_schulz, hr_newton_schulz_workspace,
 *                               hr_muon_update, hr_muon_workspace
 *     Norms of rows             hr_norm_forward, hr_norm_backward, hr_norm_workspace
 *     Gated linear units        hr_glu_forward, hr_glu_backward
 *     Rotary embeddings         hr_rope
 *     Cross entropy             hr_cross_entropy_forward, hr_cross_entropy_backward,
 *                               hr_cross_entropy_reduce
 *
 * Part 3, experimental: declared where HR_EXPERIMENTAL is defined before the include.
 *
 *     Matrices of few bits      hr_quantize_matrix, hr_dequantize_matrix
 *       and their products      hr_linear_forward, hr_linear_backward, hr_linear_query
 *       with adapters           hr_lora_forward, hr_lora_backward, hr_lora_workspace,
 *                               hr_lora_norms, hr_lora_norms_workspace
 *     The MLP block             hr_mlp_forward, hr_mlp_backward, hr_mlp_query
 *     Experts                   hr_route, hr_experts_forward, hr_experts_backward, hr_experts_query
 *     Divergences               hr_divergence_forward, hr_divergence_backward
 *     Linear cross entropy      hr_linear_cross_entropy, hr_linear_cross_entropy_backward,
 *                               hr_linear_cross_entropy_query
 *
 * Words
 * -----
 * moment      a running average of gradients (first) or of their squares (second)
 * absmax      the largest magnitude in a block of elements; it is the scale of the block
 * residual    what rounding to 16 bits took off a binary32 weight, in a tensor of its own
 * whole       a tensor before it was cut into parts, such as the shards of a distributed run
 * place       where the elements of a part lie in the whole: columns 2 to 4 of a matrix with 8
 *             columns are {offset 2, run 3, stride 8}
 * scalar      one number in device memory, passed as a pointer
 *
 * What is stable
 * --------------
 * Before 1.0 a minor version may change anything here, and its library has another name. Within a
 * minor version functions stay, configs grow only at their end, and numbers of enums keep their
 * meaning. The bits that a step computes change only with a line in the CHANGELOG. The experimental
 * part may change in every release.
 *
 * In one minute
 * -------------
 *     #include <headroom.h>              // cc program.c $(pkg-config --cflags --libs headroom)
 *
 *     float weight[3] = {1, 2, 3}, grad[3] = {.1f, .2f, .3f}, m[3] = {0}, v[3] = {0};
 *     int64_t numel[1] = {3};
 *     hr_dtype f32[1] = {HR_F32};
 *     void *weights[1] = {weight}, *grads[1] = {grad}, *ms[1] = {m}, *vs[1] = {v};
 *     hr_tensor_list params = {1, weights, numel, f32}, gradients = {1, grads, numel, f32};
 *     hr_tensor_list exp_avgs = {1, ms, numel, f32}, exp_avg_sqs = {1, vs, numel, f32};
 *     hr_exec cpu = {HR_CPU, NULL};
 *     hr_adamw_config config = HR_ADAMW_CONFIG_INIT;
 *     config.step.t = 1;
 *     if (hr_adamw(&params, &exp_avgs, &exp_avg_sqs, NULL, NULL, &gradients, &config, &cpu))
 *         fprintf(stderr, "%s\n", hr_last_error());
 *
 * Conventions, true of every function
 * -----------------------------------
 * Arguments   come in the order outputs, inputs, sizes, config, exec. A pointer points to memory of
 *             the device that `exec` names, unless its comment says "host". Sizes count elements
 *             and are 64 bits wide. `[n]` after a name gives its shape.
 * Configs     start with their size, which an INIT macro sets. A smaller config, of an older
 *             header, is accepted with the macro's values for the members that it lacks; a larger
 *             one, of a header newer than the library, is refused.
 * Checks      all happen before the first write: a call that fails leaves all memory as it was.
 * Errors      every function that can fail returns an hr_status; hr_last_error() then says which
 *             argument was wrong, its value and what was wanted. Nothing exits, prints or throws.
 * Memory      belongs to the caller. The library allocates no device memory.
 * Streams     CUDA work is queued on exec->stream and the call returns without waiting; every call
 *             can be captured in a CUDA graph. Tensors, scalars and workspace must live until the
 *             stream has run the work; lists, configs and the exec, until the call returns.
 * Threads     several threads may call functions at the same time on memory that does not overlap.
 *             CPU work runs on the calling thread unless hr_set_parallel_for() lent others.
 * Alignment   an address must be a multiple of its element's size. Addresses that are multiples of
 *             16 bytes run faster on CUDA.
 * Numerics    arithmetic is IEEE binary32 unless said otherwise, rounded to nearest even, with no
 *             contraction. A store to bf16 or f16 rounds to nearest even and writes every NaN as
 *             0x7FFF. Element-wise functions give the same bits on the CPU and on CUDA, for any
 *             instruction set and any number of threads, if the floating-point environment is the
 *             default one (denormals are kept).
 */
#ifndef HEADROOM_H
#define HEADROOM_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define HR_API __attribute__((visibility("default")))
#else
#define HR_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ==== Part 1, simple ========================================================================== */

/* ---- Version --------------------------------------------------------------------------------- */

#define HR_VERSION_MAJOR 0
#define HR_VERSION_MINOR 2
#define HR_VERSION_PATCH 0
#define HR_VERSION       (HR_VERSION_MAJOR * 10000 + HR_VERSION_MINOR * 100 + HR_VERSION_PATCH)

/* HR_VERSION of the library that is loaded, which may differ from the header compiled against. */
HR_API int32_t hr_version(void);

/* One line of `key=value` pairs separated by "; ": version, compiler, cuda ("none" or the version
 * of the CUDA compiler), archs (compute capabilities with device code), cublas ("none", without
 * which hr_gemm and what calls it do not run on CUDA, or the version of its header), cpu (the
 * instruction set in use, see hr_get_cpu_level). The string is valid until the same thread calls it again. */
HR_API const char *hr_build_info(void);

/* ---- Status ---------------------------------------------------------------------------------- */

typedef enum hr_status {
    HR_OK = 0,
    HR_INVALID_ARGUMENT = 1, /* an argument breaks its contract; nothing was written */
    HR_UNSUPPORTED = 2,      /* a valid call that this build or this machine cannot run */
    HR_CUDA_ERROR = 3,       /* the CUDA runtime failed; hr_last_error() has its message */
    HR_NO_DEVICE = 4,        /* no driver, or no device with that ordinal */
    HR_INTERNAL = 6          /* a bug in Headroom */
} hr_status;

/* A short name such as "invalid argument". Never NULL, not even for an unknown value. */
HR_API const char *hr_status_string(hr_status status);

/* The message of the last call that failed on this thread, or "" if none failed yet. The string is
 * valid until the next failure on this thread; a successful call leaves it as it is. */
HR_API const char *hr_last_error(void);

/* ---- Element types --------------------------------------------------------------------------- */

typedef enum hr_dtype {
    HR_F32 = 0,  /* IEEE binary32 */
    HR_BF16 = 1, /* bfloat16: the upper half of a binary32 */
    HR_F16 = 2,  /* IEEE binary16 */
    HR_U8 = 3,
    HR_I8 = 4,
    HR_I16 = 5,
    HR_F64 = 6 /* IEEE binary64; counters and learning rates only */
} hr_dtype;

/* Bytes per element, or 0 if the argument is not an hr_dtype. */
HR_API size_t hr_dtype_size(hr_dtype dtype);

/* The number of blocks of block_size elements that numel elements need; the last may be short. */
HR_API int64_t hr_block_count(int64_t numel, int64_t block_size);

/* ---- Where to run ---------------------------------------------------------------------------- */

/* The same type as cudaStream_t, without CUDA's headers. NULL is the default stream. */
typedef struct CUstream_st *hr_stream;

#define HR_CPU (-1)

typedef struct hr_exec {
    int32_t device;   /* HR_CPU, or the ordinal of a CUDA device */
    hr_stream stream; /* a stream of that device; ignored on the CPU */
} hr_exec;

/* ---- Lists of tensors ------------------------------------------------------------------------ */

/*
 * Optimizers and scalers work on many tensors in one call. A list describes them by parallel host
 * arrays; entry i of every list in a call belongs to the same parameter. A tensor is numel[i]
 * elements that lie together in memory. Its shape does not matter, nor does the memory order of its
 * dimensions, as long as all tensors of a parameter have the same order. Tensors with numel 0 are
 * allowed anywhere and may have a NULL address. Tensors that are written must not overlap any other
 * tensor of the call; this is not checked.
 */
typedef struct hr_tensor_list {
    int64_t count;     /* number of tensors */
    void *const *data; /* host [count]: addresses; a list in the role of an input is not written */
    const int64_t *numel;  /* host [count]: elements per tensor */
    const hr_dtype *dtype; /* host [count] */
} hr_tensor_list;

/* ---- CPU threads and instruction sets -------------------------------------------------------- */

/* Calls range(context, b, e) for subranges [b, e) that together cover [begin, end) once, on as many
 * threads as it likes, and returns when all calls have. Each subrange but the last is at least
 * `grain` long. */
typedef void (*hr_range_fn)(void *context, int64_t begin, int64_t end);
typedef void (*hr_parallel_for_fn)(int64_t begin, int64_t end, int64_t grain, hr_range_fn range,
                                   void *context);

/* Lends the host's threads to the CPU kernels, for the whole process; NULL returns to a loop on
 * the calling thread. Headroom starts no threads of its own. */
HR_API hr_status hr_set_parallel_for(hr_parallel_for_fn parallel_for);

/* CPU kernels are compiled for several instruction sets; the best one that the CPU has is used. All
 * give the same bits. */
typedef enum hr_cpu_level {
    HR_CPU_BASELINE = 0,   /* what the compiler targets by default */
    HR_CPU_AVX2 = 1,       /* x86-64 with AVX2, FMA and F16C */
    HR_CPU_AVX512 = 2,     /* x86-64 with AVX-512 F, BW, DQ and VL */
    HR_CPU_AVX512_VBMI = 3 /* also AVX-512 VBMI and BF16, which few kernels use */
} hr_cpu_level;

/* The level in use. */
HR_API hr_cpu_level hr_get_cpu_level(void);

/* Chooses a lower level, or returns to a higher one, for the whole process. HR_UNSUPPORTED if the
 * CPU or the build lacks it. The environment variable HEADROOM_CPU_LEVEL (baseline, avx2, avx512,
 * avx512vbmi) sets the level at start; one that is unknown or above the CPU's is passed over, and
 * hr_build_info() names the level in use. Python's import warns of it. */
HR_API hr_status hr_set_cpu_level(hr_cpu_level level);

/* ---- Weights in 16 bits ---------------------------------------------------------------------- */

/*
 * hr_weights: how an optimizer reads the weights of a list as binary32 and writes them back. bf16
 * keeps 8 bits of a weight, so an update below 1/256 of it is lost to rounding. A mode either
 * rounds without bias or keeps what rounding took off in a second tensor, the residual:
 *
 *     mode                              params      residual    what is kept of a weight
 *     HR_WEIGHTS_NEAREST                any         none        param alone
 *     HR_WEIGHTS_STOCHASTIC             bf16, f16   none        param, rounded up or down at random
 *     HR_WEIGHTS_KAHAN                  bf16, f16   as param    param + residual: 16 bits or more
 *     HR_WEIGHTS_MASTER                 bf16, f16   f32         residual; param is its rounding
 *     HR_WEIGHTS_REMAINDER16            bf16        i16         all 24 bits, and the exponent
 *     HR_WEIGHTS_REMAINDER8             bf16        i8          16 bits, rounded to nearest
 *     HR_WEIGHTS_REMAINDER8_STOCHASTIC  bf16        i8          16 bits, rounded at random
 *
 * REMAINDER16: with the 32 bits of a weight as an integer,
 *
 *     bits = param * 65536 + residual                    param = (bits + 32768) / 65536
 *
 * so that training takes the same steps, bit for bit, as with binary32 weights. The param is the
 * weight rounded to nearest; a tie, one weight in 65,536, is rounded away from zero, because to
 * even would leave 65,537 weights to some params, and a residual has 65,536 values. REMAINDER8
 * rounds bits to a multiple of 256 first and stores residual / 256: a relative error up to 2^-16.
 * KAHAN stores what rounding took off as a number of the param's type, and adds it in the next step
 * (Kahan, doi:10.1145/363707.363723). A NaN has residual 0.
 *
 * Other code may write params between two calls: a pruning mask, a checkpoint, a clamp, an average.
 * The residual then belongs to the old weight, and the written param counts. A step drops a
 * residual that belongs to no weight with that param; the residuals that it cannot recognize are
 * small:
 *
 *     mode          a residual is dropped if                     a written param is read as
 *     MASTER        param is not its rounding, ties to even      itself
 *     KAHAN         it is more than half a unit in the last      itself, or up to half a unit in
 *                   place of param; at 0: if it is not 0         the last place away; 0 as 0
 *     REMAINDER16,  it would turn a number into a NaN:           up to half a unit in the last
 *     REMAINDER8    negative at 0, positive at infinity          place away; 0 as less than 2^-134
 *
 * So a finite param is read as a finite number, and a NaN as NaN. An infinity is read as infinity;
 * with a negative remainder it is read as a finite number too large for bf16, because that is how
 * hr_split_weights() stores one. A call that changes no weight, such as one with lr 0, leaves
 * written params as they are, except that with KAHAN a param may move to its neighbor if the
 * residual is half a unit or the param a power of two. A weight that no other code wrote always
 * keeps its residual. hr_split_weights() sets weights exactly.
 *
 * A step reads and writes params and residuals in every mode. MASTER reads params only to find
 * those that other code wrote: 12 bytes per weight instead of 10.
 *
 * Stochastic rounding: x between neighbors a < x < b becomes b with probability (x - a) / (b - a),
 * in steps of 2^-16. The random bits come from Philox4x32-10 (Salmon et al.,
 * doi:10.1145/2063384.2063405), keyed by the tensor's seed and counted by step and element. If
 * tensors are parts of a whole, `places` tells which, so that the bits do not depend on the cut.
 */
typedef enum hr_weights_mode {
    HR_WEIGHTS_NEAREST = 0,
    HR_WEIGHTS_STOCHASTIC = 1,
    HR_WEIGHTS_KAHAN = 2,
    HR_WEIGHTS_MASTER = 3,
    HR_WEIGHTS_REMAINDER16 = 4,
    HR_WEIGHTS_REMAINDER8 = 5,
    HR_WEIGHTS_REMAINDER8_STOCHASTIC = 6
} hr_weights_mode;

/* A row of the table above. */
typedef struct hr_weights_mode_info {
    const char *name;         /* such as "HR_WEIGHTS_KAHAN" */
    uint32_t params;          /* bit 1 << dtype is set for each hr_dtype that a param may have */
    int32_t has_residuals;    /* 1: hr_weights.residuals is needed. 0: it must be NULL */
    int32_t residual_is_like; /* 1: a residual has the type of its param */
    hr_dtype residual;        /* the type of all residuals, unless residual_is_like is 1 */
    int32_t is_random;        /* 1: hr_weights.seeds is needed. 0: it must be NULL */
    hr_weights_mode nearest;  /* the mode with the same residuals that rounds to nearest */
} hr_weights_mode_info;

/* The row of a mode, in memory that stays valid, or NULL if the argument is not an
 * hr_weights_mode. */
HR_API const hr_weights_mode_info *hr_get_weights_mode_info(hr_weights_mode mode);

/* Element i of a tensor is element offset + i / run * stride + i % run of the whole. */
typedef struct hr_place {
    int64_t offset; /* >= 0 */
    int64_t run;    /* >= 1: elements that lie together in the whole */
    int64_t stride; /* >= 0: from one run to the next, in the whole */
} hr_place;

typedef struct hr_weights {
    size_t size;                     /* sizeof(hr_weights) */
    hr_weights_mode mode;            /* of every parameter of the call */
    const hr_tensor_list *residuals; /* in/out; NULL if the mode has no residuals */
    const uint64_t *seeds;           /* host [count]; NULL unless the mode rounds at random */
    const hr_place *places;          /* host [count]; NULL: no tensor is a part of another */
    int64_t *stalled; /* in/out [1], device: grows by the number of weights that the step would have
                         changed in binary32 and that are stored unchanged. NULL: not counted */
} hr_weights;

#define HR_WEIGHTS_INIT                                                \
    {                                                                  \
        sizeof(hr_weights), HR_WEIGHTS_NEAREST, NULL, NULL, NULL, NULL \
    }

/*
 * hr_join_weights, hr_split_weights: convert weights to binary32 and back, for evaluation, and to
 * save or load them without loss.
 *
 * values   join: out, split: in; f32
 * params   join: in, split: out; a type that the mode takes
 * weights  its mode and its residuals (join: in, split: out) are used. A mode that rounds at random
 *          rounds to nearest here
 *
 * Every NaN is written to `values` as 0x7FFFFFFF.
 *
 * Errors: as for hr_adamw.
 */
HR_API hr_status hr_join_weights(const hr_tensor_list *values, const hr_tensor_list *params,
                                 const hr_weights *weights, const hr_exec *exec);
HR_API hr_status hr_split_weights(const hr_tensor_list *params, const hr_tensor_list *values,
                                  const hr_weights *weights, const hr_exec *exec);

/* ---- Blocks of 8-bit codes ------------------------------------------------------------------- */

/* hr_dynamic_map: writes the 256 values of a map in ascending order: in [-1, 1] if is_signed is 1,
 * else in [0, 1]. They equal bitsandbytes' dynamic map to the bit.
 *
 * values     out: host [256]
 *
 * Errors: HR_INVALID_ARGUMENT if `values` is NULL. */
HR_API hr_status hr_dynamic_map(float *values, int32_t is_signed);

/*
 * hr_quantize_blocks, hr_dequantize_blocks: convert numbers to codes of the dynamic map (Dettmers
 * et al., arXiv:2110.02861) and back. A code takes one byte per element, and each block of
 * `block_size` consecutive elements has one binary32 scale.
 *
 *     absmax[b] = the largest |x| of block b             NaN if an element is not finite
 *     code[i]   = the code nearest to y = x[i] / absmax, ties to the lower code
 *     x'[i]     = map[code[i]] * absmax[i / block_size]
 *
 * The quotient is computed as a product with the rounded reciprocal. Zero stays zero. In the
 * unsigned map a positive x never gets code 0, which means zero, and a negative x gets code 0.
 * hr_adamw8bit stores its moments as these codes. The error of x' is at most absmax times half the
 * gap between two values of the map. The bits are the same on the CPU and on CUDA.
 */
typedef struct hr_quantize_config {
    size_t size;        /* sizeof(hr_quantize_config) */
    int32_t is_signed;  /* 1: the signed map. 0: the unsigned one, for numbers >= 0 */
    int32_t block_size; /* a power of two from 64 to 4096 */
} hr_quantize_config;

#define HR_QUANTIZE_CONFIG_INIT            \
    {                                      \
        sizeof(hr_quantize_config), 1, 256 \
    }

/*
 * codes    quantize: out, dequantize: in; u8
 * absmaxs  quantize: out, dequantize: in; f32, hr_block_count(numel, block_size) elements
 * values   quantize: in, dequantize: out; f32, bf16 or f16
 *
 * On CUDA a call makes one launch per 800 tensors.
 *
 * Errors: as for hr_adamw.
 */
HR_API hr_status hr_quantize_blocks(const hr_tensor_list *codes, const hr_tensor_list *absmaxs,
                                    const hr_tensor_list *values, const hr_quantize_config *config,
                                    const hr_exec *exec);
HR_API hr_status hr_dequantize_blocks(const hr_tensor_list *values, const hr_tensor_list *codes,
                                      const hr_tensor_list *absmaxs,
                                      const hr_quantize_config *config, const hr_exec *exec);

/* ---- The scalars of an optimizer's step ------------------------------------------------------ */

/*
 * hr_step_config: the arguments that every optimizer's step takes, whatever its rule. The rules
 * below count steps from t = 1 and start from
 *
 *     g = grad * clip_coef / grad_scale             a factor whose pointer is NULL is 1
 *     g = -g                                        if maximize
 *
 * The factor is folded once in binary64 and rounded to binary32. A scalar is read when the work
 * runs, so a captured graph uses the value that it has then.
 */
typedef struct hr_step_config {
    double lr;               /* >= 0, finite; ignored if lr_ptr is set */
    int64_t t;               /* >= 1; ignored if the call has a `steps` list */
    const void *lr_ptr;      /* device [1], lr_dtype: replaces lr */
    const float *clip_coef;  /* device [1]: gradients are multiplied by it */
    const float *grad_scale; /* device [1], finite and > 0: gradients are divided by it */
    const float *found_inf;  /* device [1]: if not 0, the call changes nothing but its workspace */
    const hr_weights *weights; /* host; how params are stored. NULL: HR_WEIGHTS_NEAREST */
    hr_dtype lr_dtype;         /* HR_F32 or HR_F64: type of *lr_ptr */
    int32_t maximize;          /* 1: steps go up the gradient */
    int32_t skip_nonfinite; /* 1: where g is infinite or NaN, the parameter and its moments stay */
    int32_t reserved[5];    /* 0: room for new members, because other structs hold this one */
} hr_step_config;

#define HR_STEP_CONFIG_INIT(lr)                            \
    {                                                      \
        lr, 0, NULL, NULL, NULL, NULL, NULL, HR_F32, 0, 0, \
        {                                                  \
            0                                              \
        }                                                  \
    }

/* ---- Adam and AdamW -------------------------------------------------------------------------- */

/*
 * hr_adamw: one step of Adam (Kingma and Ba, arXiv:1412.6980) or AdamW (Loshchilov and Hutter,
 * arXiv:1711.05101) over a list of parameters. For each element, with t the step number counted
 * from 1:
 *
 *     g = grad, scaled as at hr_step_config
 *     decoupled:      param = param * (1 - lr * weight_decay)
 *     not decoupled:  g = g + weight_decay * param
 *     exp_avg    = beta1 * exp_avg    + (1 - beta1) * g
 *     exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
 *     amsgrad:        max_exp_avg_sq = max(max_exp_avg_sq, exp_avg_sq), which replaces it below
 *     param = param - lr / (1 - beta1^t) * exp_avg / (sqrt(exp_avg_sq / (1 - beta2^t)) + eps)
 *
 * exp_avg is interpolated from the nearer of the two ends, as exp_avg + (1 - beta1) * (g - exp_avg)
 * if beta1 > 0.5, which halves the error of the sum of two products.
 *
 * Every constant is folded once in binary64 (lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t), 1 - lr *
 * weight_decay, clip_coef / grad_scale, 1 - beta) and rounded to binary32. Elements are computed in
 * binary32 whatever their types in memory. beta^t is computed by repeated squaring, so it has the
 * same bits on every device.
 */
typedef struct hr_adamw_config {
    size_t size; /* sizeof(hr_adamw_config); set by HR_ADAMW_CONFIG_INIT */
    hr_step_config step;
    double beta1, beta2; /* in [0, 1) */
    double eps;          /* >= 0, finite */
    double weight_decay; /* >= 0, finite */
    int32_t decoupled;   /* 1: AdamW's weight decay. 0: Adam's, added to the gradient (L2) */
    int32_t amsgrad;     /* 1: needs the max_exp_avg_sqs list */
} hr_adamw_config;

/* The defaults of torch.optim.AdamW. Set `step.t`, or pass a `steps` list. */
#define HR_ADAMW_CONFIG_INIT                                                             \
    {                                                                                    \
        sizeof(hr_adamw_config), HR_STEP_CONFIG_INIT(1e-3), 0.9, 0.999, 1e-8, 1e-2, 1, 0 \
    }

/*
 * hr_adamw:
 *
 * params           in/out: f32, bf16 or f16, stored as config->step.weights says
 * exp_avgs         in/out: f32, bf16 or f16; zeros before the first step
 * exp_avg_sqs      in/out: dtype of exp_avgs; zeros before the first step
 * max_exp_avg_sqs  in/out: dtype of exp_avgs; NULL unless config->amsgrad
 * steps            in/out: f32 or f64, numel 1 each: how many steps the parameter has had. The call
 *                  uses t = step + 1 and stores t, for an empty parameter too. An f32 counter can
 *                  count to 2^24, an f64 counter to 2^53. NULL: all parameters use config->step.t
 * grads            in: f32, bf16 or f16, not changed (unscaled gradients are not written back)
 *
 * The types may differ between lists and from parameter to parameter. On CUDA a call makes one
 * launch per 500 tensors or so; a `steps` list adds one small launch each. Reads and writes each
 * byte once: 28 bytes per parameter in f32, 14 in bf16.
 *
 * Errors: HR_INVALID_ARGUMENT if a pointer is NULL or misaligned, lists have unequal count or
 * numel, a dtype is not named above, a config value is outside its range, or config->size is of a
 * newer header; on the CPU also if a counter, *lr_ptr or *grad_scale is outside its range, which a
 * call on CUDA cannot read. HR_NO_DEVICE if exec->device does not exist. HR_UNSUPPORTED if the
 * build has no CUDA part.
 */
HR_API hr_status hr_adamw(const hr_tensor_list *params, const hr_tensor_list *exp_avgs,
                          const hr_tensor_list *exp_avg_sqs, const hr_tensor_list *max_exp_avg_sqs,
                          const hr_tensor_list *steps, const hr_tensor_list *grads,
                          const hr_adamw_config *config, const hr_exec *exec);

/* ---- Adam and AdamW with 8-bit moments ------------------------------------------------------- */

/*
 * hr_adamw8bit: one step of hr_adamw's rule over parameters whose two moments take one byte each: a
 * code of the dynamic map (Dettmers et al., arXiv:2110.02861) per element, and one binary32 scale
 * per block of `block_size` consecutive elements. With blocks of 256, the state takes 2.03 bytes
 * per parameter.
 *
 *     exp_avg[i]    = signed_map[code[i]]   * absmax[i / block_size]
 *     exp_avg_sq[i] = unsigned_map[code[i]] * absmax[i / block_size]
 *
 * hr_dynamic_map() gives the two maps. The step decodes both moments, applies hr_adamw's formula
 * (the parameter is updated from the new moments in binary32), takes the largest magnitude of each
 * block as its new absmax, and stores for each moment x the code nearest to y = x / absmax, ties to
 * the lower code. The quotient is computed as a product with the rounded reciprocal. Two exceptions
 * keep updates bounded:
 *
 *     a positive exp_avg_sq never gets code 0, which means zero: its code is at least 1
 *     zero stays zero, and a block of zeros has absmax 0 and the codes of zero
 *
 * Without them a second moment much smaller than the largest of its block would become zero, and
 * the next step would divide by eps alone. Blocks are counted from the tensor's first element; the
 * last may be short.
 *
 * Stochastic rounding (`seeds`): y between neighboring codes a < y < b gets b with probability (y -
 * a) / (b - a). The random bits come from Philox4x32-10 (Salmon et al.,
 * doi:10.1145/2063384.2063405), keyed by the tensor's seed and counted by step and element, and
 * depend on nothing else. The exceptions above hold, and a y below the lowest code gets the lowest
 * code. So the mean of the codes is y, except for a positive exp_avg_sq below code 1 and an exp_avg
 * below -0.993 * absmax.
 *
 * bnb_exact: the rule of bitsandbytes' CUDA kernels, in their order of operations, without
 * contraction. (The CPU quantizer of bitsandbytes is coarser: of the squares of 65,536 normal
 * numbers it gives another code to about 2,000.)
 *
 *     a gradient that is not finite:  exp_avg = exp_avg_sq = 0, param stays
 *     exp_avg_sq = exp_avg_sq * beta2 + (1 - beta2) * g * g;  exp_avg likewise
 *     param = param + (-lr * c2 / c1) * (exp_avg / (sqrt(exp_avg_sq) + c2 * eps))
 *             with c1 = 1 - beta1^t, c2 = sqrt(1 - beta2^t), then param * (1 - lr * weight_decay)
 *     codes nearest to x / absmax, a true division, with midpoints in binary32; a code of exp_avg
 *     whose sign differs from that of x moves one towards it, so that 0 / 0, in a block of zeros,
 *     gives code 255 for exp_avg and 0 for exp_avg_sq; both decode to 0, because absmax is 0
 *
 * A moment that is not finite makes the absmax of its block NaN, and all moments of the block from
 * then on. skip_nonfinite prevents this: it leaves out elements whose scaled gradient is not
 * finite. To skip the whole step instead, call hr_unscale_norm first and pass found_inf.
 *
 * The bits are the same on the CPU and on CUDA, for any instruction set and any number of threads.
 */
typedef struct hr_adamw8bit_config {
    size_t size;           /* sizeof(hr_adamw8bit_config) */
    hr_adamw_config adamw; /* amsgrad must be 0 */
    int32_t block_size;    /* 64, 128, 256 or 512 */
    int32_t bnb_exact;     /* 1: needs decoupled 1, block_size 256, no weights, no seeds and no
                              skip_nonfinite */
    const uint64_t *seeds; /* host [count]: stochastic rounding of codes; NULL: to nearest */
} hr_adamw8bit_config;

#define HR_ADAMW8BIT_CONFIG_INIT                                        \
    {                                                                   \
        sizeof(hr_adamw8bit_config), HR_ADAMW_CONFIG_INIT, 256, 0, NULL \
    }

/*
 * hr_adamw8bit:
 *
 * params              in/out: f32, bf16 or f16, stored as config->adamw.step.weights says
 * exp_avgs            in/out: u8, codes of the signed map; any before the first step
 * exp_avg_absmaxs     in/out: f32, hr_block_count(numel, block_size) elements; zeros before the
 *                     first step
 * exp_avg_sqs         in/out: u8, codes of the unsigned map; any before the first step
 * exp_avg_sq_absmaxs  in/out: f32, like exp_avg_absmaxs
 * steps               in/out: as for hr_adamw; NULL: all use config->adamw.step.t
 * grads               in: f32, bf16 or f16, not changed
 *
 * The types of params and grads may differ from each other and from parameter to parameter. On CUDA
 * a call makes one launch per 400 tensors or so; a `steps` list adds one small launch each. Reads
 * and writes each byte once: 16.06 bytes per parameter in f32, 10.06 in bf16.
 *
 * Errors: as for hr_adamw.
 */
HR_API hr_status hr_adamw8bit(const hr_tensor_list *params, const hr_tensor_list *exp_avgs,
                              const hr_tensor_list *exp_avg_absmaxs,
                              const hr_tensor_list *exp_avg_sqs,
                              const hr_tensor_list *exp_avg_sq_absmaxs, const hr_tensor_list *steps,
                              const hr_tensor_list *grads, const hr_adamw8bit_config *config,
                              const hr_exec *exec);

/* ---- SGD and Lion ---------------------------------------------------------------------------- */

/*
 * hr_momentum: one step of an optimizer with one moment over a list of parameters: of SGD with
 * momentum (Sutskever et al., On the importance of initialization and momentum in deep learning,
 * ICML 2013), as torch.optim.SGD has it, or of Lion (Chen et al., arXiv:2302.06675). For each
 * element, with t the step number counted from 1:
 *
 *     g = grad, scaled as at hr_step_config
 *     HR_SGD:   g = g + weight_decay * param
 *               moment = momentum * moment + (1 - dampening) * g;    moment = g if t is 1
 *               g = g + momentum * moment if nesterov, else moment;  without momentum g stays
 *               param = param - lr * g
 *     HR_LION:  u = sign(beta1 * moment + (1 - beta1) * g)
 *               param = param * (1 - lr * weight_decay) - lr * u
 *               moment = beta2 * moment + (1 - beta2) * g
 *
 * sign() of a zero is 0, and of a NaN NaN. Constants (1 - dampening, 1 - beta, 1 - lr *
 * weight_decay, clip_coef / grad_scale) are folded once in binary64 and rounded to binary32.
 * Elements are computed in binary32 whatever their types in memory. In each line of HR_SGD that adds
 * a product to something the two are fused (fmaf), the last product of the line: so do torch's
 * vector loops, and the result of binary32 is torch's, bit for bit.
 *
 * A moment may take one byte: codes of hr_dynamic_map()'s signed map, and a binary32 scale per block
 * of block_size consecutive elements, as at hr_adamw8bit. The parameter is updated from the new
 * moment in binary32, before it is encoded. An element whose moment is not finite makes the moments
 * of its block NaN.
 */
typedef enum hr_momentum_rule { HR_SGD = 0, HR_LION = 1 } hr_momentum_rule;

typedef struct hr_momentum_config {
    size_t size; /* sizeof(hr_momentum_config); set by an INIT macro */
    hr_step_config step;
    hr_momentum_rule rule;
    int32_t nesterov;    /* HR_SGD: 1 needs momentum > 0 and dampening 0 */
    double momentum;     /* HR_SGD: >= 0, finite; 0: parameters have no moment */
    double dampening;    /* HR_SGD: finite */
    double beta1, beta2; /* HR_LION: in [0, 1) */
    double weight_decay; /* >= 0, finite */
    int32_t block_size;  /* of moments in codes: 64, 128, 256 or 512 */
} hr_momentum_config;

/* The defaults of torch.optim.SGD, and those of Lion's authors. Set `step.t`, or pass a `steps`
 * list. */
#define HR_SGD_CONFIG_INIT                                                                        \
    {                                                                                             \
        sizeof(hr_momentum_config), HR_STEP_CONFIG_INIT(1e-3), HR_SGD, 0, 0, 0, 0.9, 0.99, 0, 256 \
    }
#define HR_LION_CONFIG_INIT                                                                        \
    {                                                                                              \
        sizeof(hr_momentum_config), HR_STEP_CONFIG_INIT(1e-4), HR_LION, 0, 0, 0, 0.9, 0.99, 0, 256 \
    }

/*
 * hr_momentum:
 *
 * params   in/out: f32, bf16 or f16, stored as config->step.weights says
 * moments  in/out: f32, bf16 or f16, zeros before the first step; or, with absmaxs, u8, any before
 *          the first step. NULL if the rule is HR_SGD and momentum is 0
 * absmaxs  in/out: f32, hr_block_count(numel, block_size) elements; zeros before the first step.
 *          NULL: moments are numbers
 * steps    in/out: as for hr_adamw; NULL: all use config->step.t
 * grads    in: f32, bf16 or f16, not changed
 *
 * The types may differ between lists and from parameter to parameter, but moments are all numbers or
 * all codes. On CUDA a call makes one launch per 500 tensors or so; a `steps` list adds one small
 * launch each. Reads and writes each byte once: with a moment 20 bytes per parameter in f32, 10 in
 * bf16; with codes 14.03 and 8.03.
 *
 * Errors: as for hr_adamw.
 */
HR_API hr_status hr_momentum(const hr_tensor_list *params, const hr_tensor_list *moments,
                             const hr_tensor_list *absmaxs, const hr_tensor_list *steps,
                             const hr_tensor_list *grads, const hr_momentum_config *config,
                             const hr_exec *exec);

/* ==== Part 2, advanced ======================================================================== */

/* ---- Adafactor ------------------------------------------------------------------------------- */

/*
 * hr_adafactor: one step of Adafactor (Shazeer and Stern, arXiv:1804.04235) over a list of
 * parameters, by the rule of one of two implementations: transformers' or torch's. A tensor of two
 * dimensions or more is factored: it is seen as [batch, rows, cols], where batch is the product of
 * all dimensions but the last two, and its second moment is stored as one mean per row and one per
 * column, 4 * (1 / rows + 1 / cols) bytes per element. Any other tensor has a second moment per
 * element, `variance`. With t the step number counted from 1:
 *
 *     g = grad, scaled as at hr_step_config
 *     w = t^beta2_decay
 *                       HR_ADAFACTOR_HF              HR_ADAFACTOR_TORCH
 *     s                 g^2 + eps1                   g^2
 *     row_var           (1 - w) * row_var + w * mean of s over the columns       factored
 *     col_var           (1 - w) * col_var + w * mean of s over the rows          factored
 *     mean              mean of row_var over rows    at least eps1               factored
 *     v                 row_var * col_var / mean                                 factored
 *     v = variance      (1 - w) * variance + w * s                               not factored
 *     u                 g / sqrt(v)                  g / sqrt(max(v, eps1^2))
 *     rho               lr; with relative_step       min(lr, 1 / sqrt(t))
 *                       min(1e-2, 1 / sqrt(t)), where
 *                       warmup_init makes 1e-2 1e-6 * t
 *     alpha             rho; with scale_parameter    rho * max(eps2, RMS(param))
 *                       rho * max(eps2, RMS(param))
 *     decay             alpha * weight_decay         lr * weight_decay
 *
 *     change = alpha * u / max(1, RMS(u) / clip_threshold)
 *     with exp_avgs:  exp_avg = beta1 * exp_avg + (1 - beta1) * change;  change = exp_avg
 *     param = param * (1 - decay) - change
 *
 * RMS is the root of the mean square over the tensor; RMS(param) is that of the joined weights if
 * config->step.weights is set. Variances are binary32 whatever the types of params and grads (torch
 * keeps them, and computes, in the type of the gradient). In torch's rule a negative eps1 stands
 * for the epsilon of the param's type, or for that of binary32 if config->step.weights names a mode
 * other than HR_WEIGHTS_NEAREST, because such weights take the steps of binary32.
 *
 * Sums have a fixed order without atomics: at most 1,024 elements are added in binary32, their sums
 * in binary64. Constants are computed in binary64, elements in binary32. A device repeats itself
 * bit for bit, on any instruction set and with any number of threads. The CPU and CUDA add in
 * different orders: their sums agree to a relative 2^-20, their updates to 2^-18, and their
 * parameters to one rounding of the parameter. For matrices of at most 64 elements, row_var and
 * col_var are the same on both.
 */
typedef enum hr_adafactor_semantics {
    HR_ADAFACTOR_HF = 0,   /* transformers.optimization.Adafactor */
    HR_ADAFACTOR_TORCH = 1 /* torch.optim.Adafactor */
} hr_adafactor_semantics;

/* The phases of a step, in order. A caller whose tensors are parts of wholes, on several devices,
 * runs them one by one and adds sums over the parts in between. All others ask for
 * HR_ADAFACTOR_ALL. */
typedef enum hr_adafactor_phases {
    HR_ADAFACTOR_SUMS = 1,   /* writes sums of g^2 and param^2 to the workspace */
    HR_ADAFACTOR_STATES = 2, /* updates row_var and col_var, writes sums of row_var */
    HR_ADAFACTOR_NORM = 4,   /* updates variance, writes the sum of u^2 */
    HR_ADAFACTOR_APPLY = 8,  /* updates params, exp_avgs, rms_values and steps */
    HR_ADAFACTOR_ALL = 15
} hr_adafactor_phases;

/* The shape of a parameter: batch * rows * cols elements. */
typedef struct hr_adafactor_shape {
    int64_t batch, rows, cols; /* 1, 1 and numel if not factored */
    int64_t factored;          /* 0 or 1 */
    /* Rows, columns and elements of the whole, if the tensor is a part of one; 0: this tensor's
     * own. If whole_rows is not 0, sums over the rows are added over parts; whole_cols likewise. */
    int64_t whole_rows, whole_cols, whole_numel;
} hr_adafactor_shape;

typedef struct hr_adafactor_config {
    size_t size;         /* sizeof(hr_adafactor_config); set by an INIT macro */
    hr_step_config step; /* lr is ignored by HF with relative_step; skip_nonfinite must be 0 */
    hr_adafactor_semantics semantics;
    int32_t phases;          /* a sum of hr_adafactor_phases */
    double beta2_decay;      /* <= 0, finite */
    double eps1;             /* >= 0, finite; TORCH: negative for the epsilon of the type */
    double eps2;             /* >= 0, finite */
    double clip_threshold;   /* > 0; infinity clips nothing */
    double weight_decay;     /* >= 0, finite */
    double beta1;            /* in [0, 1); ignored without an exp_avgs list */
    int32_t scale_parameter; /* 1: alpha is scaled by RMS(param). Only HF reads this */
    int32_t relative_step;   /* 1: rho is min(1e-2, 1 / sqrt(t)). Only HF reads this */
    int32_t warmup_init; /* 1: rho starts at 1e-6 * t; needs relative_step. Only HF reads this */
} hr_adafactor_config;

/* The defaults of each implementation. Set `step.t`, or pass a `steps` list. */
#define HR_ADAFACTOR_HF_INIT                                                                      \
    {                                                                                             \
        sizeof(hr_adafactor_config), HR_STEP_CONFIG_INIT(0.0), HR_ADAFACTOR_HF, HR_ADAFACTOR_ALL, \
            -0.8, 1e-30, 1e-3, 1.0, 0.0, 0.0, 1, 1, 0                                             \
    }
#define HR_ADAFACTOR_TORCH_INIT                                                     \
    {                                                                               \
        sizeof(hr_adafactor_config), HR_STEP_CONFIG_INIT(1e-2), HR_ADAFACTOR_TORCH, \
            HR_ADAFACTOR_ALL, -0.8, -1.0, 1e-3, 1.0, 0.0, 0.0, 1, 1, 0              \
    }

/* hr_adafactor_workspace: writes the bytes of workspace that hr_adafactor needs to *bytes, in host
 * memory, for parameters of these shapes, host [count]. That is about 2 % of the bytes of large
 * matrices, and up to 4 times the bytes of matrices with few rows or columns.
 *
 * Errors: HR_INVALID_ARGUMENT if a pointer is NULL or a shape is not valid. */
HR_API hr_status hr_adafactor_workspace(size_t *bytes, const hr_adafactor_shape *shapes,
                                        int64_t count);

/*
 * hr_adafactor:
 *
 * params     in/out: f32, bf16 or f16, row-major, stored as config->step.weights says
 * row_vars   in/out: f32, [batch, rows] if factored, else numel 0; zeros before the first step.
 *            NULL if no parameter is factored
 * col_vars   in/out: f32, [batch, cols] if factored, else numel 0; zeros before the first step.
 *            NULL if no parameter is factored
 * variances  in/out: f32, numel of the param if not factored, else 0; zeros before the first step.
 *            NULL if every parameter is factored
 * exp_avgs   in/out: f32, numel of the param; zeros before the first step. NULL: no momentum
 * rms_values  out: f32, numel 1 each: RMS(param) before the step; written only if the rule uses it
 *            (TORCH, or HF with scale_parameter). NULL: not wanted
 * steps      in/out: as for hr_adamw; NULL: all use config->step.t
 * grads      in: f32, bf16 or f16, row-major, not changed
 * shapes     in: host [count]
 * workspace  scratch memory of exec's device, at a multiple of 8 bytes; workspace_bytes is its size
 *
 * A step makes three passes. In f32 they move, per element, 4 bytes of gradient and, to scale by
 * RMS(param), 4 of param; 4 of gradient; 4 of gradient and 8 of param: 24 bytes, or 12 in bf16, and
 * without the scale 20 or 10. On the CPU, tensors of up to 131,072 elements stay in the cache and
 * move 16 bytes. On CUDA a call makes seven launches per 100 tensors, ten if it has matrices of at
 * most 64 elements.
 *
 * A call for one matrix of 512 x 256 on the CPU; `param`, `grad`, `row_var` and `col_var` are void
 * *, and the last two point to zeros:
 *
 *     hr_adafactor_shape shape = {1, 512, 256, 1, 0, 0, 0}; // batch, rows, cols, factored
 *     hr_dtype f32 = HR_F32;
 *     int64_t numel = 512 * 256, rows = 512, cols = 256;
 *     hr_tensor_list params = {1, &param, &numel, &f32}, grads = {1, &grad, &numel, &f32};
 *     hr_tensor_list row_vars = {1, &row_var, &rows, &f32}, col_vars = {1, &col_var, &cols, &f32};
 *     hr_exec cpu = {HR_CPU, NULL};
 *     hr_adafactor_config config = HR_ADAFACTOR_HF_INIT;
 *     size_t bytes = 0;
 *     hr_adafactor_workspace(&bytes, &shape, 1);
 *     void *workspace = malloc(bytes); // kept for all steps
 *     config.step.t = 1;
 *     if (hr_adafactor(&params, &row_vars, &col_vars, NULL, NULL, NULL, NULL, &grads, &shape,
 *                      &config, workspace, bytes, &cpu))
 *         fprintf(stderr, "%s\n", hr_last_error());
 *
 * To run the phases one by one, pass the same arguments and workspace to each. The workspace begins
 * with arrays of binary64, which the caller adds over the parts of the tensors:
 *
 *     [count]      sums of param^2                     over all parts
 *     [count]      sums of u^2                         over all parts
 *     [matrices]   sums of row_var                     over the parts of the rows
 *     [rows]       sums of g^2                         over the parts of the columns
 *     [columns]    sums of g^2                         over the parts of the rows
 *
 * The last three have an entry for each matrix, row or column of the factored tensors that have
 * whole_rows or whole_cols or more than 64 elements per matrix, in the order of the list. Of a
 * tensor whose whole_numel (or numel, if that is 0) is 0, only the counter changes.
 *
 * Errors: as for hr_adamw; HR_INVALID_ARGUMENT also if a shape does not fit its tensors or the
 * workspace is too small.
 */
HR_API hr_status hr_adafactor(const hr_tensor_list *params, const hr_tensor_list *row_vars,
                              const hr_tensor_list *col_vars, const hr_tensor_list *variances,
                              const hr_tensor_list *exp_avgs, const hr_tensor_list *rms_values,
                              const hr_tensor_list *steps, const hr_tensor_list *grads,
                              const hr_adafactor_shape *shapes, const hr_adafactor_config *config,
                              void *workspace, size_t workspace_bytes, const hr_exec *exec);

/* ---- Unscaling, checking and measuring gradients --------------------------------------------- */

/*
 * hr_unscale_norm: unscales gradients, finds infinities and NaNs, and measures norms, in one pass.
 * For each element x of a gradient let
 *
 *     x' = x * (clip_coef / grad_scale)             a factor whose pointer is NULL is 1
 *
 * The factor is folded in binary64 and rounded to binary32 once. If `write` is set, x' replaces x;
 * if the factor is 1, nothing is stored.
 *
 * The norms are measured before x' is rounded to its type in memory. With S_k the sum of |x'|^p
 * over tensor k (or the maximum of |x'| if p is infinite),
 *
 *     norms[k]  = S_k^(1/p)             norm = (S_0 + S_1 + ...)^(1/p)   (or the maximum)
 *     found_inf = 1 if any x' is infinite or NaN, else not written, so that calls can share a flag
 *     culprit   = the smallest k with such an x', or -1
 *     clip_coef = min(1, max_norm / (norm + 1e-6))       the factor that clips to max_norm
 *
 * Sums have a fixed order without atomics: a device repeats itself bit for bit, with any number of
 * threads. On the CPU they are binary64, and a norm of up to 1e9 elements or so is the exact one
 * rounded to binary32, or its neighbor. CUDA does the same, but for p = 2 it first adds the squares
 * of 8 neighboring elements in binary32, choosing a scale at which no sum overflows and no square
 * that matters vanishes. Its norms are within 2.5 units in the last place of the exact ones, and
 * usually within 1.
 *
 * For p = 2 even the largest and the smallest binary32 values neither overflow nor vanish on the
 * way: only a norm above the largest binary32 is stored as infinity, and clip_coef is right even
 * then. For p other than 1, 2 and infinity, |x'|^p must neither overflow nor vanish in binary64;
 * otherwise the gradient counts as infinite or zero.
 */
typedef struct hr_unscale_norm_config {
    size_t size;     /* sizeof(hr_unscale_norm_config); set by HR_UNSCALE_NORM_CONFIG_INIT */
    double p;        /* order of the norms: > 0, infinity allowed */
    double max_norm; /* >= 0; for result->clip_coef */
    int32_t write;   /* 1: gradients are replaced by x', rounded to their type */
    /* device [1], or NULL; read when the work runs */
    const float *grad_scale; /* finite and > 0 */
    const float *clip_coef;
} hr_unscale_norm_config;

#define HR_UNSCALE_NORM_CONFIG_INIT                             \
    {                                                           \
        sizeof(hr_unscale_norm_config), 2.0, 0.0, 0, NULL, NULL \
    }

/* Where to store the measurements, in memory of exec's device. NULL: not wanted. */
typedef struct hr_unscale_norm_result {
    float *norm;      /* [1] */
    float *norms;     /* [count] */
    float *found_inf; /* [1] */
    int64_t *culprit; /* [1] */
    float *clip_coef; /* [1] */
} hr_unscale_norm_result;

/* hr_unscale_norm_workspace: writes the bytes of workspace that hr_unscale_norm needs for a list to
 * *bytes, in host memory: about 8 per 16,384 elements and 16 per tensor. Reads only the list's
 * count and numel.
 *
 * Errors: HR_INVALID_ARGUMENT if a pointer is NULL, or count or a numel is negative. */
HR_API hr_status hr_unscale_norm_workspace(size_t *bytes, const hr_tensor_list *grads);

/*
 * hr_unscale_norm:
 *
 * grads      in/out: f32, bf16 or f16; written only if config->write is 1
 * result     out: host struct of device pointers. NULL: multiply only, which needs config->write 1
 * workspace  scratch memory of exec's device, at a multiple of 8 bytes; NULL if result is NULL
 *
 * On CUDA a call makes one launch per 1,300 tensors and two small ones. Reads each gradient once,
 * and writes it once if config->write is 1.
 *
 * Errors: as for hr_adamw; HR_INVALID_ARGUMENT also if the workspace is too small or the call has
 * nothing to do (result is NULL and config->write is 0).
 */
HR_API hr_status hr_unscale_norm(const hr_tensor_list *grads, const hr_unscale_norm_result *result,
                                 const hr_unscale_norm_config *config, void *workspace,
                                 size_t workspace_bytes, const hr_exec *exec);

/* ---- The loss scale -------------------------------------------------------------------------- */

/*
 * hr_update_scale: updates a dynamic loss scale (Micikevicius et al., arXiv:1710.03740) on the
 * device, after a step:
 *
 *     found_inf != 0:  growth_tracker = 0;  hysteresis_tracker = hysteresis_tracker - 1
 *                      if hysteresis_tracker <= 0: scale = max(scale * backoff_factor, min_scale)
 *     else:            growth_tracker = growth_tracker + 1
 *                      if growth_tracker == growth_interval: growth_tracker = 0,
 *                          hysteresis_tracker = hysteresis, and
 *                          scale = min(scale * growth_factor, max_scale) unless that is infinite
 *
 * Products are computed in binary64 and rounded to binary32 once. With hysteresis 1, min_scale 0
 * and max_scale infinite this is the rule of torch.amp.GradScaler, to the bit.
 */
typedef struct hr_update_scale_config {
    size_t size;             /* sizeof(hr_update_scale_config) */
    double growth_factor;    /* > 1 */
    double backoff_factor;   /* in (0, 1) */
    double min_scale;        /* >= 0, finite in binary32 */
    double max_scale;        /* >= min_scale and > 0; the INIT macro sets no bound */
    int32_t growth_interval; /* >= 1: steps without an overflow until the scale grows */
    int32_t hysteresis;      /* >= 1: overflows since the scale last grew until it falls */
} hr_update_scale_config;

#define HR_UPDATE_SCALE_CONFIG_INIT                                                    \
    {                                                                                  \
        sizeof(hr_update_scale_config), 2.0, 0.5, 0.0, 1.7976931348623157e308, 2000, 1 \
    }

/*
 * scale               in/out: device [1]
 * growth_tracker      in/out: device [1]; 0 at first
 * hysteresis_tracker  in/out: device [1]; config->hysteresis at first. NULL if that is 1
 * found_inf           in: device [1]
 *
 * Errors: as for hr_adamw.
 */
HR_API hr_status hr_update_scale(float *scale, int32_t *growth_tracker, int32_t *hysteresis_tracker,
                                 const float *found_inf, const hr_update_scale_config *config,
                                 const hr_exec *exec);

/* ---- Gradient accumulation ------------------------------------------------------------------- */

/*
 * hr_accumulate: adds a list of gradients to binary32 sums. With x = grad * factor:
 *
 *     sum = sum + x                                               without `compensations`
 *     y = x - lost;  t = sum + y;  lost = (t - sum) - y;  sum = t    with `compensations`
 *     grad = 0                                                    if zero_grads
 *
 * With `compensations`, which hold the `lost` of each sum (Kahan, doi:10.1145/363707.363723), the
 * error stays within 2 roundings of the sum of |x|, for up to 2^20 gradients or so. Without, it
 * grows with the number of gradients. The bits are the same on the CPU and on CUDA.
 */
typedef struct hr_accumulate_config {
    size_t size;             /* sizeof(hr_accumulate_config) */
    double factor;           /* finite in binary32; ignored if factor_ptr is set */
    const float *factor_ptr; /* device [1], or NULL; read when the work runs */
    int32_t zero_grads;      /* 1: gradients are zero afterwards */
} hr_accumulate_config;

#define HR_ACCUMULATE_CONFIG_INIT                  \
    {                                              \
        sizeof(hr_accumulate_config), 1.0, NULL, 0 \
    }

/*
 * sums           in/out: f32
 * compensations  in/out: f32, zeros at first. NULL: the sums are not compensated
 * grads          in, or in/out with zero_grads: f32, bf16 or f16
 *
 * Errors: as for hr_adamw.
 */
HR_API hr_status hr_accumulate(const hr_tensor_list *sums, const hr_tensor_list *compensations,
                               const hr_tensor_list *grads, const hr_accumulate_config *config,
                               const hr_exec *exec);

/* ---- Matrices of rows ------------------------------------------------------------------------ */

/* A matrix of rows that lie `stride` elements apart, stride >= cols or rows <= 1. The elements of a
 * row are consecutive. */
typedef struct hr_rows {
    void *data;
    int64_t stride;
} hr_rows;

/* ---- Matrix products ------------------------------------------------------------------------- */

/* What happens to x = alpha op(A) op(B) + beta C + bias, or + beta addend, before it is stored, or beside it.
 * gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))): Hendrycks and Gimpel,
 * arXiv:1606.08415. */
typedef enum hr_gemm_epilogue {
    HR_GEMM_NONE = 0,
    HR_GEMM_GELU = 1,   /* C = gelu(x); aux = x, if there is aux */
    HR_GEMM_DGELU = 2,  /* C = x * gelu'(aux); bias_gradient[n] = sums of C over m, if wanted */
    HR_GEMM_BGRADA = 3, /* bias_gradient[m] = sums of op(A) over k */
    HR_GEMM_BGRADB = 4  /* bias_gradient[n] = sums of op(B) over k */
} hr_gemm_epilogue;

typedef struct hr_gemm_config {
    size_t size;         /* sizeof(hr_gemm_config) */
    hr_dtype dtype;      /* f32, bf16 or f16: of A and B */
    hr_dtype out_dtype;  /* f32, or dtype: of C, bias, aux and bias_gradient */
    int32_t transpose_a; /* 1: A is stored as [k, m], and op(A) is its transpose */
    int32_t transpose_b; /* 1: B is stored as [n, k] */
    double alpha, beta;  /* finite in binary32 */
    int64_t batch;       /* 0 or more products of the same sizes; 1 with an epilogue */
    int64_t batch_stride_a, batch_stride_b, batch_stride_c; /* elements from one to the next */
    hr_gemm_epilogue epilogue;
    /* On CUDA, as torch.backends.cuda.matmul has them; the CPU has no use for them. */
    int32_t allow_tf32;                        /* f32: factors may be rounded to 11 bits */
    int32_t allow_reduced_precision_reduction; /* 16 bits: parts of sums may be rounded to them */
    int32_t deterministic; /* long sums are not split: same bits with any workspace, at some cost */
    hr_rows aux;           /* [m, n]: out for HR_GEMM_GELU (NULL data: not wanted), in for _DGELU */
    void *bias_gradient;   /* out; NULL for other epilogues */
    hr_rows addend;        /* [m, n]: what beta multiplies in place of C; NULL data: C. Batches of
                              it lie batch_stride_c apart */
} hr_gemm_config;

#define HR_GEMM_CONFIG_INIT                                                                        \
    {                                                                                              \
        sizeof(hr_gemm_config), HR_F32, HR_F32, 0, 0, 1.0, 0.0, 1, 0, 0, 0, HR_GEMM_NONE, 0, 0, 0, \
            {NULL, 0}, NULL,                                                                       \
        {                                                                                          \
            NULL, 0                                                                                \
        }                                                                                          \
    }

/*
 * hr_gemm: multiplies matrices, in row-major order:
 *
 *     C[m, n] = alpha op(A)[m, k] op(B)[k, n] + beta C[m, n] + bias[n]
 *
 * Sums are binary32, and C is rounded once. beta 0 does not read C; k 0 or alpha 0 reads neither A
 * nor B and leaves beta C + bias. If there are several products, all add the same bias.
 *
 * c          out, and in if beta is not 0: [m, n]; batches must not overlap each other
 * a, b       in: op(A) is [m, k] and op(B) [k, n]. A batch stride of 0 repeats a matrix. Neither may
 *            overlap C; this is refused where it is certain, and otherwise not checked
 * bias       in: [n], or NULL; NULL with HR_GEMM_DGELU, _BGRADA and _BGRADB. The last two also need
 *            m and n of 1 or more and an alpha that is not 0
 * config->addend  in: [m, n] in out_dtype; it may be C, and may not overlap it otherwise, which is
 *            refused where it is certain. C is then not read
 * workspace  device memory of exec's device at a multiple of 256 bytes, or NULL with 0 bytes. With
 *            fewer bytes than hr_gemm_workspace() says there are fewer algorithms to choose from,
 *            and with fewer than 512 none for HR_GEMM_GELU and _DGELU. The CPU needs none
 *
 * CPU: a product that the host lent with hr_set_gemm(), else a blocked loop, which widens 16 bits in
 * the caches, and whose bits depend on neither the threads nor the instruction set. CUDA: cuBLASLt,
 * which is looked for at the first product: in the process (PyTorch brings it), then where the
 * system and the wheels of NVIDIA have it. What it does not do at once, as HR_GEMM_GELU and _DGELU,
 * is done a part of C at a time, from sums in the workspace; bias_gradient is summed apart. A device
 * repeats itself bit for bit, with the same workspace_bytes and alignment of addresses. A call can
 * be captured in a CUDA graph, the first one too.
 *
 * Errors: HR_UNSUPPORTED if there is no cuBLASLt, or if it has no algorithm for a product.
 */
HR_API hr_status hr_gemm(const hr_rows *c, const hr_rows *a, const hr_rows *b, const void *bias,
                         int64_t m, int64_t n, int64_t k, const hr_gemm_config *config,
                         void *workspace, size_t workspace_bytes, const hr_exec *exec);

/* Bytes of workspace with which hr_gemm() has every algorithm to choose from: 0 on the CPU. */
HR_API hr_status hr_gemm_workspace(size_t *bytes, int64_t m, int64_t n, int64_t k,
                                   const hr_gemm_config *config, const hr_exec *exec);

/* Computes what hr_gemm() was called for, with m, n, k and batch of 1 or more and without an
 * epilogue, and returns HR_OK; or writes nothing and returns HR_UNSUPPORTED, after which Headroom's
 * own loop does it: also where the host would be slower, as many are in 16 bits, which that loop
 * multiplies about as fast as binary32. `beta` multiplies config->addend where that is given. Other
 * results are those of the call. */
typedef hr_status (*hr_gemm_fn)(void *context, const hr_rows *c, const hr_rows *a, const hr_rows *b,
                                const void *bias, int64_t m, int64_t n, int64_t k,
                                const hr_gemm_config *config);

/* Lends the host's matrix product to the CPU, for the whole process; NULL returns to Headroom's own
 * loop. `context` is passed on. */
HR_API hr_status hr_set_gemm(hr_gemm_fn gemm, void *context);

/* ---- Muon ------------------------------------------------------------------------------------ */

/*
 * hr_muon_momentum, hr_newton_schulz, hr_muon_update: one step of Muon (Jordan et al., Muon: an
 * optimizer for hidden layers in neural networks, kellerjordan.github.io/posts/muon, 2024), as
 * torch.optim.Muon has it, over a list of matrices. The first gathers what is to be made orthogonal,
 * u, by matrices of a size; the second makes it nearly orthogonal; the third updates params.
 *
 * A matrix of u has no more rows than columns, so that of a parameter with more rows than columns it
 * is the transpose; and all of a size lie together, with a stride or without, so that products are
 * batched. hr_muon_matrix says where one parameter has its update.
 */
typedef struct hr_muon_matrix {
    int64_t rows, cols; /* of the parameter, its gradient and its moment, which are row-major */
    int64_t stride;     /* elements of the update from a line to the next, a line or more */
    int64_t transposed; /* 0: a line of the update is a row. 1: it is a column of the parameter */
} hr_muon_matrix;

/* hr_muon_workspace: writes the bytes of workspace of hr_muon_momentum, and of hr_muon_update where
 * rows are normalized, to *bytes, in host memory: about 8 for every 8,192 elements, and at least 8 for
 * each row.
 *
 * Errors: HR_INVALID_ARGUMENT if a pointer is NULL or a matrix is not valid. */
HR_API hr_status hr_muon_workspace(size_t *bytes, const hr_muon_matrix *matrices, int64_t count);

/*
 * hr_muon_momentum: updates moments, and writes u and the sum of its squares. For each element, with
 * g the gradient, scaled as at hr_step_config,
 *
 *     moment = moment + (1 - momentum) * (g - moment)
 *     u = g + momentum * (moment - g) if nesterov, else moment
 *
 * Both are computed as torch's lerp is: from the nearer end, with a weight w of binary32 as a + w * (b
 * - a) below 0.5 and as b + (w - 1) * (b - a) otherwise, product and sum fused (fmaf): in binary32
 * moments and u are those of torch.optim.Muon, bit for bit. Other types are computed in binary32, u
 * from the new moment before that is rounded or encoded.
 *
 * Elements are the same on the CPU and on CUDA. squares[k] is the sum of the squares of matrix k of
 * u, before u is rounded: in binary32 over at most 512 elements, then in binary64, in a fixed order;
 * the CPU and CUDA agree to a relative 2^-20. It overflows to infinity for norms above 1.8e19.
 *
 * A moment may take one byte, as at hr_momentum.
 */
typedef struct hr_muon_momentum_config {
    size_t size;         /* sizeof(hr_muon_momentum_config) */
    hr_step_config step; /* lr, t and weights are not used; skip_nonfinite must be 0 */
    double momentum;     /* >= 0, finite */
    int32_t nesterov;    /* 0 or 1 */
    int32_t block_size;  /* of moments in codes: 64, 128, 256 or 512 */
} hr_muon_momentum_config;

#define HR_MUON_MOMENTUM_CONFIG_INIT                                                            \
    {                                                                                           \
        sizeof(hr_muon_momentum_config),                                                        \
            {0.0, 1, NULL, NULL, NULL, NULL, NULL, HR_F32, 0, 0, {0, 0, 0, 0, 0}}, 0.95, 1, 256 \
    }

/*
 * updates    out: f32, bf16 or f16; numel is rows * cols, and the elements lie as `matrices` says.
 *            Between lines nothing is written. In f16 what is below 6e-8 is lost
 * squares    out: [count]
 * moments    in/out: f32, bf16 or f16, zeros before the first step; or, with absmaxs, u8
 * absmaxs    in/out: f32, hr_block_count(numel, block_size) elements; zeros before the first step.
 *            NULL: moments are numbers
 * grads      in: f32, bf16 or f16, not changed
 * matrices   in: host [count]
 * workspace  at a multiple of 8 bytes, of hr_muon_workspace() bytes
 *
 * If *found_inf is not 0, neither moments nor updates and squares are written. Reads and writes each
 * byte once: 12 bytes per element in f32 moments and 16-bit updates and 4 of gradient; with codes
 * 5.03 beside the gradient.
 *
 * Errors: as for hr_adamw; HR_INVALID_ARGUMENT also if a matrix does not fit its tensors or the
 * workspace is too small.
 */
HR_API hr_status hr_muon_momentum(const hr_tensor_list *updates, float *squares,
                                  const hr_tensor_list *moments, const hr_tensor_list *absmaxs,
                                  const hr_tensor_list *grads, const hr_muon_matrix *matrices,
                                  const hr_muon_momentum_config *config, void *workspace,
                                  size_t workspace_bytes, const hr_exec *exec);

/*
 * hr_newton_schulz: makes matrices nearly orthogonal: it scales each by its Frobenius norm, and takes
 * its singular values towards 1 by the iteration of Newton and Schulz with polynomials of degree 5:
 *
 *     X = x / max(sqrt(squares), eps)
 *     for each (a, b, c):  A = X X^T;  B = b A + c A A;  X = a X + B X
 *
 * The coefficients are those of Jordan by default, with which the singular values end between 0.7 and
 * 1.2; others are the Polar Express (Amsel et al., arXiv:2505.16932). HR_NEWTON_SCHULZ_GRAM computes
 * the same from products of m x m matrices alone, but for the first and last of a run (Gram
 * Newton-Schulz, Dao et al., 2026): with R = X X^T
 *
 *     Z = c R R + b R;  Q = Z + a I at first, else Q Z + a Q
 *     S = R Z + a R;  R = Z S + a S                                if another iteration follows
 *     X = Q X                                                      at the end
 *
 * It begins anew, with R of the new X, before the third iteration, for R loses the small singular
 * values of X. It is faster where n is several m, and less exact: bf16 has too few bits for it.
 *
 * Products are those of hr_gemm, batched, of the type of x. On the CPU those that are symmetric are
 * computed up to the diagonal, in blocks of 128 rows or more, and small matrices are shared among the
 * threads. On CUDA everything runs on exec's stream, the norm is not read by the host, and a call can
 * be captured in a CUDA graph.
 */
typedef enum hr_newton_schulz_variant {
    HR_NEWTON_SCHULZ_STANDARD = 0,
    HR_NEWTON_SCHULZ_GRAM = 1
} hr_newton_schulz_variant;

typedef struct hr_newton_schulz_config {
    size_t size;    /* sizeof(hr_newton_schulz_config) */
    hr_dtype dtype; /* f32, bf16 or f16: of x, and of all matrices of the iteration */
    hr_newton_schulz_variant variant;
    const double *coefficients; /* host [3 * steps]: a, b and c of each step, finite in binary32.
                                   NULL: (3.4445, -4.7750, 2.0315) in all */
    int64_t steps;              /* 1 to 100 */
    double eps;                 /* > 0, finite */
    int32_t allow_tf32;         /* this and the next two: as in hr_gemm_config */
    int32_t allow_reduced_precision_reduction;
    int32_t deterministic;
} hr_newton_schulz_config;

#define HR_NEWTON_SCHULZ_CONFIG_INIT                                                              \
    {                                                                                             \
        sizeof(hr_newton_schulz_config), HR_BF16, HR_NEWTON_SCHULZ_STANDARD, NULL, 5, 1e-7, 0, 0, \
            0                                                                                     \
    }

/*
 * x          in/out: [batch, m, n], dense, m <= n
 * squares    in: [batch], the sums of the squares of the matrices
 * workspace  at a multiple of 256 bytes, on the CPU of 64, of hr_newton_schulz_workspace() bytes. With
 *            less, but room for x and for two matrices [batch, m, m], four with _GRAM, each rounded up
 *            to 256 bytes, there are fewer algorithms of products to choose from
 *
 * Errors: HR_INVALID_ARGUMENT; HR_UNSUPPORTED where hr_gemm returns it. If a product fails, x holds
 * what the steps before it left.
 */
HR_API hr_status hr_newton_schulz(void *x, const float *squares, int64_t batch, int64_t m,
                                  int64_t n, const hr_newton_schulz_config *config, void *workspace,
                                  size_t workspace_bytes, const hr_exec *exec);

/* Bytes of workspace with which hr_newton_schulz() has every algorithm to choose from. */
HR_API hr_status hr_newton_schulz_workspace(size_t *bytes, int64_t batch, int64_t m, int64_t n,
                                            const hr_newton_schulz_config *config,
                                            const hr_exec *exec);

/*
 * hr_muon_update: updates params by what hr_newton_schulz() made of u. For each element, with s the
 * scale of its matrix,
 *
 *     param = param * (1 - lr * weight_decay) - lr * s * update
 *
 * 1 - lr * weight_decay and lr * s are computed in binary64 and rounded to binary32; the product is
 * rounded, the second product and the sum are fused (fmaf): in binary32 the params are those of
 * torch.optim.Muon, bit for bit. Elements are the same on the CPU and on CUDA.
 *
 * With row_vars the rows of an update are normalized before (NorMuon, Li et al., arXiv:2510.05491):
 *
 *     row_var = beta2 * row_var + (1 - beta2) * mean of update^2 over the row
 *     row = row / (sqrt(row_var) + 1e-10)
 *     update = update * (norm before / (norm after + 1e-10))
 *
 * with Frobenius norms of the whole matrix. The sums are in binary64 over parts in binary32, in a
 * fixed order; the CPU and CUDA agree to a relative 2^-20.
 */
typedef struct hr_muon_update_config {
    size_t size;         /* sizeof(hr_muon_update_config) */
    hr_step_config step; /* what scales gradients is not used; skip_nonfinite must be 0 */
    double weight_decay; /* >= 0, finite */
    double beta2;        /* in [0, 1); of row_vars */
} hr_muon_update_config;

/* The defaults of torch.optim.Muon. Set `step.t`, or pass a `steps` list. */
#define HR_MUON_UPDATE_CONFIG_INIT                                          \
    {                                                                       \
        sizeof(hr_muon_update_config), HR_STEP_CONFIG_INIT(1e-3), 0.1, 0.95 \
    }

/*
 * params     in/out: f32, bf16 or f16, row-major, stored as config->step.weights says
 * row_vars   in/out: f32, [rows] each; zeros before the first step. NULL: rows are not normalized
 * steps      in/out: as for hr_adamw; NULL: all use config->step.t. Only random rounding reads them
 * updates    in: f32, bf16 or f16, where `matrices` says
 * matrices   in: host [count]
 * scales     in: host [count], >= 0 and finite. NULL: 1
 * workspace  with row_vars as for hr_muon_momentum; else NULL with 0 bytes
 *
 * Reads and writes each byte once, with row_vars the updates twice.
 *
 * Errors: as for hr_muon_momentum.
 */
HR_API hr_status hr_muon_update(const hr_tensor_list *params, const hr_tensor_list *row_vars,
                                const hr_tensor_list *steps, const hr_tensor_list *updates,
                                const hr_muon_matrix *matrices, const double *scales,
                                const hr_muon_update_config *config, void *workspace,
                                size_t workspace_bytes, const hr_exec *exec);

/* ---- Norms of rows --------------------------------------------------------------------------- */

typedef enum hr_norm_kind {
    HR_NORM_RMS = 0,  /* Zhang and Sennrich, arXiv:1910.07467 */
    HR_NORM_LAYER = 1 /* Ba et al., arXiv:1607.06450 */
} hr_norm_kind;

/* Where a value is rounded to the dtype of the rows on its way to y. Models differ in it. */
typedef enum hr_norm_casting {
    HR_NORM_ONCE = 0, /* y alone, as torch and Gemma do */
    HR_NORM_LLAMA =
        1, /* also the normed value, before the weight multiplies it; HR_NORM_RMS only */
    HR_NORM_NARROW = 2 /* also the reciprocal of the root, before that; HR_NORM_RMS only */
} hr_norm_casting;

typedef struct hr_norm_config {
    size_t size; /* sizeof(hr_norm_config) */
    hr_norm_kind kind;
    hr_norm_casting casting;
    hr_dtype dtype;        /* f32, bf16 or f16: of all rows */
    hr_dtype weight_dtype; /* f32, bf16 or f16: of weight, bias and their gradients */
    double eps;            /* >= 0, finite */
    double offset;         /* finite; added to the weight: 0, or 1 for Gemma */
} hr_norm_config;

#define HR_NORM_CONFIG_INIT                                                          \
    {                                                                                \
        sizeof(hr_norm_config), HR_NORM_RMS, HR_NORM_ONCE, HR_F32, HR_F32, 1e-6, 0.0 \
    }

/*
 * hr_norm_forward: normalizes each row x of `cols` elements, with an addition before it if there is
 * a residual:
 *
 *     sum  = x + residual, rounded; x = sum                 with `residual`
 *     mean = sum of x / cols                                HR_NORM_LAYER; else 0
 *     rstd = 1 / sqrt(sum of (x - mean)^2 / cols + eps)
 *     hat  = (x - mean) * rstd
 *     y    = hat * (weight + offset) + bias
 *
 * All of it is binary32, and config->casting says what is rounded besides y. The sums are added in
 * an order that depends on cols alone: each device repeats itself bit for bit, for any number of
 * threads; the CPU and CUDA agree to a few units in the last place.
 *
 * y         out: [rows, cols]
 * sum       out: [rows, cols]; NULL without residual. May be x or residual
 * mean      out: f32 [rows]; NULL for HR_NORM_RMS, and where it is not wanted
 * rstd      out: f32 [rows], or NULL
 * x         in: [rows, cols]
 * residual  in: [rows, cols], or NULL
 * weight    in: [cols]; NULL counts as ones, to which no offset is added
 * bias      in: [cols], or NULL; NULL for HR_NORM_RMS
 *
 * rows may be 0; cols is 1 or more, and on CUDA at most 2^29, or HR_UNSUPPORTED is returned. y may be
 * x. No other output may overlap an input (not checked).
 */
HR_API hr_status hr_norm_forward(const hr_rows *y, const hr_rows *sum, float *mean, float *rstd,
                                 const hr_rows *x, const hr_rows *residual, const void *weight,
                                 const void *bias, int64_t rows, int64_t cols,
                                 const hr_norm_config *config, const hr_exec *exec);

/*
 * hr_norm_backward: from the gradient dy of y to those of x, weight and bias, in the same pass:
 *
 *     g       = dy * (weight + offset)
 *     dx      = rstd * (g - h * mean of (g * h) - mean of g) + dsum         no mean of g for RMS
 *     dweight = sum over rows of dy * hat
 *     dbias   = sum over rows of dy
 *
 * With `residual` in the forward call, x is its sum, dsum the gradient that reached the sum, and dx
 * the gradient of both addends. hat is rounded as it was in the forward call; h is hat without any
 * rounding, as autograd of models has it: where dx cancels, nothing of g is left. dweight and dbias
 * are added in binary32 over fixed groups of rows, and the groups in binary64 in a fixed order.
 *
 * dx              out: [rows, cols], or NULL. May be dy or dsum
 * dweight, dbias  out: [cols], or NULL
 * y               out: [rows, cols]: what the forward call wrote, so that it need not have been
 *                 kept; or NULL
 * dy              in: [rows, cols]; NULL if y alone is wanted
 * dsum            in: [rows, cols], or NULL
 * x, weight, bias in: as in the forward call; bias is read for y alone
 * mean, rstd      in: what the forward call wrote; mean is NULL for HR_NORM_RMS
 * workspace       at a multiple of 8 bytes, of as many bytes as hr_norm_workspace() says
 */
HR_API hr_status hr_norm_backward(const hr_rows *dx, void *dweight, void *dbias, const hr_rows *y,
                                  const hr_rows *dy, const hr_rows *dsum, const hr_rows *x,
                                  const void *weight, const void *bias, const float *mean,
                                  const float *rstd, int64_t rows, int64_t cols,
                                  const hr_norm_config *config, void *workspace,
                                  size_t workspace_bytes, const hr_exec *exec);

/* Bytes of workspace for hr_norm_backward() with dweight or dbias; without either it needs none. */
HR_API hr_status hr_norm_workspace(size_t *bytes, int64_t rows, int64_t cols,
                                   const hr_norm_config *config);

/* ---- Gated linear units ---------------------------------------------------------------------- */

typedef enum hr_activation {
    HR_SILU = 0,         /* x / (1 + e^-x) */
    HR_GELU = 1,         /* x (1 + erf(x / sqrt(2))) / 2; Hendrycks and Gimpel, arXiv:1606.08415 */
    HR_GELU_TANH = 2,    /* x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 */
    HR_RELU = 3,         /* max(x, 0) */
    HR_RELU_SQUARED = 4, /* max(x, 0)^2; So et al., arXiv:2109.08668 */
    HR_SWIGLU_ALPHA = 5  /* hr_experts_forward() alone, and described there */
} hr_activation;

typedef struct hr_glu_config {
    size_t size; /* sizeof(hr_glu_config) */
    hr_activation activation;
    hr_dtype dtype; /* f32, bf16 or f16: of all rows */
} hr_glu_config;

#define HR_GLU_CONFIG_INIT                     \
    {                                          \
        sizeof(hr_glu_config), HR_SILU, HR_F32 \
    }

/*
 * hr_glu_forward: the product of an activated gate and another projection, or an activation alone;
 * Shazeer, arXiv:2002.05202:
 *
 *     h = act(gate) * up         h = act(gate) if up is NULL
 *
 * in binary32, rounded once: the same bits on every device. Where act(x) / x is below the smallest
 * normal number of binary32, SiLU and both GELUs are -0 and their slopes 0, at -infinity too.
 *
 * h         out: [rows, cols]. May be gate or up
 * gate      in: [rows, cols]
 * up        in: [rows, cols], or NULL. Projections that lie side by side, [rows, gate | up], are two
 *           matrices with a stride of 2 * cols
 *
 * rows may be 0; cols is 1 or more. A matrix may be the same as another where it says so; else an
 * output may not overlap anything (not checked).
 */
HR_API hr_status hr_glu_forward(const hr_rows *h, const hr_rows *gate, const hr_rows *up,
                                int64_t rows, int64_t cols, const hr_glu_config *config,
                                const hr_exec *exec);

/*
 * hr_glu_backward: from the gradient dh of h to those of gate and up, and h again, in one pass:
 *
 *     dgate = dh * up * act'(gate)
 *     dup   = dh * act(gate)
 *     h     = act(gate) * up      the bits of the forward call
 *
 * The slope of both ReLUs at 0 is 0, and dgate is 0 wherever the slope of a ReLU is.
 *
 * dgate     out: [rows, cols]. May be gate, up or dh
 * dup       out: [rows, cols]; NULL without up. May be up, gate or dh
 * h         out: [rows, cols], so that it need not have been kept; or NULL. May be dh, gate or up
 * dh        in: [rows, cols]
 * gate, up  in: as in the forward call
 */
HR_API hr_status hr_glu_backward(const hr_rows *dgate, const hr_rows *dup, const hr_rows *h,
                                 const hr_rows *dh, const hr_rows *gate, const hr_rows *up,
                                 int64_t rows, int64_t cols, const hr_glu_config *config,
                                 const hr_exec *exec);

/* ---- Rotary embeddings ----------------------------------------------------------------------- */

/* Vectors of head_dim consecutive elements, one for each head of each token of each batch. Strides
 * are >= 0 and count elements, so that [batch, tokens, heads, head_dim], [batch, heads, tokens,
 * head_dim] and the parts of a packed product of query, key and value are all read in place. */
typedef struct hr_heads {
    void *data;
    int64_t batch_stride, token_stride, head_stride;
} hr_heads;

typedef struct hr_rope_shape {
    int64_t batch, tokens, q_heads, k_heads; /* >= 0; k_heads is 0 without k */
    int64_t head_dim;                        /* >= 1 */
    int64_t table_rows;                      /* >= 0: positions that cos and sin have */
} hr_rope_shape;

typedef struct hr_rope_config {
    size_t size;          /* sizeof(hr_rope_config) */
    hr_dtype dtype;       /* f32, bf16 or f16: of q, k and the results */
    hr_dtype table_dtype; /* f32, bf16 or f16: of cos and sin */
    int32_t interleaved;  /* 1: pairs are neighbors, as in GPT-J; 0: halves, as in Llama */
    int32_t inverse;      /* 1: rotates backwards, which is the gradient */
    int64_t rotary_dim;   /* even, in [2, head_dim]; 0: head_dim */
    int64_t offset;       /* >= 0: position of the first token; ignored with `positions` */
    int64_t batch_step;   /* >= 0: what a batch adds to it; 0 unless each has rows of its own */
} hr_rope_config;

#define HR_ROPE_CONFIG_INIT                                   \
    {                                                         \
        sizeof(hr_rope_config), HR_F32, HR_F32, 0, 0, 0, 0, 0 \
    }

/*
 * hr_rope: rotates pairs of elements of queries and keys by angles that grow with the position of
 * their token (Su et al., arXiv:2104.09864). With p the position and n = rotary_dim / 2, pair i of a
 * vector x is (x[i], x[i + n]), or (x[2i], x[2i + 1]) if config->interleaved, and
 *
 *     first'  = first * cos[p][i] - second * sin[p][i]         sin counts as -sin
 *     second' = second * cos[p][i] + first * sin[p][i]         if config->inverse
 *     p       = positions[batch][token], or else offset + batch * batch_step + token
 *
 * for 0 <= i < n. It is computed in binary32 and rounded once. Elements from rotary_dim on are
 * copied. The gradient of q is the rotation of the gradient of q_out with `inverse`.
 *
 * q_out      out: [batch, tokens, q_heads, head_dim]; its elements do not share memory
 * k_out      out: [batch, tokens, k_heads, head_dim]; NULL without k
 * q, k       in: like q_out and k_out; k may be NULL
 * cos, sin   in: [table_rows, n], also the first columns of wider rows: where a table has both
 *            halves of rotary_dim columns alike, the first is read
 * positions  in: int64 [batch, tokens], with the stride from batch to batch, or stride 0 if all
 *            batches have the same; or NULL
 *
 * q_out may be q, and k_out may be k, if their strides are the same too: the rotation is then in
 * place. No output may otherwise overlap an input or the other output (not checked).
 *
 * Errors: HR_INVALID_ARGUMENT if a position has no row in the tables. Positions in the memory of a
 * CUDA device are not looked at before the call; there, a token whose position has no row gets NaN
 * in place of its rotated elements, and nothing outside of the tables is read.
 */
HR_API hr_status hr_rope(const hr_heads *q_out, const hr_heads *k_out, const hr_heads *q,
                         const hr_heads *k, const hr_rows *cos, const hr_rows *sin,
                         const hr_rows *positions, const hr_rope_shape *shape,
                         const hr_rope_config *config, const hr_exec *exec);

/* ---- Cross entropy --------------------------------------------------------------------------- */

typedef enum hr_cross_entropy_reduction {
    HR_REDUCE_SUM = 0,
    HR_REDUCE_MEAN = 1,        /* NaN if D is 0: no row counts, or all weigh 0 */
    HR_REDUCE_MEAN_OR_ZERO = 2 /* 0 if D is 0 */
} hr_cross_entropy_reduction;

typedef struct hr_cross_entropy_config {
    size_t size;
    hr_dtype dtype;       /* f32, bf16 or f16: of logits */
    hr_dtype grad_dtype;  /* of grad: the same, or bf16 or f16 where logits are f32 */
    int32_t target_bytes; /* 8: targets are int64_t; 4: int32_t */
    hr_cross_entropy_reduction reduction; /* for hr_cross_entropy_reduce alone */
    int64_t ignore_index;   /* rows with this target count for nothing; may be any number */
    double label_smoothing; /* in [0, 1] */
    double softcap;         /* > 0; 0: none */
    double z_loss;          /* >= 0, finite; 0: none */
    void *workspace;        /* for hr_cross_entropy_reduce alone; NULL: none */
    size_t workspace_bytes; /* HR_CROSS_ENTROPY_WORKSPACE or more; 0 without */
} hr_cross_entropy_config;

#define HR_CROSS_ENTROPY_CONFIG_INIT                                                             \
    {                                                                                            \
        sizeof(hr_cross_entropy_config), HR_F32, HR_F32, 8, HR_REDUCE_MEAN, -100, 0.0, 0.0, 0.0, \
            NULL, 0                                                                              \
    }

/* Bytes of the workspace of hr_cross_entropy_reduce. */
#define HR_CROSS_ENTROPY_WORKSPACE 16384

/*
 * hr_cross_entropy_forward: the cross entropy of each row of logits with its target y, from 0 to
 * classes - 1:
 *
 *     z    = softcap * tanh(logit / softcap)                               with a softcap
 *     lse  = log of the sum of exp(z)
 *     loss = (1 - s) * w_y * (lse - z_y)
 *            + s / classes * sum over j of w_j * (lse - z_j)               s: label_smoothing
 *            + z_loss * lse^2
 *
 * w is 1 without `weight`. A row is read once. Exponentials are binary32, relative to the largest
 * logit of the row; the loss is put together in binary64 and rounded once, so that a small loss is
 * as exact as the sum of exponentials is. Sums are added in an order that depends on the number of
 * classes (on CUDA also on the address of the row): each device repeats itself bit for bit, for any
 * number of threads. Sources: Milakov and Gimelshein, arXiv:1805.02867; label smoothing: Szegedy et
 * al., arXiv:1512.00567; z-loss: Chowdhery et al., arXiv:2204.02311; softcap: Gemma Team,
 * arXiv:2408.00118.
 *
 * loss      out: f32 [rows]; 0 for ignored rows
 * lse       out: f32 [rows]; 0 for ignored rows, which are not read
 * lse_low   out: f32 [rows]: what rounding to binary32 took off lse, or NULL. With it the gradient
 *           of logits around 60 is 10 times as exact
 * argmax    out: [rows]: the first class with the largest z, -1 for ignored rows; NULL: not wanted
 * logits    in: [rows, classes]. Minus infinity stands for a class that is masked
 * target    in: [rows], int64_t or int32_t as config->target_bytes says
 * weight    in: f32 [classes], or NULL
 *
 * rows may be 0; classes is 1 or more. A row whose logits are all minus infinity, or that has a NaN
 * or plus infinity, has the loss NaN.
 *
 * Errors: HR_INVALID_ARGUMENT on the CPU if a target is neither ignore_index nor a class. On CUDA,
 * where nobody waits for the targets, such a row has the loss NaN, and its gradient is NaN; nothing
 * is read outside of the logits and the weights. The three functions do the same.
 */
HR_API hr_status hr_cross_entropy_forward(float *loss, float *lse, float *lse_low, int64_t *argmax,
                                          const hr_rows *logits, const void *target,
                                          const float *weight, int64_t rows, int64_t classes,
                                          const hr_cross_entropy_config *config,
                                          const hr_exec *exec);

/*
 * hr_cross_entropy_backward: the gradient of the logits, with p_j = exp(z_j - lse):
 *
 *     a    = dloss * factors[0];  b = dloss * factors[1]
 *     dz_j = p_j * (a * ((1 - s) * w_y + s / classes * sum of w) + b * 2 * z_loss * lse)
 *            - a * s / classes * w_j - a * (1 - s) * w_y if j is y
 *     grad = dz * (1 - tanh(logit / softcap)^2)                            with a softcap
 *
 * At the target p_y - 1 is computed without cancellation. A probability below 2^-126 counts as 0.
 * Rows that are ignored get zeros. Each logit is read once, each gradient written once.
 *
 * grad      out: [rows, classes], in config->grad_dtype. May be the logits: grad->data is then
 *           logits->data, and the rows begin at the same addresses. Otherwise no overlap
 * dloss     in: f32: the gradient of the loss of row i is dloss[i * dloss_stride]
 * dloss_stride  1, or any other number of 0 or more; 0: one number for all rows
 * factors   in: f32 [2] from hr_cross_entropy_reduce(), or NULL for ones
 * logits, target, weight  in: as in the forward call
 * lse, lse_low            in: what it wrote; lse_low may be NULL for zeros
 */
HR_API hr_status hr_cross_entropy_backward(const hr_rows *grad, const float *dloss,
                                           int64_t dloss_stride, const float *factors,
                                           const hr_rows *logits, const void *target,
                                           const float *weight, const float *lse,
                                           const float *lse_low, int64_t rows, int64_t classes,
                                           const hr_cross_entropy_config *config,
                                           const hr_exec *exec);

/*
 * hr_cross_entropy_reduce: the sum or the mean of the losses, on the device, and the factors with
 * which hr_cross_entropy_backward() gives the gradient of it. With D the sum of w_y and n the
 * number of rows that are not ignored,
 *
 *     result  = sum of loss + sum of z_loss * lse^2                   HR_REDUCE_SUM
 *     result  = sum of loss / D + sum of z_loss * lse^2 / n           otherwise
 *     factors = 1, 1            or      1 / D, 1 / n
 *
 * A factor is 0 where D or n is, and so are the gradients of a mean of nothing. Sums are binary64, in
 * a fixed order, which on CUDA is another one with a workspace: without one a single thread block
 * adds up all rows. The factors depend on the targets alone, so that they can be had before there is
 * a loss.
 *
 * result   out: f32 [1], or NULL
 * factors  out: f32 [2], or NULL
 * loss     in: f32 [rows], from a forward call whose config->z_loss is 0, because a z-loss hides
 *          what is small beside it; NULL if result is
 * lse      in: f32 [rows]; NULL if result is, or without a z_loss
 * config->workspace  scratch memory of exec's device at a multiple of 8 bytes, or NULL. Worth it on
 *          CUDA from some thousand rows on; not used for less, nor on the CPU
 */
HR_API hr_status hr_cross_entropy_reduce(float *result, float *factors, const float *loss,
                                         const float *lse, const void *target, const float *weight,
                                         int64_t rows, int64_t classes,
                                         const hr_cross_entropy_config *config,
                                         const hr_exec *exec);

/* ==== Part 3, experimental ==================================================================== */

/*
 * Define HR_EXPERIMENTAL before the include to see this part: blocks and losses that make several
 * passes over their inputs. Its functions and configs may change in every release.
 */
#ifdef HR_EXPERIMENTAL

/* ---- Matrices of few bits -------------------------------------------------------------------- */

/*
 * hr_matrix: a matrix [rows, cols] that is only read, such as the frozen weight of a layer: its
 * elements, or codes of 4 or 8 bits and their scales, as bitsandbytes stores them. Products see it
 * in `dtype`: an element decodes to a binary32 product that is rounded once, to nearest even.
 *
 *     format         bits    element (r, c), with i = r * cols + c           codes
 *     HR_DENSE               data[r * stride + c]
 *     HR_NF4         4.5     table[code(i)] * absmax[i / block_size]         half a byte
 *     HR_FP4         4.5     the same, with another table                    half a byte
 *     HR_INT8_ROWS   8       code * absmax[r] * 7.874015718698502e-3f        i8, [rows, cols]
 *     HR_MXFP4       4.25    table[code(i)] * 2^(absmax_codes[i / 32] - 127) half a byte
 *
 * Two codes of 4 bits lie in a byte, that of the even i in its upper half. Blocks are counted
 * through the whole matrix and cross its rows; the last may be short. NF4 (Dettmers et al.,
 * arXiv:2305.14314) has quantiles of the normal distribution in [-1, 1]; FP4 has a sign, two bits of
 * exponent and one of mantissa, in units of 1/192: 0, 1, 128, 192, 64, 96, 32, 48, and the same with
 * a minus, of which the first is plus 0 again. The factor of HR_INT8_ROWS is 1/127, rounded up as
 * bitsandbytes has it, and products are taken from the left (LLM.int8(), arXiv:2208.07339).
 *
 * Scales may be quantized in turn, which leaves 4.127 bits in blocks of 64: absmax_codes is then not
 * NULL, absmax not read, and, with the signed map of hr_dynamic_map,
 *
 *     absmax[b] = map[absmax_codes[b]] * absmax_scales[b / 256] + offset[0]
 *
 * in two roundings.
 *
 * HR_MXFP4 is that of the OCP Microscaling Formats (MX) Specification v1.0, as the files of gpt-oss
 * store it. It is only read. Blocks have 32 elements, and cols is a multiple of 32. Of two codes in a
 * byte, that of the even i lies in the lower half. A code has a sign, two bits of exponent and one of
 * mantissa (E2M1): 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same with a minus, of which the first is -0.
 * A scale is the exponent of a power of two (E8M0), which stands in absmax_codes; 255 is NaN, and so
 * are all elements of its block. Every element is exact in f32 and bf16, but those of 2^128 and more,
 * which are infinities; f16 is rounded.
 */
typedef enum hr_format {
    HR_DENSE = 0,
    HR_NF4 = 1,
    HR_FP4 = 2,
    HR_INT8_ROWS = 3,
    HR_MXFP4 = 4
} hr_format;

typedef struct hr_matrix {
    size_t size; /* sizeof(hr_matrix) */
    hr_format format;
    hr_dtype dtype;     /* f32, bf16 or f16: of decoded elements */
    int64_t rows, cols; /* at most 2^59 elements */
    int64_t stride;     /* HR_DENSE: elements from a row to the next, >= cols; else not read */
    void *data;         /* [rows * cols] elements or codes; (rows * cols + 1) / 2 bytes in 4 bits.
                           Codes may be at any address */
    int32_t block_size; /* NF4, FP4: a power of two from 32 to 4096; else not read */
    int32_t reserved;   /* 0 */
    float *absmax;      /* [blocks]; HR_INT8_ROWS: [rows]; HR_MXFP4: not read, as the last two */
    uint8_t *absmax_codes; /* [blocks]; NF4, FP4: or NULL; HR_INT8_ROWS: NULL */
    float *absmax_scales;  /* with absmax_codes: [hr_block_count(blocks, 256)] */
    float *offset;         /* with absmax_codes: [1] */
} hr_matrix;

#define HR_MATRIX_INIT                                                                    \
    {                                                                                     \
        sizeof(hr_matrix), HR_DENSE, HR_F32, 0, 0, 0, NULL, 64, 0, NULL, NULL, NULL, NULL \
    }

typedef struct hr_quantize_matrix_config {
    size_t size;      /* sizeof(hr_quantize_matrix_config) */
    int32_t search;   /* 1: the scale of a block of 4-bit codes is the best of several, see below */
    int32_t reserved; /* 0 */
} hr_quantize_matrix_config;

#define HR_QUANTIZE_MATRIX_CONFIG_INIT          \
    {                                           \
        sizeof(hr_quantize_matrix_config), 0, 0 \
    }

/*
 * hr_quantize_matrix: writes the codes and scales of x.
 *
 *     absmax = the largest |x| of the block or row          NaN if one is NaN
 *     code   = that of the value nearest to x / absmax: up to the middle between two of them, as
 *              binary32 has it, the lower. FP4: of the two zeros the second if x > 0
 *     code   = x * (127 / absmax), rounded to nearest even            HR_INT8_ROWS
 *
 * The first quotient is computed as a product with the rounded reciprocal. Where absmax is below
 * 2^-64, both factors are scaled, so that none overflows. A block of zeros has absmax 0 and codes of
 * 0; so has the half byte after the last element of an odd number. x / absmax is NaN for all x of a
 * block with a NaN, and for the infinities of one with an infinity: such x get the code of 1
 * (HR_INT8_ROWS: 0), and the block decodes to NaN, or to NaN and infinities.
 *
 * With absmax_codes, offset is the mean of absmax, summed in binary64 in an order that depends on
 * their number alone, and codes and scales are those of hr_quantize_blocks, signed and in blocks of
 * 256, for absmax - offset.
 *
 * With config->search, absmax of a block of NF4 or FP4 is the multiple of its largest |x| which
 * leaves the least sum of squared errors, of 1, 34/32, 31/32, 30/32, 29/32, 28/32, 27/32 and 26/32,
 * the first of equal ones. Squares are counted in units of 2^-22 of the largest squared, rounded
 * down. Blocks whose largest |x| is 2^127 or more are not searched. On normal numbers in blocks of
 * 64 the mean squared error is 0.87 of that without a search.
 *
 * matrix  out: what its pointers point to. Not HR_DENSE. With absmax_codes, absmax is workspace
 * x       in: [rows, cols] of `dtype`
 * dtype   f32, bf16 or f16
 *
 * Errors: HR_INVALID_ARGUMENT if an argument breaks its contract; HR_UNSUPPORTED for HR_MXFP4.
 */
HR_API hr_status hr_quantize_matrix(const hr_matrix *matrix, const hr_rows *x, hr_dtype dtype,
                                    const hr_quantize_matrix_config *config, const hr_exec *exec);

/*
 * hr_dequantize_matrix: decodes the rectangle of `rows` rows from `row` on and `cols` columns from
 * `col` on, or copies that of a dense matrix. The bits are the same on the CPU and on CUDA.
 *
 * out     out: [rows, cols] of matrix->dtype
 * matrix  in
 *
 * Errors: HR_INVALID_ARGUMENT if an argument breaks its contract.
 */
HR_API hr_status hr_dequantize_matrix(const hr_rows *out, const hr_matrix *matrix, int64_t row,
                                      int64_t rows, int64_t col, int64_t cols, const hr_exec *exec);

/* ---- Linear layers of such matrices ---------------------------------------------------------- */

/*
 * hr_linear_forward, hr_linear_backward: y = x W^T + bias and dx = dy W, for x [m, cols], y [m, rows]
 * and a matrix W [rows, cols] that has no gradient. W is decoded to the workspace in parts, of rows
 * in forward and of columns in backward, so that each element of y and dx is rounded once. The
 * results are those of hr_gemm with parts of the decoded matrix; with its own loop on the CPU they
 * do not depend on the parts.
 *
 * With at most 16 rows of x, forward decodes W on the way, and writes no part of it to memory. Sums
 * are binary32 then, in an order that depends on cols alone. On CUDA codes must be at a multiple of
 * 16 bytes for this, and cols a multiple of 32. HR_MXFP4 is decoded in parts for any number of rows.
 *
 * config->addend is added to the sum, which is rounded once all the same.
 */
typedef struct hr_linear_config {
    size_t size;        /* sizeof(hr_linear_config) */
    int32_t allow_tf32; /* this and the next two: as in hr_gemm_config */
    int32_t allow_reduced_precision_reduction;
    int32_t deterministic;
    int32_t reserved; /* 0 */
    hr_rows addend;   /* in, of the shape and type of y or dx, and possibly y or dx itself, but no
                         other part of it, which is not checked; NULL data: nothing is added */
} hr_linear_config;

#define HR_LINEAR_CONFIG_INIT                 \
    {                                         \
        sizeof(hr_linear_config), 0, 0, 0, 0, \
        {                                     \
            NULL, 0                           \
        }                                     \
    }

typedef struct hr_linear_needs {
    size_t best;  /* bytes: a part of 4 MiB on the CPU, 32 MiB on CUDA, or at least 64 rows or
                     columns, and what hr_gemm takes */
    size_t least; /* bytes: fewer are refused */
    size_t whole; /* bytes with which the whole matrix is decoded at once */
} hr_linear_needs;

/* hr_linear_query: says how much workspace to give for m rows of x. It may be 0 in all. HR_DENSE
 * needs what hr_gemm takes. */
HR_API hr_status hr_linear_query(hr_linear_needs *needs, int64_t m, const hr_matrix *matrix,
                                 int32_t backward, const hr_linear_config *config,
                                 const hr_exec *exec);

/*
 * y, dx      out: of matrix->dtype; [m, rows] and [m, cols] of the matrix. They must not overlap an
 *            input; this is not checked
 * x, dy      in: likewise, [m, cols] and [m, rows]
 * bias       in: [rows] of matrix->dtype, or NULL
 * config     NULL counts as HR_LINEAR_CONFIG_INIT
 * workspace  memory of exec's device at a multiple of 256 bytes, or 64 on the CPU, of as many bytes
 *            as hr_linear_query() says for this call; more makes larger parts
 *
 * m may be 0.
 *
 * Errors: HR_UNSUPPORTED where hr_gemm returns it, or where W has more rows than a grid can take.
 */
HR_API hr_status hr_linear_forward(const hr_rows *y, const hr_rows *x, const hr_matrix *matrix,
                                   const void *bias, int64_t m, const hr_linear_config *config,
                                   void *workspace, size_t workspace_bytes, const hr_exec *exec);
HR_API hr_status hr_linear_backward(const hr_rows *dx, const hr_rows *dy, const hr_matrix *matrix,
                                    int64_t m, const hr_linear_config *config, void *workspace,
                                    size_t workspace_bytes, const hr_exec *exec);

/* ---- Such layers with adapters --------------------------------------------------------------- */

/*
 * hr_lora_forward, hr_lora_backward: a linear layer whose matrix W [rows, cols] stays as it is, and
 * to which two small matrices A [rank, cols] and B [rows, rank] are added that learn (LoRA, Hu et
 * al., arXiv:2106.09685); W may have few bits (QLoRA, Dettmers et al., arXiv:2305.14314). For x
 * [m, cols] and y [m, rows]:
 *
 *     t  = drop(x) A^T                                    [m, rank], kept for the backward pass
 *     y  = x W^T + scale t B^T + bias
 *
 *     dt = scale dy B                                     [m, rank], in the workspace
 *     dx = dy W + drop(dt A)        dA = dt^T drop(x)        dB = scale dy^T t
 *
 * drop() makes elements of a matrix [m, cols] zeros, and divides the others by 1 - p, where p is
 * config->dropout as a multiple of 2^-16. Which they are depends on the element's row and column and
 * on the seed alone, so that no mask is kept: element (r, c) is dropped if 16 of the random bits of
 * Philox4x32-10 with the key `seed` and the counter {c / 8 in 64 bits, r in 64 bits} are less than
 * 2^16 p: the lower half of word c % 8 / 2 for an even c, else its upper half.
 *
 * A and B are rounded to matrix->dtype for the products, whose sums are binary32. t, dt and the
 * products with A and B are rounded to matrix->dtype; what these products make of y and dx is then
 * added to the sums with W, which are rounded once, as config->addend is in hr_linear_config. No x in
 * another dtype, no dropped x and no decoded W is made as a whole.
 */
typedef struct hr_lora_config {
    size_t size;            /* sizeof(hr_lora_config) */
    int64_t rank;           /* 1 or more */
    double scale;           /* finite in binary32 */
    double dropout;         /* from 0 to below 1 */
    const int64_t *seed;    /* [1], a scalar; NULL without dropout */
    hr_dtype adapter_dtype; /* f32, or matrix->dtype: of A, B and their gradients */
    int32_t allow_tf32;     /* this and the next two: as in hr_gemm_config */
    int32_t allow_reduced_precision_reduction;
    int32_t deterministic;
} hr_lora_config;

#define HR_LORA_CONFIG_INIT                                        \
    {                                                              \
        sizeof(hr_lora_config), 1, 1.0, 0.0, NULL, HR_F32, 0, 0, 0 \
    }

/* Bytes of workspace for a call with m rows: copies of A and B where they are rounded, dt, and what
 * hr_linear_query() calls best, or as much for parts of drop(x). */
HR_API hr_status hr_lora_workspace(size_t *bytes, int64_t m, const hr_matrix *matrix,
                                   int32_t backward, const hr_lora_config *config,
                                   const hr_exec *exec);

/*
 * y          out: [m, rows] of matrix->dtype
 * t          out of forward, in of backward: [m, rank] of matrix->dtype; NULL if db is
 * dx         out: [m, cols] of matrix->dtype, or NULL
 * da, db     out: [rank, cols] and [rows, rank] of adapter_dtype, or NULL
 * x          in: [m, cols] of matrix->dtype; backward: NULL if da is
 * dy         in: [m, rows] of matrix->dtype
 * matrix     in
 * a, b       in: [rank, cols] and [rows, rank] of adapter_dtype
 * bias       in: [rows] of matrix->dtype, or NULL
 * workspace  memory of exec's device at a multiple of 256 bytes, or 64 on the CPU, of as many bytes
 *            as hr_lora_workspace() says for this call; more makes larger parts of W
 *
 * m may be 0: da and db are zeros then. Outputs must not overlap each other or an
 * input; this is not checked.
 *
 * Errors: HR_UNSUPPORTED where hr_gemm returns it, or where a matrix has more rows than a grid can
 * take.
 */
HR_API hr_status hr_lora_forward(const hr_rows *y, const hr_rows *t, const hr_rows *x,
                                 const hr_matrix *matrix, const hr_rows *a, const hr_rows *b,
                                 const void *bias, int64_t m, const hr_lora_config *config,
                                 void *workspace, size_t workspace_bytes, const hr_exec *exec);
HR_API hr_status hr_lora_backward(const hr_rows *dx, const hr_rows *da, const hr_rows *db,
                                  const hr_rows *dy, const hr_rows *x, const hr_rows *t,
                                  const hr_matrix *matrix, const hr_rows *a, const hr_rows *b,
                                  int64_t m, const hr_lora_config *config, void *workspace,
                                  size_t workspace_bytes, const hr_exec *exec);

/*
 * hr_lora_norms: the norms of the rows of W + scale B A, which DoRA (Liu et al., arXiv:2402.09353)
 * divides a layer by, without that matrix: for row i, with its rows w of W and b of B,
 *
 *     norms[i] = sqrt(|w|^2 + 2 scale b . (A w) + scale^2 b . (A A^T b))
 *
 * 0 where rounding makes the sum negative. W is decoded to the workspace in parts of rows; A and B
 * are rounded to matrix->dtype, as the products of hr_lora_forward see them. A w and A A^T are
 * binary32, the sum of the three is binary64.
 *
 * norms      out: f32 [rows]
 * matrix     in
 * a, b       in: [rank, cols] and [rows, rank] of config->adapter_dtype
 * config     of hr_lora_forward, whose dropout and seed are not read
 * workspace  as for hr_lora_forward, of as many bytes as hr_lora_norms_workspace() says
 *
 * Errors: as for hr_lora_forward.
 */
HR_API hr_status hr_lora_norms(float *norms, const hr_matrix *matrix, const hr_rows *a,
                               const hr_rows *b, const hr_lora_config *config, void *workspace,
                               size_t workspace_bytes, const hr_exec *exec);
HR_API hr_status hr_lora_norms_workspace(size_t *bytes, const hr_matrix *matrix,
                                         const hr_lora_config *config, const hr_exec *exec);

/* ---- The MLP block --------------------------------------------------------------------------- */

/*
 * hr_mlp_forward, hr_mlp_backward: the feed-forward half of a transformer block, and its gradients,
 * as one call each. For x [tokens, hidden] and `features` inner features,
 *
 *     normed    = norm(x)                                     hr_norm_forward
 *     gate, up  = normed * gate_up^T + gate_up_bias           hr_gemm
 *     activated = act(gate) * up          gated;  else act(gate)     hr_glu_forward
 *     y         = activated * down^T + down_bias + x          `+ x` with config->residual
 *
 * Matrices lie as torch's Linear has them, [outputs, inputs]. x is added to the product before it is
 * rounded; on the CPU, down_bias is added to x first.
 *
 * What is kept between the two calls is the caller's choice. Backward evaluates again what it needs
 * and was not kept, and every choice gives the same gradients to the bit, on one device with one
 * tile_tokens:
 *
 *     HR_MLP_SAVE_ALL      normed, gate, up, activated      nothing is evaluated again
 *     HR_MLP_SAVE_GATE_UP  gate, up                         norm and activation are: no product
 *     HR_MLP_SAVE_INPUT    nothing                          also the product of gate and up
 *
 * Each also keeps x, in the caller's memory, and the 4 bytes per token of the norm's statistics, 8
 * for HR_NORM_LAYER. Buffers are left out if only gradients that are not wanted need them.
 *
 * Both calls take `tile_tokens` tokens at a time, so that the workspace does not grow with the
 * number of tokens. Gradients of 16-bit matrices are added over the tiles in binary32.
 *
 * Each matrix may be an hr_matrix in config, which has no gradient. With few bits its products are
 * those of hr_linear_forward and hr_linear_backward, which decode it in parts, once for each product
 * with a tile: with SAVE_ALL or SAVE_GATE_UP twice in a step of training, for the product and for the
 * gradient of what it multiplies; with SAVE_INPUT gate and up once more. With the loop of hr_gemm on
 * the CPU the results are those of the decoded matrices, bit for bit, but for tiles of at most 16
 * tokens, whose products in forward, and of gate and up again, are sums of their own.
 */
typedef enum hr_mlp_save {
    HR_MLP_SAVE_ALL = 0,
    HR_MLP_SAVE_GATE_UP = 1,
    HR_MLP_SAVE_INPUT = 2
} hr_mlp_save;

typedef struct hr_mlp_config {
    size_t size; /* sizeof(hr_mlp_config) */
    hr_norm_kind norm;
    hr_norm_casting casting;
    hr_activation activation;
    hr_dtype dtype;      /* f32, bf16 or f16: of rows, matrices, their biases and gradients */
    hr_dtype norm_dtype; /* f32, bf16 or f16: of norm_weight, norm_bias and their gradients */
    int32_t gated;       /* 1: act(gate) * up. 0: there is no up */
    int32_t residual;    /* 1: x is added to the result */
    double eps;          /* of the norm: >= 0, finite */
    double offset;       /* added to norm_weight: 0, or 1 for Gemma */
    int64_t tile_tokens; /* tokens taken at a time, >= 0. 0: about 4,096, or all of them where that
                            takes no more memory */
    int32_t allow_tf32;  /* this and the next two: as in hr_gemm_config */
    int32_t allow_reduced_precision_reduction;
    int32_t deterministic;
    int32_t reserved; /* 0 */
    /* In `dtype`, in the place of the matrices of the same name in hr_mlp_params, whose data is then
     * NULL; NULL: those. Where gate and up are two, both are given or none */
    const hr_matrix *gate_up, *up, *down;
} hr_mlp_config;

#define HR_MLP_CONFIG_INIT                                                                     \
    {                                                                                          \
        sizeof(hr_mlp_config), HR_NORM_RMS, HR_NORM_ONCE, HR_SILU, HR_F32, HR_F32, 1, 1, 1e-6, \
            0.0, 0, 0, 0, 0, 0, NULL, NULL, NULL                                               \
    }

/* The weights of a block, which are only read, or their gradients. Biases may be NULL, norm_weight
 * too: it then counts as ones, to which no offset is added. A gradient that is not wanted is
 * NULL. */
typedef struct hr_mlp_params {
    void *norm_weight; /* [hidden] */
    void *norm_bias;   /* [hidden]; HR_NORM_LAYER only */
    hr_rows gate_up;   /* gated: [2 * features, hidden], the rows of gate first; else, or with `up`,
                          [features, hidden] */
    hr_rows up;        /* [features, hidden], if gate and up are two matrices */
    hr_rows down;      /* [hidden, features] */
    void *gate_up_bias, *up_bias, *down_bias; /* as long as their matrices have rows */
} hr_mlp_params;

/* What forward keeps for backward: dense rows. NULL: not kept. */
typedef struct hr_mlp_saved {
    float *mean;     /* [tokens]; HR_NORM_LAYER only */
    float *rstd;     /* [tokens] */
    void *normed;    /* [tokens, hidden] */
    void *gate_up;   /* [tokens, 2 * features], gate first; [tokens, features] if not gated */
    void *activated; /* [tokens, features] */
} hr_mlp_saved;

/* The gradients that backward is to compute: a sum of these. */
typedef enum hr_mlp_wanted {
    HR_MLP_X = 1,
    HR_MLP_NORM_WEIGHT = 2,
    HR_MLP_NORM_BIAS = 4,
    HR_MLP_GATE_UP = 8,       /* both matrices, if there are two */
    HR_MLP_GATE_UP_BIAS = 16, /* both biases */
    HR_MLP_DOWN = 32,
    HR_MLP_DOWN_BIAS = 64
} hr_mlp_wanted;

typedef struct hr_mlp_needs {
    size_t mean, rstd, normed, gate_up, activated; /* bytes to keep; 0: not needed */
    size_t forward_workspace, backward_workspace;  /* bytes */
    int64_t tile_tokens;                           /* the ones that are used */
    int32_t reads_x;                               /* whether backward reads x */
} hr_mlp_needs;

/*
 * hr_mlp_query: says what to keep and how much workspace to allocate. `wanted` is a sum of
 * hr_mlp_wanted; 0 is inference, which keeps nothing.
 *
 * needs   out: host
 *
 * Errors: HR_INVALID_ARGUMENT if an argument breaks its contract.
 */
HR_API hr_status hr_mlp_query(hr_mlp_needs *needs, int64_t tokens, int64_t hidden, int64_t features,
                              hr_mlp_save save, uint32_t wanted, const hr_mlp_config *config,
                              const hr_exec *exec);

/*
 * hr_mlp_forward:
 *
 * y          out: [tokens, hidden]. May be x if nothing is kept
 * saved      out: host struct of the buffers to fill. NULL: nothing is kept
 * x          in: [tokens, hidden]
 * params     in: host struct
 * workspace  at a multiple of 16 bytes, of as many bytes as hr_mlp_query() says for these buffers
 *
 * tokens may be 0; hidden and features are 1 or more.
 *
 * Errors: HR_INVALID_ARGUMENT, and what hr_gemm returns where a device has no library of products.
 */
HR_API hr_status hr_mlp_forward(const hr_rows *y, const hr_mlp_saved *saved, const hr_rows *x,
                                const hr_mlp_params *params, int64_t tokens, int64_t hidden,
                                int64_t features, const hr_mlp_config *config, void *workspace,
                                size_t workspace_bytes, const hr_exec *exec);

/*
 * hr_mlp_backward: from the gradient dy of y to those of x and the weights. It writes neither what
 * was kept nor dy, so it can run again.
 *
 * dx         out: [tokens, hidden], or NULL. Not NULL if a gradient of the norm is wanted, which
 *            passes through it. May be dy if it may be overwritten and config->residual is 0
 * grads      out: host struct. Gradients are written, not added to
 * dy         in: [tokens, hidden]
 * x          in: as in the forward call; NULL if hr_mlp_query() says that it is not read
 * params     in: as in the forward call
 * saved      in: what the forward call kept. rstd, and mean for HR_NORM_LAYER, are needed where x
 *            is read; other buffers that are NULL are evaluated again
 * workspace  as for hr_mlp_forward()
 *
 * Errors: as for hr_mlp_forward.
 */
HR_API hr_status hr_mlp_backward(const hr_rows *dx, const hr_mlp_params *grads, const hr_rows *dy,
                                 const hr_rows *x, const hr_mlp_params *params,
                                 const hr_mlp_saved *saved, int64_t tokens, int64_t hidden,
                                 int64_t features, const hr_mlp_config *config, void *workspace,
                                 size_t workspace_bytes, const hr_exec *exec);

/* ---- Experts --------------------------------------------------------------------------------- */

/*
 * hr_route: sorts the rows of a mixture of experts by expert. Token t has `slots` rows, number
 * t * slots and those that follow, and index[row] is the expert of a row.
 *
 * offsets    out: [experts + 1]: rows offsets[e] to offsets[e + 1] - 1 of `order` belong to expert e
 * order      out: [rows], the numbers of rows: by expert, and those of one expert ascending. Rows
 *            whose index is no expert, which are dropped, come last, ascending too
 * index      in: [rows] integers of index_bytes bytes each: 2, 4 or 8
 * rows       0 or more, below 2^31
 * experts    1 or more, below 2^30
 *
 * Errors: HR_INVALID_ARGUMENT if an argument breaks its contract.
 */
HR_API hr_status hr_route(int32_t *offsets, int32_t *order, const void *index, int32_t index_bytes,
                          int64_t rows, int64_t experts, const hr_exec *exec);

/*
 * hr_experts_forward, hr_experts_backward: the experts of a mixture (Shazeer et al.,
 * arXiv:1701.06538), and their gradients, for rows that hr_route() sorted. For a row of token t with
 * expert e and weight w,
 *
 *     gate, up = x[t] gate_up[e]^T + gate_up_bias[e]
 *     h        = act(min(gate, limit)) * (clamp(up, -limit, limit) + c)     c: 1 for HR_SWIGLU_ALPHA,
 *     h        = act(min(gate, limit))             if not gated                   else 0
 *     y[t]    += w * (h down[e]^T + down_bias[e])
 *
 * with act(x) = x / (1 + e^(-alpha x)) for HR_SWIGLU_ALPHA, as in gpt-oss. Experts come one after
 * another, ascending, their rows in tiles of config->tile_rows, and each token's sum is binary32 in
 * that order, rounded once: nothing is as long as all rows but what is kept. The results of the
 * first product and h are rounded to config->dtype, those of the second are not. Backward:
 *
 *     q        = dy[t] down[e]                      dweight = sum of h * q + sum of dy[t] * down_bias[e]
 *     ddown[e] = sum of dy[t]^T (w h)               ddown_bias[e] = sum of w dy[t]
 *     dgate, dup from w q as hr_glu_backward() has them; 0 for values at the limit or beyond
 *     dgate_up[e], dgate_up_bias[e], dx[t]          from those
 *
 * so that the result of the second product is not needed. Experts without rows get gradients of 0.
 * Every level of what is kept gives the same bits, and so does any number of threads, with a product
 * of hr_gemm() that does:
 *
 *     HR_EXPERTS_SAVE_ALL      gate, up, h      nothing is evaluated again
 *     HR_EXPERTS_SAVE_GATE_UP  gate, up         the activation is
 *     HR_EXPERTS_SAVE_INPUT    nothing          and the first product
 */
typedef enum hr_experts_save {
    HR_EXPERTS_SAVE_ALL = 0,
    HR_EXPERTS_SAVE_GATE_UP = 1,
    HR_EXPERTS_SAVE_INPUT = 2
} hr_experts_save;

typedef struct hr_experts_config {
    size_t size;              /* sizeof(hr_experts_config) */
    hr_activation activation; /* HR_SILU, HR_GELU_TANH, HR_RELU_SQUARED or HR_SWIGLU_ALPHA */
    hr_dtype dtype;           /* f32, bf16 or f16: of x, y, biases, their gradients, what is kept */
    hr_dtype weight_dtype;    /* f32, or dtype: of weight and dweight */
    int32_t gated;            /* 1: act(gate) * up. 0: there is no up */
    int32_t transposed;       /* 1: matrices are [inputs, outputs] */
    int32_t interleaved;      /* 1: gate and up alternate, gate first. 0: all of gate come first */
    double alpha;             /* above 0, finite: of HR_SWIGLU_ALPHA; 1.702 for gpt-oss */
    double limit;             /* above 0, finite; 0: there is none */
    int64_t tile_rows;        /* rows taken at a time, >= 0. 0: 512 */
    int32_t allow_tf32;       /* this and the next two: as in hr_gemm_config */
    int32_t allow_reduced_precision_reduction;
    int32_t deterministic;
    int32_t reserved; /* 0 */
} hr_experts_config;

#define HR_EXPERTS_CONFIG_INIT                                                                 \
    {                                                                                          \
        sizeof(hr_experts_config), HR_SILU, HR_F32, HR_F32, 1, 0, 0, 1.702, 0.0, 0, 0, 0, 0, 0 \
    }

typedef struct hr_experts_sizes {
    int64_t tokens, slots;    /* 0 or more; 1 or more. Rows, their product: below 2^31 */
    int64_t experts;          /* 1 or more, below 2^30 */
    int64_t hidden, features; /* 1 or more. width: 2 * features if gated, else features */
} hr_experts_sizes;

/* Stacks of matrices, which are only read: a matrix is that of expert 0, and `pitch` elements lead
 * from it to the next. In hr_experts_config.dtype, or in f32: then each is rounded when its expert's
 * turn comes. HR_DENSE only; other formats return HR_UNSUPPORTED. */
typedef struct hr_experts_params {
    hr_matrix gate_up;                 /* [width, hidden]; transposed: [hidden, width] */
    hr_matrix down;                    /* [hidden, features]; transposed: [features, hidden] */
    int64_t gate_up_pitch, down_pitch; /* not less than a matrix takes */
    const void *gate_up_bias;          /* [experts, width], or NULL */
    const void *down_bias;             /* [experts, hidden], or NULL */
} hr_experts_params;

/* Gradients, which are written, not added to: of the shapes of the stacks, dense and in the dtype of
 * each. NULL: not wanted. */
typedef struct hr_experts_grads {
    void *gate_up, *down, *gate_up_bias, *down_bias;
} hr_experts_grads;

/* What forward keeps for backward, in the order of hr_route(): dense rows of config->dtype. NULL: not
 * kept. Rows that are dropped are not written. */
typedef struct hr_experts_saved {
    void *gate_up;   /* [rows, width] */
    void *activated; /* [rows, features]: h */
} hr_experts_saved;

/* The gradients that backward is to compute: a sum of these. */
typedef enum hr_experts_wanted {
    HR_EXPERTS_X = 1,
    HR_EXPERTS_WEIGHT = 2,
    HR_EXPERTS_GATE_UP = 4,
    HR_EXPERTS_GATE_UP_BIAS = 8,
    HR_EXPERTS_DOWN = 16,
    HR_EXPERTS_DOWN_BIAS = 32
} hr_experts_wanted;

typedef struct hr_experts_needs {
    size_t gate_up, activated;                    /* bytes to keep; 0: not needed */
    size_t forward_workspace, backward_workspace; /* bytes */
    int64_t tile_rows;                            /* the ones that are used */
    int32_t reads_x;                              /* whether backward reads x */
} hr_experts_needs;

/*
 * hr_experts_query: says what to keep and how much workspace to allocate, which no routing changes.
 * `wanted` is a sum of hr_experts_wanted; 0 is inference, which keeps nothing.
 *
 * needs   out: host
 * params  in: host. Of the memory that it points to nothing is read
 *
 * Errors: HR_UNSUPPORTED for a matrix of few bits, and on CUDA while a stream is captured: a graph
 * would repeat the products for the routing of the capture.
 */
HR_API hr_status hr_experts_query(hr_experts_needs *needs, const hr_experts_sizes *sizes,
                                  hr_experts_save save, uint32_t wanted,
                                  const hr_experts_params *params, const hr_experts_config *config,
                                  const hr_exec *exec);

/*
 * hr_experts_forward:
 *
 * y             out: [tokens, hidden], dense
 * saved         out: host struct of the buffers to fill. NULL: nothing is kept
 * x             in: [tokens, hidden]
 * weight        in: [tokens * slots] of config->weight_dtype
 * order         in: what hr_route() wrote
 * offsets_host  in: host: what it wrote, copied to the host on CUDA
 * params        in: host struct
 * sizes         in: host struct
 * workspace     at a multiple of 16 bytes, of as many bytes as hr_experts_query() says
 *
 * Errors: as for hr_experts_query, and what hr_gemm returns where a device has no library of
 * products.
 */
HR_API hr_status hr_experts_forward(void *y, const hr_experts_saved *saved, const hr_rows *x,
                                    const void *weight, const int32_t *order,
                                    const int32_t *offsets_host, const hr_experts_params *params,
                                    const hr_experts_sizes *sizes, const hr_experts_config *config,
                                    void *workspace, size_t workspace_bytes, const hr_exec *exec);

/*
 * hr_experts_backward: from the gradient dy of y to those of x, the weights and the stacks. It
 * writes neither what was kept nor dy, so it can run again.
 *
 * dx         out: [tokens, hidden], dense; or NULL
 * dweight    out: like weight; or NULL
 * grads      out: host struct; NULL: none
 * dy         in: [tokens, hidden]
 * x          in: as in the forward call; NULL if hr_experts_query() says that it is not read
 * saved      in: what the forward call kept; NULL: nothing
 * the others as in the forward call
 *
 * Errors: as for hr_experts_forward.
 */
HR_API hr_status hr_experts_backward(void *dx, void *dweight, const hr_experts_grads *grads,
                                     const hr_rows *dy, const hr_rows *x, const void *weight,
                                     const int32_t *order, const int32_t *offsets_host,
                                     const hr_experts_saved *saved, const hr_experts_params *params,
                                     const hr_experts_sizes *sizes, const hr_experts_config *config,
                                     void *workspace, size_t workspace_bytes, const hr_exec *exec);

/* ---- Divergences ----------------------------------------------------------------------------- */

#define HR_DIVERGENCE_STATISTICS 6    /* numbers of a row that the backward call needs */
#define HR_LEAST_TEMPERATURE     1e-6 /* and the largest temperature is 1e6 */

typedef struct hr_divergence_config {
    size_t size;
    hr_dtype dtype;      /* f32, bf16 or f16: of student and teacher */
    hr_dtype grad_dtype; /* of grad: the same, or bf16 or f16 where logits are f32 */
    double beta;         /* 0, 1, or from 1e-6 to 1 - 1e-6 */
    double temperature;  /* from 1e-6 to 1e6 */
} hr_divergence_config;

#define HR_DIVERGENCE_CONFIG_INIT                              \
    {                                                          \
        sizeof(hr_divergence_config), HR_F32, HR_F32, 0.0, 1.0 \
    }

/*
 * hr_divergence_forward: the divergence between two distributions over classes in each row, the
 * generalized Jensen-Shannon divergence of distillation. With T the temperature,
 *
 *     p    = softmax of student / T,  q = softmax of teacher / T
 *     m    = beta * q + (1 - beta) * p
 *     loss = beta * KL(q || m) + (1 - beta) * KL(p || m)            beta between 0 and 1
 *     loss = KL(q || p), the forward divergence                     beta = 0
 *     loss = KL(p || q), the reverse divergence                     beta = 1
 *
 * where KL(q || p) is the sum of q * (log q - log p), in natural logarithms. The two ends are
 * defined so, after the limits of loss / beta and of loss / (1 - beta); loss itself tends to 0. The
 * loss is not multiplied by T^2, which distillation from soft targets does to keep gradients of
 * different temperatures alike: the caller can. Sources: Agarwal et al., arXiv:2306.13649, section 3;
 * temperature: Hinton et al., arXiv:1503.02531.
 *
 * A class whose probability is 0 on the side that is averaged over counts for nothing, so that minus
 * infinity masks classes in both. Probabilities below 2^-126 are 0. Elements are binary32: log p -
 * log q comes from the difference of the logits, which is divided by T last, so that close
 * distributions have a small error at any T. Logarithms of m are taken over the probability that has
 * the greater weight in it, so that the error is as small as the loss where beta is near 0 or 1.
 * What there is one of in a row is binary64. Sums are added in an order that depends on the number
 * of classes (on CUDA also on the addresses of the rows): each device repeats itself bit for bit,
 * for any number of threads.
 *
 * loss        out: f32 [rows]; 0 for ignored rows
 * statistics  out: f32 [rows, HR_DIVERGENCE_STATISTICS]: what hr_divergence_backward() needs, or
 *             NULL. T times the log-sum-exp of student / T and what rounding took off it, the same
 *             of teacher / T, and of KL(p || m), which is 0 if beta is; zeros for ignored rows
 * student     in: [rows, classes]
 * teacher     in: [rows, classes]
 * ignored     in: u8 [rows]: rows with another number than 0 count for nothing and are not read;
 *             NULL: all count
 *
 * rows may be 0; classes is 1 or more. A row with a NaN or plus infinity in one of the matrices, or
 * with minus infinity alone, has the loss NaN. The loss is infinite where one distribution excludes a
 * class of the one that it is compared with, but not with beta between 0 and 1.
 */
HR_API hr_status hr_divergence_forward(float *loss, float *statistics, const hr_rows *student,
                                       const hr_rows *teacher, const uint8_t *ignored, int64_t rows,
                                       int64_t classes, const hr_divergence_config *config,
                                       const hr_exec *exec);

/*
 * hr_divergence_backward: the gradient of the student's logits; the teacher is a constant:
 *
 *     grad_j = dloss / T * (p_j - q_j)                                                  beta = 0
 *     grad_j = dloss / T * p_j * (log(p_j / q_j) - KL(p || q))                          beta = 1
 *     grad_j = dloss / T * (1 - beta) * p_j * (log(p_j / m_j) - KL(p || m))             between
 *
 * p_j - q_j is computed without cancellation. Rows that are ignored get zeros.
 *
 * grad        out: [rows, classes], in config->grad_dtype. May be the student's logits: grad->data is
 *             then student->data, and the rows begin at the same addresses. Otherwise no overlap
 * dloss       in: f32: the gradient of the loss of row i is dloss[i * dloss_stride]
 * dloss_stride  1, or any other number of 0 or more; 0: one number for all rows
 * student, teacher, ignored  in: as in the forward call
 * statistics  in: what it wrote, with the same config but for grad_dtype
 */
HR_API hr_status hr_divergence_backward(const hr_rows *grad, const float *dloss,
                                        int64_t dloss_stride, const hr_rows *student,
                                        const hr_rows *teacher, const uint8_t *ignored,
                                        const float *statistics, int64_t rows, int64_t classes,
                                        const hr_divergence_config *config, const hr_exec *exec);

/* ---- Linear cross entropy -------------------------------------------------------------------- */

/* In which order the logits are computed, which never exist all at once. */
typedef enum hr_linear_cross_entropy_mode {
    HR_LINEAR_CROSS_ENTROPY_AUTO = 0,
    HR_LINEAR_CROSS_ENTROPY_TOKENS = 1,    /* some rows, all classes: 6 N H V operations */
    HR_LINEAR_CROSS_ENTROPY_VOCABULARY = 2 /* all rows, some classes: 8 N H V, no sums of weights */
} hr_linear_cross_entropy_mode;

typedef struct hr_linear_cross_entropy_config {
    size_t size;
    hr_dtype dtype;       /* f32, bf16 or f16: of hidden, weight and bias */
    hr_dtype grad_dtype;  /* of gradients: f32, or bf16 where dtype is */
    int32_t target_bytes; /* 8: targets are int64_t; 4: int32_t */
    hr_cross_entropy_reduction reduction;
    hr_linear_cross_entropy_mode mode;
    int32_t add_to_weight_grads; /* 1: gradients of weight and bias are added to what is there */
    int32_t allow_tf32, allow_reduced_precision_reduction, deterministic; /* as in hr_gemm_config */
    int64_t ignore_index;
    double label_smoothing; /* in [0, 1] */
    double softcap;         /* > 0; 0: none */
    double z_loss;          /* >= 0, finite; 0: none */
    double logit_scale;     /* finite, not 0 */
    int64_t sequence;       /* 0, or rows per sequence: a row then takes the target of the next */
    size_t workspace_limit; /* bytes to stay below where sizes allow it; 0: chosen from them */
    int32_t check_target;   /* 1: the targets are checked on CUDA too, for which the call waits */
    int32_t capability;     /* 10 times that of the GPU to plan for, 90 for 9.0; 0: exec's device */
    /* [classes, features] in `dtype`: the weight in place of inputs->weight, which is then not read.
     * It has no gradient. NULL: inputs->weight */
    const hr_matrix *matrix;
    /* Of hr_linear_cross_entropy_backward(), f32 [rows]: the gradient of the entropy of row i is
     * dentropy[i * dentropy_stride], and entropy is what the forward call has written. NULL: no
     * gradient comes from it */
    const float *entropy, *dentropy;
    int64_t dentropy_stride; /* 0: one number for all rows */
} hr_linear_cross_entropy_config;

#define HR_LINEAR_CROSS_ENTROPY_CONFIG_INIT                                                       \
    {                                                                                             \
        sizeof(hr_linear_cross_entropy_config), HR_F32, HR_F32, 8, HR_REDUCE_MEAN,                \
            HR_LINEAR_CROSS_ENTROPY_AUTO, 0, 0, 0, 0, -100, 0.0, 0.0, 0.0, 1.0, 0, 0, 0, 0, NULL, \
            NULL, NULL, 0                                                                         \
    }

/* What is read. bias, class_weight, token_weight and denominator may be NULL. */
typedef struct hr_linear_cross_entropy_inputs {
    hr_rows hidden;            /* [rows, features] */
    hr_rows weight;            /* [classes, features] */
    const void *bias;          /* [classes] */
    const void *target;        /* [rows], int64_t or int32_t as config->target_bytes says */
    const float *class_weight; /* [classes] */
    const float *token_weight; /* [rows]: a factor for each target, where the target lies */
    const float *denominator;  /* [1]: what the sum is divided by, instead of config->reduction's */
} hr_linear_cross_entropy_inputs;

/* What is written for each row, f32 or int64_t [rows]; NULL: not wanted. Rows that are ignored get
 * 0, and -1 in argmax and rank. */
typedef struct hr_linear_cross_entropy_rows {
    float *loss;
    float *lse, *lse_low;    /* as in hr_cross_entropy_forward() */
    float *target_logit;     /* after the softcap */
    float *largest;          /* of the logits */
    float *entropy;          /* lse - sum of p_j z_j */
    int64_t *argmax;         /* the first class with the largest logit */
    int64_t *rank;           /* how many classes have a larger logit than the target */
    float *mean_logit;       /* the mean of z over the classes */
    float *log_sum_sq_probs; /* log of the sum of p_j^2 over these */
} hr_linear_cross_entropy_rows;

/* Gradients, in config->grad_dtype. NULL data or address: not wanted. */
typedef struct hr_linear_cross_entropy_grads {
    hr_rows hidden; /* [rows, features] */
    hr_rows weight; /* [classes, features] */
    void *bias;     /* [classes] */
} hr_linear_cross_entropy_grads;

/* Which gradients are wanted: a sum of these. */
typedef enum hr_linear_cross_entropy_wanted {
    HR_LINEAR_CROSS_ENTROPY_HIDDEN = 1,
    HR_LINEAR_CROSS_ENTROPY_WEIGHT = 2,
    HR_LINEAR_CROSS_ENTROPY_BIAS = 4
} hr_linear_cross_entropy_wanted;

typedef struct hr_linear_cross_entropy_needs {
    size_t workspace;                  /* bytes */
    int64_t rows, classes;             /* of the logits that exist at a time */
    hr_linear_cross_entropy_mode mode; /* that was chosen */
} hr_linear_cross_entropy_needs;

/*
 * hr_linear_cross_entropy_query: says how much workspace to allocate for one of the functions below,
 * and in which order it computes. `wanted` is a sum of hr_linear_cross_entropy_wanted; 0: the
 * forward pass alone.
 *
 * AUTO takes TOKENS if all rows fit the limit. Else, on the CPU, unless a chunk of 64 rows does not
 * fit. On CUDA it takes what is expected to take less time: TOKENS reads and writes sums of the
 * gradient of weight for each chunk of rows; VOCABULARY computes the logits once more where gradients
 * are wanted, and reads and writes sums of the gradient of hidden for each tile of classes. It depends
 * on the sizes, on what is wanted and on the compute capability, with rates of a GPU that has it. With
 * config->capability exec may name a GPU that is not there, also in a build without CUDA; a call with
 * the same config computes in that order.
 *
 * A limit of 0 stands for half of the bytes of weight in `dtype`, and at least 32 MiB (256 MiB on
 * CUDA), of which VOCABULARY leaves up to half to the copies of its rows. The limit is for the logits;
 * about 100 bytes per row, the rows of a chunk twice, and sums of the gradient of weight come to it: 2
 * bytes for each element of weight where grad_dtype is bf16 and there are several chunks; and with
 * config->matrix the decoded weights of some classes, below.
 */
HR_API hr_status hr_linear_cross_entropy_query(hr_linear_cross_entropy_needs *needs, int64_t rows,
                                               int64_t features, int64_t classes, uint32_t wanted,
                                               const hr_linear_cross_entropy_config *config,
                                               const hr_exec *exec);

/*
 * hr_linear_cross_entropy: the loss of a linear layer and its gradients in one pass:
 *
 *     logit = logit_scale * (hidden weight^T + bias)
 *     loss, lse, gradients of the logits                as in hr_cross_entropy_forward, _backward
 *     row   = token_weight * loss
 *     result = sum of (row - token_weight * z) / D + sum of token_weight * z / n,  z = z_loss * lse^2
 *
 * (z is added, and not taken off a rounded row) with D the sum of token_weight * w_y and n the sum of token_weight over the rows that count, 1 and
 * 1 for HR_REDUCE_SUM, and both the denominator where one is given. Logits are binary32 and are
 * computed for some rows or some classes at a time. Rows that are ignored are left out of the
 * products on the CPU; on CUDA, where nobody waits for their number, products are of all rows.
 *
 * The gradient of weight is summed over chunks of rows in binary32, where grad_dtype is bf16 in two
 * halves: the upper ones are the gradient itself.
 *
 * A config->matrix of few bits is decoded to the workspace in parts of as many classes as take 4 MiB
 * in binary32 on the CPU, and half of that in `dtype` where it is not f32, or 32 MiB in `dtype` on
 * CUDA; at least 64. A part is decoded once for each product of a chunk or tile with it: twice per
 * chunk of TOKENS, for logits and gradients of hidden, and three times in VOCABULARY; but not again
 * where it is the last that was decoded. The results are those of the decoded matrix as
 * inputs->weight, bit for bit, on the CPU with 16 bits. With f32 and on CUDA products with parts may
 * round otherwise than with all classes at once, and the gradient of hidden is a sum over parts in
 * binary32.
 *
 * result     out: f32 [1], or NULL
 * factors    out: f32 [2]: 1 / D and 1 / n, or 0 where that is 0, for
 *            hr_linear_cross_entropy_backward(), or NULL
 * scale      out: f32 [1]: what the gradients have still to be multiplied by, or NULL. It is 1
 *            unless dtype is f16, whose gradients would be lost below 2^-24: they are those of a sum
 * rows_out   out, host: which results of rows are wanted; NULL: none
 * grads      out, host: which gradients are wanted; NULL: none
 * inputs     in, host
 * rows may be 0; features and classes are 1 or more.
 * workspace  at a multiple of 16 bytes, of as many bytes as hr_linear_cross_entropy_query() says
 *
 * rank needs all classes at once, which is TOKENS. Each device repeats itself bit for bit. Sources:
 * Wijmans et al., arXiv:2411.09009; and those of hr_cross_entropy_forward().
 *
 * Errors: HR_INVALID_ARGUMENT, on the CPU also if a target is neither ignore_index nor a class; the
 * first such row is named. On CUDA, where nobody waits for the targets, the row is NaN, unless
 * config->check_target is 1: the call then waits for all that the stream has to do before it, and
 * gives the same error as on the CPU, before it writes anything but workspace. It cannot wait on a
 * stream that is being captured into a CUDA graph, and refuses that. What hr_gemm returns where a
 * device has no library of products.
 */
HR_API hr_status hr_linear_cross_entropy(
    float *result, float *factors, float *scale, const hr_linear_cross_entropy_rows *rows_out,
    const hr_linear_cross_entropy_grads *grads, const hr_linear_cross_entropy_inputs *inputs,
    int64_t rows, int64_t features, int64_t classes, const hr_linear_cross_entropy_config *config,
    void *workspace, size_t workspace_bytes, const hr_exec *exec);

/*
 * hr_linear_cross_entropy_backward: the gradients from the forward pass's lse, with logits that are
 * computed again: dloss[i * dloss_stride] is the gradient of the loss of row i, which factors and
 * token_weight multiply. config->dentropy is the gradient of the entropy of a row, H, which nothing
 * multiplies: it adds
 *
 *     -dentropy * p_j (log p_j + H)                       to the gradient of logit j
 *
 * dloss      in: f32; dloss_stride 0: one number for all rows
 * factors    in: f32 [2], or NULL for ones
 * lse, lse_low  in: f32 [rows]; lse_low may be NULL for zeros
 * Others, and errors: as for hr_linear_cross_entropy; denominator, config->reduction and
 * config->check_target are not read: the forward call has checked the targets.
 */
HR_API hr_status hr_linear_cross_entropy_backward(
    const hr_linear_cross_entropy_grads *grads, const float *dloss, int64_t dloss_stride,
    const float *factors, const float *lse, const float *lse_low,
    const hr_linear_cross_entropy_inputs *inputs, int64_t rows, int64_t features, int64_t classes,
    const hr_linear_cross_entropy_config *config, void *workspace, size_t workspace_bytes,
    const hr_exec *exec);

#endif /* HR_EXPERIMENTAL */

#ifdef __cplusplus
}
#endif

#endif
