"""The losses of language models of transformers, from hidden states and not from logits."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._core.surroundings import Parameters, Settings, is_plain, version_of
from ..loss.language_model import is_plain_head, language_model_loss, takes_head
from ..loss.linear_cross_entropy import linear_cross_entropy
from ..nn.trained_copy import called
from .changes import Changes, is_patched
from .heads import KINDS, Kind, kind_of, own_loss
from .late_logits import LateLogits
from .report import PatchReport

GIVEN_BY_THE_MODEL = {  # or meaningless in its loss
    *("softcap", "reduction", "denominator", "ignore_index", "shift", "token_weight", "stats"),
}
OF_THE_LOSS = ("labels", "logits_to_keep", "return_dict")

_calls = threading.local()  # running: how many calls of loss_forward() last in this thread


@dataclasses.dataclass(frozen=True)
class LossRule:
    """Holds what the patched ``forward`` of a model knows.

    Attributes:
        kind: the name of its class in transformers.
        names: the arguments of the forward of the class, in their order.
        options: of :func:`headroom.linear_cross_entropy`.
        output: the class of what it returns.
        passed_on: what that takes from the output of the model below the head.
    """

    kind: str
    names: tuple[str, ...]
    options: Mapping[str, Any]
    output: type
    passed_on: tuple[str, ...]


class Forward(functools.partial):
    """The ``forward`` of a model with the signature of its class, by which Trainer decides what a
    batch may hold. Like any partial it is copied and pickled with the model."""

    can_stay = True  # where something else calls it, after unpatch()

    @property
    def __signature__(self) -> inspect.Signature:
        own = inspect.signature(type(self.args[0]).forward)
        return own.replace(parameters=list(own.parameters.values())[1:])


def check_loss_options(loss: bool | Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the options of ``patch(loss=...)``, or None if the loss stays as it is.

    Raises:
        TypeError: ``loss`` is neither.
        ValueError: a name is no option of :func:`headroom.linear_cross_entropy`, or is one that the
            model decides.
    """
    if isinstance(loss, bool):
        return {} if loss else None
    if not isinstance(loss, Mapping):
        raise TypeError(
            f"headroom.patch: loss is {loss!r}, wanted True, False or a dict of options"
        )
    known = inspect.signature(linear_cross_entropy).parameters.values()
    wanted = {p.name for p in known if p.kind == p.KEYWORD_ONLY} - GIVEN_BY_THE_MODEL
    if wrong := sorted(loss.keys() - wanted):
        raise ValueError(
            f"headroom.patch: loss has {wrong[0]!r}, wanted options of "
            f"headroom.linear_cross_entropy: {', '.join(sorted(wanted))}"
        )
    return dict(loss)


def swap_losses(
    model: nn.Module, options: Mapping[str, Any], changes: Changes, report: PatchReport
) -> None:
    """Makes the models of transformers in ``model``, which may be within an adapter or a wrapper,
    compute their loss from hidden states."""
    found = False
    for name, module in model.named_modules():
        kind = kind_of(module)
        if kind is None:
            continue
        found = True
        if "forward" in vars(module):
            report._leave(name, module, "its loss: something else has replaced its forward")
            continue
        if (own := own_loss(module)) is not None:
            report._leave(name, module, f"its loss, which is its own: {own}")
            continue
        names = tuple(inspect.signature(type(module).forward).parameters)[1:]
        output = getattr(sys.modules["transformers.modeling_outputs"], kind.output)
        fields = tuple(field.name for field in dataclasses.fields(output))
        passed_on = tuple(name for name in fields if name not in ("loss", "logits"))
        rule = LossRule(kind.model, names, options, output, passed_on)
        changes.set(module, "forward", Forward(loss_forward, module, rule))
        body = getattr(module, kind.body)
        if "forward" not in vars(body):
            changes.set(body, "forward", functools.partial(_body_forward, body, kind.model))
        report._swap(name, module, "loss", "headroom.linear_cross_entropy")
    if not found:
        reason = "its loss: not a model of transformers with the head of a language model"
        report._leave("", model, f"{reason} that is known")


def knows_loss(model: nn.Module) -> bool:
    """Returns whether patch() can change the loss of a model, or of one that it wraps."""
    return any(
        "forward" not in vars(module) and own_loss(module) is None for module in _known(model)
    ) or has_fused_loss(model)


def kept_loss(model: nn.Module) -> str | None:
    """Returns in which way the loss of a model, or of one that it wraps, is its own, so that
    patch() leaves it as it is; or None."""
    return next(filter(None, map(own_loss, _known(model))), None)


def _known(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if kind_of(module) is not None]


def has_fused_loss(model: nn.Module) -> bool:
    """Returns whether patch() has changed the loss of a model, or of one that it wraps."""
    return any(
        getattr(vars(module).get("forward"), "func", None) is loss_forward
        for module in model.modules()
    )


