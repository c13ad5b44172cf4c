"""The ops of Headroom as functions: steps on lists of tensors, and layers with gradients.

The optimizers and :mod:`headroom.nn` are built from these. ``headroom.h`` documents the contract of
each.
"""

from . import (
    attention_segments,  # noqa: F401  (an op that headroom.nn uses)
    linear_cross_entropy,  # noqa: F401  (an op that headroom.loss offers)
    linear_divergence,  # noqa: F401  (an op that headroom.loss offers)
    mlp,  # noqa: F401  (an op that headroom.nn offers)
)
from .accumulate import accumulate_
from .adafactor import adafactor_
from .adamw import adamw_
from .adamw8bit import adamw8bit_
from .attention_sinks import sink_attention
from .cross_entropy import cross_entropy
from .divergence import divergence
from .dynamic_map import dynamic_map
from .experts import experts
from .gemm import gemm
from .glu import glu
from .linear import linear
from .linear_quantized import linear_quantized
from .lora import lora_linear, lora_norms
from .momentum import lion_, sgd_
from .muon_momentum import muon_momentum8bit_, muon_momentum_
from .muon_update import muon_update_
from .newton_schulz import newton_schulz_, newton_schulz_workspace
from .norm import layer_norm, rms_norm
from .quantize_blocks import dequantize_blocks, quantize_blocks
from .quantize_matrix import QuantizedMatrix, dequantize_matrix, mxfp4_matrix, quantize_matrix
from .rope import rope, rope_tables
from .unscale_norm import grad_norm, unscale_norm_
from .update_scale import update_scale_
from .weights import join_weights_, split_weights_

__all__ = [
    "QuantizedMatrix",
    "accumulate_",
    "adafactor_",
    "adamw8bit_",
    "adamw_",
    "cross_entropy",
    "dequantize_blocks",
    "dequantize_matrix",
    "divergence",
    "dynamic_map",
    "experts",
    "gemm",
    "glu",
    "grad_norm",
    "join_weights_",
    "layer_norm",
    "linear",
    "linear_quantized",
    "lion_",
    "lora_linear",
    "lora_norms",
    "muon_momentum8bit_",
    "muon_momentum_",
    "muon_update_",
    "mxfp4_matrix",
    "newton_schulz_",
    "newton_schulz_workspace",
    "quantize_blocks",
    "quantize_matrix",
    "rms_norm",
    "rope",
    "rope_tables",
    "sgd_",
    "sink_attention",
    "split_weights_",
    "unscale_norm_",
    "update_scale_",
]
