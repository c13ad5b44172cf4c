"""Knows which models of transformers have the head of a language model, and whether their loss is
the one that transformers computes for them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .classes import class_in, runs_forward_of
from .families import DECODERS

LOSSES = "transformers.loss.loss_utils"
LIGER = "liger_kernel."  # whose cross entropy is that of torch, in another way


@dataclasses.dataclass(frozen=True)
class Kind:
    """Describes a class of transformers with the head of a language model.

    Attributes:
        module, model: where the class is, and its name.
        output: the class of what it returns.
        body: the attribute that holds the model below the head.
        head: returns the Linear, given the model.
        transform: returns what the Linear is given, from the model and the hidden states.
        shift: whether a token is to predict the one after it.
        loss: the name of the function that ``loss_function`` of the model is; None where the
            ``forward`` of the class computes the loss itself.
        caps: whether the logits are capped by ``final_logit_softcapping`` of the configuration.
        balances: whether it adds, where it is asked for the logits of routers, how unevenly these
            have chosen.
    """

    module: str
    model: str
    output: str = "CausalLMOutputWithPast"
    body: str = "model"
    head: Callable[[Any], nn.Module] = lambda model: model.lm_head
    transform: Callable[[Any, Tensor], Tensor] | None = None
    shift: bool = True
    loss: str | None = "ForCausalLMLoss"
    caps: bool = False
    balances: bool = False


# Mixtures of experts: the name of a module, how its classes begin, and whether they add to the loss
# how unevenly experts are chosen.
MIXTURES = {
    "mixtral": ("Mixtral", True),
    "qwen2_moe": ("Qwen2Moe", True),
    "qwen3_moe": ("Qwen3Moe", True),
    "qwen3_next": ("Qwen3Next", True),
    "qwen3_5_moe": ("Qwen3_5Moe", True),
    "olmoe": ("Olmoe", True),
    "phimoe": ("Phimoe", True),
    "gpt_oss": ("GptOss", True),
    "deepseek_v2": ("DeepseekV2", False),
    "deepseek_v3": ("DeepseekV3", False),
    "glm4_moe": ("Glm4Moe", False),
}


def _kinds() -> dict[str, Kind]:
    found = {}
    for model, prefix in DECODERS.items():
        name, caps = f"{prefix}ForCausalLM", model in ("gemma2", "gemma3")
        found[name] = Kind(f"transformers.models.{model}.modeling_{model}", name, caps=caps)
    for model, (prefix, balances) in MIXTURES.items():
        name = f"{prefix}ForCausalLM"
        output = "MoeCausalLMOutputWithPast" if balances else "CausalLMOutputWithPast"
        module = f"transformers.models.{model}.modeling_{model}"
        found[name] = Kind(module, name, output, balances=balances)
    found["GPT2LMHeadModel"] = Kind(
        "transformers.models.gpt2.modeling_gpt2",
        "GPT2LMHeadModel",
        output="CausalLMOutputWithCrossAttentions",
        body="transformer",
    )
    found["BertForMaskedLM"] = Kind(
        "transformers.models.bert.modeling_bert",
        "BertForMaskedLM",
        output="MaskedLMOutput",
        body="bert",
        head=lambda model: model.cls.predictions.decoder,
        transform=lambda model, hidden: model.cls.predictions.transform(hidden),
        shift=False,
        loss=None,
    )
    return found


KINDS = _kinds()


def kind_of(module: nn.Module) -> Kind | None:
    """Returns what is known of the class of a module, or of one that it is derived from, or
    None."""
    found = class_in(module, KINDS)
    return None if found is None else found[1]


def own_loss(model: Any) -> str | None:
    """Returns in which way the loss of a model whose kind is known is its own, and not the one that
    transformers has for that kind, or None.

    This is the one place that is asked: before a loss is replaced, and at each call, because each
    of these ways is open at any time.
    """
    found = class_in(model, KINDS)
    assert found is not None
    known, kind = found
    own = type(model)
    if not runs_forward_of(own, known):
        return f"the forward of {own.__name__} is not that of transformers"
    if own.__call__ is not nn.Module.__call__:
        return f"{own.__name__} has a __call__ of its own"
    if not _is_torchs(F.cross_entropy):
        return "torch.nn.functional.cross_entropy was replaced"
    if kind.loss is None:
        used = vars(sys.modules[kind.module]).get("CrossEntropyLoss", nn.CrossEntropyLoss)
        return None if used is nn.CrossEntropyLoss else f"CrossEntropyLoss of {known.__name__}"
    for function, name in (
        (model.loss_function, kind.loss),
        (sys.modules[LOSSES].fixed_cross_entropy, "fixed_cross_entropy"),
    ):
        if not _is_defined(function, LOSSES, name):
            return f"it is computed by {_name_of(function)}"
    return None


def _is_torchs(function: Any) -> bool:
    module = getattr(function, "__module__", None) or ""
    return module.startswith(LIGER) or _is_defined(function, F.__name__, "cross_entropy")


def _is_defined(function: Any, module: str, name: str) -> bool:
    """Returns whether a function is the one that the source of a module defines under a name: not
    one that was put in its place, nor one around it."""
    code = getattr(function, "__code__", None)
    space = vars(sys.modules[module])
    return code is not None and code.co_name == name and function.__globals__ is space


def _name_of(function: Any) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '?')}.{name}"
