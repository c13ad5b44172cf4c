"""Experts of models of transformers: recognized by what they compute, and computed by one op.

Classes of transformers whose experts are stacks of matrices say by attributes how these lie in
memory, so that others can compute them (``ALL_EXPERTS_FUNCTIONS``). The activation is found by a
trial: their own forward is called with small stacks of our choice, and its results are compared
with those of each activation in float64.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrize import is_parametrized

from .._core.surroundings import is_plain
from ..nn.experts import ExpertsRule, QuantizedExperts, experts_forward, stack_shape
from ..nn.fused import is_untouched
from .bitsandbytes_experts import (
    HeldExperts,
    bitsandbytes_experts_forward,
    without_parametrizations,
)
from .changes import Changes, patched_names
from .peft_experts import param_wrappers, peft_experts_forward, wrapper_obstacle
from .report import PatchReport
from .routing import choosing_forward

INTERFACE = "transformers.integrations.moe"
LAYOUT = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
ALPHAS, LIMITS = ("alpha", "swiglu_alpha"), ("limit", "swiglu_limit")
CPU: dict[str, Any] = {"device": "cpu", "dtype": torch.float64}
TOLERANCE = 4e-6  # of the largest number of a row: some compute activations in float32


# ---- What is recognized ------------------------------------------------------------------------


def found_experts(model: nn.Module) -> dict[nn.Module, ExpertsRule | str]:
    """Returns the modules of a model that are experts behind the interface of transformers, each
    with its rule, or why it is left as it is."""
    if INTERFACE not in sys.modules:
        return {}
    wrappers = param_wrappers(model)
    tried: dict[Any, ExpertsRule | str] = {}
    found = {}
    for module in model.modules():
        if not all(isinstance(getattr(module, name, None), bool) for name in LAYOUT):
            continue
        dense = without_parametrizations(module)
        if dense is None:
            found[module] = "its stacks are parametrized, and not by bitsandbytes alone"
            continue
        reason = _obstacle(dense)
        if reason is not None:
            found[module] = reason
            continue
        if isinstance(module, QuantizedExperts):
            rule = module.rule
        else:
            key = _key(dense)
            if key not in tried:
                tried[key] = _recognized(dense)
            rule = tried[key]
        if isinstance(rule, ExpertsRule) and is_parametrized(module):
            of_all = vars(module)["_modules"]["parametrizations"].keys() == {*rule.stacks}
            rule = (
                rule if of_all else "bitsandbytes has put some of its stacks into 4 bits, not all"
            )
        if isinstance(rule, ExpertsRule) and module in wrappers:
            rule = wrapper_obstacle(wrappers[module], rule) or rule
        found[module] = rule
    return found


def _obstacle(module: Any) -> str | None:
    """Returns why no forward can be set on a module of experts, or None."""
    if "forward" in vars(module).keys() - patched_names(vars(module)):
        return "something else has replaced its forward"
    if isinstance(module, QuantizedExperts):
        return None
    if not all(is_plain(p) for p in module._parameters.values() if p is not None):
        return "its weights are tensors of another class, such as DTensors"
    if not all(map(is_untouched, module.children())):
        return "its activation has hooks, or a forward of its own"
    if module.has_post_expert_norm:
        return "it has a norm behind each expert"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are spread over ranks"
    own = type(module).forward
    if getattr(own, "__globals__", {}).get("__name__") != INTERFACE:
        return f"the forward of {type(module).__name__} is not that of the interface"
    name = getattr(module.config, "_experts_implementation", None)
    chosen = vars(sys.modules[INTERFACE])["ALL_EXPERTS_FUNCTIONS"].get(name, own)
    if (getattr(chosen, "__module__", "") or "").partition(".")[0] != "transformers":
        return f"its experts_implementation, {name}, is not one of transformers"
    return None


def _key(module: nn.Module) -> Any:
    """Returns what decides the result of a trial."""
    plain = (bool, int, float, str)
    own = tuple(item for item in vars(module).items() if isinstance(item[1], plain))
    shapes = tuple((name, p.shape) for name, p in module._parameters.items() if p is not None)
    return type(module), own, shapes, tuple(map(repr, module.children()))


def _recognized(module: Any) -> ExpertsRule | str:
    """Returns what a module of experts computes, or why it is not swapped."""
    eager = type(module).forward.__wrapped__
    names = tuple(inspect.signature(eager).parameters)[1:]
    stacks = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    layout = dict(
        gated=module.has_gate,
        transposed=module.is_transposed,
        interleaved=module.has_gate and not module.is_concatenated,
    )
    rule = ExpertsRule(names, stacks, module.has_bias, layout)
    given = {name for name, p in module._parameters.items() if p is not None}
    if len(names) != 3 or given != {*rule.parameters} or [*module.buffers()]:
        return "its forward or its parameters are not those of the interface"
    if any(p.dim() != (3 if name in stacks else 2) for name, p in module._parameters.items()):
        return "its parameters are not stacks of matrices"
    trial = _Trial(module, rule)
    y = trial.own(eager)
    fits = () if y is None else (rule for rule in _candidates(module, rule) if trial.fits(y, rule))
    return next(iter(fits), "it computes none of the activations that headroom.functional has")


def _candidates(module: nn.Module, rule: ExpertsRule) -> Iterator[ExpertsRule]:
    options: list[dict[str, Any]] = [{"activation": name} for name in ("silu", "gelu_tanh")]
    options.append({"activation": "relu_squared"})
    alpha, limit = (
        next((vars(module)[name] for name in names if name in vars(module)), None)
        for names in (ALPHAS, LIMITS)
    )
    if module.has_gate and isinstance(alpha, (int, float)) and isinstance(limit, (int, float)):
        clamped = {"activation": "swiglu_clamped", "alpha": float(alpha), "limit": float(limit)}
        options.append(clamped)
    for one in options:
        yield dataclasses.replace(rule, options=rule.options | one)


class _Own(nn.Module):
    """Calls a forward of a module without the module's hooks."""

    def __init__(self, module: nn.Module, forward: Any) -> None:
        super().__init__()
        self.module, self._forward = module, forward

    def forward(self, *args: Any) -> Any:
        return self._forward(self.module, *args)


