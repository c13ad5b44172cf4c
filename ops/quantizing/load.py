"""Fills a model from safetensors files, whose weights are put into few bits as they are read."""

from __future__ import annotations

import math
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
from ..functional.quantize_matrix import mxfp4_matrix
from ..nn.bitsandbytes import BLOCKS, KEYS_8BIT, scales_name, weight_behind
from ..nn.experts import QuantizedExperts
from ..nn.quantized import QuantizedLinear, quantized_weight
from ..nn.torch_encoder import call_linears
from ..state.file.safetensors import Entry, entries_in, read
from .choice import Holder, choose, holders, is_conv1d, joined, left_parameters
from .names import by_names_of
from .quantize import check_arguments, take_shape
from .report import QuantizeReport
from .stacks import Stack, matrices_at_once, quantized_stack, read_whole
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
    peak of memory is that of the result and one tensor. Stacks of experts are read and quantized
    matrix by matrix, also where files have each matrix for itself, as transformers saves them.
    Tensors that are not quantized keep the dtype of the file.

    Tensors that are tied in the model stay so if the files have one of them, or equal ones; others
    that the files have each for itself are no longer tied, as in transformers.

    Weights that bitsandbytes quantized, alone or through transformers, and experts in MXFP4, as
    those of gpt-oss, are taken as they are, in their own format; other weights of such files were
    left on purpose, and are left.

    Of a model of transformers: ``with torch.device("meta"): model =
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))``, and then
    ``headroom.load_quantized(model, folder)``.

    Args:
        model: with parameters on the meta device, or on another, where they are replaced, and live
            until all is read.
        files: a safetensors file, an index (``model.safetensors.index.json``), a folder that has
            either, or several files. Names are those of ``model.state_dict()``, or those that
            transformers makes these of.
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
    found = _by_module(by_names_of(model, entries_in(files)), modules)
    packed = {name: behind for name, own in found.items() if (behind := _packed(own))}
    held, others = holders(model)
    chosen, reasons = _choice(model, found, held, packed, skip)
    _compare(model, modules, found, packed, held, others)
    ties = list(_ties(modules))
    given_to = {joined(name, key) for name, own in found.items() for key in own}
    options: dict[str, Any] = {"block_size": block_size, "double": double, "search": search}
    report = QuantizeReport(model)
    total = sum(entry.size for own in found.values() for entry in own.values())
    # All weights that are quantized are read to one place: in places of their own, codes would come
    # to lie between them, and what is freed could not be given back.
    wide = {name: _wide(one, found[name]) for name, one in chosen.items()}
    sizes = [_at_once(entry, block_size) for own in wide.values() for entry in own.values()]
    room = torch.empty(max(sizes, default=0), dtype=torch.uint8)
    shown = progress_bar(total, "load_quantized", unit="B", shown=True)
    with all_or_nothing(model), torch.no_grad(), shown as bar:
        for name, own in found.items():
            module, was = modules[name], type(modules[name]).__name__
            before = _wide_bytes(module, held.get(name), own, packed.get(name, ()))
            rest = {key: entry for key, entry in own.items() if key not in wide.get(name, ())}
            given = {key: read_whole(entry).to(device) for key, entry in rest.items()}
            if name in wide:
                given |= _quantized(name, chosen[name], wide[name], to, options, device, room)
            elif name in packed and name in held:
                _take_form(name, held[name], own)
            _fill(module, joined(name, ""), given)
            if isinstance(module, (QuantizedLinear, QuantizedExperts)):
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


Found = Mapping[str, Mapping[str, Entry | Stack]]


def _by_module(
    entries: Mapping[str, Entry | Stack], modules: Mapping[str, nn.Module]
) -> dict[str, dict[str, Entry | Stack]]:
    """Returns the entries of each module by the rest of their names, in the order of the files."""
    found: dict[str, dict[str, Entry | Stack]] = {}
    for name, entry in entries.items():
        owner = name.rpartition(".")[0]
        while owner and owner not in modules:
            owner = owner.rpartition(".")[0]
        found.setdefault(owner, {})[name[len(owner) :].lstrip(".")] = entry
    return found


def _packed(own: Collection[str]) -> set[str]:
    """Returns the names of the weights of a module that the files have in few bits."""
    return {name for key in own if (name := weight_behind(key, own)) is not None}


def _take_form(name: str, one: Holder, own: Mapping[str, Entry | Stack]) -> None:
    """Turns a layer or experts into few bits, in place, of the format that the files have, without
    values."""
    blocks = [own.get(f"{key}_{BLOCKS}") for key in one.params]
    if None in blocks:
        is_8bit = any(key.rpartition(".")[2] in KEYS_8BIT for key in own)
        take_shape(one, "int8" if is_8bit else "nf4")
        return
    found = []
    for (key, weight), entry in zip(one.weights.items(), blocks):
        assert entry is not None and one.rule is not None
        made = [
            torch.empty(shape, dtype=torch.uint8, device="meta")
            for shape in (entry.shape, entry.shape[:-1])
        ]
        q = mxfp4_matrix(*made)  # which is exact in bfloat16, whatever the model is made in
        wanted = weight.mT if one.rule.options["transposed"] else weight
        if q.shape != wanted.shape:
            raise ValueError(
                f"'{joined(name, key)}' is {[*q.shape]} in the files, and {[*wanted.shape]} in the "
                "model, [experts, out, in]"
            )
        found.append(q)
    one.take(*found)


