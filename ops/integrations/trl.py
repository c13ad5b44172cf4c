"""The fused head of TRL's trainers, by :func:`headroom.linear_log_prob`.

TRL's trainers (SFT, DPO, KTO, GRPO, RLOO) compute log-probabilities of tokens from hidden states,
by a ``forward`` that they set on a model: what :func:`headroom.patch` does to a model's loss is not
called there. :func:`register` has them compute by Headroom's op, which selects no rows by a mask,
so that nothing waits for a GPU and a step can be planned.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..functional.linear_quantized import weight_and_bias
from ..loss.language_model import is_plain_head, takes_head
from ..loss.log_prob import linear_log_prob
from ..patching.losses import Forward
from .head_probe import returns_logits

__all__ = ["register"]

SETTER = "add_fused_lm_head"  # TRL's function
# TRL's names of results, and ours.
STATS = {
    "entropy": "entropy",
    "is_top1": "is_top1",
    "log_sum_sq_probs": "log_sum_sq_probs",
    "mean_logits": "mean_logit",
}
SOFTCAP = "final_logit_softcapping"
# Names in configs that TRL's head heeds, whether the class of the model does or not.
SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")


@dataclasses.dataclass(frozen=True)
class Head:
    """Holds what the ``forward`` of a model knows that a trainer of TRL has given a fused head.

    Attributes:
        theirs: the ``forward`` that TRL has set.
        output: the class of what it returns.
        temperature, in_float32, outputs: what TRL was asked for.
        softcap: of the logits, or None.
    """

    theirs: Callable[..., Any]
    output: Callable[..., Any]
    temperature: float
    in_float32: bool
    outputs: tuple[str, ...]
    softcap: float | None


def register() -> None:
    """Makes the trainers of TRL that are made from now on compute log-probabilities by
    :func:`headroom.linear_log_prob`, in this process.

    It holds for heads that are a Linear. Models with adapters or hooks on their head, with experts
    whose router has a loss, and weights that DeepSpeed has sharded keep TRL's own. So do models
    that do anything to their logits but cap them by ``final_logit_softcapping``, such as scale them
    or cap them by another name: the ``forward`` of the class is tried on numbers to see that.

    Raises:
        ImportError: the package trl is missing, or of a release whose trainers have no such head.
    """
    try:
        from trl.trainer import utils
    except ImportError as error:
        raise ImportError("headroom.integrations.trl needs the package trl") from error
    theirs = getattr(utils, SETTER, None)
    if theirs is None:
        raise ImportError(
            f"headroom.integrations.trl: this release of trl has no {SETTER}, wanted 1.16 or "
            "newer; without register() its trainers work with headroom.patch(model) and "
            "Headroom's optimizers"
        )
    if isinstance(theirs, _Setter):
        return
    ours = _Setter(theirs, utils.FusedCausalLMOutput)
    for name, module in list(sys.modules.items()):
        if name.startswith("trl.") and vars(module).get(SETTER) is theirs:
            setattr(module, SETTER, ours)


class _Setter:
    """Takes the place of TRL's ``add_fused_lm_head``."""

    def __init__(self, theirs: Callable[..., None], output: Callable[..., Any]) -> None:
        self._theirs, self._output = theirs, output

    def __call__(
        self,
        model: Any,
        temperature: float = 1.0,
        cast_lm_head_to_fp32: bool = False,
        outputs: Sequence[str] = ("log_probs",),
    ) -> None:
        self._theirs(model, temperature, cast_lm_head_to_fp32, tuple(outputs))
        config = model.config.get_text_config()
        if any(getattr(config, name, None) not in (None, 1.0) for name in SCALES):
            return
        softcap, lm_head = getattr(config, SOFTCAP, None), model.get_output_embeddings()
        if not isinstance(lm_head, nn.Linear) or not returns_logits(
            model, model.base_model, lm_head, softcap
        ):
            return
        head = Head(
            model.forward,
            self._output,
            temperature,
            cast_lm_head_to_fp32,
            tuple(outputs),
            softcap,
        )
        model.forward = Forward(fused_forward, model, head)


def fused_forward(
    self: Any,
    rule: Head,
    *args: Any,
    fused_lm_head: bool = False,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    **kwargs: Any,
) -> Any:
    """Takes the place of the ``forward`` of a model to which TRL has given a fused head."""
    if args and args[0] is self:
        args = args[1:]  # accelerate binds a forward to the model when it takes its wrapper off
    head = self.get_output_embeddings()
    if not fused_lm_head or not _is_ours(self, head, kwargs):
        given = {"shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
        given = {name: value for name, value in given.items() if value is not None}
        return rule.theirs(*args, fused_lm_head=fused_lm_head, labels=labels, **given, **kwargs)
    hidden = self.base_model(*args, **{**kwargs, "use_cache": False}).last_hidden_state
    shift = shift_labels is None
    target: Any = labels if shift else shift_labels
    device = head.weight.device
    found, stats = _log_probs(rule, hidden.to(device), head, target.to(device), shift)
    mask = target.to(device) != -100
    if shift:  # the last token predicts nothing
        found, mask = found[:, :-1], mask[:, 1:]
        stats = {name: value[:, :-1] for name, value in stats.items()}
    count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return rule.output(loss=-found.sum() / count, log_probs=found, label_mask=mask, **stats)


def _log_probs(
    rule: Head, hidden: Tensor, head: nn.Linear, target: Tensor, shift: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns log-probabilities of tokens, and what else TRL has asked for."""
    plain = nullcontext()
    if rule.in_float32:
        hidden = hidden.float()
        plain = torch.autocast(hidden.device.type, enabled=False)
    names = [name for name in rule.outputs if name != "log_probs"]
    stats = [STATS[name] for name in names]
    options: Any = {"temperature": rule.temperature, "softcap": rule.softcap, "shift": shift}
    with plain:
        weight, bias = weight_and_bias(head, hidden.dtype)
        if isinstance(weight, Tensor) and not torch.is_autocast_enabled(hidden.device.type):
            weight = weight.to(hidden.dtype)
            bias = None if bias is None else bias.to(hidden.dtype)
        found: Any = linear_log_prob(hidden, weight, target, bias, stats=stats, **options)
    if not stats:
        return found, {}
    return found[0], {name: found[1][STATS[name]] for name in names}


def _is_ours(model: Any, head: Any, given: dict[str, Any]) -> bool:
    """Returns whether the op computes what TRL would."""
    routes = given.get("output_router_logits")
    if routes is None:
        routes = getattr(model.config.get_text_config(), "output_router_logits", False)
    if routes or not is_plain_head(head) or hasattr(head.weight, "ds_id"):
        return False
    return takes_head(head)
