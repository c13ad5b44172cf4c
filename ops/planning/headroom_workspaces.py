"""Adds what Headroom's own operations allocate inside, as their C functions say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .._core.registration import FLOATS, binder, by_name
from ..functional import attention_segments, attention_sinks, kept_gradients, linear_divergence
from ..functional.linear_cross_entropy import BIAS, HIDDEN, WEIGHT
from .op_workspaces import BODIES, Sizes, entry
from .products import capability

Named = Callable[[dict[str, Any], str], Sizes]


def workspace_of(*names: str) -> Callable[[Named], Named]:
    """Registers what ops of these names allocate, from their arguments by name."""

    def register(function: Named) -> Named:
        for name in names:
            bound = binder(name)

            def found(
                args: Sequence[Any], kwargs: dict[str, Any], device: str, bound=bound
            ) -> Sizes:
                return function(bound(tuple(args), kwargs), device)

            entry(f"headroom::{name}")(found)
        return function

    return register


def _workspace(name: str, given: dict[str, Any], **own: Any) -> Any:
    """Returns what ``headroom::name`` says, whose numbers have the names of those of the op that
    ``given`` are the arguments of; or None where it refuses them."""
    try:
        with _disable_current_modes():  # of numbers alone: no operation to follow
            return by_name(name)(**given | own)
    except RuntimeError:
        return None


@workspace_of("rms_norm_backward", "layer_norm_backward")
def _norm_backward(given: dict[str, Any], device: str) -> Sizes:
    if not (given["want_dweight"] or given.get("want_dbias")):
        return []
    *rows, cols = given["x"].shape
    own = {"rows": prod(rows), "cols": cols, "layer": "want_dbias" in given}
    found = _workspace("norm_workspace", given, **own)
    return [] if found is None else [(found, "temporaries")]


@workspace_of("mlp_block", "mlp_block_backward")
def _mlp(given: dict[str, Any], device: str) -> Sizes:
    x, gate_up, down = given.get("dy", given["x"]), given["gate_up"], given["down"]
    norms = (t for t in (given["norm_weight"], given["norm_bias"]) if t is not None)
    apart = given["up"] is not None or given["up_codes"] is not None
    if down is None:
        features, gated = given["features"], given["gated"]
    else:
        features = down.shape[1]
        gated = apart or gate_up.shape[0] != features
    found = _workspace(
        "mlp_block_workspace",
        given,
        tokens=prod(x.shape[:-1]),
        hidden=x.shape[-1],
        features=features,
        dtype=FLOATS.index(x.dtype),
        norm_dtype=FLOATS.index(next(norms, x).dtype),
        gated=gated,
        apart=apart,
        is_cuda=device == "cuda",
    )
    return [] if found is None else [(found["dy" in given], "temporaries")]


@workspace_of("experts", "experts_backward")
def _experts(given: dict[str, Any], device: str) -> Sizes:
    backward = "dy" in given
    x, weight = given["dy" if backward else "x"], given["weight"]
    own = {}
    for name in ("gate_up", "down"):
        stack, a = given[name], given[f"{name}_a"]
        own[f"{name}_dtype"] = FLOATS.index(x.dtype if given[f"{name}_format"] else stack.dtype)
        own[f"{name}_rank"] = 0 if a is None else a.shape[1]
        own[f"{name}_adapter_dtype"] = 0 if a is None else FLOATS.index(a.dtype)
    found = _workspace(
        "experts_workspace",
        given,
        **dict(zip(("tokens", "slots"), weight.shape)),
        hidden=x.shape[-1],
        dtype=FLOATS.index(x.dtype),
        weight_dtype=FLOATS.index(weight.dtype),
        is_cuda=device == "cuda",
        **own,
    )
    return [] if found is None else [(found[backward], "temporaries")]


def _loss(given: dict[str, Any], device: str, wanted: int, adds: bool = False) -> Sizes:
    hidden, weight = given["hidden"], given["weight"]
    major, minor = capability()
    found = _workspace(
        "linear_cross_entropy_workspace",
        given,
        rows=prod(hidden.shape[:-1]),
        features=hidden.shape[-1],
        classes=given["classes"] if weight is None else weight.shape[0],
        dtype=FLOATS.index(hidden.dtype),
        wanted=wanted,
        adds=adds,
        capability=10 * major + minor if device == "cuda" else 0,
    )
    return [] if found is None else [(found, "temporaries")]


def _product(name: str, given: dict[str, Any], device: str, **own: Any) -> Sizes:
    """Returns the workspace of a layer, whose weight has rows and columns, or of its gradient."""
    backward = "dy" in given
    x = given["dy" if backward else "x"]
    found = _workspace(
        name,
        given,
        tokens=prod(x.shape[:-1]),
        rows=x.shape[-1] if backward else given["rows"],
        cols=given["cols"] if backward else x.shape[-1],
        dtype=FLOATS.index(x.dtype),
        backward=backward,
        is_cuda=device == "cuda",
        **own,
    )
    return [(found, "temporaries")] if found else []


@workspace_of("linear_quantized", "linear_quantized_backward")
def _linear(given: dict[str, Any], device: str) -> Sizes:
    return _product("linear_quantized_workspace", given, device)


@workspace_of("lora_linear", "lora_linear_backward")
def _lora(given: dict[str, Any], device: str) -> Sizes:
    a = given["a"]
    own = {"rank": a.shape[0], "adapter_dtype": FLOATS.index(a.dtype)}
    return _product("lora_linear_workspace", given, device, **own)


@workspace_of("linear_cross_entropy", "linear_cross_entropy_backward")
def _loss_and_gradients(given: dict[str, Any], device: str) -> Sizes:
    return _loss(given, device, given["wanted"])


@workspace_of("linear_cross_entropy_backward_")
def _loss_gradients_in_place(given: dict[str, Any], device: str) -> Sizes:
    grads = {HIDDEN: given["want_hidden"], WEIGHT: given["weight_grad"], BIAS: given["bias_grad"]}
    wanted = sum(bit for bit, grad in grads.items() if grad is not None and grad is not False)
    return _loss(given, device, wanted, adds=True)


def _all_rows(ignored: Tensor) -> Tensor:
    """Returns the numbers of all rows: at most these count."""
    ignored.flatten().logical_not()
    return torch.arange(ignored.numel(), device=ignored.device)


def _one_sequence(cu_seqlens: Tensor, tokens: int) -> list[int]:
    """Returns where the only sequence ends: shorter ones take as much, or less."""
    return [0, tokens]


for _name, _module in {
    "attention_segments": attention_segments,
    "attention_sinks": attention_sinks,
}.items():
    BODIES[f"headroom::{_name}"] = partial(_module.forward_of, find=_one_sequence)
    BODIES[f"headroom::{_name}_backward"] = partial(_module.backward_of, find=_one_sequence)
BODIES["headroom::linear_divergence"] = partial(linear_divergence.forward_of, find=_all_rows)
BODIES["headroom::linear_divergence_scale"] = linear_divergence.scale_of
BODIES["headroom::linear_divergence_backward"] = partial(
    linear_divergence.backward_of, find=_all_rows
)


def fakes_overwritten() -> Any:
    """Lets the loss scale gradients of fakes in place, as it does those of tensors: only these have
    the type that it asks for."""
    is_free, tensor = kept_gradients.may_overwrite, torch.empty(0)
    return mock.patch.object(kept_gradients, "may_overwrite", lambda kept: is_free(tensor))
