"""checkpoint_every of layers that transformers hands a cache to."""

import copy

import headroom
import pytest
import torch

transformers = pytest.importorskip("transformers")


def test_layers_that_are_given_a_cache():
    config = transformers.GPT2Config(
        vocab_size=61, n_embd=24, n_layer=3, n_head=2, n_positions=16, attn_implementation="eager",
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = transformers.GPT2LMHeadModel(config).train()
    other = copy.deepcopy(plain)
    headroom.checkpoint_every(other)
    ids = torch.randint(61, (2, 9))
    for model in (plain, other):
        model(ids, labels=ids, use_cache=True).loss.backward()
    for want, got in zip(plain.parameters(), other.parameters()):
        torch.testing.assert_close(got.grad, want.grad)
