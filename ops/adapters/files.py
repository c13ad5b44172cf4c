"""Adapters in the files of PEFT: :func:`save_adapter` and :func:`load_adapter`."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._core.all_or_nothing import all_or_nothing
from .._core.atomic import replacing
from .._core.checks import check_choice, check_module
from .._core.dtensor import gathered
from .._core.ranks import fsdp_class
from .._core.text import quoted
from ..nn.lora import Adapter, features_of, is_embedding, lora_layers, takes_adapters
from ..nn.lora_experts import LoRAExperts
from ..nn.lora_weight import LoRAWeight, holds_matrix
from ..nn.quantized import QuantizedLinear
from ..nn.switched import Switched, outside, switched
from ..nn.trained_copy import TrainedCopy
from ..quantizing.choice import joined
from ..state.file.safetensors import entries_in, read, write_plain
from .attach import attach
from .expert_files import (
    LAYOUTS,
    names_parameter,
    packed,
    parameter_targets,
    stack_tensors,
    take_stacks,
)
from .experts import experts_in
from .tying import inner, tied_heads, with_tied

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
_READ = {
    *("alpha_pattern", "lora_alpha", "lora_dropout", "modules_to_save", "target_parameters"),
    *("use_dora", "use_rslora"),
}
_WITHOUT_EFFECT = set(
    """auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config
    exclude_modules fan_in_fan_out inference_mode layers_pattern layers_to_transform loftq_config
    lora_ga_config megatron_core peft_version qalora_group_size r rank_pattern revision
    runtime_config target_modules task_type""".split()
)
# Ends of keys of A, B and the lengths of rows.
_LINEAR = ("A.weight", "B.weight", "magnitude_vector")
_EMBEDDING = ("embedding_A", "embedding_B", "magnitude_vector")
_OF_TASKS = "classifier", "score", "qa_outputs"  # PEFT lists them where a model has one of them
_BASE = ".base_layer.weight"  # of embedding and head, which PEFT saves if the first has an adapter
_INITIALIZATIONS = (True, False, "gaussian", "eva", "orthogonal")  # that leave the base as it is

Value = TypeVar("Value", bound=Hashable)


def save_adapter(model: nn.Module, folder: str | os.PathLike[str], name: str = "default") -> None:
    """Saves an adapter of a model as PEFT 0.21.2 does: ``adapter_model.safetensors`` and
    ``adapter_config.json``, which ``peft.PeftModel.from_pretrained(model, folder)`` loads.

    Its copies of modules are saved too, as PEFT's ``modules_to_save``, and so are other modules
    with parameters that train. What an embedding and its head share is written for both, with
    ``ensure_weight_tying``, which PEFT reads.

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
    check_module(model)
    model = _unwrapped(model)
    layers = {path: one for path, one in lora_layers(model).items() if name in one.adapters}
    experts = {
        path: one
        for path, one in switched(model).items()
        if isinstance(one, LoRAExperts) and name in one.adapters
    }
    if not layers and not experts:
        raise ValueError(f"the model has no adapter {name!r}")
    tensors, of_stacks = {}, {}
    for path, layer in layers.items():
        a, b = layer.matrices(name)
        lengths = layer.magnitude(name)
        kind = _EMBEDDING if is_embedding(layer) else _LINEAR
        found = dict(zip(kind, (a, b, *(() if lengths is None else (lengths,)))))
        tensors |= {f"{PREFIX}{path}.lora_{key}": value for key, value in found.items()}
    for path, module in experts.items():
        of_stacks |= stack_tensors(PREFIX + path, module, name)
    saved = _modules_to_save(model, name)
    for path, module in saved.items():
        tensors |= module.state_dict(prefix=f"{PREFIX}{path}.")
    tied = any(head in layers or head in saved for head in tied_heads(model))
    adapters = {path: one.adapters[name] for path, one in layers.items()}
    by_stack = {
        joined(path, stack): adapter
        for path, one in experts.items()
        for stack, adapter in one.adapters[name].items()
    }
    config = _config(model, adapters, by_stack, saved, tied)
    text = json.dumps(config, indent=2, sort_keys=True)
    place = os.path.join(folder, "" if name == "default" else name)
    with gathered(dict(sorted((tensors | of_stacks).items()))) as whole:
        if whole is None:
            return  # another rank writes
        whole |= {key: packed(key, whole[key]) for key in of_stacks}
        write_plain(os.path.join(place, TENSORS), whole, {"format": "pt"})
        with replacing(os.path.join(place, CONFIG)) as number:
            with open(number, "w", encoding="utf-8", closefd=False) as file:
                file.write(text)


