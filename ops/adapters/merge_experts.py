"""Adds adapters of experts to their stacks of matrices, one matrix after another."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..functional.quantize_matrix import MXFP4, QuantizedMatrix, dequantize_matrix
from ..nn.bitsandbytes import scales_name
from ..nn.experts import LowRankStack, QuantizedExperts
from ..nn.lora_experts import LoRAExperts
from ..nn.quantized import quantized_weight

KEPT = "_before_merge"  # of a merged layer: what was in its place


def merged_experts(
    module: LoRAExperts, originals: Mapping[str, Tensor], dtype: torch.dtype | None, again: bool
) -> tuple[nn.Module, float]:
    """Returns a module like the base of one with adapters, whose stacks are the sums with these,
    and what rounding took of them: the norm of it over the norm of what adapters added.

    Args:
        module: has active adapters.
        originals: the stacks to which they are added in place of those of the base, by name; the
            base has some of few bits then.
        dtype: of the stacks, and of biases; None: that which each has, or had before it was
            quantized.
        again: whether stacks of few bits become such again.
    """
    base: Any = module.base_layer
    adapters, held = module.added_stacks(), stacks_in(module)
    in_few_bits = isinstance(base, QuantizedExperts)
    again = again and in_few_bits
    made, stacks = _copied(base), {}
    squares = torch.zeros(
        2, dtype=torch.float64, device=getattr(base, module.rule.stacks[0]).device
    )
    if again and any(getattr(stack, "format", None) == MXFP4 for stack in held.values()):
        raise ValueError("requantize=True, but nothing can be put into MXFP4: merge without it")
    for name in changed_stacks(module, again):
        weight = held[name]
        if name in originals:
            weight = originals[name].to(squares.device)
            weight = weight.mT if is_turned(module) else weight
        wanted = None if again else dtype or held[name].dtype
        stacks[name] = _sum(module, weight, adapters.get(name), wanted, held[name], squares)
    if in_few_bits and not again:
        made.__class__ = base._was
        del made._was, made.rule, made._forms
        for name in stacks:
            delattr(made, scales_name(name))
    for name, stack in stacks.items():
        if isinstance(stack, QuantizedMatrix):
            made._hold(name, stack)
        else:
            stack = stack.mT.contiguous() if is_turned(module) else stack
            made._parameters[name] = nn.Parameter(stack, requires_grad=False)
    for name, param in made._parameters.items() if not again else ():
        if dtype is not None and param is not None and param.dtype != dtype:
            made._parameters[name] = nn.Parameter(param.detach().to(dtype), requires_grad=False)
    rounding, added = squares.sqrt().tolist()
    return made, rounding / added if added else 0.0


def stacks_in(module: LoRAExperts) -> dict[str, Tensor | QuantizedMatrix]:
    """Returns the stacks of the base of a module, by name."""
    base: Any = module.base_layer
    if isinstance(base, QuantizedExperts):
        return dict(zip(module.rule.stacks, base.stacks()))
    return {name: getattr(base, name) for name in module.rule.stacks}


def is_turned(module: LoRAExperts) -> bool:
    """Returns whether the stacks of the base lie otherwise than the dense ones of its class, as
    those in MXFP4 do."""
    base: Any = module.base_layer
    return base.is_transposed != module.rule.options["transposed"]


def changed_stacks(module: LoRAExperts, again: bool) -> list[str]:
    """Returns the names of the stacks that are others after merging."""
    adapters = module.added_stacks()
    decoded = isinstance(module.base_layer, QuantizedExperts) and not again
    return [name for name in module.rule.stacks if decoded or name in adapters]


def _copied(base: Any) -> Any:
    """Returns a module that shares the parameters and the config of another, patched as it is."""
    held = getattr(base, "config", None), vars(base).get(KEPT)
    shared = [*base.parameters(), *(one for one in held if one is not None)]
    made = copy.deepcopy(base, {id(one): one for one in shared})
    vars(made).pop(KEPT, None)
    return made


def _sum(
    module: LoRAExperts,
    weight: Tensor | QuantizedMatrix,
    adapter: LowRankStack | None,
    dtype: torch.dtype | None,
    like: Any,
    squares: Tensor,
) -> Tensor | QuantizedMatrix:
    """Returns the sums of the matrices of a stack with an adapter, in float32 and rounded once.

    Args:
        dtype: of the result; None: in few bits, as ``like``.
        squares: to which those of what rounding took, and of what the adapter added, are added.
    """
    wide = weight
    if isinstance(weight, QuantizedMatrix):
        wide = dequantize_matrix(weight, torch.float32)
    assert isinstance(wide, Tensor)
    total = torch.empty_like(wide, dtype=dtype or torch.float32)
    for e in range(len(wide)):
        exact = wide[e].float()
        if adapter is not None:
            a, b, scale = adapter
            delta = b[e].float() @ a[e].float() * scale
            exact = exact + (delta.mT if module.rule.options["transposed"] else delta)
        total[e] = exact
        squares[0] += (total[e].double() - exact).square().sum()
        squares[1] += (exact.double() - wide[e].float()).square().sum()
    if dtype is not None:
        return total
    q = quantized_weight(total, like.format, block_size=like.block_size, double=like.nested)
    decoded = dequantize_matrix(q, torch.float32)
    squares[0] += sum((one.double() - exact).square().sum() for one, exact in zip(decoded, total))
    return dataclasses.replace(q, dtype=like.dtype)
