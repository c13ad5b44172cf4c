"""convert_state: old forms, and weights of 16 bits."""

import headroom
import pytest
import torch

from helpers.bits import assert_same_bits, same_bits
from helpers.conversions import (
    ADAMW,
    ADAMW8BIT,
    LR,
    clones,
    convert,
    old_bitsandbytes,
    parameters,
    run,
)

# ---- Old forms -----------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [256, 2048])
def test_old_states_of_bitsandbytes(block_size):
    """Blocks that are not ours are decoded by what they are."""
    source = old_bitsandbytes(parameters(shapes=[(90, 100)]), block_size)
    entry = source["state"][0]
    state, report = convert(source, "torch")
    for name, j, is_signed in (("exp_avg", 1, True), ("exp_avg_sq", 2, False)):
        values = headroom.functional.dynamic_map(is_signed)
        scales = entry[f"absmax{j}"].repeat_interleave(block_size)[:9000].view(90, 100)
        wanted = values[entry[f"state{j}"].int()] * scales
        assert same_bits(state["state"][0][name], wanted)
    _, report = convert(source, "headroom-8bit")
    assert report.is_lossless == (block_size == 256)


def test_codes_of_another_map_are_refused():
    source = old_bitsandbytes(parameters(shapes=[(90, 100)]), 256, torch.linspace(-1, 1, 256))
    with pytest.raises(
        ValueError, match="parameter 0 has 8-bit codes of another map.*0.36 to 0.41"
    ):
        convert(source, "torch")


# ---- Weights of 16 bits -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["remainder16", "remainder8", "kahan"])
def test_what_completes_weights_goes_along(mode):
    options = {"rounding": "kahan"} if mode == "kahan" else {"master": mode}
    params, optimizer = run(ps := parameters(torch.bfloat16), ADAMW(ps, lr=LR, **options))
    state, report = convert(optimizer, "headroom-8bit")
    assert all(loss.kind == "none" for loss in report.losses if "exp_avg" not in loss.name)
    loaded = ADAMW8BIT(clones(params))
    loaded.load_state_dict(state)
    assert_same_bits(
        headroom.optim.master_weights(loaded).values(),
        headroom.optim.master_weights(optimizer).values(),
    )
    _, report = convert(optimizer, "torch")
    assert [loss.kind for loss in report.losses].count("dropped") == 3
