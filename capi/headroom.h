/*
 * headroom.h: the C interface of Headroom, and its textbook.
 *
 * Headroom holds the kernels of memory-lean training: optimizer steps and what goes with them, on
 * the CPU and on CUDA devices, behind plain C functions. Nothing here knows of PyTorch or Python.
 *
 * Contents
 * --------
 * Version, status, element types, where to run, lists of tensors, CPU threads and instruction sets;
 * then, each with its formula, its config and its functions:
 *
 *     Weights in 16 bits        hr_join_weights, hr_split_weights
 *     Blocks of 8-bit codes     hr_quantize_blocks, hr_dequantize_blocks, hr_dynamic_map
 *     Scalars of a step         hr_step_config, which every optimizer's config holds
 *     Adam and AdamW            hr_adamw
 *       with 8-bit moments      hr_adamw8bit
 *     Adafactor                 hr_adafactor, hr_adafactor_workspace
 *     Gradients: unscale, norm  hr_unscale_norm, hr_unscale_norm_workspace
 *     The loss scale            hr_update_scale
 *     Gradient accumulation     hr_accumulate
 *
 * Words
 * -----
 * moment      a running average of gradients (first) or of their squares (second)
 * absmax      the largest magnitude in a block of elements, which is the block's scale
 * residual    what a 16-bit parameter lacks of its binary32 weight, in a tensor of its own
 * whole       a tensor before it was cut into parts, as over the ranks of a distributed run
 * place       where the elements of a part lie in the whole: columns 2 to 4 of a matrix with 8
 *             columns are {offset 2, run 3, stride 8}
 * scalar      one number in device memory, behind a pointer
 *
 * What is stable
 * --------------
 * Before 1.0 a minor version may change anything here, and its library has another name. Within a
 * minor version functions stay, configs grow only at their end, and numbers of enums keep their
 * meaning. A trajectory (the bits that a rule gives) changes only with a line in the CHANGELOG.
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
 * Arguments   come in the order outputs, inputs, sizes, config, exec. A pointer is to memory of the
 *             device that `exec` names unless its comment says "host". Sizes count elements and are
 *             64 bits wide. `[n]` after a name gives its shape.
 * Configs     start with their size, which an INIT macro sets. A smaller one, of an older header, is
 *             accepted with the macro's values for the members that it lacks; a larger one, of a
 *             newer header than the library's, is refused.
 * Checks      all happen before the first write: a call that fails leaves all memory as it was.
 * Errors      every function that can fail returns an hr_status; hr_last_error() then says which
 *             argument, what was got and what was wanted. Nothing exits, prints or throws.
 * Memory      belongs to the caller. The library allocates no device memory.
 * Streams     CUDA work is queued on exec->stream and the call returns without waiting; every call
 *             can be captured in a CUDA graph. The buffers must live until the stream has run the
 *             work. Lists, configs and the exec itself are read before the call returns.
 * Threads     functions may be called from any thread at once, on memory that does not overlap.
 *             CPU work runs on the calling thread unless hr_set_parallel_for() lent others.
 * Alignment   an address must be a multiple of its element's size. Addresses that are multiples of
 *             16 bytes run faster on CUDA.
 * Numerics    arithmetic is IEEE binary32 unless said otherwise, rounded to nearest even, with no
 *             contraction; a store to bf16 or f16 rounds to nearest even and writes every NaN as
 *             0x7FFF. Element-wise functions give the same bits on the CPU and on CUDA, for any
 *             instruction set and any number of threads, under the default floating-point
 *             environment (denormals kept).
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

/* ---- Version --------------------------------------------------------------------------------- */

#define HR_VERSION_MAJOR 0
#define HR_VERSION_MINOR 2
#define HR_VERSION_PATCH 0
#define HR_VERSION       (HR_VERSION_MAJOR * 10000 + HR_VERSION_MINOR * 100 + HR_VERSION_PATCH)

/* HR_VERSION of the library that is loaded, which may differ from the header compiled against. */
HR_API int32_t hr_version(void);

/* One line of `key=value` pairs separated by "; ": version, compiler, cuda ("none" or the version
 * of the CUDA compiler), archs (compute capabilities with device code), cpu (the instruction set in
 * use, see hr_get_cpu_level). The string is valid until the same thread calls it again. */
HR_API const char *hr_build_info(void);

/* ---- Status ---------------------------------------------------------------------------------- */

typedef enum hr_status {
    HR_OK = 0,
    HR_INVALID_ARGUMENT = 1, /* an argument breaks its contract; nothing was written */
    HR_UNSUPPORTED = 2,      /* right in principle, not offered by this build or machine */
    HR_CUDA_ERROR = 3,       /* the CUDA runtime refused; hr_last_error() has its words */
    HR_NO_DEVICE = 4,        /* no driver, or no device with that ordinal */
    HR_INTERNAL = 6          /* a bug in Headroom */
} hr_status;

