"""Names of Headroom's optimizers for the Trainer of transformers, which makes one by
``TrainingArguments(optim=...)``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from torch import nn

from .. import optim
from .._core.text import value_of

__all__ = ["NAMES", "add_handlers", "add_names", "register"]

NAMES: dict[str, type[optim.Optimizer]] = {
    "headroom_" + name.lower().replace("8bit", "_8bit"): found
    for name in optim.__all__
    if isinstance(found := getattr(optim, name), type)
    and issubclass(found, optim.Optimizer)
    and found is not optim.Optimizer
}
"""The optimizers by the names that :func:`register` adds."""
# Options that transformers has arguments of its own for.
OF_ARGUMENTS = {
    "lr": "learning_rate",
    "weight_decay": "weight_decay",
    "betas": "adam_beta1 and adam_beta2",
    "eps": "adam_epsilon",
}
# Options without an effect, and those that no text is.
NOT_OF_TEXT = ("foreach", "fused", "capturable", "differentiable")
NOT_OF_TEXT += ("params", "adamw", "split", "process_group")


def register() -> tuple[str, ...]:
    """Adds Headroom's optimizers to those that the Trainer of transformers makes by name, and
    returns the names, such as ``headroom_adamw_8bit``.

    Then ``TrainingArguments(optim="headroom_adamw_8bit", optim_args="master=remainder16")`` works,
    and so do the same words in a YAML file or on a command line that ``HfArgumentParser`` reads,
    which must be made after this call. Learning rate, weight decay, betas and epsilon are those of
    the arguments, in the parameter groups that the Trainer makes; every other option of an
    optimizer is one of ``optim_args``. A second call changes nothing.

    Arguments that were pickled, as in ``training_args.bin``, are loaded where this was called.

    Raises:
        ImportError: the package transformers is missing, or has no table of optimizers.
    """
    try:
        from transformers import trainer_optimizer, training_args
    except ImportError as error:
        raise ImportError(
            "headroom.integrations.transformers.register needs the package transformers, of "
            "5.2 or newer, whose Trainer has a table of optimizers"
        ) from error
    add_names(training_args)
    add_handlers(trainer_optimizer)
    return tuple(NAMES)


def add_names(training_args: Any) -> None:
    """Adds the names to ``OptimizerNames`` of the module ``transformers.training_args``."""
    names = training_args.OptimizerNames
    for text in NAMES:
        if text in names._value2member_map_:
            continue
        # An Enum has no way to add a member: this is what its definition would have done.
        member = str.__new__(names, text)
        member._name_, member._value_ = text.upper(), text
        member.__objclass__, member._sort_order_ = names, len(names._member_names_)
        names._member_names_.append(member._name_)
        names._member_map_[member._name_] = names._value2member_map_[text] = member
        type.__setattr__(names, member._name_, member)


def add_handlers(trainer_optimizer: Any) -> None:
    """Adds what makes the optimizers to the table of the module ``transformers.trainer_optimizer``,
    after :func:`add_names`."""
    for text, optimizer in NAMES.items():
        name = trainer_optimizer.OptimizerNames(text)
        trainer_optimizer._OPTIMIZER_HANDLERS[name] = partial(_handler, optimizer)


def _handler(optimizer: Callable[..., Any], context: Any) -> tuple[Any, dict[str, Any]]:
    """Returns an optimizer and its options, as a handler of transformers does for its own.

    Args:
        context: ``args``, the TrainingArguments; ``optimizer_kwargs``, the learning rate;
            ``adam_kwargs``, betas and epsilon; and ``optim_args``, texts by names.
    """
    takes = inspect.signature(optimizer).parameters
    options = dict(context.optimizer_kwargs)
    if optimizer is optim.Adafactor:  # as transformers makes its own
        if context.optim_args.get("semantics", "hf") == "hf":
            options |= {"semantics": "hf", "scale_parameter": False, "relative_step": False}
    elif getattr(optimizer, "takes_model", False):  # Muon: the learning rate is one of AdamW
        groups = _named_groups(context.model, context.args.weight_decay)
        options |= {"params": groups, "adamw": context.adam_kwargs}
        options["adjust_lr_fn"] = "match_rms_adamw"
    else:
        options |= {name: value for name, value in context.adam_kwargs.items() if name in takes}
    return optimizer, options | _options_of(context.optim_args, takes, optimizer.__name__)


def _named_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns the Trainer's groups, with the names of their parameters and the model."""
    from transformers import Trainer

    decayed = set(Trainer.get_decay_parameter_names(cast(Any, None), model))
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return [
        {
            "params": [each for each in named if (each[0] in decayed) is is_decayed],
            "model": model,
            "weight_decay": weight_decay if is_decayed else 0.0,
        }
        for is_decayed in (True, False)
    ]


def _options_of(texts: dict[str, str], takes: Any, optimizer: str) -> dict[str, Any]:
    """Returns the options that ``optim_args`` gives.

    Raises:
        ValueError: an optimizer takes none of this name, or another argument sets it.
    """
    known = [name for name in takes if name not in (*OF_ARGUMENTS, *NOT_OF_TEXT)]
    for name in texts:
        if name in OF_ARGUMENTS and name in takes:
            raise ValueError(
                f"optim_args has {name!r}, which the argument {OF_ARGUMENTS[name]} sets; leave it "
                "out there"
            )
        if name not in known:
            raise ValueError(
                f"optim_args has {name!r}, which headroom.optim.{optimizer} does not take; wanted "
                f"of {', '.join(known)}"
            )
    return {name: value_of(text) for name, text in texts.items()}