def loss_forward(self: Any, rule: LossRule, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of a model's ``forward``. What asks for logits is left to that.

    Takes ``label_smoothing`` besides, which then holds for the loss of an evaluation too.
    """
    if torch.compiler.is_compiling():
        return _loss_forward(self, rule, *args, **kwargs)
    _calls.running = running = getattr(_calls, "running", 0) + 1
    try:
        return _loss_forward(self, rule, *args, **kwargs)
    finally:
        _calls.running = running - 1


def _body_forward(self: Any, model: str, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of the ``forward`` of the model below the head, and says so if that trains
    without the patched loss, as where another library has set a ``forward`` of the model since."""
    if (
        self.training
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not getattr(_calls, "running", 0)
        and torch._C._current_graph_task_id() == -1  # no backward pass computes it again
    ):
        warnings.warn(
            f"headroom.patch: loss= and its options do nothing in this training: the body of "
            f"{model} is called past the forward that was patched. TRL's trainers, for one, set a "
            "forward of their own, with a loss that makes no logits either: patch without loss=, "
            "and call headroom.integrations.trl.register() for Headroom's",
            stacklevel=2,
        )
    return type(self).forward(self, *args, **kwargs)


def _loss_forward(self: Any, rule: LossRule, *args: Any, **kwargs: Any) -> Any:
    if args and args[0] is self:
        args = args[1:]  # accelerate binds a forward to the model when it takes its wrapper off
    if not is_patched(self):  # any more, but something else calls what patch() had set
        return type(self).forward(self, *args, **kwargs)
    given = dict(zip(rule.names, args)) | kwargs
    kind = KINDS[rule.kind]
    smoothing = given.pop("label_smoothing", None)
    if not _wants_loss(self, kind, given):
        return _left_to_the_class(self, kind, smoothing, given)
    loss_of = _loss_of(self, kind, given)
    balance = _balance_of(self, kind, given)
    outputs = getattr(self, kind.body)(**{k: v for k, v in given.items() if k not in OF_THE_LOSS})
    hidden = outputs.last_hidden_state
    if kind.transform is not None:
        hidden = kind.transform(self, hidden)
    options = dict(rule.options) if self.training else {}
    if smoothing is not None:
        options["label_smoothing"] = smoothing
    head = called(kind.head(self))
    softcap = self.config.final_logit_softcapping if kind.caps else None
    loss = loss_of(hidden, head, softcap=softcap, **options)
    logits = None if self.training else _late_logits(hidden, head, softcap)
    others = {name: outputs[name] for name in rule.passed_on if outputs.get(name) is not None}
    if balance is not None:
        others["aux_loss"] = aux = balance(outputs.router_logits)
        loss = _balanced(self, loss, aux)
    return rule.output(loss=loss, logits=logits, **others)


def _wants_loss(model: Any, kind: Kind, given: Mapping[str, Any]) -> bool:
    """Returns whether a call wants a loss that is not the model's own, and logits for nothing
    else: one of training, or of an evaluation, whose logits can be computed when they are read."""
    keep, is_compiling = given.get("logits_to_keep"), torch.compiler.is_compiling()
    if given.get("labels") is None or (
        keep is not None and not (isinstance(keep, int) and not keep)
    ):
        return False
    if not model.training and (torch.is_grad_enabled() or is_compiling):
        return False
    if given.get("return_dict") is False or not getattr(model.config, "return_dict", True):
        return False
    if is_compiling:  # of which no trace can be made; it was asked when the model was patched
        if getattr(model, "_loss_function", None) is not None:
            return False
    elif own_loss(model) is not None:
        return False
    head: Any = called(kind.head(model))
    if not model.training and not is_plain(head.weight):
        return False  # ranks that share it read it together
    return is_plain_head(head) and takes_head(head)


def _late_logits(hidden: Tensor, head: Any, softcap: float | None) -> LateLogits:
    """Returns the logits that the class of a model would compute here, which are computed when
    they are read."""
    kind = hidden.device.type
    settings, weights, version = Settings((kind,)), Parameters([head]), version_of(hidden)

    def compute() -> Tensor:
        changed = weights.changed()
        if changed is None and version_of(hidden) != version:
            changed = "the hidden states have changed"
        if changed is not None:
            raise RuntimeError(
                "headroom.patch: logits of an evaluation are computed when they are read, and "
                f"{changed} since; read them before, such as by outputs.logits.clone()"
            )
        with torch.no_grad(), settings.restored():
            logits = head(hidden)
            return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    dtype = hidden.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    shape = (*hidden.shape[:-1], head.out_features)
    return LateLogits(compute, shape, dtype, hidden.device)


def _loss_of(model: Any, kind: Kind, given: Mapping[str, Any]) -> Callable[..., Tensor]:
    """Returns the function of hidden states and head that transformers' loss function would be."""
    shifted = given.get("shift_labels") if kind.shift else None
    return functools.partial(
        language_model_loss,
        labels=given["labels"] if shifted is None else shifted,
        shift=kind.shift and shifted is None,
        ignore_index=-100 if kind.loss is None else given.get("ignore_index", -100),
        denominator=given.get("num_items_in_batch"),
    )


def _balance_of(
    model: Any, kind: Kind, given: dict[str, Any]
) -> Callable[[tuple[Tensor, ...]], Tensor] | None:
    """Returns the function of the logits of routers that transformers adds to the loss, if the call
    asks for these; or None."""
    if not kind.balances:
        return None
    if given.get("output_router_logits") is None:
        given["output_router_logits"] = model.config.output_router_logits
    if not given["output_router_logits"]:
        return None
    balance = vars(sys.modules[kind.module])["load_balancing_loss_func"]
    others = model.num_experts, model.num_experts_per_tok, given.get("attention_mask")
    return lambda logits: balance(logits, *others)


def _left_to_the_class(
    model: Any, kind: Kind, smoothing: float | None, given: dict[str, Any]
) -> Any:
    own = type(model).forward
    if not smoothing or given.get("labels") is None:
        return own(model, **given)
    outputs = own(model, **given | {"labels": None, "return_dict": True})
    loss_of = _loss_of(model, kind, given)
    loss = loss_of(outputs.logits, nn.Identity(), label_smoothing=smoothing)
    aux = outputs.get("aux_loss")
    outputs.loss = loss if aux is None else _balanced(model, loss, aux)
    return outputs


def _balanced(model: Any, loss: Tensor, aux: Tensor) -> Tensor:
    """Adds how unevenly routers have chosen to a loss, as the classes of transformers do."""
    return loss + model.router_aux_loss_coef * aux.to(loss.device)
