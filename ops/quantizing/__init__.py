"""Weights of models in few bits, in place: which layers take them, the way back, and files.

``headroom.quantize`` is a function, hence the name of this package.
"""

from __future__ import annotations

from .load import load_quantized
from .quantize import dequantize, quantize
from .report import QuantizeReport

__all__ = ["QuantizeReport", "dequantize", "load_quantized", "quantize"]
