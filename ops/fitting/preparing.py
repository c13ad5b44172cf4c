"""What is looked at before anything is chosen: the arguments, the model as it was given, and what
can be changed about it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..memory.track import device_of
from ..planning.api import made
from ..step.errors import PlanError
from ..step.trees import tensors_in
from .arguments import check_arguments
from .blocks import Blocks
from .candidates import setup_of
from .choice import ALLOWABLE, Choice
from .families import Families
from .replacing import made as optimizer_of
from .rest import settled
from .search import Found, Search
from .setting import Setting
from .techniques import Techniques

__all__ = ["Asked", "peak_as_given", "peak_before", "search_of"]


@dataclass(frozen=True)
class Asked:
    """What :func:`headroom.fit` and :func:`headroom.ladder` are asked about: those of their
    arguments that say what is trained and what may be changed, as they are described there."""

    model: nn.Module
    sample_batch: Any
    optimizer: Any
    loss: Callable[..., Tensor] | None
    forward: Callable[[nn.Module, Any], Tensor] | None
    device: str | torch.device | None
    amp: torch.dtype | None
    scaler: Any
    max_grad_norm: float | None
    allow: Collection[str] | str
    only: Mapping[str, Collection[Any]] | None = None
    choice: Choice | Mapping[str, Any] | None = None
    parts_add_up: bool = False  # which the loop itself sees to

    @property
    def stored(self) -> Choice | None:
        """The choice that was made before."""
        if self.choice is None:
            return None
        # One that was made by hand is looked at as well.
        given = vars(self.choice) if isinstance(self.choice, Choice) else self.choice
        return Choice.from_json(given)

    @property
    def allowed(self) -> tuple[str, ...]:
        """What may change the mathematics: also what a choice that was made before needs."""
        allowed = (self.allow,) if isinstance(self.allow, str) else tuple(self.allow)
        needed = () if self.stored is None else self.stored.needs
        return tuple(dict.fromkeys((*allowed, *needed)))

    @property
    def live_scaler(self) -> Any:
        """The scaler, or None where losses are not scaled."""
        return self.scaler if self.scaler is not None and self.scaler.is_enabled() else None

    def check(self) -> None:
        """Looks at all arguments that stand for themselves.

        Raises:
            TypeError, ValueError: one does not fit; says which one, and what was wanted.
        """
        model = self.model
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is {type(model).__name__}, wanted a torch.nn.Module")
        if not model.training:
            raise ValueError("the model is in eval(): call model.train() before this")
        if self.sample_batch is None:
            raise ValueError("sample_batch is None, wanted a batch such as the loop will see")
        if self.loss is not None and self.forward is not None:
            raise ValueError("loss and forward were both given: forward computes the loss itself")
        check_arguments(
            self.sample_batch,
            loss=self.loss,
            forward=self.forward,
            amp=self.amp,
            scaler=self.scaler,
            max_grad_norm=self.max_grad_norm,
            allow=self.allow,
        )
        if wrong := [name for name in self.allowed if name not in ALLOWABLE]:
            raise ValueError(f"allow has {wrong[0]!r}, wanted some of {', '.join(ALLOWABLE)}")


def search_of(asked: Asked) -> Search:
    """Returns the search for a model, which has measured nothing yet.

    Raises:
        TypeError, ValueError: an argument does not fit; says which one, and what was wanted.
    """
    asked.check()
    where = device_of(asked.model, asked.device)
    for x in tensors_in(asked.sample_batch):
        if x.device != where:
            raise ValueError(
                f"sample_batch has a tensor on {x.device}, but the model is on {where}"
            )
    optimizer = torch.optim.AdamW if asked.optimizer is None else asked.optimizer
    given = optimizer_of(optimizer, asked.model)
    setting = Setting(
        asked.model,
        asked.sample_batch,
        asked.loss,
        asked.forward,
        where,
        asked.amp,
        asked.live_scaler is not None,
    )
    techniques = Techniques.of(
        setting, given, asked.allowed, asked.max_grad_norm, asked.only, asked.parts_add_up
    )
    return Search(Families(techniques))


def peak_as_given(search: Search, steps: int = 2) -> int | None:
    """Returns the planned bytes of the model as it was given, or None if it cannot be planned. With
    one step they are estimated from the first, which takes half as long."""
    techniques = search.families.techniques
    choice = Choice((), techniques.micro_batches[0])
    try:
        setup = setup_of(techniques.setting, choice, (), techniques.given, techniques.max_grad_norm)
        return settled(made(setup.but(steps=steps))).total_bytes
    except PlanError:
        return None


def peak_before(search: Search, found: Found) -> int | None:
    """Returns the bytes of the model as it was given, for the report of what was found, or None if
    it cannot be planned. It takes no plan of its own where the search has made one from which they
    follow: for blocks whose levels are known, with the optimizer that was given."""
    families = search.families
    techniques = families.techniques
    now = Blocks(techniques.setting.model).now
    if now is not None and techniques.micro_batches[0] == 1:
        levels = tuple(now[name] for name in families.names)
        choice = Choice(levels, fused_loss=techniques.fused_losses[0])
        if choice == found.choice:
            return found.plan.total_bytes
        if (outer := search.outer_of(choice)) is not None:
            return outer.at(levels).peak
    return peak_as_given(search, steps=1)
