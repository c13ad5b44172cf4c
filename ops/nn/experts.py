"""The experts of a mixture as a module of transformers holds them, computed by one op; and such a
module whose matrices are frozen, in 4 or 8 bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from .._core.registration import FLOATS
from .._core.rows import autocast_dtype
from .._core.surroundings import is_plain, takes_ops
from ..functional.experts import experts
from ..functional.quantize_matrix import MXFP4, QuantizedMatrix, dequantize_matrix
from .bitsandbytes import (
    BLOCKS,
    KEYS_8BIT,
    TABLES,
    canonical_key,
    entries_of,
    has_values,
    is_bitsandbytes_key,
    scales_name,
    stack_key,
)
from .fused import is_untouched, known
from .quantized import keys_behind, matrix_in, sharded_as


@dataclasses.dataclass(frozen=True)
class ExpertsRule:
    """Says what a module of experts computes, and what it keeps.

    Attributes:
        names: of the arguments of its forward: rows, indices and weights.
        stacks: the names of its parameters: the matrices in front of the activation and behind it.
        has_bias: whether there are biases, whose names end in ``_bias``.
        options: of :func:`headroom.functional.experts`.
    """

    names: tuple[str, ...]
    stacks: tuple[str, str]
    has_bias: bool
    options: dict[str, Any]

    @property
    def parameters(self) -> tuple[str, ...]:
        biases = [f"{name}_bias" for name in self.stacks] if self.has_bias else []
        return *self.stacks, *biases

    def at(self, save: str) -> ExpertsRule:
        return dataclasses.replace(self, options=self.options | {"save": save})


# A, B and the scale of an adapter of a stack: ``[experts, rank, in]``, ``[experts, out, rank]``.
LowRankStack = tuple[Tensor, Tensor, float]


def experts_forward(module: Any, rule: ExpertsRule, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of the forward of a module of experts."""
    y = experts_computed(module, rule, args, kwargs)
    if y is not None:
        return y
    if isinstance(module, QuantizedExperts):
        raise TypeError(f"experts take {', '.join(rule.names)}, each once")
    return type(module).forward(module, *args, **kwargs)


known.add(experts_forward)


def experts_computed(
    module: Any,
    rule: ExpertsRule,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    adapters: Mapping[str, LowRankStack] | None = None,
) -> Tensor | None:
    """Returns what a module of experts makes of a call, by the op; None if this does not take it.

    Args:
        adapters: what is added to the matrices of stacks, by their names.
    """
    given, adapters = {**dict(zip(rule.names, args)), **kwargs}, adapters or {}
    if len(args) > 3 or given.keys() != {*rule.names}:
        return None
    x, index, weight = (given[name] for name in rule.names)
    # Those in MXFP4 lie otherwise, and may have come, or gone, since the rule was made.
    transposed = module.is_transposed
    if isinstance(module, QuantizedExperts):
        matrices, dtype = module.stacks(), x.dtype
        transposed = module.rule.options["transposed"]
    elif _takes(module, rule, given, adapters):
        matrices = [getattr(module, name) for name in rule.stacks]
        dtype = matrices[0].dtype
    else:
        return None
    biases = [getattr(module, name) for name in rule.parameters[2:]]
    rows, lowered = x, autocast_dtype(x.device.type)
    if lowered is None:
        # As transformers does: in the dtype of the stacks, and the result in that of the rows.
        # Those of few bits have none, and are computed in the dtype of the rows, as Linears are.
        rows, biases = x.to(dtype), [bias.to(dtype) for bias in biases]
        weight = weight if weight.dtype == rows.dtype else weight.float()
    named = dict(zip(("gate_up_bias", "down_bias"), biases)) | rule.options
    named["transposed"] = transposed
    for name, argument in zip(rule.stacks, ("gate_up_adapter", "down_adapter")):
        if name in adapters:
            a, b, scale = adapters[name]
            own = torch.float32 if a.dtype == b.dtype == torch.float32 else lowered or rows.dtype
            named[argument] = a.to(own), b.to(own), scale
    return experts(rows, index, weight, *matrices, **named).to(x.dtype)


