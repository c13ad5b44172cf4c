"""Linear layers and embeddings with low-rank adapters beside a frozen weight."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._core.all_or_nothing import all_or_nothing
from .._core.checks import check_count, check_flags, check_number
from .._core.grouping import grouped
from .._core.rows import autocast_dtype
from .._core.surroundings import takes_ops
from .._core.text import quoted
from ..functional.linear import linear
from ..functional.quantize_matrix import QuantizedMatrix
from .dora import Magnitude, dora_linear, row_factors, row_norms, scale_columns
from .fused import bias_of, frozen_matrix, is_known, known, readers
from .linear import Linear
from .mlp_lora import Factor, LowRank, times
from .quantized import QuantizedLinear
from .switched import Switched


@dataclasses.dataclass(frozen=True)
class Adapter:
    """The numbers of an adapter of a layer.

    Attributes:
        rank: rows of A and columns of B.
        alpha: what B A is multiplied with, times the rank, or its root with ``rslora``.
        dropout: the probability with which elements of x are zero in front of A, in training.
        rslora: whether ``scale`` is that of rsLoRA (Kalajdzievski, arXiv:2312.03732).
        dora: whether rows of the sum of weight and adapter have lengths that are trained (DoRA, Liu
            et al., arXiv:2402.09353).

    Raises:
        TypeError: one of them has another type.
        ValueError: the rank is not from 1 to 2^31 - 1, alpha is not finite, or the dropout is not
            in [0, 1).
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False

    def __post_init__(self) -> None:
        check_count("rank", self.rank, 1)
        check_number("alpha", self.alpha)
        check_number("dropout", self.dropout)
        check_flags(rslora=self.rslora, dora=self.dora)
        if self.rank >= 1 << 31:
            raise ValueError(f"rank is {self.rank}, wanted less than 2^31")
        if not abs(self.alpha) <= sys.float_info.max:  # a NaN, an infinity, or a larger integer
            raise ValueError(f"alpha is {quoted(self.alpha)}, wanted a finite number")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}, wanted a number in [0, 1)")

    @property
    def scale(self) -> float:
        """Returns what B A is multiplied with."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class LoRALayer(Switched):
    """A layer with adapters, which may be added to its weight ``[out, in]``.

    Attributes:
        base_layer: the layer, which stays as it is.
        adapters: the :class:`Adapter` of each name.
    """

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_magnitude_vector = nn.ModuleDict()
        self.adapters: dict[str, Adapter] = {}
        self.train(base_layer.training)

    @property
    def in_features(self) -> int:
        return features_of(self.base_layer)[0]

    @property
    def out_features(self) -> int:
        return features_of(self.base_layer)[1]

    @property
    def weight(self) -> Any:
        """Returns the weight of the base, for those who ask a layer for its dtype or device."""
        return self.base_layer.weight

    @property
    def names(self) -> list[str]:
        return [*self.adapters]

    def checked(self, names: Iterable[str]) -> tuple[str, ...]:
        names = super().checked(names)
        if len(names) > 1 and any(self.adapters[name].dora for name in names):
            raise ValueError(
                f"{[*names]} cannot be added up, because one has DoRA, which is no sum: use one of "
                "them, or merge one first"
            )
        return names

    def matrices(self, name: str) -> tuple[Tensor, Tensor]:
        """Returns A, ``[rank, in]``, and B, ``[out, rank]``, of an adapter."""
        raise NotImplementedError

    def own_matrices(self, name: str) -> list[nn.Parameter]:
        """Returns the parameters of this layer that A and B of an adapter are."""
        raise NotImplementedError

    def magnitude(self, name: str) -> nn.Parameter | None:
        """Returns the lengths of rows, ``[out]``, of an adapter; None if it does not have DoRA."""
        held: Any = self.lora_magnitude_vector
        return held[name].weight if name in held else None

    def trained(self, name: str) -> list[nn.Parameter]:
        lengths = self.magnitude(name)
        return [*self.own_matrices(name), *([] if lengths is None else [lengths])]

    def add_adapter(
        self, name: str, adapter: Adapter, dtype: torch.dtype | None = torch.float32
    ) -> None:
        """Adds an adapter whose product is zero, and which is not active yet.

        Raises:
            ValueError: there is one of this name; or DoRA cannot read the weight.
        """
        if name in self.adapters:
            raise ValueError(f"there is an adapter {name!r} already")
        with all_or_nothing(self):
            self._add_matrices(name, adapter.rank, {"device": self.weight.device, "dtype": dtype})
            if adapter.dora:
                norms = row_norms(self.base_matrix(), *self.matrices(name), adapter.scale)
                self.lora_magnitude_vector[name] = Magnitude(norms.to(dtype or norms.dtype))
            self.adapters[name] = adapter

    def delete_adapter(self, name: str) -> None:
        """Removes an adapter of this name, if there is one."""
        super().delete_adapter(name)
        if self.adapters.pop(name, None) is not None:
            for parts in (*self._parts(), self.lora_magnitude_vector):
                if name in parts:
                    del parts[name]

    def delta(self, rows: slice = slice(None)) -> Tensor:
        """Returns the sum of the ``added`` adapters' matrices in float32, ``[out, in]``, or some
        rows of it."""
        total = torch.zeros((1, 1), device=self.weight.device)
        for name in self.added:
            a, b = (each.detach().float() for each in self.matrices(name))
            total = total + b[rows] @ a * self.adapters[name].scale
        return total

    def sum(self, weight: Tensor, rows: slice = slice(None)) -> Tensor:
        """Returns what a weight ``[out, in]`` and the ``added`` adapters are together, in float32,
        or some rows of it."""
        total = weight[rows].float() + self.delta(rows)
        for name in self.added:
            if (lengths := self.magnitude(name)) is not None:
                norms = torch.linalg.vector_norm(total, dim=1)
                total = total * row_factors(lengths.detach()[rows], norms).unsqueeze(1)
        return total

    def _add_matrices(self, name: str, rank: int, options: dict[str, Any]) -> None:
        raise NotImplementedError

    def _parts(self) -> tuple[Any, ...]:
        """Returns what holds A and B by name."""
        raise NotImplementedError

    def base_matrix(self) -> Tensor | QuantizedMatrix:
        """Returns the matrix of the base, ``[out, in]``, whose rows DoRA measures.

        Raises:
            ValueError: bitsandbytes holds it.
        """
        if isinstance(self.base_layer, QuantizedLinear):
            return self.base_layer.matrix
        if _library(self.base_layer) == "bitsandbytes":
            raise ValueError(
                "its weight is in bits of bitsandbytes, of which DoRA cannot know the norms: "
                "quantize the model by headroom.quantize, or let PEFT add the adapter and call "
                "headroom.patch"
            )
        return self.weight if hasattr(self.base_layer, "in_features") else self.weight.t()

    def extra_repr(self) -> str:
        numbers = (f"{name}: rank={one.rank}" for name, one in self.adapters.items())
        return f"{', '.join(numbers)}, active={[*self.active]}"


class LoRALinear(LoRALayer):
    """A linear layer with adapters: ``base_layer(x) + sum of scale * B A dropout(x)`` (Hu et al.,
    arXiv:2106.09685).

    With DoRA, of which one adapter is active at a time, columns of what is in front of the bias
    are multiplied with ``magnitude / |W + scale * B A|``, the norms of its rows
    (arXiv:2402.09353); a new adapter has those of ``W``.

    A and B may be wider than x: their products are in the dtype of x, or of autocast, and their
    gradients in their own. Names of parameters are those of PEFT: ``lora_A.default.weight``
    ``[rank, in]``, ``lora_B.default.weight`` ``[out, rank]``,
    ``lora_magnitude_vector.default.weight`` ``[out]``, and ``base_layer.weight``.

    The output head of a model may have the weight of its embedding. Its adapters are then those of
    the embedding, transposed: it has no parameters of its own, and what is added to the weight is
    the same in both.

    Args:
        base_layer: ``nn.Linear``, :class:`Linear4bit`, :class:`Linear8bit`, or another module that
            multiplies its input with a matrix; it is called as it is.
        tied_to: the embedding that has the same weight, and whose adapters this layer uses.

    Attributes:
        adapters: the :class:`Adapter` of each name.
        active: names of the adapters that are added up.
        enabled: whether any is.
    """

    _tied_to: tuple[LoRAEmbedding, ...] = ()  # also of layers that were pickled without it

    def __init__(self, base_layer: nn.Module, tied_to: LoRAEmbedding | None = None) -> None:
        super().__init__(base_layer)
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        self._tied_to = () if tied_to is None else (tied_to,)  # no child, or it is there twice

    @property
    def tied_to(self) -> LoRAEmbedding | None:
        """Returns the embedding whose adapters these are, or None."""
        return self._tied_to[0] if self._tied_to else None

    @property
    def bias(self) -> Any:
        return self.base_layer.bias

    @property
    def draws(self) -> bool:
        """Returns whether a call may draw random numbers."""
        return not is_known(self.base_layer) or any(map(self._dropout, self.added))

    def matrices(self, name: str) -> tuple[Tensor, Tensor]:
        if self.tied_to is not None:
            a, b = self.tied_to.matrices(name)
            return b.t(), a.t()
        a, b = self.own_matrices(name)
        return a, b

    def own_matrices(self, name: str) -> list[nn.Parameter]:
        return [] if self._tied_to else [part[name].weight for part in self._parts()]

    def forward(self, input: Tensor) -> Tensor:
        y, names = None, self.added
        if names and self.adapters[names[0]].dora:
            return self._with_lengths(input, names[0])
        for dropout, names in grouped(self.added, self._dropout).items():
            # Adapters that drop as much are one of their joined rank, which reads x once.
            if y is None and (read := self._factor(input, names, dropout)) is not None:
                y = times(input, read)
                continue
            a, b, scale = self._joined(names)
            y = self.base_layer(input) if y is None else y
            x = F.dropout(input, dropout) if dropout else input
            t = linear(x, a.to(x.dtype)) * scale
            y = y + linear(t, b.to(t.dtype)).to(y.dtype)
        return self.base_layer(input) if y is None else y

    def _factor(self, x: Tensor, names: list[str], dropout: float) -> Factor | None:
        """Returns the matrix and the bias of the base beside the sum of some adapters, if a call of
        the base does no more than multiply with them; else None."""
        a, b, scale = self._joined(names)
        weight = readable_matrix(self.base_layer, x, a, b)
        if weight is None:
            return None
        return Factor(weight, bias_of(self, x), LowRank(a, b, scale, dropout))

    def _with_lengths(self, input: Tensor, name: str) -> Tensor:
        """Returns the result with an adapter that has DoRA."""
        (a, b), lengths = self.matrices(name), self.magnitude(name)
        weight = readable_matrix(self.base_layer, input, a, b)
        assert lengths is not None
        return dora_linear(
            self.base_layer,
            self.base_matrix() if weight is None else weight,
            input,
            a,
            b,
            lengths,
            scale=self.adapters[name].scale,
            dropout=self._dropout(name),
            fused=weight is not None,
        )

    def _add_matrices(self, name: str, rank: int, options: dict[str, Any]) -> None:
        if self.tied_to is not None:
            if name not in self.tied_to.adapters:
                raise ValueError(f"the embedding with the same weight has no adapter {name!r}")
            with torch.no_grad():  # as below: an embedding's own B is too large for a head
                nn.init.kaiming_uniform_(self.matrices(name)[0], a=math.sqrt(5))
            return
        # A as nn.Linear initializes its weight.
        self.lora_A[name] = nn.Linear(self.in_features, rank, bias=False, **options)
        self.lora_B[name] = nn.Linear(rank, self.out_features, bias=False, **options)
        nn.init.zeros_(self.lora_B[name].weight)

    def _parts(self) -> tuple[Any, ...]:
        return self.lora_A, self.lora_B

    def _dropout(self, name: str) -> float:
        return self.adapters[name].dropout if self.training else 0.0

    def _joined(self, names: list[str]) -> tuple[Tensor, Tensor, float]:
        """Returns A, B and the scale of one adapter, or of the sum of several."""
        return joined([(*self.matrices(name), self.adapters[name].scale) for name in names])


class LoRAEmbedding(LoRALayer):
    """An embedding with adapters: ``base_layer(ids) + sum of scale * (B A)[:, ids]``, for a weight
    that is ``[vocabulary, dim]``. As in PEFT there is no dropout, and DoRA trains a length per
    dimension, not per token.

    Names of parameters are those of PEFT: ``lora_embedding_A.default`` ``[rank, vocabulary]``,
    ``lora_embedding_B.default`` ``[dim, rank]``, and ``base_layer.weight``.

    Args:
        base_layer: ``nn.Embedding``, or one of transformers that multiplies with ``embed_scale``,
            which is then a factor of the adapters too.

    Attributes:
        adapters, active, enabled: as of :class:`LoRALinear`.
    """

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        self.lora_embedding_A, self.lora_embedding_B = nn.ParameterDict(), nn.ParameterDict()

    @property
    def num_embeddings(self) -> int:
        return self.in_features

    @property
    def embedding_dim(self) -> int:
        return self.out_features

    @property
    def padding_idx(self) -> Any:
        return self.base_layer.padding_idx

    def matrices(self, name: str) -> tuple[Tensor, Tensor]:
        return self.lora_embedding_A[name], self.lora_embedding_B[name]

    def own_matrices(self, name: str) -> list[nn.Parameter]:
        return [self.lora_embedding_A[name], self.lora_embedding_B[name]]

    def forward(self, input: Tensor) -> Tensor:
        base: Any = self.base_layer
        y, lengths, total = base(input), None, None
        for name in self.added:
            (a, b), lengths = self.matrices(name), self.magnitude(name)
            t = F.embedding(
                input, a.t(), base.padding_idx, scale_grad_by_freq=base.scale_grad_by_freq
            )
            product = linear(t * self.adapters[name].scale, b)
            total = product if total is None else total + product
        if total is None:
            return y
        scale = getattr(base, "embed_scale", None)
        total = total if scale is None else total * scale
        y = (y + total).to(y.dtype)
        if lengths is None:
            return y
        norms = row_norms(self.base_matrix(), a, b, self.adapters[name].scale)
        return scale_columns(y, row_factors(lengths, norms))

    def _add_matrices(self, name: str, rank: int, options: dict[str, Any]) -> None:
        a = torch.zeros((rank, self.in_features), **options)
        b = torch.empty((self.out_features, rank), **options)
        self.lora_embedding_A[name] = nn.Parameter(a)
        self.lora_embedding_B[name] = nn.Parameter(nn.init.normal_(b))

    def _parts(self) -> tuple[Any, ...]:
        return self.lora_embedding_A, self.lora_embedding_B


def _read(layer: LoRALinear, x: Tensor) -> Factor | None:
    """Returns the matrix, the bias and the adapter of a layer, or None where these are not all that
    it computes."""
    groups = [*grouped(layer.added, layer._dropout).items()]
    if len(groups) != 1 or layer.adapters[layer.added[0]].dora:
        return None
    ((dropout, names),) = groups
    return layer._factor(x, names, dropout)


known.add(LoRALinear)
readers[LoRALinear] = _read


def joined(adapters: Sequence[tuple[Tensor, Tensor, float]]) -> tuple[Tensor, Tensor, float]:
    """Returns A, B and the scale of an adapter that is the sum of some, or is the only one."""
    if len(adapters) == 1:
        return adapters[0]
    scaled = [b * scale for _, b, scale in adapters]
    return torch.cat([a for a, _, _ in adapters], dim=-2), torch.cat(scaled, dim=-1), 1.0


def takes_adapters(module: nn.Module) -> bool:
    """Returns whether a module is a linear layer that may have adapters, or has some: of torch, of
    Headroom, Conv1D of transformers, or of bitsandbytes. Other subclasses may compute, or be used,
    in other ways."""
    kind, library = type(module), _library(module)
    return (
        isinstance(module, (LoRALinear, QuantizedLinear))
        or kind in (nn.Linear, Linear)
        or (library == "transformers" and kind.__name__ == "Conv1D")
        or (library == "bitsandbytes" and isinstance(module, nn.Linear))
    )


def _library(module: nn.Module) -> str:
    return type(module).__module__.partition(".")[0]


def is_embedding(module: nn.Module) -> bool:
    """Returns whether a module is an embedding that may have adapters, or has some."""
    if isinstance(module, LoRAEmbedding):
        return True
    if not isinstance(module, nn.Embedding) or module.max_norm is not None or module.sparse:
        return False
    is_scaled = _library(module) == "transformers" and hasattr(module, "embed_scale")
    return type(module) is nn.Embedding or is_scaled


def readable_matrix(
    base: nn.Module, x: Tensor, a: Tensor, b: Tensor
) -> Tensor | QuantizedMatrix | None:
    """Returns the matrix of the base of an adapter, if ``lora_linear`` may take the place of a call
    of it; None where the base does more, is trained, or has another dtype."""
    lowered = autocast_dtype(x.device.type)
    if not takes_ops(a) or not takes_ops(b) or a.dtype != b.dtype:
        return None
    return frozen_matrix(base, x) if a.dtype in (torch.float32, lowered or x.dtype) else None


def features_of(layer: Any) -> tuple[int, int]:
    """Returns how many columns and rows the matrix of a linear layer has, of Conv1D too."""
    if hasattr(layer, "in_features"):
        return layer.in_features, layer.out_features
    return layer.weight.shape[0], layer.weight.shape[1]  # transposed


def lora_layers(model: nn.Module) -> dict[str, LoRALayer]:
    """Returns the layers of a model that have adapters, by their names."""
    return {name: one for name, one in model.named_modules() if isinstance(one, LoRALayer)}
