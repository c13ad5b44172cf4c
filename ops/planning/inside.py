"""Adds what operations allocate inside, and free before they end: fakes do not show it.

Every entry says where its figure is from: a line of torch's source, which was compared with the
allocations that torch's profiler shows for the operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .probe import asked, unasked

__all__ = ["BODIES", "entry", "inside", "left_out"]

Sizes = list[tuple[int, str]]
Entry = Callable[[Sequence[Any], dict[str, Any], str], Sizes]
_TABLE: dict[str, Entry] = {}
# Of operations that are made of others in Python: that code, whose operations are recorded instead.
BODIES: dict[str, Callable[..., Any]] = {}


def inside(func: Any, args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Sizes:
    """Returns the bytes and kinds of what an operation holds while its results are allocated."""
    name = func._schema.name
    if device == "cpu" and (name in _CONVOLUTIONS or (name in _PRODUCTS and _is_narrow(args))):
        if "coefficients" in kwargs:  # of iterations, each of which takes as much
            kwargs = kwargs | {"coefficients": kwargs["coefficients"][:3]}
        found = asked(func, args, kwargs)
        if found is not None:
            return [(found[0], "temporaries")]
    entry = _TABLE.get(name)
    return [] if entry is None else entry(args, kwargs, device)


def left_out() -> list[str]:
    """Returns the operations of this plan whose scratch memory is known in no way."""
    return sorted(unasked - _TABLE.keys() - BODIES.keys())


_CONVOLUTIONS = {"aten::convolution", "aten::convolution_backward"}
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"} | {
    "headroom::gemm",
    "headroom::gemm_",
    "headroom::linear_quantized",
    "headroom::linear_quantized_backward",
    "headroom::lora_linear",
    "headroom::lora_linear_backward",
    "headroom::mlp_block",  # whose products are torch's, with the scratch memory of those
    "headroom::mlp_block_backward",
    "headroom::newton_schulz_",
}


def _is_narrow(args: Sequence[Any]) -> bool:
    dtypes = (arg.dtype for arg in args if isinstance(arg, Tensor))
    return any(dtype in (torch.bfloat16, torch.float16) for dtype in dtypes)


def entry(*names: str) -> Callable[[Entry], Entry]:
    """Registers what operations of these names allocate inside."""

    def register(function: Entry) -> Entry:
        for name in names:
            _TABLE[name] = function
        return function

    return register


def _wide(x: Tensor) -> int:
    """Returns the bytes of an element of the type that x is summed in."""
    return 4 if x.dtype in (torch.bfloat16, torch.float16) else x.element_size()


def _flash_blocks(q: Tensor, k: Tensor) -> tuple[int, int]:
    """Returns the rows and columns of a block: FlashAttentionKernel.cpp, cpu_flash_attention."""
    rows, columns = q.shape[-2], k.shape[-2]
    block = 256 if rows >= 768 else 64 if rows >= 192 else 32
    return min(block, rows), min(512, columns)


@entry("aten::_scaled_dot_product_flash_attention_for_cpu")
def _flash(args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Sizes:
    # buf: scores, maximum and sum of a row, and results, of a block of each thread.
    q, k = args[0], args[1]
    rows, columns = _flash_blocks(q, k)
    threads = torch.get_num_threads()
    sizes = [threads * (rows * columns + 2 * rows + rows * q.shape[-1]) * _wide(q)]
    if q.element_size() < 4:  # buf_reduced: scores in the dtype of the inputs
        sizes.append(threads * rows * columns * q.element_size())
    return [(size, "temporaries") for size in sizes]


@entry("aten::_scaled_dot_product_flash_attention_for_cpu_backward")
def _flash_backward(args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Sizes:
    # buf: scores and their gradients, of a block of each thread; dsum: a row of the block.
    q, k = args[1], args[2]
    rows, columns = _flash_blocks(q, k)
    threads = torch.get_num_threads()
    sizes = [2 * threads * rows * columns * _wide(q), rows * _wide(q)]
    if q.element_size() < 4:
        sizes.append(2 * threads * rows * columns * q.element_size())
    return [(size, "temporaries") for size in sizes]


@entry("aten::_safe_softmax")
def _safe_softmax(args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Sizes:
    # attention.cpp: a mask of minus infinity, and whether a row is all mask.
    x = args[0]
    return [(x.numel(), "temporaries"), (x.numel() // x.shape[-1], "temporaries")]


@entry("aten::native_layer_norm_backward")
def _layer_norm_backward(args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Sizes:
    if device != "cpu":
        return []
    # layer_norm_kernel.cpp: sums of each thread for the weight and the bias, in the dtype of x.
    x, columns = args[1], math.prod(args[2])
    return [(2 * torch.get_num_threads() * columns * x.element_size(), "temporaries")]


@entry("aten::embedding", "aten::embedding_dense_backward")
def _embedding(args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Sizes:
    # Embedding.cpp: indices become contiguous.
    indices = args[1]
    return [] if indices.is_contiguous() else [(indices.nbytes, "temporaries")]


@entry("aten::mean")
def _mean(args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Sizes:
    # ReduceOps.cpp: 16-bit numbers are summed as a copy in 32 bits.
    if device != "cpu" or not _is_narrow(args):
        return []
    return [(4 * args[0].numel(), "temporaries")]


@entry("aten::sort")
def _sort(args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Sizes:
    # Sorting.cpp: the numbers of the elements of a row.
    x = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
    if device != "cpu" or not x.dim() or isinstance(dim, bool):
        return []
    return [(8 * x.shape[dim], "temporaries")]


def _reduced_in_its_own_memory(x: Tensor, y: Tensor, reduction: int = 1, *rest: Any) -> Tensor:
    # Loss.cpp: the losses of all elements are written to the result, which mean_out or sum_out then
    # makes a scalar. Its memory stays as large as it was for as long as the scalar lives.
    shape, dtype = torch.broadcast_shapes(x.shape, y.shape), torch.result_type(x, y)
    every = x.new_empty(shape, dtype=dtype)
    return every if reduction == 0 else every.as_strided((), ())


BODIES |= dict.fromkeys(("aten::mse_loss", "aten::smooth_l1_loss"), _reduced_in_its_own_memory)