class _Trial:
    """Calls a module of experts with small stacks: for some tokens gates are beyond any clamp."""

    HIDDEN, FEATURES = 8, 6

    def __init__(self, module: Any, rule: ExpertsRule) -> None:
        self.module = module
        count = getattr(module, rule.stacks[0]).shape[0]
        width = self.FEATURES * (2 if rule.options["gated"] else 1)
        generator = torch.Generator("cpu").manual_seed(count)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, **CPU)

        scales = torch.tensor([0.1, 0.5, 1.0, 1.0, 2.0, 5.0, 20.0, 1e2, 1e3], **CPU)
        self.x = normal(9, self.HIDDEN) * scales[:, None]
        slots = torch.arange(9 * min(2, count), device="cpu").view(9, -1)
        self.index, self.weight = slots % count, normal(*slots.shape).abs() + 0.1
        stacks = normal(count, width, self.HIDDEN), normal(count, self.HIDDEN, self.FEATURES)
        if rule.options["transposed"]:
            stacks = tuple(stack.transpose(1, 2).contiguous() for stack in stacks)
        biases = normal(count, width), normal(count, self.HIDDEN)
        self.given = dict(zip(rule.parameters, (*stacks, *biases)))

    def own(self, eager: Any) -> Tensor | None:
        """Returns the result of the module, or None if it raises."""
        caller = _Own(self.module, eager)
        given = {f"module.{name}": p for name, p in self.given.items()}
        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                y = functional_call(caller, given, (self.x.clone(), self.index, self.weight))
        except Exception:
            return None
        return y if isinstance(y, Tensor) and y.shape == self.x.shape else None

    def fits(self, y: Tensor, rule: ExpertsRule) -> bool:
        exact = self._exact(rule)
        allowed = TOLERANCE * exact.abs().amax(1, keepdim=True)
        return bool(((y.double() - exact).abs() <= allowed).all())

    def _exact(self, rule: ExpertsRule) -> Tensor:
        stacks = [self.given[name][self.index] for name in rule.parameters]
        gate_up, down = stacks[:2]
        if not rule.options["transposed"]:
            gate_up, down = gate_up.transpose(-1, -2), down.transpose(-1, -2)
        biases = stacks[2:] or [torch.zeros((), **CPU)] * 2
        z = (self.x[:, None, None] @ gate_up).squeeze(-2) + biases[0]
        y = (_activated(z, rule.options)[..., None, :] @ down).squeeze(-2) + biases[1]
        return (y * self.weight[..., None]).sum(1)