/* A short name such as "invalid argument", for any value, known or not. Never NULL. */
HR_API const char *hr_status_string(hr_status status);

/* What went wrong in the last failed call of the calling thread, or "" if none failed yet. Valid
 * until the next failure on that thread. A successful call leaves it alone. */
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

/* Bytes per element; 0 for what is not an hr_dtype. */
HR_API size_t hr_dtype_size(hr_dtype dtype);

/* How many blocks of block_size elements there are in numel elements; the last may be short. */
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
 * arrays; entry i of every list in a call belongs to the same parameter. A tensor is a dense run of
 * numel[i] elements: its shape does not matter, and dense tensors of equal strides may be in any
 * memory order. Tensors with numel 0 are allowed anywhere and may have a NULL address. Tensors that
 * are written must not overlap any other tensor of the call (not checked).
 */
typedef struct hr_tensor_list {
    int64_t count;     /* number of tensors */
    void *const *data; /* host [count]: addresses; a list in the role of an input is not written */
    const int64_t *numel;  /* host [count]: elements per tensor */
    const hr_dtype *dtype; /* host [count] */
} hr_tensor_list;

/* ---- CPU threads and instruction sets -------------------------------------------------------- */

/* Runs range(context, b, e) over subranges that together cover [begin, end) once, each at least
 * `grain` long except the last, possibly at the same time on several threads, and returns when all
 * are done. */
typedef void (*hr_range_fn)(void *context, int64_t begin, int64_t end);
typedef void (*hr_parallel_for_fn)(int64_t begin, int64_t end, int64_t grain, hr_range_fn range,
                                   void *context);

/* Lends the host's threads to the CPU kernels, for the whole process; NULL returns to a plain loop
 * on the calling thread. Headroom starts no threads of its own. */
HR_API hr_status hr_set_parallel_for(hr_parallel_for_fn parallel_for);

/* CPU kernels are compiled for several instruction sets; the best one that the CPU has is used. The
 * bits of the result are the same for all. */
typedef enum hr_cpu_level {
    HR_CPU_BASELINE = 0,   /* what the compiler targets by default */
    HR_CPU_AVX2 = 1,       /* x86-64 with AVX2, FMA and F16C */
    HR_CPU_AVX512 = 2,     /* x86-64 with AVX-512 F, BW, DQ and VL */
    HR_CPU_AVX512_VBMI = 3 /* and VBMI and BF16, which only a few kernels use */
} hr_cpu_level;

HR_API hr_cpu_level hr_get_cpu_level(void);

/* Chooses a lower level, or returns to a higher one, for the whole process. HR_UNSUPPORTED where
 * the CPU or the build lacks it. The environment variable HEADROOM_CPU_LEVEL (baseline, avx2,
 * avx512, avx512vbmi) sets the level at start. */
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
 * so that the weights follow those of binary32 bit for bit. The param is the weight rounded to
 * nearest; a tie, one weight in 65,536, is rounded away from zero, because to even would leave
 * 65,537 weights to some params, and a residual has 65,536 values. REMAINDER8 is the same with
 * residual * 256, after bits was rounded to a multiple of 256: a relative error up to 2^-16.
 * KAHAN keeps what rounding took off as a number of the param's type, and adds it in the next step
 * (Kahan, doi:10.1145/363707.363723). A NaN has residual 0.
 *
 * Someone else may write params between two calls: a pruning mask, a checkpoint, a clamp, an
 * average. Their residuals are then those of other weights. What was written counts: a residual that
 * belongs to no weight of its param is dropped when it is read, and the others are small.
 *
 *     mode          a residual is dropped where                  a written param is read as
 *     MASTER        param is not its rounding, ties to even      itself
 *     KAHAN         it is more than half a unit in the last      itself, or up to half a unit in its
 *                   place of param; any but 0 at a zero          last place beside; 0 as 0
 *     REMAINDER16,  it would make a NaN of a param that is       up to half a unit in its last place
 *     REMAINDER8    none: negative at 0, positive at infinity    beside; 0 as less than 2^-134
 *
 * So a finite param is read as a finite number and a NaN as NaN. An infinity is read as itself, but
 * with a negative remainder as a number that is too large for bf16, for so hr_split_weights() stores
 * that. A call that changes no weight, as with lr 0, leaves written params as they are; with KAHAN one
 * may move to its neighbour, where the residual is half a unit or param a power of two. A weight that
 * nobody else wrote keeps its residual always. hr_split_weights() sets weights exactly.
 *
 * A step reads and writes params and residuals in every mode. MASTER reads params for this comparison
 * alone: 12 bytes for each weight and not 10.
 *
 * Stochastic rounding: x between neighbours a < x < b becomes b with probability (x - a) / (b - a),
 * in steps of 2^-16, from Philox4x32-10 (Salmon et al., doi:10.1145/2063384.2063405) keyed by the
 * tensor's seed and counting by step and element. Where tensors are parts of a whole, `places`
 * tells which, so that the bits do not depend on how it was cut.
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

