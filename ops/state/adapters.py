"""Adapters in the files of PEFT: :func:`save_adapter` and :func:`load_adapter`."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._core.atomic import replacing
from .._core.dtensor import gathered
from .._core.fsdp import fsdp_class
from ..nn.lora import Adapter, LoRALinear, attach, features_of, lora_layers, takes_adapters
from ..nn.quantized import QuantizedLinear
from .file.safetensors import entries_in, read, write_plain

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
# What peft 0.21.2 writes for a LoraConfig() with its defaults.
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(
        """alora_invocation_tokens arrow_config auto_mapping base_model_name_or_path corda_config
        eva_config exclude_modules kasa_config layer_replication layers_pattern layers_to_transform
        lora_ga_config megatron_config modules_to_save monteclora_config revision target_modules
        target_parameters task_type trainable_token_indices use_bdlora velora_config""".split()
    ),
    **dict.fromkeys(
        """ensure_weight_tying fan_in_fan_out lora_bias use_dora use_qalora use_rslora""".split(),
        False,
    ),
    "alpha_pattern": {},
    "bias": "none",
    "inference_mode": True,
    "init_lora_weights": True,
    "loftq_config": {},
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "megatron_core": "megatron.core",
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 8,
    "rank_pattern": {},
}
# Keys that are read, and those that say nothing about what given tensors compute.
_READ = {"alpha_pattern", "lora_alpha", "lora_dropout", "modules_to_save", "use_rslora"}
_WITHOUT_EFFECT = set(
    """auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config
    exclude_modules fan_in_fan_out inference_mode layers_pattern layers_to_transform loftq_config
    lora_ga_config megatron_core peft_version qalora_group_size r rank_pattern revision
    runtime_config target_modules task_type""".split()
)
_INITIALIZATIONS = (True, False, "gaussian", "eva", "orthogonal")  # that leave the base as it is

Value = TypeVar("Value", bound=Hashable)


def save_adapter(model: nn.Module, folder: str | os.PathLike[str], name: str = "default") -> None:
    """Saves an adapter of a model as PEFT 0.21.2 does: ``adapter_model.safetensors`` and
    ``adapter_config.json``, which ``peft.PeftModel.from_pretrained(model, folder)`` loads.

    Modules outside of adapters that have parameters which train are saved too, as PEFT's
    ``modules_to_save``.

    Args:
        model: has the adapter. It may be inside DDP or ``torch.compile``. Of one that FSDP2 has
            sharded, all ranks call this together: what is saved is gathered, and the first writes.
        folder: is made if it is missing. Both files in it are replaced, each as a whole.
        name: of the adapter. As in PEFT, another one than "default" goes to a folder of its name in
            this one.

    Raises:
        OSError: the system refuses.
        TypeError: a tensor is without values.
        ValueError: the model has no such adapter; layers differ in what the files have once; or
            what trains cannot be said in them.
    """
    model = _unwrapped(model)
    layers = {path: one for path, one in lora_layers(model).items() if name in one.adapters}
    if not layers:
        raise ValueError(f"the model has no adapter {name!r}")
    tensors = {}
    for path, layer in layers.items():
        tensors[f"{PREFIX}{path}.lora_A.weight"] = layer.lora_A[name].weight
        tensors[f"{PREFIX}{path}.lora_B.weight"] = layer.lora_B[name].weight
    saved = _modules_to_save(model)
    for path in saved:
        for key, value in model.get_submodule(path).state_dict(prefix=f"{PREFIX}{path}.").items():
            tensors[key] = value
    config = _config(model, {path: one.adapters[name] for path, one in layers.items()}, saved)
    text = json.dumps(config, indent=2, sort_keys=True)
    place = os.path.join(folder, "" if name == "default" else name)
    with gathered(dict(sorted(tensors.items()))) as whole:
        if whole is None:
            return  # another rank writes
        write_plain(os.path.join(place, TENSORS), whole, {"format": "pt"})
        with replacing(os.path.join(place, CONFIG)) as number:
            with open(number, "w", encoding="utf-8", closefd=False) as file:
                file.write(text)


def load_adapter(model: nn.Module, folder: str | os.PathLike[str], name: str = "default") -> None:
    """Adds an adapter from the files of PEFT, or of :func:`save_adapter`, to a model.

    As after :func:`headroom.lora` it is the only one that is active, and it trains, in float32,
    with modules that were saved beside it; all else is frozen.

    Args:
        model: has the layers; they may be quantized or have other adapters.
        folder: has both files, or has a folder called ``name`` that does.
        name: that the adapter gets.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is malformed, does not fit the model, or has what changes its numbers and
            is not supported; the message names the key. Nothing is changed then.
        TypeError: a weight of the model is a DTensor.
    """
    place = os.fspath(folder)
    if not os.path.exists(os.path.join(place, CONFIG)):
        inside = os.path.join(place, name)
        place = inside if os.path.exists(os.path.join(inside, CONFIG)) else place
    config = _read_config(os.path.join(place, CONFIG))
    entries = entries_in(os.path.join(place, TENSORS))
    tensors = {key: read(entry) for key, entry in entries.items()}
    pairs, others = _pairs(tensors)
    _check_pairs(model, pairs)
    saved = _saved(model, others, config["modules_to_save"] or ())
    wanted = {path: _adapter(path, len(a), config) for path, (a, _) in pairs.items()}
    attach(model, wanted, name, torch.float32)
    with torch.no_grad():
        for path, (a, b) in pairs.items():
            layer: Any = model.get_submodule(path)
            layer.lora_A[name].weight.copy_(a)
            layer.lora_B[name].weight.copy_(b)
        for target, value in saved:
            target.copy_(value)
    for target, _ in saved:
        if isinstance(target, nn.Parameter):
            target.requires_grad_(target.is_floating_point())


def _unwrapped(model: nn.Module) -> nn.Module:
    """Returns what DDP and torch.compile have wrapped, whose names the files have."""
    inner: Any = getattr(model, "_orig_mod", None)
    if isinstance(model, DistributedDataParallel):
        inner = model.module
    return model if inner is None else _unwrapped(inner)


# ---- writing -------------------------------------------------------------------------------------


def _config(
    model: nn.Module, adapters: Mapping[str, Adapter], saved: Iterable[str]
) -> dict[str, Any]:
    """Returns what PEFT writes for these adapters of layers."""
    ranks = {path: one.rank for path, one in adapters.items()}
    alphas = {path: _whole(one.alpha) for path, one in adapters.items()}
    rank, alpha = _most(ranks), _most(alphas)
    settings = getattr(model, "config", None)
    fsdp = fsdp_class("FSDPModule")  # fully_shard() makes subclasses
    kind = next(one for one in type(model).__mro__ if not issubclass(one, fsdp))
    return DEFAULTS | {
        "alpha_pattern": _pattern(alphas, alpha),
        "auto_mapping": {"base_model_class": kind.__name__, "parent_library": kind.__module__},
        "base_model_name_or_path": getattr(settings, "_name_or_path", None) or None,
        "lora_alpha": alpha,
        "lora_dropout": _one("dropout", [one.dropout for one in adapters.values()]),
        "modules_to_save": [*saved] or None,
        "r": rank,
        "rank_pattern": _pattern(ranks, rank),
        "target_modules": _targets(model, adapters),
        "use_rslora": _one("rslora", [one.rslora for one in adapters.values()]),
    }


def _whole(number: float) -> float:
    return int(number) if number == int(number) else float(number)


def _most(values: Mapping[str, Value]) -> Value:
    return Counter(values.values()).most_common(1)[0][0]


def _one(name: str, values: list[Value]) -> Value:
    if len({*values}) > 1:
        raise ValueError(f"layers have a {name} of {values[0]} and others, and a file has one")
    return values[0]


def _pattern(values: Mapping[str, Value], usual: Value) -> dict[str, Value]:
    """Returns what is not usual, by expressions that PEFT finds at the end of a layer's name."""
    return {f"^{re.escape(path)}": one for path, one in values.items() if one != usual}


