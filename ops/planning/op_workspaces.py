"""Adds what operations allocate inside, and free before they end: fakes do not show it.

Every entry says where its figure is from: a line of torch's source, which was compared with the
allocations that torch's profiler shows for the operation.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .probe import asked, unasked
from .products import capability, is_grouped

__all__ = ["BODIES", "RESULTS", "as_allocated", "as_placed", "entry", "workspaces_of", "left_out"]

Sizes = list[tuple[int, str]]
RESULTS = 0, "results"  # among sizes: where the results are allocated, if not before all of them
Entry = Callable[[Sequence[Any], dict[str, Any], str], Sizes]
_TABLE: dict[str, Entry] = {}
# Of operations that are made of others in Python: that code, whose operations are recorded instead.
BODIES: dict[str, Callable[..., Any]] = {}


def workspaces_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Sizes:
    """Returns the bytes and kinds of what an operation holds until it ends, in the order in which
    they are allocated. Negative bytes are freed before that."""
    name = func._schema.name
    if device == "cpu" and (name in _CONVOLUTIONS or (name in _PRODUCTS and _is_narrow(args))):
        if "coefficients" in kwargs:  # of iterations, each of which takes as much
            kwargs = kwargs | {"coefficients": kwargs["coefficients"][:3]}
        found = asked(func, args, kwargs)
        if found is not None:
            return [(found[0], "temporaries")]
    entry = _TABLE.get(name)
    return [] if entry is None else entry(args, kwargs, device)


# Of operations that allocate their results in another order than that in which they return them.
_ORDERS = {
    "aten::native_dropout": (1, 0),
    "aten::_scaled_dot_product_efficient_attention": (2, 3, 0, 1),
}


def as_allocated(name: str, result: Any) -> Any:
    """Returns the results of an operation in the order in which it allocates them."""
    order = _ORDERS.get(name)
    return result if order is None else [result[i] for i in order]


def as_placed(name: str, args: Sequence[Any], result: Any) -> Any:
    """Returns the results of an operation on the devices on which it makes them."""
    if name == "aten::_scaled_dot_product_efficient_attention" and len(args) > 5 and args[5]:
        # attention.cu: what dropout drew, but in graphs that are captured, is on the host.
        out, sums, *numbers = result
        return out, sums, *(torch.empty_like(x, device="cpu") for x in numbers)
    return result


def left_out() -> list[str]:
    """Returns the operations of this plan whose scratch memory is known in no way."""
    return sorted(unasked - _TABLE.keys() - BODIES.keys())


_CONVOLUTIONS = {"aten::convolution", "aten::convolution_backward"}
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"} | {
    "headroom::experts",
    "headroom::experts_backward",
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


def _temporary(sizes: Sequence[int]) -> Sizes:
    return [(size, "temporaries") for size in sizes]


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
    packs = _packs(q, k, rows)
    even = columns + columns % 2 if packs else columns
    if q.element_size() < 4:  # buf_reduced: scores in the dtype of the inputs
        sizes.append(threads * rows * even * q.element_size())
    if packs:  # keys and values in the layout of the processor's tiles, and a block transposed
        heads, size, width = k.shape[0] * k.shape[1], q.shape[-1], q.element_size()
        padded = size + size % 2
        sizes += [heads * padded * k.shape[-2] * width]
        sizes += [heads * (k.shape[-2] + k.shape[-2] % 2) * size * width]
        sizes.append(threads * columns * size * width)
        sizes.append(threads * rows * padded * width if padded > size else 0)
    return _temporary(sizes)


def _packs(q: Tensor, k: Tensor, block: int) -> bool:
    """Returns whether keys and values are packed: FlashAttentionKernel.cpp, need_pack, where oneDNN
    has products of tiles for the dtype."""
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    if (
        q.dtype is not torch.bfloat16
        or not torch.backends.mkldnn.enabled
        or not torch.cpu._is_amx_tile_supported()
        or not ("AMX" in isa or isa in ("ALL", "DEFAULT"))
        or min(q.shape[-2], k.shape[-2]) < 64
    ):
        return False
    heads, threads = q.shape[0] * q.shape[1], torch.get_num_threads()
    each = -(-heads * -(-q.shape[-2] // block) // threads)
    return each * block >= 4 * heads


@entry("aten::_scaled_dot_product_flash_attention_for_cpu_backward")
def _flash_backward(args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Sizes:
    # buf: scores and their gradients, of a block of each thread; dsum: a row of the block.
    q, k = args[1], args[2]
    rows, columns = _flash_blocks(q, k)
    threads = torch.get_num_threads()
    sizes = [2 * threads * rows * columns * _wide(q), rows * _wide(q)]
    if q.element_size() < 4:
        sizes.append(2 * threads * rows * columns * q.element_size())
    return _temporary(sizes)


@entry("aten::_scaled_dot_product_flash_attention")
def _flash_on_cuda(args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Sizes:
    # flash_api.cpp, set_params_splitkv: where rows are too few for the device, keys are split, and
    # each part has sums and results of its own. cuDNN has none.
    q, k = args[:2]
    batch, heads, rows, size = q.shape
    dropout = args[3] if len(args) > 3 else kwargs.get("dropout_p", 0.0)
    columns = 256 if size <= 64 else 128 if size <= 128 else 64
    parts = _parts(batch * heads * -(-rows // 64), -(-k.shape[-2] // columns))
    if dropout:  # a place for the state of random numbers, before the one that is returned
        return [(16, "temporaries")]
    if parts == 1 or _is_by_cudnn():
        return []
    sums = 4 * parts * batch * heads * rows
    return _temporary([sums, sums * _flash_size(size)])


def _is_by_cudnn() -> bool:
    """Returns whether cuDNN computes attention in place of flash attention: it comes first on 9.0
    and 10.0."""
    return capability()[0] in (9, 10) and torch.backends.cuda.cudnn_sdp_enabled()


def _parts(blocks: int, columns: int) -> int:
    """Returns into how many parts flash attention splits blocks of columns, as
    num_splits_heuristic does."""
    places = 2 * _multiprocessors()[0]
    if blocks >= 0.8 * places:
        return 1
    counts = [
        n
        for n in range(1, min(128, places, columns) + 1)
        if n == 1 or -(-columns // n) != -(-columns // (n - 1))
    ]
    busy = [blocks * n / places / math.ceil(blocks * n / places) for n in counts]
    return next(n for n, part in zip(counts, busy, strict=True) if part >= 0.85 * max(busy))


def _flash_size(size: int) -> int:
    """Returns to how many elements flash attention rounds up those of a head."""
    return -(-size // 32) * 32 if size <= 192 else 256


def _copied(*tensors: Tensor) -> list[int]:
    """Returns the bytes of those that attention copies, since heads are not inside of rows."""
    return [x.nbytes for x in tensors if not x.transpose(1, 2).is_contiguous()]


def _for_each_head(args: Sequence[Any]) -> list[int]:
    """Returns the bytes of gradients of keys and values for each head of the query, where these
    share them."""
    q, k, v = args[1:4]
    return [x.nbytes // x.shape[1] * q.shape[1] for x in (k, v) if x.shape[1] != q.shape[1]]


@entry("aten::_scaled_dot_product_flash_attention_backward")
def _flash_backward_on_cuda(args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Sizes:
    # flash_api.cpp, mha_bwd: sums of rows and the gradient of the query in 32 bits. cuDNN has both
    # in one workspace (cudnn-frontend, scaled_dot_product_flash_attention.h).
    q, shared = args[1], _for_each_head(args)
    batch, heads, rows, size = q.shape
    if _is_by_cudnn():
        scratch = [4 * batch * heads * rows * (size + 1) + sum(shared)]
    else:
        sums = 4 * batch * heads * -(-rows // 128) * 128
        scratch = [sums, sums * _flash_size(size), *shared]
    return [*_temporary(_copied(args[0], args[4])), RESULTS, *_temporary(scratch)]


@entry("aten::_flash_attention_backward")
def _packed_flash_backward_on_cuda(
    args: Sequence[Any], kwargs: dict[str, Any], device: str
) -> Sizes:
    # flash_api.cpp, mha_varlen_bwd: the same for rows of all sequences, each with 128 more.
    dout, q, k, v, out, _, ends = args[:7]
    tokens, heads, size = q.shape
    sums = 4 * heads * (tokens + 128 * (ends.shape[0] - 1))
    shared = [x.nbytes // x.shape[1] * heads for x in (k, v) if x.shape[1] != heads]
    copies = [x.nbytes for x in (dout, out) if not x.is_contiguous()]
    scratch = [sums, sums * _flash_size(size), *shared]
    return [*_temporary(copies), RESULTS, *_temporary(scratch)]


@entry("aten::_scaled_dot_product_efficient_attention_backward")
def _efficient_backward(args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Sizes:
    # attention_backward.cu: sums of rows, of products in 32 bits, and kernel_backward.h,
    # GradQTempStorage: blocks of the gradient of the query, each with a head of 16 bytes.
    q = args[1]
    batch, heads, rows, size = q.shape
    height = 64 if size <= 64 or capability() < (8, 0) else 128
    blocks = -(-rows // height) * -(-size // 64)
    sums = 4 * batch * heads * rows
    rows_of_sums = [sums]
    if q.element_size() == 4:  # of products, and in another layout
        rows_of_sums = [sums * size, sums, sums, -sums, -sums * size]
    workspace = batch * heads * blocks * (16 + 4 * height * 64)
    copies = _temporary(_copied(args[0]))
    return [*copies, RESULTS, *_temporary([*_for_each_head(args), *rows_of_sums, workspace])]


@entry("aten::_safe_softmax")
def _safe_softmax(args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Sizes:
    # attention.cpp: a mask of minus infinity, whether a row is all mask, and a zero.
    x = args[0]
    zero = [x.element_size()] if device == "cuda" else []
    return _temporary([x.numel(), x.numel() // x.shape[-1], *zero])


@entry("aten::_softmax_backward_data")
def _softmax_backward(args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Sizes:
    # SoftMax.cu: products of the gradient and the result.
    return [(args[0].nbytes, "temporaries")] if device == "cuda" else []


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
    if device != "cpu":
        return _sum(args, kwargs, device)
    return [(4 * args[0].numel(), "temporaries")] if _is_narrow(args) else []


@entry("aten::sum")
def _sum(args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Sizes:
    # Reduce.cuh, setReduceConfig: sums of columns, such as the gradient of a bias, are divided
    # among blocks of threads, and each thread keeps its own.
    x, dims = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
    if device != "cuda" or not isinstance(dims, (list, tuple)) or not x.is_contiguous():
        return []
    count = len(dims)
    if not 0 < count < x.dim() or {dim % x.dim() for dim in dims} != {*range(count)}:
        return []
    rows, columns = math.prod(x.shape[:count]), math.prod(x.shape[count:])
    if rows < 2 or columns < 2:
        return []
    together = math.gcd(columns, 4)
    most = 512 // together
    width = min(most, _power_of_two(columns // together))
    height = min(most, _power_of_two(rows), most // min(width, 32))
    width = min(width, most // height)
    each, grid = -(-rows // height), -(-(columns // together) // width)
    processors, threads = _multiprocessors()
    target = processors * (threads // (width * height))
    if each < 256 or grid > target:
        return []
    blocks = max(min(-(-target // grid), -(-each // 16)), -(-each // 256))
    if blocks < 2:
        return []
    size = _wide(x) * columns * blocks * width * together
    return [(size, "temporaries"), (4 * grid, "temporaries")]


def _power_of_two(n: int) -> int:
    """Returns the largest power of two up to a number."""
    return 1 << (n.bit_length() - 1)


def _multiprocessors() -> tuple[int, int]:
    """Returns how many multiprocessors the device has that plans are for, and the threads of
    each: those of an A100 where none is in use."""
    if not torch.cuda.is_initialized():
        return 108, 2048
    found = torch.cuda.get_device_properties()
    return found.multi_processor_count, found.max_threads_per_multi_processor


@entry("aten::_grouped_mm")
def _grouped_mm(args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Sizes:
    # GroupMM.cu: sizes and addresses of each group, and CUTLASS's descriptors of tensors for each
    # multiprocessor.
    if device != "cuda" or not is_grouped(args[0].dtype):
        return []
    each = 512 if capability()[0] == 9 else 5888
    return [(512, "temporaries"), (each * _multiprocessors()[0], "temporaries")]


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
