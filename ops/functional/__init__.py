"""The ops of Headroom as functions on tensors and lists of tensors."""

from .quantize_blocks import dequantize_blocks, quantize_blocks

__all__ = ["dequantize_blocks", "quantize_blocks"]
