"""torchtitan: the optimizers of its configuration, by an override that its command line names."""

# /// script
# dependencies = ["torchtitan==0.3.0"]
# environment = ["torchtitan"]
# ///

import operator

import headroom
import torch
from _small import assert_same_losses, batches, network, state_bytes, trained
from headroom.integrations.torchtitan import adamw, adamw8bit
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

CONFIG = OptimizersContainer.Config(
    param_groups=[
        ParamGroupConfig(
            pattern="bias$", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3, "eps": 1e-8}
        ),
        ParamGroupConfig(
            pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3, "weight_decay": 0.1}
        ),
    ],
    implementation="for-loop",
)


def run(config):
    model = network()
    container = config.build(model_parts=[model])
    return container, model, trained(model, container, batches())


theirs, _, reference = run(CONFIG)
_, _, losses = run(adamw(CONFIG))
assert_same_losses(losses, reference)
ours, model, losses = run(adamw8bit(CONFIG, min_8bit_size=1024))
assert_same_losses(losses, reference, rtol=0.01)
assert isinstance(ours.optimizers[0], headroom.optim.AdamW8bit)
assert state_bytes(ours.optimizers[0]) < 0.3 * state_bytes(theirs.optimizers[0])

# Its checkpoints are flat, by the names of parameters; a new container makes its states in a step.
again = adamw8bit(CONFIG, min_8bit_size=1024).build(model_parts=[model])
before = [p.detach().clone() for p in model.parameters()]
saved = ours.state_dict()
again.load_state_dict(saved)
for key, value in again.state_dict().items():
    same = torch.equal if isinstance(value, torch.Tensor) else operator.eq
    assert same(value, saved[key]), key
assert all(torch.equal(old, new) for old, new in zip(before, model.parameters()))
