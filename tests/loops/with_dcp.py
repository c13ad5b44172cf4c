"""torch.distributed.checkpoint: a run that is saved, and resumed from its files."""

# /// script
# dependencies = ["torch==2.15.0"]
# ///

import headroom
import torch.distributed.checkpoint as dcp
from _small import batches, network, trained
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def made():
    model = network()
    return model, headroom.optim.AdamW8bit(model.parameters(), lr=1e-3, min_8bit_size=1024)


data = batches(12)
model, optimizer = made()
trained(model, optimizer, data[:6])
dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer))), checkpoint_id="saved")
reference = trained(model, optimizer, data[6:])

model, optimizer = made()
state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
dcp.load(state, checkpoint_id="saved")
set_state_dict(
    model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
)
assert trained(model, optimizer, data[6:]) == reference
