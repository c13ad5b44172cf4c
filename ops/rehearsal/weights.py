"""Lets ``from_pretrained`` of transformers make models from their configurations alone.

Its own code runs, with its device map, quantization and what it allocates on the way. The file of
weights that it reads is made for it: it has the names, shapes and dtypes that the model would save,
and is a hole of zeros, which takes no room on the disk.
"""

from __future__ import annotations

import atexit
import contextvars
import copy
import functools
import json
import shutil
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from headroom.integrations.attaching import after_import

__all__ = ["load_no_weights"]

_wanted: contextvars.ContextVar[Any] = contextvars.ContextVar("what from_pretrained was given")


def load_no_weights() -> None:
    """Lets programs load no weights from now on. What would need their values is refused."""
    after_import("transformers.modeling_utils", _replace_in_transformers)
    after_import("diffusers.models.modeling_utils", _replace_in_diffusers)
    torch.hub.load_state_dict_from_url = _refusing("torch.hub.load_state_dict_from_url")


def _replace_in_transformers(module: ModuleType) -> None:
    base = module.PreTrainedModel
    own, resolve = base.from_pretrained.__func__, module._get_resolved_checkpoint_files

    @functools.wraps(own)
    def from_pretrained(cls: Any, name: Any, *args: Any, **options: Any) -> Any:
        before = _wanted.set((cls, name, args, options))
        try:
            return own(cls, name, *args, **options)
        finally:
            _wanted.reset(before)

    @functools.wraps(resolve)
    def resolved(*_: Any, **given: Any) -> tuple[list[str], None]:
        cls, name, args, options = _wanted.get()
        if given.get("gguf_file") is not None:
            raise ValueError("--no-weights makes no GGUF files; give gguf_file=None")
        config = _config(cls, name, options)
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError(
                f"--no-weights: the weights of {name} are quantized on the disk, in a format that "
                "its configuration does not tell; rehearse with those weights, or with the model "
                "that was quantized and quantization_config="
            )
        return [str(_file(cls, config, args))], None

    base.from_pretrained = classmethod(from_pretrained)
    module._get_resolved_checkpoint_files = resolved


def _replace_in_diffusers(module: ModuleType) -> None:
    module.ModelMixin.from_pretrained = staticmethod(_refusing("from_pretrained of diffusers"))


def _refusing(what: str) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"--no-weights knows from_pretrained of transformers alone, and {what} would load "
            "weights: let the program make the model without them, such as with weights=None"
        )

    return refuse


def _config(cls: Any, name: Any, options: dict[str, Any]) -> Any:
    """Returns the configuration of a model as ``from_pretrained`` finds it."""
    config = options.get("config")
    if config is None or isinstance(config, (str, Path)):
        others = {key: value for key, value in options.items() if key not in ("config", "dtype")}
        found = cls.config_class.from_pretrained(
            name if config is None else config, return_unused_kwargs=True, **others
        )
        return found[0]
    return copy.deepcopy(config)


def _file(cls: Any, config: Any, args: Any) -> Path:
    """Makes a file of zeros with what a model would save, and returns where it is."""
    from safetensors.torch import _TYPES
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = cls(config, *args)
    # What is tied is saved once, under its first name.
    state = reversed(model.state_dict(keep_vars=True).items())
    once = {id(t): (name, t.detach()) for name, t in state}
    weights = revert_weight_conversion(model, dict(once.values()))
    names = {dtype: name for name, dtype in _TYPES.items()}
    floating = getattr(config, "dtype", None) or torch.float32
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, t in weights.items():
        dtype = floating if t.is_floating_point() else t.dtype
        begin, end = end, end + t.numel() * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": [*t.shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path
