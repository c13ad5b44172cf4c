"""Blocks of a model that decide what they keep for the backward pass."""

from __future__ import annotations

from . import functional
from .attention import Attention, Rotation
from .block import LAYOUTS, Block
from .config import TransformerConfig
from .experts import QuantizedExperts
from .hf import config_from_hf, state_from_hf, state_to_hf, transformer_from_hf
from .linear import Linear
from .lora import Adapter, LoRAEmbedding, LoRALayer, LoRALinear
from .lora_experts import LoRAExperts
from .lora_weight import LoRAWeight
from .loss import LinearCrossEntropyLoss
from .mlp import MLP
from .norms import LayerNorm, RMSNorm
from .pattern import Pattern, attention_pattern
from .quantized import Linear4bit, Linear8bit
from .steps import LEVELS
from .trained_copy import TrainedCopy
from .transformer import Embedding, Transformer

__all__ = [
    "Adapter",
    "Attention",
    "Block",
    "Embedding",
    "LAYOUTS",
    "LEVELS",
    "LayerNorm",
    "Linear",
    "Linear4bit",
    "Linear8bit",
    "LinearCrossEntropyLoss",
    "LoRAEmbedding",
    "LoRAExperts",
    "LoRALayer",
    "LoRALinear",
    "LoRAWeight",
    "MLP",
    "Pattern",
    "QuantizedExperts",
    "RMSNorm",
    "Rotation",
    "TrainedCopy",
    "Transformer",
    "TransformerConfig",
    "attention_pattern",
    "config_from_hf",
    "functional",
    "state_from_hf",
    "state_to_hf",
    "transformer_from_hf",
]
