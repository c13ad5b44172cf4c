"""Changes a model that exists in place, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn

from ..host.arena import HostArena
from ..nn.experts import ExpertsRule
from . import families, generic
from .bitsandbytes import swap_bitsandbytes
from .blocks import LEANEST_FREE, Options, PatchedLayer, chosen_levels, find_blocks
from .changes import Changes, restore, undo
from .experts import found_experts, swap_experts
from .losses import check_loss_options, swap_losses
from .peft import swap_adapters
from .report import PatchReport
from .sinks import swap_sinks
from .streaming import chosen_blocks, move_weights, stream_weights, streamed_blocks

CALL = "_headroom_patch_call"  # the attribute of a model that says how patch() was called


def patch(
    model: nn.Module,
    save: str | Sequence[str | None] | Mapping[str | int, str] | None = None,
    *,
    norms: bool = True,
    glu: bool = True,
    rope: bool = True,
    experts: bool = True,
    loss: bool | Mapping[str, Any] = False,
    checkpoint_options: Mapping[str, Any] | None = None,
    weights: Literal["host"] | Mapping[str | int, str] | None = None,
    prefetch: int = 1,
    host: HostArena | None = None,
) -> PatchReport:
    """Gives a model Headroom's norms and blocks with a dial, in place; layers of bitsandbytes the
    product :func:`headroom.functional.linear_quantized`; layers with adapters of PEFT the op
    :func:`headroom.functional.lora_linear`; eager attention of transformers that has sinks
    :func:`headroom.functional.sink_attention`; and on a CPU without instructions for
    products in 16 bits, Linears in these :func:`headroom.functional.linear`.

    Parameters, their names and the ``state_dict`` stay as they are, but for where weights that
    stream are; only attributes of module instances are set, and :func:`unpatch` removes them. A
    second call starts anew. If the call raises, the model is as it was before it.

    Args:
        model: any module. Blocks of :mod:`headroom.nn` and of the architectures of transformers
            that :mod:`headroom.patching.families` knows have all levels. In any other model norms
            are recognized by what they compute, and repeated blocks, which are the
            members of a ModuleList or Sequential of one class, can be at L0 or at L5; so can such
            blocks beside those that are known, as in the vision tower of a language model. Blocks
            with experts that are swapped can be at L1 and at L2 too. One level for all leaves those
            as they are that cannot have it, and the report says so.
        save: what blocks keep for the backward pass: one level for all, one per block, or levels
            by the name or the number of a block. L0 keeps everything, L5 the input alone. None,
            also for a block that is not named, leaves blocks as they are, but is L1 for layers of
            those architectures of transformers and for blocks with experts: the leanest level that
            costs nothing, at which norms, rotations and activations are computed again, but no
            product.
        norms: whether norms are swapped.
        glu: whether gated units are swapped, in known architectures.
        rope: whether rotary embeddings are swapped, in known architectures.
        experts: whether the experts of mixtures of transformers are swapped, for
            :func:`headroom.functional.experts`; those that bitsandbytes holds in 4 bits too.
        loss: whether language models of transformers compute their loss by
            :func:`headroom.linear_cross_entropy`, without logits; or a dict of its options, such as
            ``{"z_loss": 1e-4}``, which hold in training. ``outputs.logits`` is then None in
            training, and computed when it is read in evaluation; without labels everything is as
            before. A loss that is the model's own stays.
        checkpoint_options: options of :func:`headroom.checkpoint` for blocks at L5, such as
            ``context_fn`` or ``verify``; only for those that have no other levels.
        weights: ``"host"`` lets the weights of all blocks stream, ``{block: "host"}`` those of
            some, by name or number: their parameters become tensors of the CPU in the host arena,
            the device that they were on has them while their block runs, and their gradients come
            to the CPU. Losses and gradients have the same bits. Weights that are tied to others
            outside of their block stay, and the report says so. On the CPU this is of use only with
            an arena in files.
        prefetch: how many blocks ahead weights are copied, in both passes; the device has slots for
            one block more.
        host: the arena; by default that of the process, :func:`headroom.host.default_arena`.

    Returns:
        What was done: ``print(report)``, ``report.undo()``.

    Raises:
        HostMemoryError: the arena has no room for the weights.
        TypeError: ``model`` is no module, ``loss`` neither a bool nor a dict, or ``host`` no arena.
        ValueError: ``save`` asks for levels that the blocks cannot have, or the model has none;
            ``checkpoint_options`` or ``loss`` has a name that is none of its options; or weights
            shall stream, and the model is compiled, sharded, on meta, or has no such block.
        RuntimeError: the model was patched before, and a ``forward`` replaced since.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"headroom.patch: model is {model!r}, wanted an instance of nn.Module")
    options = Options(norms, glu, rope, experts, checkpoint=checkpoint_options or {})
    loss_options = check_loss_options(loss)
    report, changes = PatchReport(model), Changes()
    before = streamed_blocks(model)
    try:
        restore(model.named_modules(), changes)
        found = found_experts(model) if experts else {}
        report.architecture, layers = _layers_of(model, found)
        levels = chosen_levels(save, layers, model)
        on_host = chosen_blocks(weights, layers, model)
        for layer, level in zip(layers, levels):
            layer.patch(level, options, changes, report)
            if isinstance(save, str) and level is None:
                reason = f"it cannot be at {save}, only at {' or '.join(layer.levels)}"
                report._leave(layer.name, layer.module, reason)
        if norms:
            generic.swap_norms(model, changes, report)
        swap_experts(model, model, found, LEANEST_FREE, changes, report)
        swap_sinks(model, changes, report)
        generic.swap_linears(model, changes, report)
        swap_bitsandbytes(model, changes, report)
        swap_adapters(model, changes, report)
        if loss_options is not None:
            swap_losses(model, loss_options, changes, report)
        streamed = stream_weights(model, on_host, prefetch, host, before, changes, report)
        if report.changed:
            call = {"save": dict(report.levels), "norms": norms, "glu": glu, "rope": rope}
            call |= {"experts": experts, "loss": loss, "checkpoint_options": checkpoint_options}
            if streamed:
                where = dict.fromkeys(report.streamed, "host")
                call |= {"weights": where, "prefetch": prefetch, "host": host}
            changes.set(model, CALL, call)
        move_weights(streamed, before)
    except BaseException:
        changes.rollback()
        raise
    changes.finish()
    return report


def patch_call(model: nn.Module) -> dict[str, Any] | None:
    """Returns the arguments with which the model was patched last, with the level of each block
    whose level was set, by name; or None if it is not patched."""
    return vars(model).get(CALL)


def repeated_layers(
    model: nn.Module, experts: bool = True
) -> tuple[str | None, list[PatchedLayer]]:
    """Returns the name of a known architecture, or None, and the blocks whose levels :func:`patch`
    can set, in the order of ``named_modules()``; with ``experts`` swapped, or not."""
    return _layers_of(model, found_experts(model) if experts else {})


def _layers_of(
    model: nn.Module, found: dict[nn.Module, ExpertsRule | str]
) -> tuple[str | None, list[PatchedLayer]]:
    name, known = families.find_layers(model) or (None, [])
    return name, find_blocks(model, known, found)


def unpatch(model: nn.Module) -> None:
    """Removes what :func:`patch` set on a model or on parts of it. A model that is not patched
    stays as it is.

    Raises:
        RuntimeError: something else has replaced a ``forward`` since; nothing is changed.
    """
    undo(model.named_modules())