/* Element i of a tensor is element offset + i / run * stride + i % run of the whole. */
typedef struct hr_place {
    int64_t offset; /* >= 0 */
    int64_t run;    /* >= 1: elements that lie together in the whole */
    int64_t stride; /* >= 0: from one run to the next, in the whole */
} hr_place;

typedef struct hr_weights {
    size_t size;                     /* sizeof(hr_weights) */
    hr_weights_mode mode;            /* of every parameter of the call */
    const hr_tensor_list *residuals; /* in/out; NULL where the mode has none */
    const uint64_t *seeds;           /* host [count]; NULL unless the mode is stochastic */
    const hr_place *places;          /* host [count]; NULL: every tensor is a whole */
    int64_t *stalled; /* in/out [1], device: grows by the number of weights that binary32 would have
                         moved and that are stored as they were. NULL: they are not counted */
} hr_weights;

#define HR_WEIGHTS_INIT                                                \
    {                                                                  \
        sizeof(hr_weights), HR_WEIGHTS_NEAREST, NULL, NULL, NULL, NULL \
    }

/*
 * hr_join_weights, hr_split_weights: the weights as binary32, and back: for evaluation, and to save
 * or load them without loss.
 *
 * values   join: out, split: in; f32
 * params   join: in, split: out
 * weights  its mode and its residuals (join: in, split: out). A stochastic mode rounds to nearest
 *
 * A NaN among the values is written as one NaN, 0x7FFFFFFF.
 *
 * Errors: those of hr_adamw.
 */
HR_API hr_status hr_join_weights(const hr_tensor_list *values, const hr_tensor_list *params,
                                 const hr_weights *weights, const hr_exec *exec);
HR_API hr_status hr_split_weights(const hr_tensor_list *params, const hr_tensor_list *values,
                                  const hr_weights *weights, const hr_exec *exec);

/* ---- Blocks of 8-bit codes ------------------------------------------------------------------- */

/* The 256 values of a map, ascending, in [-1, 1] (is_signed) or [0, 1]: bitsandbytes' to the bit.
 * Host memory. */
HR_API hr_status hr_dynamic_map(float *values, int32_t is_signed);

/*
 * hr_quantize_blocks, hr_dequantize_blocks: numbers as codes of the dynamic map (Dettmers et al.,
 * arXiv:2110.02861), one byte per element, with one binary32 scale per block of `block_size`
 * consecutive elements.
 *
 *     absmax[b] = the largest |x| of block b             NaN if one is not finite
 *     code[i]   = the code nearest to y = x[i] / absmax, ties to the lower code
 *     x'[i]     = map[code[i]] * absmax[i / block_size]
 *
 * The quotient is the product with the rounded reciprocal. In the unsigned map a positive x never
 * gets code 0, which means zero, and what is negative gets it; zero stays zero. These are the codes
 * that hr_adamw8bit stores for its moments. The error of x' is at most half the gap between two
 * values of the map times absmax. Same bits on the CPU and on CUDA.
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
 * absmaxs  likewise; f32, hr_block_count(numel, block_size) elements
 * values   the other way round; f32, bf16 or f16
 *
 * On CUDA one launch per 800 tensors.
 *
 * Errors: those of hr_adamw.
 */
HR_API hr_status hr_quantize_blocks(const hr_tensor_list *codes, const hr_tensor_list *absmaxs,
                                    const hr_tensor_list *values, const hr_quantize_config *config,
                                    const hr_exec *exec);
HR_API hr_status hr_dequantize_blocks(const hr_tensor_list *values, const hr_tensor_list *codes,
                                      const hr_tensor_list *absmaxs,
                                      const hr_quantize_config *config, const hr_exec *exec);

/* ---- The scalars of an optimizer's step ------------------------------------------------------ */

/*
 * hr_step_config: what every optimizer's step has, whatever its rule. With t the step number
 * counted from 1, and absent factors 1, the rules below start from
 *
 *     g = grad * clip_coef / grad_scale                               maximize: g = -g
 *
 * with the factor folded once in binary64 and rounded to binary32. A pointer in the memory of
 * exec's device is read when the work runs, so a captured graph sees what it holds then. It can be
 * NULL.
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
    int32_t maximize;          /* 1: ascend */
    int32_t skip_nonfinite; /* 1: where g is infinite or NaN, the parameter and its moments stay */
    int32_t reserved[5];    /* 0: room for members to come, as other structs hold this one */
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
 *     amsgrad:        max_exp_avg_sq = max(max_exp_avg_sq, exp_avg_sq), used in its place below
 *     param = param - lr / (1 - beta1^t) * exp_avg / (sqrt(exp_avg_sq / (1 - beta2^t)) + eps)
 *
 * exp_avg is interpolated from the nearer of the two ends, as exp_avg + (1 - beta1) * (g - exp_avg)
 * if beta1 > 0.5, which halves the error of the sum of two products.
 * Every constant is folded once in binary64 (lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t), 1 - lr *
 * weight_decay, clip_coef / grad_scale, 1 - beta) and rounded to binary32; the element arithmetic
 * is binary32 whatever the storage types. beta^t is a product by repeated squaring, so it has the
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

