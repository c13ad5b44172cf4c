"""The plugin of axolotl, which a YAML file names::

    plugins:
      - headroom.integrations.axolotl.HeadroomPlugin
    optimizer: headroom_adamw_8bit
    headroom_budget: 20 GiB

Keys: ``headroom_budget``, bytes or text, into which :func:`headroom.fit` fits the training;
``headroom_allow``, a list of what may change the mathematics for that; ``headroom_patch``, true or
a save level such as L2, which :func:`headroom.patch` gives the model before its adapters; and
``headroom_snapshot``, a folder for a snapshot if memory runs out.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ..memory import snapshot
from ..patching.patch import patch
from .trainer_fit import HeadroomCallback
from .trainer_optimizers import register

try:
    from axolotl.integrations.base import BasePlugin
except ImportError as error:
    raise ImportError("headroom.integrations.axolotl needs the package axolotl") from error

__all__ = ["HeadroomArgs", "HeadroomPlugin"]


class HeadroomArgs(BaseModel):
    """The keys that the plugin adds to axolotl's configuration."""

    headroom_budget: int | str | None = None
    headroom_allow: list[str] = []
    headroom_patch: bool | str = False
    headroom_snapshot: str | None = None


class HeadroomPlugin(BasePlugin):
    """Gives axolotl Headroom's optimizers by name, patched models, budgets and snapshots."""

    def register(self, cfg: Any) -> None:
        """Adds the names of Headroom's optimizers, before the configuration is checked."""
        register()

    def get_input_args(self) -> str:
        """Returns where axolotl finds the keys."""
        return f"{__name__}.{HeadroomArgs.__name__}"

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Patches the model, before adapters are put into it."""
        if cfg.headroom_patch:
            print(patch(model, None if cfg.headroom_patch is True else cfg.headroom_patch))

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Makes ``train()`` fit the training and write a snapshot, if these are asked for."""
        if cfg.headroom_budget is not None:
            callback = HeadroomCallback(cfg.headroom_budget, cfg.headroom_allow or ())
            trainer.add_callback(callback)
            callback.attach(trainer)
        if cfg.headroom_snapshot is not None:
            trainer.train = functools.partial(_recorded, trainer, trainer.train, cfg)


def _recorded(trainer: Any, train: Any, cfg: Any, *given: Any, **options: Any) -> Any:
    """Trains, and writes a snapshot if memory runs out."""
    folder = Path(cfg.headroom_snapshot)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{os.environ.get('RANK', 0)}.pickle"
    with snapshot(path, trainer.model, oom_only=True):
        return train(*given, **options)
