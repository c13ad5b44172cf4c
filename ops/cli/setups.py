"""Arguments that describe a training step, for the subcommands that plan one."""

from __future__ import annotations

import argparse
import os
import re
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._core.text import value_of
from ..planning import sources
from ..step.pytree import map_tensors
from ..techniques import TECHNIQUES
from .arguments import ArgumentError, count

__all__ = ["add_setup_arguments", "real_setup_of", "setup_of"]

MODEL = "module:function that returns a model, or a transformers config.json or its folder"
DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "bfloat16", "float16", "int64", "int32", "bool", "uint8")
}
AMP = ("bfloat16", "float16")
DECIDED = {name: option for technique in TECHNIQUES for name, option in technique.options.items()}
"""What fitting decides by itself."""


def add_setup_arguments(command: argparse.ArgumentParser) -> None:
    """Adds what says which model, batch, optimizer and means a step has."""
    command.add_argument("model", metavar="MODEL", help=MODEL)
    batch = command.add_argument_group("the batch: one of these")
    batch.add_argument(
        "--tokens", metavar="BxS", help="input_ids and labels of B sequences of S tokens: 4x2048"
    )
    batch.add_argument(
        "--input",
        action="append",
        metavar="SHAPE[:DTYPE]",
        help="a tensor, float32 by default: 8x3x224x224, 8x512:int64; again for more arguments",
    )
    batch.add_argument("--batch", metavar="MODULE:FUNCTION", help="a function that returns it")
    step = command.add_argument_group("the step")
    step.add_argument("--target", metavar="SHAPE[:DTYPE]", help="what the loss compares with")
    step.add_argument(
        "--loss",
        metavar="NAME",
        help="of torch.nn.functional, or module:function: loss(output, target); by default the "
        "output's loss",
    )
    step.add_argument(
        "--optimizer",
        default="AdamW",
        metavar="NAME",
        help="of headroom.optim, or torch.optim.NAME, or none (default: %(default)s)",
    )
    step.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the optimizer: master=kahan; again for more",
    )
    step.add_argument("--device", default="cuda", help="cuda (default, no GPU needed) or cpu")
    step.add_argument("--amp", choices=AMP, help="dtype of torch.autocast")
    for name, option in DECIDED.items():
        how: dict[str, Any] = {"choices": option.choices}
        if option.default is False:
            how = {"action": "store_true"}
        elif option.least is not None:
            how = {"type": count(option.least), "metavar": "N"}
        name = f"--{name.replace('_', '-')}"
        step.add_argument(name, default=option.default, help=option.help, **how)
    step.add_argument("--scaler", action="store_true", help="scale losses")
    step.add_argument("--max-grad-norm", type=float, metavar="NORM")


def setup_of(options: argparse.Namespace) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of :func:`headroom.plan` that the options stand for.

    Raises:
        ArgumentError: an option is not of the form that it should have; says which one.
    """
    given = [name for name in ("tokens", "input", "batch") if getattr(options, name) is not None]
    if len(given) != 1:
        raise ArgumentError(
            f"the batch is given {len(given)} times, wanted once: --tokens, --input or --batch"
        )
    if options.target and options.loss is None:
        raise ArgumentError("--target needs a --loss, which compares the output with it")
    if options.target and not options.input:
        raise ArgumentError("--target goes with --input")
    _check(options)
    batch: Any
    if options.tokens is not None:
        ids = tensor(options.tokens + ":int64", "--tokens", dimensions=2)
        batch = {"input_ids": ids, "labels": ids.clone()}
    elif options.batch is not None:
        batch = named(options.batch, "--batch")()
        if batch is None:
            raise ArgumentError(f"--batch is {options.batch!r}, which returned None")
    else:
        parts = [tensor(text, "--input") for text in options.input]
        parts += [tensor(options.target, "--target")] if options.target else []
        batch = tuple(parts)
    keywords = {
        "loss": _loss(options.loss),
        "device": options.device,
        "amp": DTYPES[options.amp] if options.amp else None,
        "scaler": options.scaler,
        "max_grad_norm": options.max_grad_norm,
    } | {name: getattr(options, name) for name in DECIDED}
    return (options.model, _optimizer(options.optimizer, options.option), batch), keywords


def real_setup_of(options: argparse.Namespace) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the model and a batch on the device, and the other arguments of
    :func:`headroom.fit` that the options stand for. Tensors that are given by their shapes hold
    normal random numbers, or zeros where they are not floating-point.

    Raises:
        ArgumentError: the device is not there, the model is no function, or an option says what
            fitting decides by itself.
    """
    decided = [name for name, one in DECIDED.items() if getattr(options, name) != one.default]
    if decided:
        raise ArgumentError(f"--{decided[0].replace('_', '-')} is what is looked for: leave it out")
    _check(options)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--device is cuda, and there is no GPU to measure on: --device cpu")
    (source, optimizer, batch), keywords = setup_of(options)
    if ":" not in source:
        raise ArgumentError(f"MODEL is {source!r}, wanted module:function, whose model can be run")
    if optimizer is None:
        raise ArgumentError("--optimizer is none, wanted one that makes the step")
    with device:
        model = named(source, "MODEL")
        model = model if isinstance(model, torch.nn.Module) else model()
        if not isinstance(model, torch.nn.Module):
            raise ArgumentError(f"MODEL is {source!r}, which returned a {type(model).__name__}")
        batch = map_tensors(batch, lambda x: _filled(x, device))
    chosen = {name: keywords[name] for name in ("loss", "device", "amp", "max_grad_norm")}
    scaler = torch.amp.GradScaler(device.type) if options.scaler else None
    return (model.to(device), batch), chosen | {"optimizer": optimizer, "scaler": scaler}