/* torch.optim.AdamW's defaults. Set `step.t`, or pass a `steps` list. */
#define HR_ADAMW_CONFIG_INIT                                                             \
    {                                                                                    \
        sizeof(hr_adamw_config), HR_STEP_CONFIG_INIT(1e-3), 0.9, 0.999, 1e-8, 1e-2, 1, 0 \
    }

/*
 * params           in/out: f32, bf16 or f16
 * exp_avgs         in/out: f32, bf16 or f16; zeros before the first step
 * exp_avg_sqs      in/out: dtype of exp_avgs; zeros before the first step
 * max_exp_avg_sqs  in/out: dtype of exp_avgs; NULL unless config->amsgrad
 * steps            in/out: numel 1 each, f32 or f64: how many steps the parameter has had. The call
 *                  uses t = step + 1 and stores t. An f32 counter ends at 2^24, f64 at 2^53.
 *                  An empty parameter's counter counts too. NULL: all use config->step.t
 * grads            in: f32, bf16 or f16, not changed (unscaled gradients are not written back)
 *
 * The types may differ between lists and from parameter to parameter. On CUDA the whole list is one
 * launch up to about 500 tensors, then one more per 500; a `steps` list adds one small launch each.
 * Reads and writes each byte once: 28 bytes per parameter in f32, 14 in bf16.
 *
 * HR_INVALID_ARGUMENT: a NULL or misaligned pointer, lists of unequal count or numel, a dtype not
 * named above, a config value outside its range, a config->size of a newer header; on the CPU also
 * a counter, *lr_ptr or *grad_scale outside its range, which a call on CUDA cannot look at.
 * HR_NO_DEVICE, HR_UNSUPPORTED: exec->device does not exist, or the build has no CUDA part.
 */
HR_API hr_status hr_adamw(const hr_tensor_list *params, const hr_tensor_list *exp_avgs,
                          const hr_tensor_list *exp_avg_sqs, const hr_tensor_list *max_exp_avg_sqs,
                          const hr_tensor_list *steps, const hr_tensor_list *grads,
                          const hr_adamw_config *config, const hr_exec *exec);

/* ---- Adam and AdamW with 8-bit moments ------------------------------------------------------- */

/*
 * hr_adamw8bit: one step of hr_adamw's rule over parameters whose two moments take one byte each: a
 * code of the dynamic map (Dettmers et al., arXiv:2110.02861) per element and one binary32 scale
 * per block of `block_size` consecutive elements. 2.03 bytes of state per parameter at 256.
 *
 *     exp_avg[i]    = signed_map[code[i]]   * absmax[i / block_size]
 *     exp_avg_sq[i] = unsigned_map[code[i]] * absmax[i / block_size]
 *
 * hr_dynamic_map() gives the two maps, bitsandbytes' to the bit. The step decodes both moments,
 * applies hr_adamw's formula (the parameter sees the new moments as binary32), takes the largest
 * magnitude of each block as its new absmax, and stores for each moment x the code nearest to
 * y = x / absmax, ties to the lower code, where the quotient is the product with the rounded
 * reciprocal. Exceptions, so that no update can blow up:
 *
 *     a positive exp_avg_sq never gets code 0, which means zero: its code is at least 1
 *     zero stays zero, and a block of zeros has absmax 0 and the codes of zero
 *
 * Without them a second moment much smaller than its block's largest becomes zero, and the next
 * step divides by eps alone. Blocks are counted from the tensor's first element; the last may be
 * short.
 *
 * Stochastic rounding (`seeds`): y between neighbouring codes a < y < b gets b with probability
 * (y - a) / (b - a), from Philox4x32-10 (Salmon et al., doi:10.1145/2063384.2063405) keyed by the
 * tensor's seed and counting by step and element, so that the bits depend on nothing else. The
 * exceptions above hold here too, and what is below the lowest code gets that: the mean of the
 * codes is y but for a positive exp_avg_sq below code 1, and an exp_avg below -0.993 * absmax.
 *
 * bnb_exact: the rule of bitsandbytes' CUDA kernels, in their order of operations, without
 * contraction. (Its CPU quantizer is coarser: of the squares of 65,536 normal numbers about 2,000
 * get another code.)
 *
 *     a gradient that is not finite:  exp_avg = exp_avg_sq = 0, param stays
 *     exp_avg_sq = exp_avg_sq * beta2 + (1 - beta2) * g * g;  exp_avg likewise
 *     param = param + (-lr * c2 / c1) * (exp_avg / (sqrt(exp_avg_sq) + c2 * eps))
 *             with c1 = 1 - beta1^t, c2 = sqrt(1 - beta2^t), then param * (1 - lr * weight_decay)
 *     codes nearest to x / absmax, a true division, with midpoints in binary32; a code of exp_avg
 *     whose sign is not that of x moves one towards it, so that 0 / 0, in a block of zeros, gives
 *     code 255 for exp_avg and 0 for exp_avg_sq, whose values are 0 all the same
 *
 * Moments that are not finite make their block's absmax NaN, and the block's moments from then on,
 * unless skip_nonfinite leaves out the elements whose gradient, scaled, is not finite. To skip the
 * whole step instead, measure first (hr_unscale_norm) and pass found_inf.
 *
 * Same bits on the CPU and on CUDA, for any instruction set and number of threads.
 */
