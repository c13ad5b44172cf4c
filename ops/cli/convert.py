"""Converts the state of an optimizer for another library. Runs no code that may be in the file, and
writes OUT whole or not at all."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch

from .._core.atomic import replacing
from ..state.convert import LIBRARIES, RULES, convert_state
from ..state.file import is_state_file
from ..state.load import load_state
from ..state.save import save_state
from .arguments import ArgumentError, count
from .output import print_json

HELP = "convert an optimizer state for a library"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OUT = "the file to write; *.safetensors becomes a file of headroom.save_state with the optimizer"
WHAT = "the state of an optimizer, a dict with 'state' and 'param_groups'"


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", type=Path, metavar="IN", help=f"a file with {WHAT}")
    command.add_argument("target", type=Path, metavar="OUT", help=OUT)
    library: dict[str, Any] = {"choices": LIBRARIES, "metavar": "LIBRARY"}
    command.add_argument("--to", required=True, help=f"one of {', '.join(LIBRARIES)}", **library)
    command.add_argument("--from", dest="from_", help="IN's library, if not recognized", **library)
    command.add_argument("--rule", choices=RULES, help="what IN is the state of, if not recognized")
    command.add_argument("--key", help="the state's place in IN: 'optimizer', 'a.b'")
    command.add_argument("--param-dtype", choices=DTYPES, help="dtype of the parameters")
    command.add_argument("--block-size", type=count(1), help="elements per scale of 8-bit moments")
    command.add_argument("--min-8bit-size", type=count(0), default=4096)


def run(options: argparse.Namespace) -> int:
    """Loads IN without running code, converts it, and writes OUT whole or not at all."""
    checkpoint = _load(options.source)
    path = _path(checkpoint, options.key)
    source = checkpoint
    for key in path:
        source = source[key]
    state, report = convert_state(
        source,
        options.to,
        from_=options.from_,
        rule=options.rule,
        param_dtype=DTYPES.get(options.param_dtype),
        block_size=options.block_size,
        min_8bit_size=options.min_8bit_size,
        progress=not options.json,
    )
    whole: Any = state
    for depth in reversed(range(len(path))):
        outer = checkpoint
        for key in path[:depth]:
            outer = outer[key]
        whole = outer | {path[depth]: whole}
    if options.target.suffix == ".safetensors":
        save_state(options.target, optimizer=_Held(state), rng=False)
    else:
        with replacing(options.target) as file, os.fdopen(os.dup(file), "wb") as stream:
            torch.save(whole, stream)
    if options.json:
        losses = [vars(loss) | {"relative": loss.relative} for loss in report.losses]
        print_json(
            {
                "format": "headroom.convert/1",
                "source": report.source,
                "target": report.target,
                "is_lossless": report.is_lossless,
                "losses": losses,
                "notes": report.notes,
            }
        )
    else:
        print(report)
    return 0


def _load(path: Path) -> Any:
    if is_state_file(path):
        held = _Held()
        load_state(path, optimizer=held, rng=False)
        return held.state
    if not path.exists():
        raise ValueError(f"there is no {path}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many types: truncated, not a file of torch, or unsafe
        if "torchao" in str(error):
            try:
                import torchao.optim  # noqa: F401  (which says that its states are safe)

                return torch.load(path, map_location="cpu", weights_only=True)
            except ImportError as missing:
                raise ImportError(f"{path} needs the package torchao") from missing
        raise ValueError(f"{path} cannot be loaded: {error}") from error


def _path(checkpoint: Any, key: str | None) -> list[str]:
    """Returns the keys that lead to the state of the optimizer."""

    def is_state(value: Any) -> bool:
        return isinstance(value, dict) and {"state", "param_groups"} <= value.keys()

    if key is not None:
        path, inner = key.split("."), checkpoint
        for part in path:
            inner = inner.get(part) if isinstance(inner, dict) else None
        if not is_state(inner):
            raise ArgumentError(f"--key is {key!r}, where there is not {WHAT}")
        return path
    if is_state(checkpoint):
        return []
    found = (
        [k for k, v in checkpoint.items() if is_state(v)] if isinstance(checkpoint, dict) else []
    )
    if len(found) != 1:
        raise ValueError(f"the file has {len(found)} of {WHAT}; say which with --key")
    return found


class _Held:
    """Stands in for an optimizer."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
