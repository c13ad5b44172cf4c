"""Linear layers whose weights are frozen, in 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from typing_extensions import Self

from .._core.checks import check_choice
from ..functional.linear_quantized import quantized_linear_forward
from ..functional.quantize_matrix import (
    MXFP4,
    QuantizedMatrix,
    dequantize_matrix,
    mxfp4_matrix,
    quantize_matrix,
)
from .bitsandbytes import (
    BLOCKS,
    KEYS_4BIT,
    KEYS_8BIT,
    TABLES,
    entries_of,
    has_values,
    is_bitsandbytes_key,
    is_finite,
    matrix_of,
)


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is a matrix of few bits, which is read and never trained.

    ``weight`` holds the codes and ``scales`` the bytes of their scales: two plain Parameters of
    integers, so that ``.to(dtype)``, ``.half()`` and casts of FSDP2 leave them as they are, DDP
    sends them once, and FSDP2 shards them.

    Attributes:
        format, block_size, nested: as in :class:`headroom.functional.QuantizedMatrix`.
        weight_dtype: of the weight before it was quantized.
    """

    formats: tuple[str, ...] = ()
    scales: nn.Parameter
    format: str
    block_size: int
    nested: bool
    weight_dtype: torch.dtype

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._hold(quantize_matrix(self.weight.detach(), **options))

    @classmethod
    def take(cls, module: nn.Module, q: QuantizedMatrix) -> Self:
        """Turns a module with a ``bias`` into this class, in place: its hooks, and those who hold
        it, stay."""
        layer: Any = module
        layer.__class__ = cls
        layer.out_features, layer.in_features = q.shape
        layer._hold(q)
        return layer

    def release(self, dtype: torch.dtype | None = None) -> None:
        """Turns this module into ``nn.Linear``, in place, with a weight that requires gradients."""
        weight = nn.Parameter(self.dequantize(dtype))
        layer: Any = self
        layer.__class__ = nn.Linear
        layer.weight = weight
        del layer.scales, layer.format, layer.block_size, layer.nested, layer.weight_dtype

    def _hold(self, q: QuantizedMatrix) -> None:
        check_choice("format", q.format, self.formats, f"{type(self).__name__}: ")
        self.weight = nn.Parameter(q.codes, requires_grad=False)
        self.scales = nn.Parameter(q.scales, requires_grad=False)
        self._describe(q)

    def _describe(self, q: QuantizedMatrix) -> None:
        self.format, self.block_size, self.nested = q.format, q.block_size, q.nested
        self.weight_dtype = q.dtype

    @property
    def matrix(self) -> QuantizedMatrix:
        """Returns the weight, whose tensors are those of this module."""
        return QuantizedMatrix(
            self.weight,
            self.scales,
            (self.out_features, self.in_features),
            self.weight_dtype,
            self.format,
            self.block_size,
            self.nested,
        )

    @property
    def W_q(self) -> nn.Parameter:
        """Returns the codes. By this name PEFT finds :meth:`dequantize`, which DoRA needs."""
        return self.weight

    forward = quantized_linear_forward

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the weight in ``dtype``, by default that which it had: ``[out, in]``."""
        return dequantize_matrix(self.matrix, dtype)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freezes the bias too, and returns the layer; the weight cannot be trained.

        Raises:
            RuntimeError: ``requires_grad`` is True.
        """
        if requires_grad:
            raise RuntimeError(
                f"{type(self).__name__}: a weight in {self.format} cannot be trained; train the "
                "bias (layer.bias.requires_grad_()), an adapter, or the layer after "
                "headroom.dequantize(model)"
            )
        return super().requires_grad_(False)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self.format}"

    # ---- state_dict --------------------------------------------------------------------------

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Writes what bitsandbytes writes; shards, and tensors without values, as they are."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not has_values(self.matrix):
            return
        del destination[f"{prefix}scales"]
        for key, value in entries_of(self.matrix).items():
            destination[prefix + key] = value

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
        """Takes what bitsandbytes or this module wrote, and a weight of 16 or 32 bits, which is
        quantized. A file may have another format of as many bits, or other blocks."""
        mine = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
        try:
            q = matrix_in(mine, self.matrix, self.formats, f"the layer is a {type(self).__name__}")
            if q is not None:
                self._make_room(q, assign=local_metadata.get("assign_to_params_buffers", False))
                mine = {k: v for k, v in mine.items() if not is_bitsandbytes_key(k)}
                mine |= {"weight": sharded_as(self.weight, q.codes)}
                mine["scales"] = sharded_as(self.scales, q.scales)
        except (ValueError, RuntimeError) as error:
            error_msgs.append(f"'{prefix}weight' cannot be loaded: {error}")
            return
        given = {prefix + key: value for key, value in mine.items()}
        rest = local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(given, prefix, *rest)

    def _make_room(self, q: QuantizedMatrix, assign: bool) -> None:
        """Gives ``scales`` the size of those of ``q``, which may have other blocks."""
        if self.scales.shape != q.scales.shape:
            if isinstance(self.scales, DTensor):
                raise ValueError("its blocks are others than those of the layer, which is sharded")
            device = q.scales.device if assign else self.scales.device
            scales = torch.empty_like(q.scales, device=device)
            self.scales = nn.Parameter(scales, requires_grad=False)
        self._describe(q)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tells torch.distributed.checkpoint, which follows the dots of a key from attribute to
        attribute, where the keys of bitsandbytes lead to."""
        return dict.fromkeys(("weight", *KEYS_8BIT), "_keys")

    @property
    def _keys(self) -> Any:
        return SimpleNamespace(weight=keys_behind(), **dict.fromkeys(KEYS_8BIT))


class Linear4bit(QuantizedLinear):
    """``torch.nn.Linear`` with a frozen weight in 4 bits: ``x @ weight.T + bias``.

    The weight is decoded in parts, to the dtype of x or of autocast, in which the layer computes
    and answers. x and the bias have gradients.

    Its ``state_dict`` has the keys and bytes of ``bitsandbytes.nn.Linear4bit``, and it loads these,
    and weights of 16 or 32 bits. Sharded by FSDP2 it has ``weight`` and ``scales``, of bytes.

    Args:
        in_features, out_features, bias, device, dtype: as of ``torch.nn.Linear``, whose initial
            weight is quantized.
        format: "nf4" or "fp4".
        block_size: weights that share a scale: a power of two from 32 to 4096.
        double: quantizes the scales too: 4.13 bits per weight in place of 4.5, in blocks of 64.
    """

    formats = ("nf4", "fp4")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        format: str = "nf4",
        block_size: int = 64,
        double: bool = True,
    ) -> None:
        options = {"to": format, "block_size": block_size, "double": double}
        super().__init__(in_features, out_features, bias, device, dtype, **options)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, block_size={self.block_size}, double={self.nested}"


class Linear8bit(QuantizedLinear):
    """``torch.nn.Linear`` with a frozen weight in int8 and a scale for each row of it.

    x is not quantized. All else is as in :class:`Linear4bit`, and ``bitsandbytes.nn.Linear8bitLt``
    has the keys and bytes of its ``state_dict``.

    Args:
        in_features, out_features, bias, device, dtype: as of ``torch.nn.Linear``, whose initial
            weight is quantized.
    """

    formats = ("int8",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype, to="int8")


CLASSES: dict[str, type[QuantizedLinear]] = {
    kind: cls for cls in (Linear4bit, Linear8bit) for kind in cls.formats
}


def quantized_weight(
    weight: Tensor, to: str, *, block_size: int, double: bool, search: bool = False
) -> QuantizedMatrix:
    """Returns a weight in few bits.

    Raises:
        ValueError: an element is not finite.
    """
    q = quantize_matrix(weight, to=to, block_size=block_size, double=double, search=search)
    if not is_finite(q):  # the largest magnitudes, and so their mean, are if all elements are
        raise ValueError("an element is not finite")
    return q


def matrix_in(
    entries: Mapping[str, Any], like: QuantizedMatrix, formats: Collection[str], holder: str
) -> QuantizedMatrix | None:
    """Returns the matrix in entries of a state_dict, as :mod:`headroom.nn.bitsandbytes` names them;
    None where ``weight`` and ``scales`` are those of a module itself, or where there is none.

    Args:
        like: the matrix in whose place it comes.
        formats: that it may have.
        holder: what is in the way of another format, for the error.

    Raises:
        ValueError: the entries do not fit each other or the module, or a scale is not finite.
    """
    if BLOCKS in entries:
        if "scales" not in entries:
            raise ValueError("its scales are missing")
        q = mxfp4_matrix(entries[BLOCKS], entries["scales"], like.dtype)
        if q.shape != like.shape:
            raise ValueError(f"it is {[*q.shape]}, and the layer {[*like.shape]}")
        return _checked(q, formats, holder)
    weight = entries.get("weight")
    quantized = {k: v for k, v in entries.items() if k == "weight" or is_bitsandbytes_key(k)}
    if len(quantized) == (weight is not None):  # no key that only bitsandbytes has
        if not isinstance(weight, Tensor):
            return None
        if weight.is_floating_point():
            if weight.shape != like.shape:
                raise ValueError(f"it is {[*weight.shape]}, and the layer {[*like.shape]}")
            options: Any = {"block_size": like.block_size, "double": like.nested}
            return quantized_weight(weight.detach(), like.format, **options)
        if "scales" in entries:
            _check_dtypes(entries, {"weight": like.codes.dtype, "scales": torch.uint8})
            return None
    return _checked(matrix_of(quantized, like.shape, like.dtype), formats, holder)


def _checked(q: QuantizedMatrix, formats: Collection[str], holder: str) -> QuantizedMatrix:
    if q.format not in formats:
        raise ValueError(f"it is in {q.format}, and {holder}")
    if not is_finite(q):
        known = {"int8": "'SCB'", MXFP4: "'weight_scales'"}
        where = known.get(q.format, "'weight.absmax' and what belongs to it")
        raise ValueError(f"{where} must have finite numbers alone")
    return q


def keys_behind() -> Any:
    """Returns attributes for what the keys of bitsandbytes have behind the name of a weight in 4
    bits."""
    names = (key.removeprefix("weight.") for key in KEYS_4BIT)
    states = SimpleNamespace(**{f"bitsandbytes__{kind}": None for kind in TABLES})
    return SimpleNamespace(**dict.fromkeys(names), quant_state=states)


def sharded_as(param: Tensor, value: Tensor) -> Tensor:
    """Returns the shard of a whole value for a parameter that is sharded; else the value."""
    if isinstance(param, DTensor) and not isinstance(value, DTensor):
        return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
    return value


def _check_dtypes(entries: Mapping[str, Any], wanted: Mapping[str, torch.dtype]) -> None:
    for key, dtype in wanted.items():
        x = entries[key]
        if not isinstance(x, Tensor) or x.dtype != dtype or x.layout != torch.strided:
            raise ValueError(
                f"'{key}' is {getattr(x, 'dtype', x)}, wanted a dense tensor of {dtype}"
            )