typedef struct hr_adamw8bit_config {
    size_t size;           /* sizeof(hr_adamw8bit_config) */
    hr_adamw_config adamw; /* amsgrad must be 0; bnb_exact: decoupled 1 and no weights */
    int32_t block_size;    /* 64, 128, 256 or 512 */
    int32_t bnb_exact;     /* 1: needs block_size 256, no seeds, no skip_nonfinite */
    const uint64_t *seeds; /* host [count]: stochastic rounding of codes; NULL: to nearest */
} hr_adamw8bit_config;

#define HR_ADAMW8BIT_CONFIG_INIT                                        \
    {                                                                   \
        sizeof(hr_adamw8bit_config), HR_ADAMW_CONFIG_INIT, 256, 0, NULL \
    }

/*
 * params              in/out: f32, bf16 or f16
 * exp_avgs            in/out: u8, codes of the signed map; before the first step any, with absmax 0
 * exp_avg_absmaxs     in/out: f32, hr_block_count(numel, block_size) elements; zeros at first
 * exp_avg_sqs         in/out: u8, codes of the unsigned map
 * exp_avg_sq_absmaxs  in/out: f32, like exp_avg_absmaxs
 * steps               in/out: as for hr_adamw; NULL: all use config->adamw.step.t
 * grads               in: f32, bf16 or f16, not changed
 *
 * The types of params and grads may differ between them and from parameter to parameter. On CUDA
 * the whole list is one launch up to about 400 tensors, then one more per 400; a `steps` list adds
 * one small launch each. Reads and writes each byte once: 16.06 bytes per parameter in f32, 10.06
 * in bf16.
 *
 * Errors: those of hr_adamw.
 */
HR_API hr_status hr_adamw8bit(const hr_tensor_list *params, const hr_tensor_list *exp_avgs,
                              const hr_tensor_list *exp_avg_absmaxs,
                              const hr_tensor_list *exp_avg_sqs,
                              const hr_tensor_list *exp_avg_sq_absmaxs, const hr_tensor_list *steps,
                              const hr_tensor_list *grads, const hr_adamw8bit_config *config,
                              const hr_exec *exec);

/* ---- Adafactor ------------------------------------------------------------------------------- */

/*
 * hr_adafactor: one step of Adafactor (Shazeer and Stern, arXiv:1804.04235) over a list of
 * parameters, by the rule of one of two implementations, transformers' and torch's. A tensor of two
 * dimensions or more is [batch, rows, cols], its last two dimensions and all others; its second
 * moment is kept as a mean for each row and one for each column, 4 * (1 / rows + 1 / cols) bytes
 * per element. Any other tensor has a second moment per element, `variance`. With t the step number
 * counted from 1:
 *
 *     g = grad, scaled as at hr_step_config
 *     w = t^beta2_decay
 *                       HR_ADAFACTOR_HF              HR_ADAFACTOR_TORCH
 *     s                 g^2 + eps1                   g^2
 *     row_var           (1 - w) * row_var + w * mean of s over the columns       factored
 *     col_var           (1 - w) * col_var + w * mean of s over the rows          factored
 *     mean              mean of row_var over rows    the same, but at least eps1
 *     v                 row_var * col_var / mean                                 factored
 *     v = variance      (1 - w) * variance + w * s                               not factored
 *     u                 g / sqrt(v)                  g / sqrt(max(v, eps1^2))
 *     rho               relative_step:               min(lr, 1 / sqrt(t))
 *                       min(1e-2, 1 / sqrt(t)),
 *                       warmup_init: 1e-6 * t for 1e-2; else lr
 *     alpha             scale_parameter:             rho * max(eps2, RMS(param))
 *                       the same; else rho
 *     decay             alpha * weight_decay         lr * weight_decay
 *
 *     change = alpha * u / max(1, RMS(u) / clip_threshold)
 *     with exp_avgs:  exp_avg = beta1 * exp_avg + (1 - beta1) * change;  change = exp_avg
 *     param = param * (1 - decay) - change
 *
 * RMS is the root of the mean square over the tensor, of weights that config->step.weights has
 * joined. Statistics are binary32 whatever the types of params and grads; torch's take the type of
 * the gradient, and it computes in it. A negative eps1, in torch's rule, is the epsilon of the
 * param's type; in any mode of config->step.weights but HR_WEIGHTS_NEAREST that of binary32, whose
 * trajectory those weights take.
 *
 * Sums are in a fixed order without atomics, in binary32 over at most 1,024 elements and then in
 * binary64; constants are binary64, elements binary32. A device repeats itself bit for bit, on any
 * instruction set and with any number of threads. The CPU and CUDA add in different orders: their
 * sums agree to 2^-20, so that updates agree to 2^-18 of their size and parameters to a rounding of
 * theirs. Tensors of matrices of at most 64 elements have the same row_var and col_var on both.
 */
