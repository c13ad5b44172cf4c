"""The structs of headroom.h that functions of lists take."""

from __future__ import annotations

from ctypes import POINTER, c_double, c_int32, c_int64, c_uint64, c_void_p

from tests.python.fuzz._c_calls import TensorList, config, struct

Place = struct(("offset run stride", c_int64))
Weights = config(
    ("mode", c_int32),
    ("residuals", POINTER(TensorList)),
    ("seeds", POINTER(c_uint64)),
    ("places", POINTER(Place)),
    ("stalled", c_void_p),
)
Step = struct(
    ("lr", c_double),
    ("t", c_int64),
    ("lr_ptr clip_coef grad_scale found_inf", c_void_p),
    ("weights", POINTER(Weights)),
    ("lr_dtype maximize skip_nonfinite", c_int32),
    ("reserved", c_int32 * 5),
)
AdamW = config(
    ("step", Step), ("beta1 beta2 eps weight_decay", c_double), ("decoupled amsgrad", c_int32)
)
AdamW8bit = config(
    ("adamw", AdamW), ("block_size bnb_exact", c_int32), ("seeds", POINTER(c_uint64))
)
Momentum = config(
    ("step", Step),
    ("rule nesterov", c_int32),
    ("momentum dampening beta1 beta2 weight_decay", c_double),
    ("block_size", c_int32),
)
Shape = struct(("batch rows cols factored whole_rows whole_cols whole_numel", c_int64))
Adafactor = config(
    ("step", Step),
    ("semantics phases", c_int32),
    ("beta2_decay eps1 eps2 clip_threshold weight_decay beta1", c_double),
    ("scale_parameter relative_step warmup_init", c_int32),
)
MuonMatrix = struct(("rows cols stride transposed", c_int64), sizes=("rows", "cols", "stride"))
MuonMomentum = config(("step", Step), ("momentum", c_double), ("nesterov block_size", c_int32))
MuonUpdate = config(("step", Step), ("weight_decay beta2", c_double))
NewtonSchulz = config(
    ("dtype variant", c_int32),
    ("coefficients", POINTER(c_double)),
    ("steps", c_int64),
    ("eps", c_double),
    ("allow_tf32 allow_reduced_precision_reduction deterministic", c_int32),
    sizes=("steps",),
)
UnscaleNorm = config(
    ("p max_norm", c_double), ("write", c_int32), ("grad_scale clip_coef", c_void_p)
)
NormResult = struct(("norm norms found_inf culprit clip_coef", c_void_p))
UpdateScale = config(
    ("growth_factor backoff_factor min_scale max_scale", c_double),
    ("growth_interval hysteresis", c_int32),
)
Quantize = config(("is_signed block_size", c_int32))
