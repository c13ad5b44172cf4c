"""A model to plan with, from what names it. Nothing is downloaded, and no memory is taken."""

from __future__ import annotations

import json
import os
import pkgutil
import sys
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from ..step.errors import PlanError

__all__ = ["model_from", "named"]

# Keeps transformers from the network, also where it is imported later.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def model_from(source: Any) -> nn.Module:
    """Returns the model that ``source`` stands for; what is built here is on the meta device.

    Args:
        source: one of

            - a module, which is returned as it is;
            - a function without arguments that returns one, which is called with meta as the
              default device; or the text ``"module:function"`` that names it, where the module is
              importable, also from the current folder;
            - a configuration of transformers: its object, its dict, the path of a ``config.json``
              or of the folder that holds one.

    Raises:
        PlanError: the text is no function and no file, such as the name of a model on the hub, or
            the configuration says nothing that transformers knows.
    """
    if isinstance(source, nn.Module):
        return source
    if isinstance(source, Mapping):
        return _from_config(dict(source))
    if hasattr(source, "to_dict") and hasattr(source, "model_type"):
        return _from_config(source)
    if isinstance(source, PathLike):
        return _from_config(_read(Path(source)))
    if isinstance(source, str):
        return _from_text(source)
    if callable(source):
        return _called(source, getattr(source, "__name__", repr(source)))
    raise PlanError(
        f"the model is a {type(source).__name__}, wanted a module, a function that returns one, "
        "'module:function', or a configuration of transformers"
    )


def _from_text(text: str) -> nn.Module:
    if Path(text).exists():
        return _from_config(_read(Path(text)))
    module, colon, function = text.partition(":")
    if colon and function and os.sep not in text:
        try:
            return _called(named(text), text)
        except (ModuleNotFoundError, AttributeError) as error:
            raise PlanError(f"there is no {text!r}: {error}") from error
    if colon or text.endswith(".json") or text.startswith((".", os.sep, "~")):
        raise PlanError(f"there is no file {text!r} and no function of this name")
    raise PlanError(
        f"there is no file or folder {text!r}. Names on the Hugging Face hub are not looked up, "
        "since nothing is downloaded: give the path of a config.json that you have, or the "
        "configuration itself"
    )


def named(text: str) -> Any:
    """Returns what ``"module:name"`` names, whose module may be in the current folder.

    Raises:
        ImportError, AttributeError, ValueError: there is nothing of this name.
    """
    path = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        return pkgutil.resolve_name(text)
    finally:
        sys.path[:] = path


def _called(function: Any, name: str) -> nn.Module:
    if isinstance(function, nn.Module):
        return function
    if not callable(function):
        raise PlanError(f"{name!r} is a {type(function).__name__}, wanted a function")
    with torch.device("meta"):
        model = function()
    if not isinstance(model, nn.Module):
        raise PlanError(f"{name!r} returned a {type(model).__name__}, wanted a torch.nn.Module")
    return model


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PlanError(f"there is no file {str(file)!r}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PlanError(f"{str(file)!r} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise PlanError(f"{str(file)!r} holds a {type(found).__name__}, wanted a configuration")
    return found


def _from_config(config: Any) -> nn.Module:
    """Builds the model of a configuration of transformers, on the meta device, in the dtype that it
    names, or else torch's default."""
    with mock.patch.dict(os.environ, _OFFLINE):
        try:
            import transformers
        except ImportError as error:
            raise PlanError(
                "a configuration needs transformers: pip install transformers"
            ) from error
        if isinstance(config, dict):
            config = _configuration(transformers, config)
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(_dtype(config))
            with torch.device("meta"):
                return _class(transformers, config)(config)
        finally:
            torch.set_default_dtype(before)


def _configuration(transformers: Any, values: dict[str, Any]) -> Any:
    kind = values.get("model_type")
    if "auto_map" in values and kind not in transformers.CONFIG_MAPPING:
        raise PlanError(
            "the configuration's model is code of its own (auto_map), which is not run here; give "
            "the model, or a function that returns it"
        )
    if kind is None:
        raise PlanError("the configuration has no 'model_type', which says what model it is of")
    if kind not in transformers.CONFIG_MAPPING:
        raise PlanError(f"transformers {transformers.__version__} knows no model type {kind!r}")
    return transformers.CONFIG_MAPPING[kind].from_dict(values)


def _dtype(config: Any) -> torch.dtype:
    found = getattr(config, "dtype", None)
    if isinstance(found, str):
        found = getattr(torch, found.removeprefix("torch."), None)
    if isinstance(found, torch.dtype) and found.is_floating_point:
        return found
    return torch.get_default_dtype()


def _class(transformers: Any, config: Any) -> Any:
    """Returns the class that the configuration names, or else the one with a language head."""
    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    mappings = ("MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_MASKED_LM_MAPPING", "MODEL_MAPPING")
    for mapping in mappings:
        found = getattr(transformers, mapping, {})
        if type(config) in found:
            return found[type(config)]
    raise PlanError(f"transformers knows no model for a {type(config).__name__}")