def _activated(z: Tensor, options: dict[str, Any]) -> Tensor:
    name = options["activation"]
    gate, up = z, torch.ones((), **CPU)
    if options["gated"] and options["interleaved"]:
        gate, up = z[..., ::2], z[..., 1::2]
    elif options["gated"]:
        gate, up = z.chunk(2, dim=-1)
    if name == "swiglu_clamped":
        limit = options["limit"]
        gate = gate.clamp(max=limit)
        return gate * (options["alpha"] * gate).sigmoid() * (up.clamp(-limit, limit) + 1)
    if name == "silu":
        return F.silu(gate) * up
    return (F.gelu(gate, approximate="tanh") if name == "gelu_tanh" else gate.relu() ** 2) * up


# ---- What takes their place --------------------------------------------------------------------


def swap_experts(
    model: nn.Module,
    inside: nn.Module,
    found: dict[nn.Module, ExpertsRule | str],
    save: str,
    changes: Changes,
    report: PatchReport,
) -> None:
    """Swaps the experts of ``model`` that are in a module of it and have not been swapped, and says
    so in the report; or why not.

    Args:
        found: what :func:`found_experts` returned.
        save: what they keep, as in :func:`headroom.functional.experts`.
    """
    within, wrappers = set(inside.modules()), param_wrappers(inside)
    for name, module in model.named_modules():
        rule = found.get(module)
        if rule is None or module not in within or report._is_claimed(module):
            continue
        report._claim(module)
        if isinstance(rule, str):
            report._leave(name, module, rule)
            continue
        forward = functools.partial(experts_forward, module, rule.at(save))
        if is_parametrized(module):
            held = HeldExperts(rule.at(save))
            try:
                held.hold(module)
            except ValueError as error:
                report._leave(name, module, f"its stacks cannot be read: {error}")
                continue
            forward = functools.partial(bitsandbytes_experts_forward, module, held)
        changes.set(module, "forward", forward)
        if module in wrappers:
            outer = wrappers[module][0]
            forward = functools.partial(peft_experts_forward, outer, rule.at(save))
            changes.set(outer, "forward", forward)
        report._swap(name, module, "experts", "headroom.functional.experts")


def keep_choices(
    block: nn.Module, found: dict[nn.Module, ExpertsRule | str], changes: Changes
) -> None:
    """Lets the modules of a block that choose among experts, which are those that hold them, choose
    the same when the block is computed again."""
    for module in block.modules():
        for held in module.children():
            experts = _inner(held)
            rule = found.get(experts)
            if rule is None or isinstance(rule, str) or _inner(module) is experts:
                continue
            shape = stack_shape(without_parametrizations(experts), rule, rule.stacks[0])
            own = vars(module).get("forward")
            forward = functools.partial(choosing_forward, module, own, shape[0])
            changes.set(module, "forward", forward)


def _inner(module: nn.Module) -> nn.Module:
    """Returns what is inside of the modules around it that hold adapters."""
    while (base := module._modules.get("base_layer")) is not None:
        module = base
    return module
