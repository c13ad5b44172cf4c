"""Models and optimizers through torch's distributed checkpoints."""

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)


def saved(model, optimizer, path, **options):
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))
    dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=path)


def loaded(model, optimizer, path, **options):
    options = StateDictOptions(**options)
    state = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