typedef enum hr_adafactor_semantics {
    HR_ADAFACTOR_HF = 0,   /* transformers.optimization.Adafactor */
    HR_ADAFACTOR_TORCH = 1 /* torch.optim.Adafactor */
} hr_adafactor_semantics;

/* The parts of a step, in order. Sums that cross the parts of a tensor on several devices are added
 * by the caller between them; all other callers ask for HR_ADAFACTOR_ALL. */
typedef enum hr_adafactor_phases {
    HR_ADAFACTOR_SUMS = 1,   /* leaves sums of g^2 and param^2 in the workspace */
    HR_ADAFACTOR_STATES = 2, /* updates row_var and col_var, leaves sums of row_var */
    HR_ADAFACTOR_NORM = 4,   /* leaves the sum of u^2; updates variance */
    HR_ADAFACTOR_APPLY = 8,  /* updates params, exp_avgs, rmss and steps */
    HR_ADAFACTOR_ALL = 15
} hr_adafactor_phases;

/* The shape of a parameter: batch * rows * cols elements. Not factored: [1, 1, numel]. */
typedef struct hr_adafactor_shape {
    int64_t batch, rows, cols;
    int64_t factored; /* 0 or 1 */
    /* Of the whole that a tensor is a part of; 0: the same as here. Where whole_rows or whole_cols
     * is not 0, sums over columns or rows cross parts. */
    int64_t whole_rows, whole_cols, whole_numel;
} hr_adafactor_shape;

typedef struct hr_adafactor_config {
    size_t size;         /* sizeof(hr_adafactor_config); set by an INIT macro */
    hr_step_config step; /* its lr: ignored if HF with relative_step; skip_nonfinite must be 0 */
    hr_adafactor_semantics semantics;
    int32_t phases;          /* of hr_adafactor_phases, added */
    double beta2_decay;      /* <= 0, finite */
    double eps1;             /* >= 0, finite; TORCH: negative for the epsilon of the type */
    double eps2;             /* >= 0, finite */
    double clip_threshold;   /* > 0; infinity clips nothing */
    double weight_decay;     /* >= 0, finite */
    double beta1;            /* in [0, 1); ignored without an exp_avgs list */
    int32_t scale_parameter; /* HF only, as the next two */
    int32_t relative_step;
    int32_t warmup_init; /* needs relative_step */
} hr_adafactor_config;

/* The defaults of the two. Set `step.t`, or pass a `steps` list. */
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

/* Bytes of workspace that hr_adafactor needs for parameters of these shapes, host [count]: about 2
 * % of those of the largest matrices, up to 4 times those of matrices with few rows or columns. */
HR_API hr_status hr_adafactor_workspace(size_t *bytes, const hr_adafactor_shape *shapes,
                                        int64_t count);