def _targets(model: nn.Module, paths: Iterable[str]) -> list[str]:
    """Returns the last parts of names, if these layers alone have them; else whole names."""
    names, inside = set(), set()
    for path, module in model.named_modules():
        if module not in inside:
            names.add(path)
        if isinstance(module, LoRALinear):
            inside |= {*module.modules()} - {module}
    ends = sorted({path.rpartition(".")[2] for path in paths})
    found = {path for path in names if path.rpartition(".")[2] in ends}
    return ends if found == {*paths} else sorted(paths)


def _modules_to_save(model: nn.Module) -> list[str]:
    """Returns the modules outside of adapters that have parameters which train.

    Raises:
        ValueError: the files have no place for one.
    """
    layers = lora_layers(model)
    inside = {part: path for path, one in layers.items() for part in one.modules()}
    found: list[str] = []
    owners: dict[int, str] = {}
    for path, module in model.named_modules():
        params = [*module.parameters(recurse=False)]
        for param in params:
            other = owners.setdefault(id(param), path)
            if other != path and param.requires_grad:
                raise ValueError(
                    f"'{other}' and '{path}' have the same weight, which trains, and PEFT would "
                    "load two: untie them"
                )
        if not any(param.requires_grad for param in params):
            continue
        if any(path.startswith(f"{one}.") for one in found):
            continue  # a part of what is saved as a whole
        is_whole = not any(one.startswith(f"{path}.") for one in layers)
        if module not in inside and path and is_whole and not isinstance(module, QuantizedLinear):
            found.append(path)
        elif not re.match(rf"{re.escape(inside.get(module, path))}\.lora_[AB]\.", path):
            raise ValueError(f"'{path}' trains, and the files of an adapter have no place for it")
    return found


