"""Chooses the parameters that Muon steps: the hidden matrices, which are the weights of linear
layers. All others are AdamW's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from ..._core.registration import FLOATS
from .matrices import Split, as_split, matrix_shape, parts_of

EMBEDDINGS = re.compile(r"(^|[._])(wte|wpe|\w*emb(ed)?(ding)?s?(_\w+)?)([._]|$)")
TABLES = re.compile(r"(^|[._])rel(ative)?_(pos|att)[^.]*$")  # of relative positions
EMBEDDINGS_OUTSIDE_LAYERS = {"shared"}  # of encoders and decoders, as in T5 and BART
HEADS = {"lm_head", "embed_out", "output_layer", "unembed", "to_logits", "qa_outputs"}
HEADS_OUTSIDE_LAYERS = {"head", "heads", "output", "classifier", "score", "logits", "decoder"}
PACKED_QKV = {"qkv", "qkv_proj", "Wqkv", "c_attn", "in_proj_weight"}
# Of these the rows are all queries, then all keys, then all values, in every library.
QKV_IN_ORDER = {"qkv", "Wqkv", "in_proj_weight"}
# Modules of transformers that pack as many rows of each by head, or by a part of the heads, and the
# attribute that says by how many. (CodeGen has values before keys, which are as many.)
QKV_BY_HEAD = {
    "CodeGenAttention": "mp_num",
    "GPTBigCodeAttention": "num_heads",
    "MiniMaxLightningAttention": "num_attention_heads",
}
PACKED_HALVES = {"gate_up", "gate_up_proj", "up_gate_proj"}
EXPERTS = {"gate_proj", "up_proj", "down_proj", *PACKED_HALVES}  # of three dimensions
GATES = {"LSTM": 4, "LSTMCell": 4, "GRU": 3, "GRUCell": 3}

HIDDEN, EMBEDDING, HEAD, VECTOR, CONVOLUTION, OTHER = (
    "hidden matrices",
    "embeddings",
    "heads",
    "norms, biases and vectors",
    "convolutions",
    "parameters of no known linear layer",
)
FLAT = (
    "Muon wants whole matrices, and FSDP1 keeps parameters in flat shards: {}. Use fully_shard() "
    "(FSDP2), whose shards are gathered one batch at a time, or headroom.optim.AdamW"
)


@dataclass
class MuonChoice:
    """Says which parameters Muon steps and which AdamW, by the reason."""

    names: dict[str, list[str]] = field(default_factory=dict)  # of parameters, by reason
    numel: dict[str, int] = field(default_factory=dict)  # their elements
    splits: dict[str, int] = field(default_factory=dict)  # parts of packed matrices, by name
    unknown: list[str] = field(default_factory=list)  # packed matrices that are not split

    def add(self, reason: str, name: str, param: Tensor) -> None:
        self.names.setdefault(reason, []).append(name)
        self.numel[reason] = self.numel.get(reason, 0) + param.numel()

    def __str__(self) -> str:
        lines = []
        for reason, names in sorted(self.names.items(), key=lambda item: item[0] != HIDDEN):
            stepped = "Muon " if reason.startswith(HIDDEN) else "AdamW"
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            lines.append(
                f"{stepped} {reason}: {self.numel[reason]:,} elements in {len(names):,} "
                f"tensor{'s' * (len(names) != 1)} ({shown})"
            )
        if self.splits:
            ends: dict[str, int] = {}
            for name, parts in self.splits.items():
                ends[f"{name.removesuffix('.weight').rpartition('.')[2]} in {parts}"] = 1
            lines.append(f"packed matrices are split: {', '.join(ends)}")
        if self.unknown:
            ends = {name.removesuffix(".weight").rpartition(".")[2]: 1 for name in self.unknown}
            lines.append(
                f"packed matrices are whole, since their layout is not known: {', '.join(ends)}; "
                "split= gives their parts, or None"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class _Owner:
    """Names the module that has a parameter, and the one around it."""

    module: nn.Module | None = None
    parent: nn.Module | None = None

    @property
    def kinds(self) -> set[str]:
        """Returns the names of the module's classes."""
        return {kind.__name__ for kind in type(self.module).__mro__}

    @property
    def is_conv1d(self) -> bool:
        """Returns whether the module is a linear layer of transformers whose rows are inputs."""
        return "Conv1D" in self.kinds

    def is_linear(self, name: str, dim: int) -> bool:
        """Returns whether a parameter of this name in the module is a matrix of a linear layer, or
        a batch of such matrices, as experts have. Without modules names must say so."""
        word = name.rpartition(".")[2]
        is_weight = word.startswith("weight") or word.endswith("_weight")
        if self.module is None:
            return is_weight if dim == 2 else word in EXPERTS or (is_weight and "experts" in name)
        if isinstance(self.module, (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)):
            return is_weight
        words = {*name.split(".")}
        if dim == 3 and (words & {"lora_A", "lora_B"} or any("Experts" in k for k in self.kinds)):
            return True
        # Those of other libraries, too, and LoRA's factors in them.
        is_linear = self.is_conv1d or any("Linear" in kind for kind in self.kinds)
        return is_linear and (is_weight or word.startswith("lora_"))

    def qkv(self, word: str, rows: int, cols: int) -> Split:
        """Returns the parts of packed queries, keys and values, or None if their layout is not
        known."""
        says_heads = all(hasattr(self.parent, one) for one in ("heads", "kv_heads", "head_dim"))
        kinds = {kind.__name__ for kind in type(self.parent).__mro__}
        if (split := _by_head(self.parent, kinds, rows)) is not None:
            return split
        says_heads |= any(kind.startswith(("Phi", "GPTBigCode")) for kind in kinds)
        if word in QKV_IN_ORDER or says_heads:
            if sum(sizes := _head_rows(self.parent)) == rows:
                return sizes
            if rows == 3 * cols and word in QKV_IN_ORDER:
                return 3
        return (rows,) * 3 if cols == 3 * rows else None