def load_adapter(
    model: nn.Module,
    folder: str | os.PathLike[str],
    name: str = "default",
    *,
    experts_layout: Literal["peft", "peft-0.17", "unsloth"] | None = None,
) -> None:
    """Adds an adapter from the files of PEFT, or of :func:`save_adapter`, to a model.

    As after :func:`headroom.lora` it is the only one that is active, and it trains, in float32,
    with copies of the modules that were saved beside it; all else is frozen.

    Args:
        model: has the layers; they may be quantized or have other adapters.
        folder: has both files, or has a folder called ``name`` that does.
        name: that the adapter gets.
        experts_layout: how the file has the matrices of experts: "peft", as PEFT from 0.19.1 on,
            "peft-0.17", as PEFT before it, with rows and columns exchanged, or "unsloth", as
            Unsloth until September 2026, which no file says. None: one of the first two, as the
            shapes of its tensors say, or its version of PEFT.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is malformed, does not fit the model, or has what changes its numbers and
            is not supported; the message names the key.
        TypeError: a weight of the model is a DTensor.

    Nothing is changed where it raises or is interrupted.
    """
    check_module(model)
    if experts_layout is not None:
        check_choice("experts_layout", experts_layout, LAYOUTS)
    place = os.fspath(folder)
    if not os.path.exists(os.path.join(place, CONFIG)):
        inside = os.path.join(place, name)
        place = inside if os.path.exists(os.path.join(inside, CONFIG)) else place
    config = _read_config(os.path.join(place, CONFIG))
    entries = entries_in(os.path.join(place, TENSORS))
    tensors = {key: read(entry) for key, entry in entries.items()}
    parts, others = _parts(tensors)
    rules = experts_in(model)
    stacks = take_stacks(model, parts, rules, config, experts_layout, TENSORS)
    _check_parts(model, parts, config["use_dora"], config["target_parameters"] or ())
    if not parts and not stacks:
        raise ValueError(f"{TENSORS} has no adapter")
    heads = tied_heads(model)
    matrices = {p: [b.t(), a.t()] if p in heads else [a, b] for p, (a, b, *_) in parts.items()}
    _check_tied(heads, matrices, "an adapter")
    bases = {path.removesuffix(_BASE): path for path in others if path.endswith(_BASE)}
    weights = _weights(model, {path: others.pop(key) for path, key in bases.items()}, parts)
    tying = heads if config["ensure_weight_tying"] else {}
    copies = _copies(model, others, config["modules_to_save"] or (), tying)
    whole = {path: [state["weight"]] for path, state in copies.items() if "weight" in state}
    _check_tied(heads, whole, "a weight")
    wanted = {path: _adapter(path, len(found[0]), config) for path, found in parts.items()}
    of_stacks = {
        path: {
            stack: _adapter(joined(path, stack), a.shape[1], config)
            for stack, (a, _) in found.items()
        }
        for path, found in stacks.items()
    }
    with all_or_nothing(model), torch.no_grad():
        attach(model, wanted, name, torch.float32, copies, of_stacks, rules)
        for path, by_stack in stacks.items():
            experts: Any = model.get_submodule(path)
            for stack, matrices in by_stack.items():
                for param, value in zip(experts.matrices(name, stack), matrices, strict=True):
                    param.copy_(value)
        for path, found in parts.items():
            layer: Any = model.get_submodule(path)
            if path in heads:
                continue  # it has those of the embedding
            for param, value in zip(layer.trained(name), found, strict=True):
                param.copy_(value)
        for path, state in copies.items():
            copied: Any = model.get_submodule(path)
            copied.modules_to_save[name].load_state_dict(state)
        _write(weights)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Returns what DDP and torch.compile have wrapped, whose names the files have."""
    inner: Any = getattr(model, "_orig_mod", None)
    if isinstance(model, DistributedDataParallel):
        inner = model.module
    return model if inner is None else _unwrapped(inner)


# ---- writing -------------------------------------------------------------------------------------


def _config(
    model: nn.Module,
    layers: Mapping[str, Adapter],
    stacks: Mapping[str, Adapter],
    saved: Iterable[str],
    tied: bool,
) -> dict[str, Any]:
    """Returns what PEFT writes for these adapters of layers, and of parameters of experts."""
    kinds = {path: isinstance(model.get_submodule(path), LoRAWeight) for path in layers}
    weights = {joined(path, "weight"): layers[path] for path, is_one in kinds.items() if is_one}
    layers = {path: layers[path] for path, is_one in kinds.items() if not is_one}
    adapters = {**layers, **weights, **stacks}
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
        "ensure_weight_tying": tied,
        "lora_alpha": alpha,
        "lora_dropout": _one("dropout", [one.dropout for one in adapters.values()]),
        "modules_to_save": [*saved] or None,
        "r": rank,
        "rank_pattern": _pattern(ranks, rank),
        "target_modules": _targets(model, layers),
        "target_parameters": parameter_targets(model, [*weights, *stacks]),
        "use_dora": _one("dora", [one.dora for one in adapters.values()]),
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
    names = [path for path, _ in outside(model)]
    ends = sorted({path.rpartition(".")[2] for path in paths})
    found = {path for path in names if path.rpartition(".")[2] in ends}
    return ends if found == {*paths} else sorted(paths)


def _modules_to_save(model: nn.Module, name: str) -> dict[str, nn.Module]:
    """Returns the copies of modules that an adapter has, and the modules outside of adapters that
    have parameters which train.

    Raises:
        ValueError: the files have no place for one.
    """
    layers = switched(model)
    own = {id(p) for one in layers.values() for each in one.names for p in one.trained(each)}
    inside = {part for one in layers.values() for part in one.modules()}
    found: dict[str, nn.Module] = {
        path: one.modules_to_save[name]
        for path, one in layers.items()
        if isinstance(one, TrainedCopy) and name in one.names
    }
    owners: dict[int, str] = {}
    heads = tied_heads(model)
    for path, module in model.named_modules():
        params = [p for p in module.parameters(recurse=False) if id(p) not in own]
        for param in params:
            other = owners.setdefault(id(param), path)
            if other not in with_tied([path], heads) and param.requires_grad:
                raise ValueError(
                    f"'{other}' and '{path}' have the same weight, which trains, and PEFT would "
                    "load two: untie them"
                )
        if not any(param.requires_grad for param in params):
            continue
        if any(path.startswith(f"{one}.") for one in found):
            continue  # a part of what is saved as a whole
        is_whole = not any(one.startswith(f"{path}.") for one in layers)
        if module in inside or not path or not is_whole or isinstance(module, QuantizedLinear):
            raise ValueError(f"'{path}' trains, and the files of an adapter have no place for it")
        found[path] = module
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
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is malformed: {quoted(error)}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is malformed: it is no object")
    if config.get("peft_type") != "LORA":
        found = quoted(repr(config.get("peft_type")))
        raise ValueError(f"{path}: 'peft_type' is {found}, wanted 'LORA'")
    for key, value in config.items():
        if key in _READ | _WITHOUT_EFFECT:
            continue
        if key == "init_lora_weights":
            if value in _INITIALIZATIONS:
                continue
        elif value == DEFAULTS.get(key) or (key not in DEFAULTS and not value):
            continue
        raise ValueError(
            f"{path}: {quoted(repr(key))} is {quoted(repr(value))}, which changes the numbers of a "
            "model and is not supported"
        )
    config = DEFAULTS | {"peft_version": None} | config
    alphas = config["alpha_pattern"]
    for key, wanted, is_it in (
        *(
            (key, "a list of names, or null", config[key] is None or _are_names(config[key]))
            for key in ("modules_to_save", "target_parameters")
        ),
        ("alpha_pattern", "an object of expressions and numbers", isinstance(alphas, dict)),
        ("use_dora", "true or false", isinstance(config["use_dora"], bool)),
        ("use_rslora", "true or false", isinstance(config["use_rslora"], bool)),
    ):
        if not is_it:
            found = quoted(repr(config[key]))
            raise ValueError(f"{path} is malformed: '{key}' is {found}, wanted {wanted}")
    for pattern in alphas:
        try:
            re.compile(_at_the_end(pattern))
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(
                f"{path} is malformed: 'alpha_pattern' has {quoted(repr(pattern))}, which is no "
                f"regular expression: {error}"
            ) from error
    return config


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) and one for one in value)


def _at_the_end(pattern: str) -> str:
    """Returns the expression by which PEFT finds a pattern at the end of a layer's name."""
    return rf"(.*\.)?({pattern})$"


