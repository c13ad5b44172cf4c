"""The command line: ``python -m headroom``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .convert import LIBRARIES, convert_state

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WHAT = "the state of an optimizer, a dict with 'state' and 'param_groups'"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m headroom", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("convert", help="an optimizer's state to another library's")
    command.add_argument("source", type=Path, metavar="IN", help=f"a file with {WHAT}")
    command.add_argument("target", type=Path, metavar="OUT", help="the file to write")
    command.add_argument("--to", required=True, choices=LIBRARIES)
    command.add_argument("--from", dest="from_", choices=LIBRARIES, help="if the keys do not tell")
    command.add_argument("--key", help="where it is in the file, as in 'optimizer' or 'a.b'")
    command.add_argument("--param-dtype", choices=DTYPES, help="of the model")
    command.add_argument("--block-size", type=int, help="of 8-bit moments")
    command.add_argument("--min-8bit-size", type=int, default=4096)
    command.set_defaults(run=_convert)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except (OSError, ValueError, NotImplementedError, ImportError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1


def _convert(options: argparse.Namespace) -> int:
    """Loads without running code, converts, and writes OUT at once or not at all."""
    checkpoint = _load(options.source)
    path = _path(checkpoint, options.key)
    source = checkpoint
    for key in path:
        source = source[key]
    state, report = convert_state(
        source,
        options.to,
        from_=options.from_,
        param_dtype=DTYPES.get(options.param_dtype),
        block_size=options.block_size,
        min_8bit_size=options.min_8bit_size,
        progress=True,
    )
    whole: Any = state
    for depth in reversed(range(len(path))):
        outer = checkpoint
        for key in path[:depth]:
            outer = outer[key]
        whole = outer | {path[depth]: whole}
    unfinished = options.target.with_name(options.target.name + ".unfinished")
    try:
        _save(whole, unfinished, options.target.suffix == ".safetensors")
        os.replace(unfinished, options.target)
    finally:
        unfinished.unlink(missing_ok=True)
    print(report)
    return 0


def _load(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return _load_safetensors(path)
    if not path.exists():
        raise ValueError(f"there is no {path}")
    try:
        import torchao.optim  # noqa: F401  (whose states are then safe to load)
    except ImportError:
        pass
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many types: truncated, not a file of torch, or unsafe
        raise ValueError(f"{path} cannot be loaded: {error}") from error


def _path(checkpoint: Any, key: str | None) -> list[str]:
    """The keys that lead to the state of the optimizer."""

    def is_state(value: Any) -> bool:
        return isinstance(value, dict) and {"state", "param_groups"} <= value.keys()

    if key is not None:
        path, inner = key.split("."), checkpoint
        for part in path:
            inner = inner.get(part) if isinstance(inner, dict) else None
        if not is_state(inner):
            raise ValueError(f"there is no {WHAT}, at {key!r}")
        return path
    if is_state(checkpoint):
        return []
    found = (
        [k for k, v in checkpoint.items() if is_state(v)] if isinstance(checkpoint, dict) else []
    )
    if len(found) != 1:
        raise ValueError(f"the file has {len(found)} of {WHAT}; say which with --key")
    return found


def _save(value: Any, path: Path, as_safetensors: bool) -> None:
    if as_safetensors:
        _save_safetensors(value, path)
    else:
        torch.save(value, path)


# ---- Safetensors: tensors by the path of their keys, the rest as JSON in the metadata ------------


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("files in .safetensors need the package safetensors") from error
    return safetensors


def _save_safetensors(state_dict: dict[str, Any], path: Path) -> None:
    tensors: dict[str, Tensor] = {}

    def taken_out(value: Any, name: str) -> Any:
        """The value with a marker for each tensor."""
        if isinstance(value, Tensor):
            if type(value) is not Tensor or not value.is_contiguous():
                raise ValueError(
                    f"{name} is a tensor that safetensors cannot hold; use torch's file"
                )
            tensors[name] = value.clone()  # no two may share memory
            return {"tensor": name}
        if isinstance(value, dict):
            return {
                "dict": [[k, taken_out(v, f"{name}.{k}".lstrip("."))] for k, v in value.items()]
            }
        if isinstance(value, (list, tuple)):
            items = [taken_out(v, f"{name}.{i}") for i, v in enumerate(value)]
            return {type(value).__name__: items}
        return {"value": value}

    text = json.dumps(taken_out(state_dict, ""))
    _safetensors().torch.save_file(tensors, path, metadata={"headroom": text})


def _load_safetensors(path: Path) -> Any:
    with _safetensors().safe_open(path, "pt") as file:
        text = (file.metadata() or {}).get("headroom")
        if text is None:
            raise ValueError(f"{path} has no description of {WHAT}")

        def put_back(value: dict[str, Any]) -> Any:
            (kind, content), *_ = value.items()
            if kind == "tensor":
                return file.get_tensor(content)
            if kind == "dict":
                return {key: put_back(inner) for key, inner in content}
            if kind in ("list", "tuple"):
                return {"list": list, "tuple": tuple}[kind](map(put_back, content))
            return content

        return put_back(json.loads(text))


if __name__ == "__main__":
    sys.exit(main())
