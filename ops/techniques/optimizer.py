"""Another optimizer of the same rule in the place of the one that was given, or Adafactor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..optim import SGD, Adafactor
from ..optim.muon.muon import ADAMW
from ..state.convert.bitsandbytes import is_bitsandbytes, options_from
from ..step.description import Step, class_of_optimizer
from ..step.optimizers import counterparts, counterparts_named, is_headroom, obstacle, replacement
from .technique import Change, Request, Technique

_WORDS = {"headroom": "headroom.optim", "8bit": "8-bit moments", "adafactor": "Adafactor"}
_IN_ROWS = {**_WORDS, "headroom": "Headroom's"}
_OPTIONS = (
    *("lr", "betas", "eps", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    *("adamw", "split", "convolutions", "ns_coefficients", "ns_steps", "adjust_lr_fn"),
    *("variant", "ns_dtype", "normuon"),
)
_TABLE = "README, table of optimizers"


class ReplacedOptimizer(Technique):
    """Makes another optimizer of the same groups and options: it is given to the training, and
    nothing of the model is changed."""

    field, default = "optimizer", "given"
    told, row = 2, 1
    allowed = {"8bit": 1, "adafactor": 3}
    changes = {
        "8bit": "the optimizer keeps its moments in 8 bits",
        "adafactor": "Adafactor takes the place of the optimizer",
    }

    def values(self, request: Request, choice: Any) -> Sequence[str]:
        given, allow = request.step.optimizer, request.allowed
        if choice.weights == "given":
            request.optimizers["given", "given"] = given
        if (reason := obstacle(given)) is not None:
            if allow or not is_headroom(given):
                request.note(f"the optimizer stays as it is: {reason}")
            return (self.default,)
        classes = counterparts(type(given))
        is_8bit = type(given) is classes["8bit"]
        kinds = [] if is_headroom(given) else ["headroom"]
        kinds += ["8bit"] if "8bit" in allow and not is_8bit else []
        kinds += ["adafactor"] if "adafactor" in allow and "adafactor" in classes else []
        master = None
        if choice.weights != "given":
            kinds = [*dict.fromkeys(("8bit" if is_8bit else "headroom", *kinds))]
            master = "remainder16"
        for kind in kinds:
            key = kind, choice.weights
            if key not in request.optimizers:
                try:
                    request.optimizers[key] = replacement(given, kind, master)
                except (TypeError, ValueError, RuntimeError) as error:
                    request.note(f"{kind}: {error}")
        return [kind for kind, weights in request.optimizers if weights == choice.weights]

    def words(self, choice: Any) -> list[str]:
        return [_WORDS[choice.optimizer]]

    def change(self, before: Any, after: Any, step: Step) -> tuple[str, str, str]:
        return "optimizer", type(step.optimizer).__name__, _IN_ROWS[after.optimizer]

    def advice(self, step: Step) -> Iterator[Change]:
        classes = counterparts_of(step.optimizer)
        if not classes or is_of_8_bits(step.optimizer):
            return
        options, params = options_of(step.optimizer), source_of(step.optimizer)
        for kind, time in (
            ("headroom", "faster: one pass over the parameters"),
            ("8bit", "no slower: 8-bit states are fewer bytes to move"),
        ):
            if kind == "headroom" and is_ours(step.optimizer):
                continue
            name = f"headroom.optim.{classes[kind].__name__}"
            yield (
                name,
                step.but(optimizer=maker(classes[kind], options, params)),
                time,
                _TABLE,
                f"optimizer = {name}({params}{shown_options(options)})",
            )
        if "adafactor" in classes:
            yield (
                "headroom.optim.Adafactor",
                step.but(optimizer=maker(Adafactor, {}, params)),
                "no slower, but another optimizer: the learning rate is to be found again",
                "Shazeer and Stern 2018",
                "optimizer = headroom.optim.Adafactor(model.parameters())",
            )


def is_ours(optimizer: Any) -> bool:
    """Returns whether an optimizer, or what makes one, is of Headroom."""
    return getattr(class_of_optimizer(optimizer), "__module__", "").startswith("headroom")


def counterparts_of(optimizer: Any) -> dict[str, Any]:
    """Returns the counterparts of an optimizer by the name of its class, whose ever it is."""
    return counterparts_named(getattr(class_of_optimizer(optimizer), "__name__", ""))


def is_of_8_bits(optimizer: Any) -> bool:
    """Returns whether an optimizer has states of 8 bits, which one of its counterparts has."""
    return class_of_optimizer(optimizer).__name__ == counterparts_of(optimizer)["8bit"].__name__


def source_of(optimizer: Any) -> str:
    """Returns the code of what Headroom's counterpart is made of."""
    takes_model = _takes_model(optimizer, counterparts_of(optimizer)["headroom"])
    return "model" if takes_model else "model.parameters()"


def _takes_model(optimizer: Any, ours: Any) -> bool:
    """Returns whether Headroom's counterpart is made of the model, which torch's Muon, with some of
    its matrices, is not."""
    return getattr(ours, "takes_model", False) and is_ours(optimizer)


def options_of(optimizer: Any) -> dict[str, Any]:
    """Returns the options that differ from the defaults of Headroom's counterpart, of the first
    group."""
    classes = counterparts_of(optimizer)
    if not hasattr(optimizer, "param_groups"):
        found = getattr(optimizer, "keywords", {})
    else:
        found = optimizer.param_groups[0]
        if classes.get("headroom") is SGD and is_bitsandbytes(optimizer):
            found = options_from(found, "sgd", [])
        if _takes_model(optimizer, classes.get("headroom")):
            whole = optimizer._whole_arguments
            adamw = {key: value for key, value in whole["adamw"].items() if ADAMW.get(key) != value}
            found = {**found, **whole, "adamw": adamw}
    usual = inspect.signature(classes["headroom"]).parameters if classes else {}
    return {
        key: found[key]
        for key in _OPTIONS
        if key in usual and isinstance(found.get(key), (int, float, tuple, str, dict))
        if found[key] not in (usual[key].default, {})
    }


def shown_options(options: Mapping[str, Any]) -> str:
    """Returns options as code that follows other arguments."""
    return "".join(f", {key}={value!r}" for key, value in options.items())


def maker(kind: Any, options: Mapping[str, Any], params: str) -> Callable[[Any], Any]:
    """Returns what makes an optimizer of a class with options."""

    def make(params: Any) -> Any:
        return kind(params, **options)

    make.__name__, make.__module__ = kind.__name__, kind.__module__
    make.takes_model = params == "model"  # type: ignore[attr-defined]
    return make