/*
 * params     in/out: f32, bf16 or f16, row-major, stored as config->step.weights says
 * row_vars   in/out: f32, [batch, rows] where factored, else numel 0; zeros before the first step.
 *            NULL if nothing is factored
 * col_vars   in/out: f32, [batch, cols], likewise
 * variances  in/out: f32, like the param where not factored, else numel 0; zeros before the first
 *            step. NULL if everything is factored
 * exp_avgs   in/out: f32, like the param; zeros before the first step. NULL: no momentum
 * rmss       out: f32, numel 1 each: RMS(param) before the step, if it is asked for by
 *            scale_parameter or TORCH. NULL: not wanted
 * steps      in/out: as for hr_adamw; NULL: all use config->step.t
 * grads      in: f32, bf16 or f16, row-major, not changed
 * shapes     in: host [count]
 * workspace  scratch memory of exec's device, a multiple of 8 bytes, and its size in bytes
 *
 * Three passes: 4 bytes of gradient and, to scale by RMS(param), 4 of param; 4 of gradient; 4 of
 * gradient and 8 of param. 24 bytes per f32 element, 12 in bf16; without the scale 20 and 10. On
 * the CPU tensors up to 131,072 elements stay in the cache and move 16. On CUDA seven launches per
 * 100 tensors, ten where there are matrices of at most 64 elements.
 *
 * A call for one matrix of 512 x 256, on the CPU:
 *
 *     hr_adafactor_shape shape = {1, 512, 256, 1, 0, 0, 0};
 *     hr_adafactor_config config = HR_ADAFACTOR_HF_INIT;
 *     size_t bytes;
 *     hr_adafactor_workspace(&bytes, &shape, 1);
 *     void *workspace = malloc(bytes);
 *     config.step.t = 1;                        // lists: params and grads of numel 512 * 256,
 *     hr_adafactor(&params, &row_vars, &col_vars, // row_vars of 512 and col_vars of 256, f32
 *                  NULL, NULL, NULL, NULL, &grads, &shape, &config, workspace, bytes, &cpu);
 *
 * Phases apart: the same arguments and workspace for each. The workspace begins with arrays of
 * binary64 that the caller adds over the parts of the tensors: [count] sums of param^2 and [count]
 * of u^2, over all parts; then of the factored tensors that have whole_rows or whole_cols, or more
 * than 64 elements per matrix, in the order of the list, all matrices' sums of row_var (over parts
 * of the rows), all rows' sums of g^2 (over parts of the columns) and all columns' (over parts of
 * the rows). A tensor whose whole_numel, or else numel, is 0 is not changed but for its counter.
 *
 * Errors: those of hr_adamw; also shapes that do not fit, and a workspace that is too small.
 */
HR_API hr_status hr_adafactor(const hr_tensor_list *params, const hr_tensor_list *row_vars,
                              const hr_tensor_list *col_vars, const hr_tensor_list *variances,
                              const hr_tensor_list *exp_avgs, const hr_tensor_list *rmss,
                              const hr_tensor_list *steps, const hr_tensor_list *grads,
                              const hr_adafactor_shape *shapes, const hr_adafactor_config *config,
                              void *workspace, size_t workspace_bytes, const hr_exec *exec);

/* ---- Unscaling, checking and measuring gradients --------------------------------------------- */

/*
 * hr_unscale_norm: one pass over a list of gradients. For each gradient x let
 *
 *     x' = x * (clip_coef / grad_scale)                  absent factors are 1
 *
 * with the factor folded in binary64 and rounded to binary32 once. If `write` is set, x' is stored
 * in the place of x; a factor of 1 stores nothing.
 *
 * The norms are those of x' before it is rounded to its dtype: with S_k the sum of |x'|^p over
 * tensor k (or the maximum of |x'| if p is infinite),
 *
 *     norms[k]  = S_k^(1/p)             norm = (S_0 + S_1 + ...)^(1/p)   (or the maximum)
 *     found_inf = 1 if any x' is infinite or NaN, else not written, so that calls can share a flag
 *     culprit   = the smallest k with such an x', or -1
 *     clip_coef = min(1, max_norm / (norm + 1e-6))       the factor that clips to max_norm
 *
 * Sums are in a fixed order without atomics: a device repeats itself bit for bit, with any number
 * of threads. On the CPU they are binary64, and a norm is the exact one rounded to binary32, or the
 * neighbour of that, for more than 1e9 elements. On CUDA likewise, but for p = 2 the squares of 8
 * neighbours are first added in binary32 (where none can overflow, or matter and vanish), so that a
 * norm is within 2.5 units in the last place of the exact one; usually 1, the errors being random.
 * For p = 2 neither the largest nor the smallest binary32 values overflow or vanish on the way:
 * only a norm above the largest binary32 is stored as infinity, and clip_coef is right even then.
 * For p other than 1, 2 and infinity, |x'|^p must neither overflow nor vanish in binary64, or the
 * gradient counts as infinite or zero.
 */
typedef struct hr_unscale_norm_config {
    size_t size;     /* sizeof(hr_unscale_norm_config); set by HR_UNSCALE_NORM_CONFIG_INIT */
    double p;        /* order of the norms: > 0, infinity allowed */
    double max_norm; /* >= 0; for result->clip_coef */
    int32_t write;   /* 1: gradients are replaced by x', rounded to their dtype */
    /* Scalars in the memory of exec's device, or NULL. They are read when the work runs. */
    const float *grad_scale; /* finite and > 0 */
    const float *clip_coef;
} hr_unscale_norm_config;

#define HR_UNSCALE_NORM_CONFIG_INIT                             \
    {                                                           \
        sizeof(hr_unscale_norm_config), 2.0, 0.0, 0, NULL, NULL \
    }

/* Where to store the measurements, in the memory of exec's device. NULL: not wanted. */
typedef struct hr_unscale_norm_result {
    float *norm;      /* [1] */
    float *norms;     /* [count] */
    float *found_inf; /* [1] */
    int64_t *culprit; /* [1] */
    float *clip_coef; /* [1] */
} hr_unscale_norm_result;

