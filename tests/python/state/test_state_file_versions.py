"""State files of every version load.

    python tests/python/state/test_state_file_versions.py

writes the files of this format in tests/states anew.
"""

import pytest
import torch
from headroom import load_state, save_state
from headroom.state.file import layout

from helpers.state_runs import OPTIMIZERS, assert_same, made, state_of, step, tensors


def stored(name):
    """A run whose numbers follow from nothing but their places."""
    model, optimizer = made(name)
    step(model, optimizer)
    for number, tensor in enumerate(tensors(model, optimizer).values()):
        places = torch.arange(tensor.numel()).reshape(tensor.shape)
        tensor.copy_((places * (number + 3)) % 97)
    return model, optimizer


@pytest.mark.parametrize("version", range(1, layout.FORMAT + 1))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_files_of_every_version_load(name, version):
    model, optimizer = made(name, seed=5)
    assert load_state(state_of(name, version), model=model, optimizer=optimizer) == {"step": 1}
    assert_same(stored(name), (model, optimizer))
    step(model, optimizer)


def main():
    for name in OPTIMIZERS:
        model, optimizer = stored(name)
        state_of(name).parent.mkdir(exist_ok=True)
        save_state(state_of(name), model=model, optimizer=optimizer, extra={"step": 1}, rng=False)


if __name__ == "__main__":
    main()