def _adapter(path: str, rank: int, config: Mapping[str, Any]) -> Adapter:
    alpha = config["lora_alpha"]
    for pattern, other in config["alpha_pattern"].items():
        if re.match(_at_the_end(pattern), path):
            alpha = other
            break
    try:
        return Adapter(
            rank, alpha, config["lora_dropout"], config["use_rslora"], config["use_dora"]
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{CONFIG} is malformed: {quoted(error)}") from error


def _parts(tensors: Mapping[str, Tensor]) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
    """Returns A, B and lengths, if there are some, by the names of their layers, and the other
    tensors by their names.

    Raises:
        ValueError: a name is none of PEFT, or a layer lacks A or B.
    """
    found: dict[str, dict[int, Tensor]] = {}
    others: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if not key.startswith(PREFIX):
            raise ValueError(f"{TENSORS}: '{quoted(key)}' does not begin with '{PREFIX}'")
        path, dot, which = key.removeprefix(PREFIX).rpartition(".lora_")
        kind = next((kind for kind in (_LINEAR, _EMBEDDING) if which in kind), None)
        if dot and kind is not None:
            found.setdefault(path, {})[kind.index(which)] = tensor
        else:
            others[key.removeprefix(PREFIX)] = tensor
    for path, parts in found.items():
        if 0 not in parts or 1 not in parts:
            raise ValueError(f"{TENSORS}: '{path}' has only one of lora_A and lora_B")
    return {path: [parts[k] for k in sorted(parts)] for path, parts in found.items()}, others


def _check_parts(
    model: nn.Module, found: Mapping[str, list[Tensor]], dora: bool, targets: Iterable[str]
) -> None:
    for path, (a, b, *lengths) in found.items():
        layer = _submodule(model, path)
        is_layer = takes_adapters(layer) or is_embedding(layer)
        if not is_layer and not (holds_matrix(layer) and names_parameter(path, "weight", targets)):
            raise ValueError(
                f"{TENSORS}: '{path}' is a {type(layer).__name__}, no linear layer or embedding"
            )
        for one in (a, b, *lengths):
            if not one.is_floating_point():
                raise ValueError(f"{TENSORS}: '{path}' has {one.dtype}, wanted floats")
        if is_layer:
            columns, rows = features_of(layer)
        else:
            base: Any = inner(layer)
            rows, columns = base.weight.shape
        if a.dim() != 2 or a.shape != (len(a), columns) or b.shape != (rows, len(a)):
            raise ValueError(
                f"{TENSORS}: lora_A {[*a.shape]} and lora_B {[*b.shape]} of '{path}' do not fit "
                f"its weight {[rows, columns]}"
            )
        if [one.shape for one in lengths] != [(rows,)] * dora:
            shapes = [[*one.shape] for one in lengths]
            raise ValueError(
                f"{TENSORS}: lora_magnitude_vector of '{path}' has shapes {shapes}, and with "
                f"use_dora={dora} there should be {[[rows]] * dora}"
            )


_UNTIED = (
    "would untie them: let PEFT train with ensure_weight_tying=True, over a base whose dtype is "
    "that of its adapters, or untie the model before loading"
)


def _check_tied(heads: Mapping[str, str], found: Mapping[str, list[Tensor]], what: str) -> None:
    """Raises where an embedding and its head do not have the same tensors.

    Args:
        heads: names of embeddings, by those of their heads.
        found: by name what a file has of modules, of a head as an embedding would have it.
        what: a module has there.
    """
    for head, embedding in heads.items():
        mine, other = found.get(head), found.get(embedding)
        if mine is None and other is None:
            continue
        both = f"{TENSORS}: '{embedding}' and '{head}' have the same weight in the model, and"
        if mine is None or other is None:
            alone = embedding if mine is None else head
            raise ValueError(f"{both} the file has {what} of '{alone}' alone, which {_UNTIED}")
        if not all(map(torch.equal, mine, other)):  # of other shapes too
            raise ValueError(f"{both} the file has {what} of its own for each, which {_UNTIED}")


def _submodule(model: nn.Module, path: str) -> nn.Module:
    """Returns a module of a model, outside of layers that have adapters.

    Raises:
        ValueError: the model has none of this name.
    """
    try:
        above = [model.get_submodule(path[: dot.start()]) for dot in re.finditer(r"\.", path)]
        module = model.get_submodule(path)
    except AttributeError as error:
        raise ValueError(f"{TENSORS}: the model has no '{quoted(path)}'") from error
    if any(isinstance(one, Switched) for one in above):
        raise ValueError(f"{TENSORS}: '{quoted(path)}' is inside of a module that has adapters")
    return module


def _weights(
    model: nn.Module, values: Mapping[str, Tensor], adapted: Mapping[str, Any]
) -> list[tuple[Tensor, Tensor]]:
    """Returns the weights of layers, and what PEFT has saved of them beside their adapters.

    Raises:
        ValueError: one does not fit, or is of another layer.
    """
    found = []
    for path, value in values.items():
        layer: Any = model.get_submodule(path) if path in adapted else None
        is_it = layer is not None and layer.weight.is_floating_point()  # and no codes
        if not is_it or layer.weight.shape != value.shape:
            raise ValueError(
                f"{TENSORS}: '{path}{_BASE}' is {[*value.shape]}, and no layer with an adapter has "
                "such a weight of floats"
            )
        found.append((layer.weight, value))
    return found


def _write(weights: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Writes values into weights, or into none where it is interrupted."""
    # PEFT saves what an adapter does not change: most often there is nothing to write.
    changed = [(target, value) for target, value in weights if not _is_same(target, value)]
    before = [target.clone() for target, _ in changed]
    try:
        for target, value in changed:
            target.copy_(value)
    except BaseException:
        for (target, _), value in zip(changed, before):
            target.copy_(value)
        raise


def _is_same(target: Tensor, value: Tensor) -> bool:
    return torch.equal(target, value.to(target.device, target.dtype))


def _copies(
    model: nn.Module,
    others: Mapping[str, Tensor],
    modules: Iterable[str],
    heads: Mapping[str, str],
) -> dict[str, dict[str, Tensor]]:
    """Returns the states of modules that were saved whole, by the names of the modules.

    Args:
        model: has the modules.
        others: tensors of the file, by their names.
        modules: names in ``modules_to_save``, which PEFT finds at the ends of names.
        heads: heads that PEFT saves with their embedding, which alone is in ``modules_to_save``.

    Raises:
        ValueError: a key is of no such module, or does not fit; or a tensor is missing.
    """
    paths = [path for path, _ in outside(model)]
    named = [path for path in paths if any(path.endswith(one) for one in modules)]  # as PEFT does
    places = {path: inner(model.get_submodule(path)) for path in with_tied(named, heads)}
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in others.items():
        above = [key[: match.start()] for match in re.finditer(r"\.", key)]
        path = next((one for one in above if one in places), None)
        if path is None:
            raise ValueError(f"{TENSORS}: '{key}' is not supported")
        target = places[path].state_dict().get(key.removeprefix(f"{path}."))
        if target is None or target.shape != value.shape:
            raise ValueError(f"{TENSORS}: '{key}' is {[*value.shape]}, and the model has no such")
        found.setdefault(path, {})[key.removeprefix(f"{path}.")] = value
    for path, state in found.items():
        missing = sorted(places[path].state_dict().keys() - state.keys())
        if missing:
            raise ValueError(f"{TENSORS}: '{path}' was saved without '{missing[0]}'")
    for one in modules:
        of_task = one in _OF_TASKS and not any(path.endswith(one) for path in places)
        if not of_task and not any(path.endswith(one) for path in found):
            raise ValueError(f"{TENSORS} has no tensors of '{quoted(one)}' of 'modules_to_save'")
    return found
