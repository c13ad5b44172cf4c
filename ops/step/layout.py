"""Says which dimension of each tensor of a batch counts its samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from .pytree import tensors_in

__all__ = ["ENDS", "LONGEST", "Layout", "labels_of", "layout_of"]

# Where batches say at which tokens sequences end, and how long the longest is: in headroom.nn, and
# in transformers and TRL.
ENDS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
LONGEST = ("max_length_q", "max_length_k")

INPUTS = ("input_ids", "inputs_embeds", "decoder_input_ids")  # have a row for each sample
BESIDE = ("position", "mask")  # in the names of what may have other dimensions before its rows
SHARED = (*ENDS, "cache_position")  # belong to all samples
# Hold any number of images, videos and sounds for each sample, in one dimension.
PIECES = (
    *("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "image_sizes"),
    *("input_features", "pixel_attention_mask", "feature_attention_mask"),
)


class Layout(NamedTuple):
    """Says where the samples of a batch are.

    Attributes:
        samples: how many there are, or None if no tensor has a dimension.
        tokens: of the row ``[1, tokens, ...]``, if there is one.
        dims: the dimension that counts samples, by the id of the tensor. Other tensors belong to
            all samples.
        untold: why a batch of several samples cannot be cut, or None.
    """

    samples: int | None
    tokens: int | None
    dims: dict[int, int]
    untold: str | None = None


def layout_of(batch: Any) -> Layout:
    """Returns where the samples of a batch are.

    The inputs of transformers' models tell it by their names, or else labels with which another
    tensor agrees, or else the first tensor that is no mask and no positions, which may be ``[3,
    rows, tokens]``. All tensors that have as many rows in their first dimension have samples there,
    and those in which ``[rows, tokens]`` follow behind another dimension in the second.
    """
    named = [(name, x) for name, x in _named(batch) if x.dim()]
    own = [(name, x) for name, x in named if name not in SHARED] or named
    rows = [x for name in INPUTS for known, x in own if known == name]
    rows = rows or [x for name, x in own if not any(word in name for word in BESIDE)]
    rows = rows or [x for _, x in own]
    if not rows:
        return Layout(None, None, {})
    named_rows = any(name in INPUTS for name, _ in own)
    first = rows[0] if named_rows else _first(rows, labels_of(batch))
    row = next((x for x in rows if x.dim() > 1), first)
    samples = len(first)
    length = row.shape[1] if row.dim() > 1 else None
    starts = {x.shape[:2] for _, x in own if x.dim() > 1 and len(x) == samples}
    dims, untold = {}, None
    for name, x in own:
        behind = x.dim() > 2 and x.shape[1:3] in starts
        has_axes = "position" in name and x.dim() == 3
        if behind and (len(x) not in (1, samples) or has_axes):
            dims[id(x)] = 1
        elif len(x) == samples and not (has_axes and (1, x.shape[2]) == (x.shape[1], length)):
            dims[id(x)] = 0
        if name in PIECES and (samples == 1 or id(x) not in dims):
            untold = (
                untold or f"nothing says which samples have which part of {name}, {list(x.shape)}"
            )
    return Layout(samples, length if len(row) == 1 else None, dims, untold)


def _first(rows: list[Tensor], labels: Tensor | None) -> Tensor:
    """Returns the labels if they tell the samples, or else the first tensor."""
    first = rows[0]
    if labels is None or first.shape[:2] == (1, len(labels)):  # of the tokens of a row
        return first
    if any(x is not labels and len(x) == len(labels) for x in rows):
        return labels
    behind = labels.dim() > 1 and len(first) > 1 and first.shape[1:][: labels.dim()] == labels.shape
    return labels if behind else first


def labels_of(batch: Any) -> Tensor | None:
    """Returns the labels of a batch that are whole numbers: of a dict by their name, else the last
    ones. None if there are none."""
    found = None
    if isinstance(batch, Mapping):
        found = batch.get("shift_labels", batch.get("labels"))
    elif isinstance(batch, (tuple, list)) and batch:
        found = batch[-1]
    if not isinstance(found, Tensor) or not found.dim():
        return None
    return None if found.is_floating_point() or found.is_complex() else found


def _named(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a batch, each with the name that it or its container has."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(item, str(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _named(item, name)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _named(getattr(value, field.name, None), field.name)
    else:
        for x in tensors_in(value):
            yield name, x