# ---- reading -------------------------------------------------------------------------------------


def _read_config(path: str) -> dict[str, Any]:
    """Returns the settings of an adapter, with PEFT's defaults for those that a file lacks.

    Raises:
        ValueError: one is malformed, or not supported.
    """
    with open(path, encoding="utf-8") as file:
        try:
            config = json.load(file)
        except ValueError as error:
            raise ValueError(f"{path} is malformed: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is malformed: it is no object")
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{path}: 'peft_type' is {config.get('peft_type')!r}, wanted 'LORA'")
    for key, value in config.items():
        if key in _READ | _WITHOUT_EFFECT:
            continue
        if key == "init_lora_weights":
            if value in _INITIALIZATIONS:
                continue
        elif value == DEFAULTS.get(key) or (key not in DEFAULTS and not value):
            continue
        raise ValueError(
            f"{path}: {key!r} is {value!r}, which changes the numbers of a model and is not "
            "supported"
        )
    return DEFAULTS | config


def _adapter(path: str, rank: int, config: Mapping[str, Any]) -> Adapter:
    alpha = config["lora_alpha"]
    for pattern, other in config["alpha_pattern"].items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            alpha = other
            break
    try:
        return Adapter(rank, alpha, config["lora_dropout"], config["use_rslora"])
    except TypeError as error:
        raise ValueError(f"{CONFIG} is malformed: {error}") from error


def _pairs(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns A and B by the names of their layers, and the other tensors by their names.

    Raises:
        ValueError: a name is none of PEFT, or a layer lacks one of the two.
    """
    found: dict[str, dict[str, Tensor]] = {}
    others: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if not key.startswith(PREFIX):
            raise ValueError(f"{TENSORS}: '{key}' does not begin with '{PREFIX}'")
        path, dot, which = key.removeprefix(PREFIX).rpartition(".lora_")
        if dot and which in ("A.weight", "B.weight"):
            found.setdefault(path, {})[which[0]] = tensor
        else:
            others[key.removeprefix(PREFIX)] = tensor
    for path, both in found.items():
        if len(both) != 2:
            raise ValueError(f"{TENSORS}: '{path}' has only one of lora_A and lora_B")
    return {path: (both["A"], both["B"]) for path, both in found.items()}, others


def _check_pairs(model: nn.Module, pairs: Mapping[str, Any]) -> None:
    for path, (a, b) in pairs.items():
        try:
            layer = model.get_submodule(path)
        except AttributeError as error:
            raise ValueError(f"{TENSORS}: the model has no '{path}'") from error
        if not takes_adapters(layer):
            raise ValueError(f"{TENSORS}: '{path}' is a {type(layer).__name__}, no linear layer")
        columns, rows = features_of(layer)
        if a.dim() != 2 or a.shape != (len(a), columns) or b.shape != (rows, len(a)):
            raise ValueError(
                f"{TENSORS}: lora_A {[*a.shape]} and lora_B {[*b.shape]} of '{path}' do not fit "
                f"its weight {[rows, columns]}"
            )
    if not pairs:
        raise ValueError(f"{TENSORS} has no adapter")


def _saved(
    model: nn.Module, others: Mapping[str, Tensor], modules: Iterable[str]
) -> list[tuple[Tensor, Tensor]]:
    """Returns the parameters and buffers of modules that were saved whole, and their values.

    Raises:
        ValueError: a key is of no such module, or does not fit.
    """
    places = dict(model.named_parameters()) | dict(model.named_buffers())
    found = []
    for key, value in others.items():
        above = [key[: match.start()] for match in re.finditer(r"\.", key)]
        if not any(path.endswith(one) for path in above for one in modules):  # as PEFT does
            raise ValueError(f"{TENSORS}: '{key}' is not supported")
        target = places.get(key)
        if target is None or target.shape != value.shape:
            raise ValueError(f"{TENSORS}: '{key}' is {[*value.shape]}, and the model has no such")
        found.append((target, value))
    return found