/* Bytes of workspace that hr_unscale_norm needs for a list: about 8 per 16,384 elements and 16 per
 * tensor. Reads only count and numel. */
HR_API hr_status hr_unscale_norm_workspace(size_t *bytes, const hr_tensor_list *grads);

/*
 * grads      in/out: f32, bf16 or f16; written only if config->write
 * result     out: host struct of device pointers; NULL with config->write: multiply, do not measure
 * workspace  scratch memory of exec's device, a multiple of 8 bytes; NULL if result is NULL
 *
 * On CUDA one launch per 1,300 tensors and two small ones. Reads each gradient once, and writes it
 * once if asked.
 *
 * Errors: those of hr_adamw; also a workspace that is too small, and a call that has nothing to do
 * (neither write nor result).
 */
HR_API hr_status hr_unscale_norm(const hr_tensor_list *grads, const hr_unscale_norm_result *result,
                                 const hr_unscale_norm_config *config, void *workspace,
                                 size_t workspace_bytes, const hr_exec *exec);

/* ---- The loss scale -------------------------------------------------------------------------- */

/*
 * hr_update_scale: the update of a dynamic loss scale (Micikevicius et al., arXiv:1710.03740), on
 * the device, after a step:
 *
 *     found_inf != 0:  growth_tracker = 0;  hysteresis_tracker = hysteresis_tracker - 1
 *                      if hysteresis_tracker <= 0: scale = max(scale * backoff_factor, min_scale)
 *     else:            growth_tracker = growth_tracker + 1
 *                      if growth_tracker == growth_interval: growth_tracker = 0,
 *                          hysteresis_tracker = hysteresis, and
 *                          scale = min(scale * growth_factor, max_scale) unless that is infinite
 *
 * Products are binary64, rounded to binary32 once. With hysteresis 1, min_scale 0 and max_scale
 * infinite this is the rule of torch.amp.GradScaler, to the bit.
 */
typedef struct hr_update_scale_config {
    size_t size;             /* sizeof(hr_update_scale_config) */
    double growth_factor;    /* > 1 */
    double backoff_factor;   /* in (0, 1) */
    double min_scale;        /* >= 0, finite in binary32 */
    double max_scale;        /* >= min_scale and > 0; at first no bound */
    int32_t growth_interval; /* >= 1 */
    int32_t hysteresis;      /* >= 1: overflows, since the scale last grew, until it falls */
} hr_update_scale_config;

#define HR_UPDATE_SCALE_CONFIG_INIT                                                    \
    {                                                                                  \
        sizeof(hr_update_scale_config), 2.0, 0.5, 0.0, 1.7976931348623157e308, 2000, 1 \
    }

/*
 * scale, growth_tracker   in/out: one element each, in the memory of exec's device
 * hysteresis_tracker      in/out: likewise, config->hysteresis at first; NULL if that is 1
 * found_inf               in: one element
 */
HR_API hr_status hr_update_scale(float *scale, int32_t *growth_tracker, int32_t *hysteresis_tracker,
                                 const float *found_inf, const hr_update_scale_config *config,
                                 const hr_exec *exec);

/* ---- Gradient accumulation ------------------------------------------------------------------- */

/*
 * hr_accumulate: adds a list of gradients to buffers of binary32, with x = grad * factor (absent:
 * grad):
 *
 *     sum = sum + x                                            plain
 *     y = x - lost;  t = sum + y;  lost = (t - sum) - y;  sum = t       with `lost` (Kahan, 1965)
 *     grad = 0                                                 if zero_grads
 *
 * The error of the compensated sum stays within 2 roundings of the sum of |x|, for any number of
 * them up to 2^20 or so; that of the plain sum grows with their number. Same bits on CPU and CUDA.
 */
typedef struct hr_accumulate_config {
    size_t size;             /* sizeof(hr_accumulate_config) */
    double factor;           /* finite in binary32; ignored if factor_ptr is set */
    const float *factor_ptr; /* scalar in the memory of exec's device, or NULL */
    int32_t zero_grads;      /* 1: gradients are zero afterwards */
} hr_accumulate_config;

#define HR_ACCUMULATE_CONFIG_INIT                  \
    {                                              \
        sizeof(hr_accumulate_config), 1.0, NULL, 0 \
    }

/*
 * sums   in/out: f32
 * losts  in/out: f32, zeros at first; NULL: plain sum
 * grads  in, or in/out with zero_grads: f32, bf16 or f16
 */
HR_API hr_status hr_accumulate(const hr_tensor_list *sums, const hr_tensor_list *losts,
                               const hr_tensor_list *grads, const hr_accumulate_config *config,
                               const hr_exec *exec);

#ifdef __cplusplus
}
#endif

#endif