def _choice(
    model: nn.Module,
    found: Found,
    held: Collection[str],
    packed: Collection[str],
    skip: Iterable[str] | str | None,
) -> tuple[dict[str, Holder], dict[str, str]]:
    """Returns the layers and experts to quantize, and reasons for the others."""
    if packed:
        return {}, dict.fromkeys(held, "the files have it so")
    chosen, reasons = choose(model, skip)
    for name, one in list(chosen.items()):
        own = found.get(name, {})
        dtypes = {own[key].dtype for key in one.params if key in own}
        if not dtypes <= set(FLOATS):
            del chosen[name]
            reasons[name] = f"it is {dtypes.pop()} in the files"
    return chosen, reasons


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields what the state_dict of a module has of its own."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def _compare(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    found: Found,
    packed: Mapping[str, Collection[str]],
    held: Mapping[str, Holder],
    others: Mapping[str, str],
) -> None:
    """Raises where names or shapes of files and model differ, before anything is read."""
    given, filled, unexpected = set(), set(), []
    for name, own in found.items():
        module, in_few_bits = modules[name], packed.get(name, ())
        numels = _numels(module, held.get(name))
        if in_few_bits and not numels:
            why = others.get(name, "no linear layer")
            raise ValueError(f"'{name}' is in few bits in the files, and {why}")
        if in_few_bits and in_few_bits != numels.keys():
            wanted, got = sorted(numels), sorted(in_few_bits)
            raise ValueError(f"'{name}' has {got} in few bits in the files, wanted {wanted}")
        tensors = dict(_tensors(module))
        given |= {joined(name, key) for key in (*own, *map(scales_name, in_few_bits))}
        for key in in_few_bits:
            if f"{key}_{BLOCKS}" in own:
                if key == "weight":
                    raise ValueError(f"'{name}' is in MXFP4 in the files, and no module of experts")
                _check_blocks(joined(name, key), key, own, numels[key])
                given.add(joined(name, key))
        # Codes are not what another module can have too.
        filled |= {id(tensors[key]) for key in own.keys() - in_few_bits if key in tensors}
        for key, entry in own.items():
            full = joined(name, key)
            if key not in tensors and weight_behind(key, own) not in in_few_bits:
                unexpected.append(full)
            elif key in tensors and key not in in_few_bits:
                if (wanted := tuple(tensors[key].shape)) != entry.shape:
                    raise ValueError(
                        f"'{full}' is {[*entry.shape]} in the files, and {[*wanted]} in the model"
                    )
    missing = [
        full
        for name, module in modules.items()
        for key, tensor in _tensors(module)
        if (full := joined(name, key)) not in given
        and (id(tensor) not in filled or key in packed.get(name, ()))
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


def _check_blocks(full: str, key: str, own: Mapping[str, Entry | Stack], numel: int) -> None:
    """Raises where the blocks and scales of a stack in MXFP4 do not fit."""
    shapes = [own[k].shape if k in own else None for k in (f"{key}_{BLOCKS}", scales_name(key))]
    blocks, scales = shapes
    if (
        blocks is None
        or scales != blocks[:-1]
        or len(blocks) != 4
        or 2 * math.prod(blocks) != numel
    ):
        raise ValueError(
            f"'{full}' has blocks {blocks} and scales {scales} in the files, wanted [experts, out, "
            f"in / 32, 16] and [experts, out, in / 32] for {numel:,} elements"
        )


def _such(names: list[str]) -> str:
    return f" (such as '{names[0]}')" if names else ""


# ---- one module ----------------------------------------------------------------------------------


def _numels(module: nn.Module, held: Holder | None) -> dict[str, int]:
    """Returns how many elements the weights of a module have that can be in few bits, by name."""
    if isinstance(module, QuantizedExperts):
        return {key: math.prod(q.shape) for key, q in zip(module.rule.stacks, module.stacks())}
    if isinstance(module, QuantizedLinear):
        return {"weight": module.out_features * module.in_features}
    return {} if held is None else {key: weight.numel() for key, weight in held.weights.items()}


def _wide_bytes(
    module: nn.Module,
    held: Holder | None,
    own: Mapping[str, Entry | Stack],
    in_few_bits: Collection[str],
) -> int:
    """Returns the bytes of weights before they were quantized, or those of 16 bits if the files
    have them quantized."""
    return sum(
        2 * numel if key in in_few_bits or own[key].dtype not in FLOATS else own[key].size
        for key, numel in _numels(module, held).items()
        if key in own or key in in_few_bits
    )


def _wide(one: Holder, own: Mapping[str, Entry | Stack]) -> dict[str, Entry | Stack]:
    """Returns where the weights lie that are quantized, those of experts matrix by matrix."""
    found = {key: own[key] for key in one.params}
    if one.rule is None:
        return found
    return {k: Stack.of(one) if isinstance(one, Entry) else one for k, one in found.items()}


def _at_once(entry: Entry | Stack, block_size: int) -> int:
    """Returns how many bytes of a weight are read before they are quantized."""
    if isinstance(entry, Entry):
        return entry.size
    return entry.bytes_of_one * matrices_at_once(entry, block_size)


def _quantized(
    name: str,
    one: Holder,
    wide: Mapping[str, Entry | Stack],
    to: str,
    options: dict[str, Any],
    device: torch.device | str,
    room: Tensor,
) -> dict[str, Tensor]:
    """Quantizes the weights of a layer or of experts, which become those of few bits, and returns
    their tensors."""
    found = []
    for key, entry in wide.items():
        try:
            if isinstance(entry, Stack):
                q = quantized_stack(entry, to, **options, device=device, room=room)
            else:
                weight = read(entry, room).to(device)
                weight = weight.t() if is_conv1d(one.module) else weight
                q = quantized_weight(weight, to, **options)
        except ValueError as error:
            raise ValueError(f"'{joined(name, key)}' cannot be quantized: {error}") from error
        found.append(q)
    layer = one.take(*found)
    names = [*wide, *map(scales_name, wide)]
    return {key: getattr(layer, key) for key in names}


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
    return place[1] in _numels(place[0], None)


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