def _takes(
    module: nn.Module,
    rule: ExpertsRule,
    given: dict[str, Any],
    adapters: Mapping[str, LowRankStack],
) -> bool:
    """Returns whether the op takes the arguments, the stacks and the adapters of a call."""
    x, index, weight = (given[name] for name in rule.names)
    if not (takes_ops(x, (2,)) and takes_ops(weight, (2,)) and is_plain(index)):
        return False
    if not all(map(is_untouched, module.children())):
        return False  # its activation has got hooks since
    stacks = [module._parameters.get(name) for name in rule.parameters]
    plain = [p for p in stacks if p is not None and is_plain(p)]
    return (
        len(plain) == len(stacks)
        and index.dtype == torch.int64
        and {p.dtype for p in plain} <= {plain[0].dtype}.intersection(FLOATS)
        and {p.device for p in plain} == {x.device}
        and all(takes_ops(t, (3,)) for a, b, _ in adapters.values() for t in (a, b))
    )


class QuantizedExperts(nn.Module):
    """The experts of a mixture whose matrices are in few bits, which are read and never trained.
    :func:`headroom.quantize` and :func:`headroom.load_quantized` make them.

    The parameter of each stack of matrices holds its codes, and another, whose name has
    ``_scales`` behind it, the bytes of their scales: two plain Parameters of integers, as of
    :class:`headroom.nn.Linear4bit`. Experts are decoded one at a time, to the dtype of the rows or
    of autocast, in which they compute; rows, weights and biases have gradients.

    The ``state_dict`` has the keys and bytes of ``bitsandbytes.nn.parametrize``, such as
    ``gate_up_proj`` and ``gate_up_proj.absmax``, and takes these, and stacks of 16 or 32 bits; in
    MXFP4 it has those of gpt-oss, ``gate_up_proj_blocks`` and ``gate_up_proj_scales``.

    Attributes:
        rule: what the module computes.
    """

    rule: ExpertsRule
    _was: type[nn.Module]
    _forms: dict[str, dict[str, Any]]  # of each stack: its QuantizedMatrix without the tensors

    @classmethod
    def take(
        cls, module: nn.Module, rule: ExpertsRule, stacks: Sequence[QuantizedMatrix]
    ) -> QuantizedExperts:
        """Turns a module of experts into this class, in place: its hooks, biases, and those who
        hold it, stay.

        Args:
            rule: of the module; rows of stacks in MXFP4 are outputs, whatever it says.
            stacks: the matrices.
        """
        layer: Any = module
        if stacks[0].format == MXFP4:
            rule = dataclasses.replace(rule, options=rule.options | {"transposed": False})
        layer._was, layer.__class__ = type(module), cls
        layer.rule, layer._forms = rule, {}
        for name, q in zip(rule.stacks, stacks):
            layer._hold(name, q)
        return layer

    def release(self, dtype: torch.dtype | None = None) -> None:
        """Turns this module into one of the class that it was, in place, with stacks that require
        gradients."""
        layer: Any = self
        is_turned = layer.is_transposed != self.rule.options["transposed"]
        for name, q in zip(self.rule.stacks, self.stacks()):
            stack = dequantize_matrix(q, dtype)
            setattr(layer, name, nn.Parameter(stack.mT.contiguous() if is_turned else stack))
            delattr(layer, scales_name(name))
        layer.__class__ = self._was
        del layer._was, layer.rule, layer._forms

    def _hold(self, name: str, q: QuantizedMatrix) -> None:
        setattr(self, name, nn.Parameter(q.codes, requires_grad=False))
        setattr(self, scales_name(name), nn.Parameter(q.scales, requires_grad=False))
        self._describe(name, q)

    def _describe(self, name: str, q: QuantizedMatrix) -> None:
        form = {field.name: getattr(q, field.name) for field in dataclasses.fields(q)}
        del form["codes"], form["scales"]
        self._forms[name] = form

    def stacks(self) -> list[QuantizedMatrix]:
        """Returns the matrices in front of the activation and behind it, whose tensors are those of
        this module."""
        return [
            QuantizedMatrix(getattr(self, name), getattr(self, scales_name(name)), **form)
            for name, form in self._forms.items()
        ]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return experts_forward(self, self.rule, *args, **kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freezes biases too, and returns the module; the stacks cannot be trained.

        Raises:
            RuntimeError: ``requires_grad`` is True.
        """
        if requires_grad:
            raise RuntimeError(
                f"{type(self).__name__}: stacks in few bits cannot be trained; train the biases or "
                "the rest of the model, or these after headroom.dequantize(model)"
            )
        return super().requires_grad_(False)

    def extra_repr(self) -> str:
        forms = (f"{k}={[*form['shape']]} in {form['format']}" for k, form in self._forms.items())
        return ", ".join(forms)

    # ---- state_dict --------------------------------------------------------------------------

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Writes what bitsandbytes writes; shards, and tensors without values, as they are."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, q in zip(self.rule.stacks, self.stacks()):
            if q.format == MXFP4:
                destination[f"{prefix}{name}_{BLOCKS}"] = destination.pop(prefix + name)
            elif has_values(q):
                del destination[prefix + scales_name(name)]
                for key, value in entries_of(q).items():
                    destination[prefix + stack_key(name, key)] = value

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Takes what bitsandbytes or this module wrote, and stacks of 16 or 32 bits, which are
        quantized. A file may have another format of as many bits, or other blocks."""
        mine = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
        found = {}
        for name, like in zip(self.rule.stacks, self.stacks()):
            own = {key: canonical_key(name, key) for key in mine}
            formats = [*TABLES] if like.format in TABLES else [like.format]
            entries = {key: mine[k] for k, key in own.items() if key is not None}
            try:
                q = matrix_in(entries, like, formats, f"the stack in {like.format}")
                if q is None:
                    continue
                self._check_room(name, q)
            except (ValueError, RuntimeError) as error:
                reason = str(error).replace("'weight", f"'{name}")
                error_msgs.append(f"'{prefix}{name}' cannot be loaded: {reason}")
                return
            found[name] = q
            gone = {
                k for k, key in own.items() if key and (key == BLOCKS or is_bitsandbytes_key(key))
            }
            mine = {k: v for k, v in mine.items() if k not in gone}
        for name, q in found.items():
            self._make_room(name, q, local_metadata.get("assign_to_params_buffers", False))
            for key, value in ((name, q.codes), (scales_name(name), q.scales)):
                mine[key] = sharded_as(getattr(self, key), value)
        given = {prefix + key: value for key, value in mine.items()}
        rest = local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(given, prefix, *rest)

    def _check_room(self, name: str, q: QuantizedMatrix) -> None:
        scales = getattr(self, scales_name(name))
        if scales.shape != q.scales.shape and not is_plain(scales):
            raise ValueError("its blocks are others than those of the stack, which is sharded")

    def _make_room(self, name: str, q: QuantizedMatrix, assign: bool) -> None:
        """Gives scales the size of those of ``q``, which may have other blocks."""
        scales = getattr(self, scales_name(name))
        if scales.shape != q.scales.shape:
            room = torch.empty_like(q.scales, device=q.scales.device if assign else scales.device)
            setattr(self, scales_name(name), nn.Parameter(room, requires_grad=False))
        self._describe(name, q)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tells torch.distributed.checkpoint, which follows the dots of a key from attribute to
        attribute, where the keys of bitsandbytes lead to."""
        return dict.fromkeys(self.rule.stacks, "_keys")

    @property
    def _keys(self) -> Any:
        behind = keys_behind()
        for key in KEYS_8BIT:
            setattr(behind, key, None)
        return SimpleNamespace(**dict.fromkeys(self.rule.stacks, behind))


def stack_shape(module: Any, rule: ExpertsRule, stack: str) -> tuple[int, int, int]:
    """Returns how many matrices a stack of a module has, and their sizes: ``[out, in]``, however
    they lie."""
    if isinstance(module, QuantizedExperts):
        shape = module.stacks()[rule.stacks.index(stack)].shape
    else:
        shape = getattr(module, stack).shape
    count, rows, cols = shape
    return (count, cols, rows) if rule.options["transposed"] else (count, rows, cols)
