"""Fills a model from safetensors files, whose weights are put into few bits as they are read."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._core.all_or_nothing import all_or_nothing
from .._core.grouping import grouped
from .._core.progress import progress_bar
from .._core.registration import FLOATS
from ..nn.bitsandbytes import is_bitsandbytes_key
from ..nn.quantized import QuantizedLinear, quantized_weight
from ..nn.torch_encoder import call_linears
from ..state.file.safetensors import Entry, entries_in, read
from .choice import choose, is_conv1d, is_linear, joined, left_parameters, weight_of
from .quantize import check_arguments, take, take_shape
from .report import QuantizeReport
from .transformers_config import describe

Files = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def load_quantized(
    model: nn.Module,
    files: Files,
    to: str = "nf4",
    *,
    block_size: int = 64,
    double: bool = True,
    skip: Iterable[str] | str | None = None,
    search: bool = False,
    device: torch.device | str = "cpu",
) -> QuantizeReport:
    """Fills a model on the meta device from safetensors files, with its weights in few bits.

    Tensors are read one after the other, and each weight is quantized before the next is read: the
    peak of memory is that of the result and one tensor. Tensors that are not quantized keep the
    dtype of the file.

    Tensors that are tied in the model stay so if the files have one of them, or equal ones; others
    that the files have each for itself are no longer tied, as in transformers.

    Weights that bitsandbytes quantized, alone or through transformers, are taken as they are, in
    their own format; other weights of such files were left on purpose, and are left.

    Of a model of transformers: ``with torch.device("meta"): model =
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))``, and then
    ``headroom.load_quantized(model, folder)``.

    Args:
        model: with parameters on the meta device, or on another, where they are replaced, and live
            until all is read.
        files: a safetensors file, an index (``model.safetensors.index.json``), a folder that has
            either, or several files. Names are those of ``model.state_dict()``.
        to, block_size, double, skip, search: as in :func:`headroom.quantize`.
        device: where the model shall be, and weights are quantized.

    Returns:
        What was quantized, and what was not: ``print(report)``.

    Raises:
        OSError: a file cannot be read.
        TypeError: ``model`` is no module, ``files`` no path, or ``skip`` no names.
        ValueError: an argument is none of the above; a file is malformed; files and model have
            other names or shapes; a weight has an element or a scale that is not finite. Names and
            shapes are compared before anything is read.

    Nothing is changed where it raises or is interrupted.
    """
    check_arguments(model, to, block_size)
    modules = dict(model.named_modules())
    found = _by_module(entries_in(files), modules)
    packed = {name for name, own in found.items() if any(map(is_bitsandbytes_key, own))}
    chosen, reasons = _choice(model, found, modules, packed, skip)
    _compare(model, modules, found, packed)
    ties = list(_ties(modules))
    given_to = {joined(name, key) for name, own in found.items() for key in own}
    options: dict[str, Any] = {"block_size": block_size, "double": double, "search": search}
    report = QuantizeReport(model)
    total = sum(entry.size for own in found.values() for entry in own.values())
    # All weights that are quantized are read to one place: in places of their own, codes would come
    # to lie between them, and what is freed could not be given back.
    largest = max((found[name]["weight"].size for name in chosen), default=0)
    room = torch.empty(largest, dtype=torch.uint8)
    shown = progress_bar(total, "load_quantized", unit="B", shown=True)
    with all_or_nothing(model), torch.no_grad(), shown as bar:
        for name, own in found.items():
            module, was = modules[name], type(modules[name]).__name__
            before = _wide_bytes(module, own) if name in chosen or name in packed else 0
            wide = own["weight"] if name in chosen else None
            given = {key: read(one).to(device) for key, one in own.items() if one is not wide}
            if wide is not None:
                given |= _quantized(name, module, read(wide, room).to(device), to, options)
            elif name in packed and is_linear(module):
                take_shape(module, "int8" if "SCB" in own else "nf4")
            _fill(module, joined(name, ""), given)
            if isinstance(module, QuantizedLinear):
                report._add(name, was, before, module)
            bar.update(sum(entry.size for entry in own.values()))
        for places in ties:
            _tie(model, places, given_to)
        _fill_buffers(modules, device)
        report.left = left_parameters(model, reasons)
        call_linears(model)
        describe(model)
    return report


# ---- names and shapes ----------------------------------------------------------------------------


def _by_module(
    entries: Mapping[str, Entry], modules: Mapping[str, nn.Module]
) -> dict[str, dict[str, Entry]]:
    """Returns the entries of each module by the rest of their names, in the order of the files."""
    found: dict[str, dict[str, Entry]] = {}
    for name, entry in entries.items():
        owner = name.rpartition(".")[0]
        while owner and owner not in modules:
            owner = owner.rpartition(".")[0]
        found.setdefault(owner, {})[name[len(owner) :].lstrip(".")] = entry
    return found


def _choice(
    model: nn.Module,
    found: Mapping[str, Mapping[str, Entry]],
    modules: Mapping[str, nn.Module],
    packed: Collection[str],
    skip: Iterable[str] | str | None,
) -> tuple[set[str], dict[str, str]]:
    """Returns the layers to quantize, and reasons for the others."""
    if packed:
        linear = [name for name, module in modules.items() if is_linear(module)]
        return set(), dict.fromkeys(linear, "the files have it so")
    chosen, reasons = choose(model, skip)
    for name in list(chosen):
        entry = found.get(name, {}).get("weight")
        if entry is not None and entry.dtype not in FLOATS:
            del chosen[name]
            reasons[name] = f"it is {entry.dtype} in the files"
    return set(chosen), reasons


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields what the state_dict of a module has of its own."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def _compare(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    found: Mapping[str, Mapping[str, Entry]],
    packed: Collection[str],
) -> None:
    """Raises where names or shapes of files and model differ, before anything is read."""
    given, filled, unexpected = set(), set(), []
    for name, own in found.items():
        module, is_packed = modules[name], name in packed
        if is_packed and not (is_linear(module) or isinstance(module, QuantizedLinear)):
            raise ValueError(f"'{name}' is in few bits in the files, and no linear layer")
        tensors = dict(_tensors(module))
        given |= {joined(name, key) for key in (*own, *(["scales"] if is_packed else []))}
        # Codes are not what another module can have too.
        plain = own.keys() - ({"weight"} if is_packed else ())
        filled |= {id(tensors[key]) for key in plain if key in tensors}
        for key, entry in own.items():
            full = joined(name, key)
            if key not in tensors and not (is_packed and is_bitsandbytes_key(key)):
                unexpected.append(full)
            elif key in tensors and not (is_packed and key == "weight"):
                if (wanted := tuple(tensors[key].shape)) != entry.shape:
                    raise ValueError(
                        f"'{full}' is {[*entry.shape]} in the files, and {[*wanted]} in the model"
                    )
    missing = [
        full
        for name, module in modules.items()
        for key, tensor in _tensors(module)
        if (full := joined(name, key)) not in given
        and (id(tensor) not in filled or (name in packed and key == "weight"))
    ]
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unexpected = [name for name in unexpected if not any(re.search(one, name) for one in ignored)]
    if missing or unexpected:
        raise ValueError(
            f"{len(missing)} tensors of the model are not in the files{_such(missing)}, and "
            f"{len(unexpected)} of the files are not in the model{_such(unexpected)}"
        )
    for name, module in modules.items():
        if lost := _lost_buffers(module):
            _initializer(modules, name, lost[0])


def _such(names: list[str]) -> str:
    return f" (such as '{names[0]}')" if names else ""


# ---- one module ----------------------------------------------------------------------------------


def _wide_bytes(module: nn.Module, own: Mapping[str, Entry]) -> int:
    """Returns the bytes of a weight before it was quantized, or those of 16 bits if the files have
    it quantized."""
    if own["weight"].dtype in FLOATS and not any(map(is_bitsandbytes_key, own)):
        return own["weight"].size
    if isinstance(module, QuantizedLinear):
        return 2 * module.out_features * module.in_features
    return 2 * weight_of(module).numel()


def _quantized(
    name: str, module: nn.Module, weight: Tensor, to: str, options: dict[str, Any]
) -> dict[str, Tensor]:
    """Quantizes the weight of a layer, which becomes one of few bits, and returns its tensors."""
    try:
        q = quantized_weight(weight.t() if is_conv1d(module) else weight, to, **options)
    except ValueError as error:
        what = joined(name, "weight")
        raise ValueError(f"'{what}' cannot be quantized: {error}") from error
    layer = take(module, q)
    return {"weight": layer.weight, "scales": layer.scales}


def _fill(module: nn.Module, prefix: str, given: dict[str, Tensor]) -> None:
    """Gives a module its own tensors."""
    state = {prefix + key: value for key, value in given.items()}
    errors: list[str] = []
    module._load_from_state_dict(
        state, prefix, {"assign_to_params_buffers": True}, True, [], [], errors
    )
    if errors:
        raise ValueError("; ".join(errors))


# ---- tensors that are in several places, or in no file -------------------------------------------


Places = dict[str, tuple[nn.Module, str]]  # modules and attributes, by the names of tensors


def _ties(modules: Mapping[str, nn.Module]) -> Iterator[Places]:
    """Yields the places of each tensor that is in several."""
    places = {
        joined(path, name): (module, name)
        for path, module in modules.items()
        for name, _ in _tensors(module)
    }
    for same in grouped(places.items(), lambda item: id(getattr(*item[1]))).values():
        if len(same) > 1:
            yield dict(same)


def _tie(model: nn.Module, places: Places, given: Collection[str]) -> None:
    """Gives places one tensor: those that the files did not fill, and those that they filled with
    the same numbers. What they filled with others is no longer tied."""
    mine = [one for one in places if one in given and not _has_codes(places[one])]
    first = getattr(*places[mine[0]]) if mine else None
    for one, (module, name) in places.items():
        if one not in given or (one in mine and _is_equal(getattr(module, name), first)):
            setattr(module, name, first)
        else:
            getattr(model, "all_tied_weights_keys", {}).pop(one, None)  # of transformers


def _has_codes(place: tuple[nn.Module, str]) -> bool:
    return isinstance(place[0], QuantizedLinear) and place[1] == "weight"


def _is_equal(x: Tensor, y: Tensor) -> bool:
    return x is y or (x.dtype == y.dtype and torch.equal(x, y))


def _lost_buffers(module: nn.Module) -> list[str]:
    """Returns the buffers that no file holds, and that the meta device took the values of."""
    names = sorted(module._non_persistent_buffers_set & module._buffers.keys())
    return [name for name in names if (b := module._buffers[name]) is not None and b.is_meta]


def _initializer(modules: Mapping[str, nn.Module], name: str, buffer: str) -> Any:
    """Returns the method by which the nearest model of transformers around a module computes its
    buffers."""
    above = name
    while True:
        if hasattr(modules[above], "_init_weights"):
            return modules[above]._init_weights
        if not above:
            break
        above = above.rpartition(".")[0]
    raise ValueError(
        f"'{joined(name, buffer)}' is on the meta device, and no file holds it: make the "
        "model with its buffers elsewhere, as by accelerate.init_empty_weights()"
    )


def _fill_buffers(modules: Mapping[str, nn.Module], device: torch.device | str) -> None:
    """Computes the buffers that no file holds, such as the frequencies of rotary embeddings."""
    for name, module in modules.items():
        lost = _lost_buffers(module)
        for buffer in lost:
            module._buffers[buffer] = torch.zeros_like(getattr(module, buffer), device=device)
        if lost:
            for param in module.parameters(recurse=False):
                param._is_hf_initialized = True  # type: ignore[attr-defined]
            with torch.no_grad():
                _initializer(modules, name, lost[0])(module)
