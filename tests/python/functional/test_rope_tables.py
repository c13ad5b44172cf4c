"""The tables of cos and sin: those of transformers, at far positions too."""

import math

import pytest
import torch
from headroom.functional import rope_tables

from helpers.rope_scalings import SCALINGS


def frequencies_of_transformers(scaling, head_dim, theta, longest, positions):
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    from transformers import LlamaConfig

    if scaling["rope_type"] == "default":  # which has no function of its own
        scaling = {"rope_type": "linear", "factor": 1.0}
    config = LlamaConfig(
        head_dim=head_dim,
        max_position_embeddings=longest,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    return functions[scaling["rope_type"]](config, torch.device("cpu"), seq_len=positions)


@pytest.mark.parametrize("theta", (10000.0, 500000.0), ids=("1e4", "5e5"))
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_are_those_of_transformers(name, theta):
    scaling, head_dim, positions, longest = SCALINGS[name], 128, 700, 512
    frequencies, size = frequencies_of_transformers(scaling, head_dim, theta, longest, positions)
    cos, sin = rope_tables(
        head_dim, positions, theta, scaling, max_position_embeddings=longest, dtype=torch.float64
    )
    angles = torch.arange(positions).double()[:, None] * frequencies.double()
    # Their frequencies are float32: each is off by some units in the last place.
    slack = 2**-20 * angles + 2**-22
    assert ((cos - angles.cos() * size).abs() <= slack * size).all()
    assert ((sin - angles.sin() * size).abs() <= slack * size).all()
    if name != "none":
        plain, _ = rope_tables(head_dim, positions, theta, dtype=torch.float64)
        assert (cos - plain).abs().max() > 0.1


def test_far_positions_are_exact():
    cos, sin = rope_tables(64, 100_001)
    for table, function in ((cos, math.cos), (sin, math.sin)):
        for pair in (0, 1, 7):
            exact = function(100_000 * 10000.0 ** (-2 * pair / 64))
            assert abs(table[100_000, pair].item() - exact) < 1e-7


def test_arguments_of_tables():
    whole = rope_tables(32, 10, 5e5, rotary_dim=16)
    dicts = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    assert all(torch.equal(a, b) for a, b in zip(whole, rope_tables(32, 10, scaling=dicts)))
    assert whole[0].shape == (10, 8) and whole[0].dtype == torch.float32
    assert rope_tables(32, 0)[0].shape == (0, 16)
    assert rope_tables(32, 10, dtype=torch.bfloat16)[1].dtype == torch.bfloat16
    near = rope_tables(32, 10, scaling={"type": "dynamic", "factor": 2}, max_position_embeddings=10)
    assert torch.equal(near[0], rope_tables(32, 10)[0])  # as long as the model was trained


BAD_TABLES = {
    "type 'longrope', wanted one of": {"scaling": {"rope_type": "longrope"}},
    "'linear' lacks factor": {"scaling": {"type": "linear"}},
    "has no key mrope_section": {"scaling": {"type": "default", "mrope_section": [1]}},
    "needs original_max_position_embeddings": {"scaling": {"type": "dynamic", "factor": 2.0}},
    "factor 0.5, wanted a number of 1 or more": {"scaling": {"type": "linear", "factor": 0.5}},
    "high_freq_factor 1": {
        "scaling": SCALINGS["llama3"] | {"high_freq_factor": 1},
    },
    "rotary_dim is 7": {"rotary_dim": 7},
    "rotary_dim is 10, wanted .* head_dim \\(8\\)": {"rotary_dim": 10},
    "positions is -1": {"positions": -1},
    "base is 1": {"base": 1.0},
}


@pytest.mark.parametrize("message", BAD_TABLES)
def test_bad_arguments_of_tables(message):
    with pytest.raises(ValueError, match=message):
        rope_tables(**{"head_dim": 8, "positions": 4} | BAD_TABLES[message])
