"""torchtune: an optimizer that a recipe's configuration names by its path."""

# /// script
# dependencies = ["torchtune==0.6.1", "torchao==0.10.0"]
# environment = ["torchtune"]
# ///

import headroom
from _small import assert_same_losses, batches, network, trained
from omegaconf import OmegaConf
from torchtune import config

RECIPE = """
optimizer:
  _component_: {name}
  lr: 1e-3
"""


def run(name):
    model = network()
    recipe = OmegaConf.create(RECIPE.format(name=name))
    optimizer = config.instantiate(recipe.optimizer, model.parameters())
    return optimizer, trained(model, optimizer, batches())


_, reference = run("torch.optim.AdamW")
optimizer, losses = run("headroom.optim.AdamW8bit")
assert isinstance(optimizer, headroom.optim.AdamW8bit)
assert_same_losses(losses, reference, rtol=0.01)