def _check(options: argparse.Namespace) -> None:
    """Refuses a model, a device or a norm that is none."""
    if ":" in options.model:
        named(options.model, "MODEL")
    elif not os.path.exists(options.model) or not options.model:
        raise ArgumentError(
            f"MODEL is {options.model!r}, and there is no such file or folder; wanted {MODEL}. "
            "Names on the Hugging Face hub are not looked up, since nothing is downloaded"
        )
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", options.device):
        raise ArgumentError(f"--device is {options.device!r}, wanted cpu, cuda or cuda:1")
    norm = options.max_grad_norm
    if norm is not None and not norm > 0:
        raise ArgumentError(f"--max-grad-norm is {norm}, wanted a positive number")


def _filled(x: Tensor, device: torch.device) -> Tensor:
    if not x.is_meta:
        return x.to(device)
    if x.is_floating_point():
        return torch.randn(x.shape, dtype=x.dtype, device=device)
    return torch.zeros(x.shape, dtype=x.dtype, device=device)


def tensor(text: str, argument: str, dimensions: int | None = None) -> Tensor:
    """Returns a tensor on the meta device, from text such as ``"8x512:int64"``."""
    shape, colon, dtype = text.partition(":")
    sizes = shape.split("x")
    good = all(re.fullmatch(r"[1-9]\d{0,11}", size) for size in sizes)
    if not good or (dimensions is not None and len(sizes) != dimensions):
        form = "BxS" if dimensions == 2 else "sizes with x between them"
        raise ArgumentError(f"{argument} is {shape!r}, wanted {form}, such as 4x2048")
    if colon and dtype not in DTYPES:
        raise ArgumentError(
            f"{argument} has the dtype {dtype!r}, wanted one of {', '.join(DTYPES)}"
        )
    try:
        return torch.empty(
            [int(size) for size in sizes], dtype=DTYPES[dtype or "float32"], device="meta"
        )
    except RuntimeError as error:  # more bytes than 64 bits count
        raise ArgumentError(f"{argument} is {shape!r}: {error}") from None


def named(text: str, argument: str) -> Any:
    """Returns the function ``"module:function"``, whose module may be in the current folder."""
    try:
        found = sources.named(text)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentError(f"{argument} is {text!r}, wanted module:function: {error}") from error
    if not callable(found):
        got = type(found).__name__
        raise ArgumentError(f"{argument} is {text!r}, a value of type {got}; wanted a function")
    return found


def _loss(text: str | None) -> Any:
    if text is None or ":" in text:
        return text and named(text, "--loss")
    found = getattr(torch.nn.functional, text, None)
    if not callable(found) or isinstance(found, type):
        raise ArgumentError(f"--loss is {text!r}, wanted one of torch.nn.functional, or a function")
    return found


def _optimizer(text: str, options: list[str]) -> Any:
    values = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or not name.isidentifier():
            raise ArgumentError(f"--option is {option!r}, wanted NAME=VALUE")
        values[name] = value_of(value)
    if text == "none":
        return None
    if ":" in text:
        return partial(named(text, "--optimizer"), **values)
    place, _, name = text.rpartition(".")
    if place not in ("", "torch.optim", "headroom.optim"):
        raise ArgumentError(
            f"--optimizer is {text!r}, wanted a name of headroom.optim or torch.optim"
        )
    import headroom.optim

    package = torch.optim if place == "torch.optim" else headroom.optim
    found = getattr(package, name, None)
    if not isinstance(found, type) or not issubclass(found, torch.optim.Optimizer):
        raise ArgumentError(
            f"--optimizer is {text!r}, and {package.__name__} has none of this name"
        )
    if not values:
        return found
    try:
        found([torch.nn.Parameter(torch.zeros(2, 2))], **values)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"--option is refused by {text}: {error}") from error
    return partial(found, **values)
