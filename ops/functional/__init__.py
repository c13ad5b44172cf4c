"""The ops of Headroom as functions on lists of tensors, without an optimizer object.

The optimizers are built from these. ``headroom.h`` documents the contract of each.
"""

from .accumulate import accumulate_
from .adafactor import adafactor_
from .adamw import adamw_
from .adamw8bit import adamw8bit_
from .dynamic_map import dynamic_map
from .quantize_blocks import dequantize_blocks, quantize_blocks
from .unscale_norm import grad_norm, unscale_norm_
from .update_scale import update_scale_
from .weights import join_weights_, split_weights_

__all__ = [
    "accumulate_",
    "adafactor_",
    "adamw8bit_",
    "adamw_",
    "dequantize_blocks",
    "dynamic_map",
    "grad_norm",
    "join_weights_",
    "quantize_blocks",
    "split_weights_",
    "unscale_norm_",
    "update_scale_",
]