class Chooser:
    """Sorts parameters by what they are, from the modules of a model or from names alone.

    Args:
        split: parts of packed matrices, by the end of a name; before what is known.
        convolutions: whether Muon steps the weights of convolutions.
    """

    def __init__(self, split: Mapping[str, Any] | None, convolutions: bool) -> None:
        self.choice = MuonChoice()
        self._given, self._convolutions = dict(split or {}), convolutions
        self._unused = list(self._given)
        self._owners: dict[int, _Owner] = {}
        self._embeddings: set[int] = set()
        self._vocabularies: set[int] = set()
        self._heads: set[int] = set()

    def look_at(self, model: nn.Module) -> None:
        """Learns from the modules of a model what its parameters are."""
        for name, module in model.named_modules():
            if type(module).__name__ == "FullyShardedDataParallel":
                raise ValueError(FLAT.format(f"'{name or 'the model'}' is wrapped in it"))
            parent = model.get_submodule(name.rpartition(".")[0]) if name else None
            for param in module._parameters.values():
                if param is not None:
                    self._owners.setdefault(id(param), _Owner(module, parent))
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                self._embeddings.add(id(module.weight))
                self._vocabularies.add(module.num_embeddings)
        get_head = getattr(model, "get_output_embeddings", None)
        head = get_head() if callable(get_head) else None
        if isinstance(getattr(head, "weight", None), Tensor):
            self._heads.add(id(head.weight))

    def reason(self, name: str, param: Tensor) -> str:
        """Returns what a parameter is."""
        if "_flat_param" in name or "_fsdp_wrapped_module" in name:
            raise ValueError(FLAT.format(f"'{name}' is of one"))
        if is_lazy(param):
            raise ValueError(f"'{name}' has no shape yet: run the model once before")
        owner, words = self._owners.get(id(param), _Owner()), name.split(".")
        if param.dtype not in FLOATS or param.dim() < 2 or words[-1].endswith("bias"):
            return VECTOR
        in_layer = any(word.isdigit() for word in words[:-2])
        module = words[-2] if len(words) > 1 else words[-1]
        if id(param) in self._embeddings:
            return EMBEDDING
        is_head = id(param) in self._heads or module in HEADS
        is_head |= not in_layer and module in HEADS_OUTSIDE_LAYERS
        is_head |= (
            not in_layer
            and isinstance(owner.module, nn.Linear)
            and owner.module.out_features in self._vocabularies
        )
        if is_head:
            return HEAD
        path = name.removesuffix(".weight")
        is_embedding = bool(EMBEDDINGS.search(path) or TABLES.search(path))
        is_embedding |= not in_layer and module in EMBEDDINGS_OUTSIDE_LAYERS
        if is_embedding and not isinstance(owner.module, nn.Linear):
            return EMBEDDING
        if isinstance(owner.module, _ConvNd) or param.dim() > 3:
            # Of one channel, as of state-space models, each filter is by itself.
            is_matrix = param.dim() > 3 and param.shape[1] > 1
            return HIDDEN + " of convolutions" if self._convolutions and is_matrix else CONVOLUTION
        if owner.module is None and param.dim() == 3 and "conv" in name:
            return CONVOLUTION
        if min(matrix_shape(param.shape)[1:]) == 1:
            return VECTOR
        is_known = self._ends_of(name) or owner.is_linear(name, param.dim())
        return HIDDEN if is_known else OTHER

    def _ends_of(self, name: str) -> list[str]:
        """Returns the ends of a name for which the user gave parts."""
        names = f".{name.removesuffix('.weight')}", f".{name}"
        return [end for end in self._given if any(one.endswith(f".{end}") for one in names)]

    def split_of(self, name: str, param: Tensor) -> Split:
        """Returns the parts of a packed matrix; None: it is one."""
        ends = self._ends_of(name)
        self._unused = [end for end in self._unused if end not in ends]
        if ends:
            return as_split(self._given[ends[0]])
        owner, path = self._owners.get(id(param), _Owner()), name.removesuffix(".weight")
        word = path.rpartition(".")[2]
        _, rows, cols = matrix_shape(param.shape)
        if param.dim() == 3 and word in PACKED_HALVES:  # experts of transformers
            lines = cols if (by_columns := self.is_transposed(param)) else rows
            is_concatenated = getattr(owner.module, "is_concatenated", None)
            if not isinstance(is_concatenated, bool) or lines % 2 or (by_columns and rows == cols):
                return None
            if not is_concatenated:
                return lines // 2, (1, 1)
            return (lines // 2,) * 2 if by_columns else 2
        if param.dim() != 2:
            return None
        gates = [GATES[kind] for kind in owner.kinds & GATES.keys()]
        if gates and word.startswith(("weight_ih", "weight_hh")):  # and not the projection
            return gates[0]
        if word in PACKED_HALVES and rows % 2 == 0:
            return 2
        if word not in PACKED_QKV:
            return None
        if (split := owner.qkv(word, rows, cols)) is None:
            self.choice.unknown.append(name)
        return split

    def is_transposed(self, param: Tensor) -> bool:
        """Returns whether the rows of a weight are its inputs: of ``Conv1D`` of transformers, and
        of its experts that say so."""
        owner = self._owners.get(id(param), _Owner())
        if param.dim() == 3:
            return getattr(owner.module, "is_transposed", None) is True
        return owner.is_conv1d

    def check_split(self) -> None:
        """Refuses parts that were given for names which no matrix of Muon has.

        Raises:
            ValueError: such a name.
        """
        if self._unused:
            raise ValueError(
                f"split has {self._unused[0]!r}, and no name of a matrix that Muon steps ends so: "
                "give the end of a name in named_parameters(), without '.weight' or with it; in a "
                'group with use_muon=True, give the parts as its "split"'
            )

    def groups_of(self, params: Any) -> list[dict[str, Any]]:
        """Returns groups that all say whether Muon steps them.

        Args:
            params: a model; pairs of names and parameters; parameters of two or three dimensions;
                or groups, which without ``use_muon`` hold any of these but a model; their
                ``"model"`` is that of named parameters.
        """
        if isinstance(params, nn.Module):
            self.look_at(params)
            return self._sorted(list(params.named_parameters()), {})
        if isinstance(params, Tensor):
            raise TypeError("params is a tensor, wanted a model, named parameters, or groups")
        given, groups = list(params), []
        if not given:
            raise ValueError("optimizer got an empty parameter list")
        if not isinstance(given[0], dict):
            given = [{"params": given}]
        for group in given:
            members = group.get("params")
            members = [members] if isinstance(members, Tensor) else list(members or ())
            others = {name: group[name] for name in group if name not in ("params", "model")}
            if "use_muon" in group:
                groups.append({**others, "params": members})
            else:
                if "model" in group:
                    self.look_at(group["model"])
                groups += self._sorted(members, others)
        return groups

    def _sorted(self, params: Iterable[Any], options: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the groups of parameters with these options: of matrices one for each way in
        which they are split and stored, and one of all others."""
        pairs = [one if isinstance(one, tuple) else (None, one) for one in params]
        if any(name is None for name, _ in pairs):
            if bad := [p for _, p in pairs if isinstance(p, Tensor) and p.dim() < 2]:
                raise ValueError(
                    f"one of the parameters has shape {list(bad[0].shape)}, and parameters without "
                    "names do not say which are hidden matrices: give the model or its "
                    "named_parameters(), or groups with use_muon=True and False"
                )
            return [{**options, "params": [p for _, p in pairs], "use_muon": True}]
        sorted_by: dict[tuple[bool, Split, bool], list[Any]] = {}
        for name, param in pairs:
            reason = self.reason(name, param)
            use_muon = reason.startswith(HIDDEN)
            split = self.split_of(name, param) if use_muon else None
            if split is not None:
                parts = parts_of(param.shape, split)
                self.choice.splits[name] = len(parts)
            self.choice.add(reason, name, param)
            key = use_muon, split, use_muon and self.is_transposed(param)
            sorted_by.setdefault(key, []).append((name, param))
        keys = sorted(sorted_by, key=lambda key: (not key[0], key[1] is not None))
        return [
            {**options, "params": sorted_by[key], "use_muon": key[0]}
            | ({} if key[1] is None else {"split": key[1]})
            | ({"transposed": True} if key[2] else {})
            for key in keys
        ]


def _by_head(attention: Any, kinds: set[str], rows: int) -> Split:
    """Returns the parts of queries, keys and values that a module of attention of these classes
    packs by head, or None if it packs them otherwise."""
    for kind in QKV_BY_HEAD.keys() & kinds:
        times = getattr(attention, QKV_BY_HEAD[kind])
        heads = getattr(attention, "num_heads", None) or attention.num_attention_heads
        if rows == 3 * heads * attention.head_dim and rows % (3 * times) == 0:
            return times, (rows // (3 * times),) * 3
    return None


def _head_rows(attention: nn.Module | None) -> tuple[int, ...]:
    """Returns the rows of queries, keys and values of a module of attention, or none if it does not
    say how many heads it has."""
    config = getattr(attention, "config", None)
    heads = getattr(attention, "heads", None) or getattr(config, "num_attention_heads", None)
    keys = getattr(attention, "kv_heads", None) or getattr(attention, "num_key_value_heads", None)
    keys = keys or getattr(config, "num_key_value_heads", heads)
    dim = getattr(attention, "head_dim", None)
    if not all(isinstance(one, int) for one in (heads, keys, dim)):
        return ()
    return heads * dim, keys * dim, keys * dim


def check_matrices(params: Any, split: Split) -> None:
    """Refuses parameters without whole matrices.

    Raises:
        ValueError: one has fewer than two dimensions, or does not fit the split.
    """
    for one in [params] if isinstance(params, Tensor) else params:
        name, param = one if isinstance(one, tuple) else ("a parameter", one)
        if not isinstance(param, Tensor) or is_lazy(param):
            continue
        if type(param).__name__ == "FlatParameter":
            raise ValueError(FLAT.format(f"{name} is one"))
        if param.dim() < 2:
            raise ValueError(
                f"Muon steps matrices, and {name} has shape {list(param.shape)}: give it in a "
                "group with use_muon=False, or the model to choose by. A shard that FSDP1 "
                "flattened is not a matrix: use fully_shard() (FSDP2)"
            )
        parts_of(param.shape, split)
