"""checkpoint_every of layers that transformers hands a cache to."""

import copy

import headroom
import pytest
import torch
from headroom.checkpointing.caches import is_filled
from torch import nn

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


class Cached(nn.Module):
    """A layer that says what it was given, and adds its input to a cache."""

    def __init__(self, number: int | None = None) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 4), []
        if number is not None:
            self.layer_idx = number

    def forward(self, x, past=None, *, mask=None, cache=None, use_cache=None):
        self.seen.append((past, mask, cache, use_cache))
        if (found := past if cache is None else cache) is not None:
            found.update(x[None].detach(), x[None].detach(), getattr(self, "layer_idx", 0))
        return self.linear(x) + (0 if mask is None else mask)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("number", [None, 1])
def test_an_empty_cache_alone_is_dropped_and_a_filled_one_is_used(named, number, monkeypatch):
    warned = []
    logger = transformers.utils.logging.get_logger("transformers.modeling_layers")
    monkeypatch.setattr(type(logger), "warning_once", lambda self, text: warned.append(text))
    model = nn.Sequential(Cached(number), Cached(number))
    layer, mask, x = model[0], torch.ones(4), torch.randn(1, 3, 4, requires_grad=True)
    headroom.checkpoint_every(model)
    cache = transformers.DynamicCache()
    given = {"mask": mask, "use_cache": True}

    def run():
        layer.seen.clear()
        tensors = () if named else (cache,)
        layer(x, *tensors, **given, **({"cache": cache} if named else {})).sum().backward()
        return layer.seen

    assert run() == [(None, mask, None, False)] * 2  # twice, and nobody has filled the cache
    assert warned == [
        "Caching is incompatible with checkpoint_every in Cached. Setting `past_key_values=None`."
    ]
    cache.update(x[None].detach(), x[None].detach(), number or 0)
    assert is_filled(cache, layer) and not is_filled(cache, Cached(2))
    used = (None, mask, cache, True) if named else (cache, mask, None, True)
    assert run() == [used] and cache.get_seq_length(number or 0) == 6
    layer._can_checkpoint_with_cache = True
    assert run() == [used] * 2
    given["use_cache"], cache = None, None
    assert run() == [(None, mask, None, None)] * 2 and len(warned) == 1


def test_a_cache_of_linear_attention_says_whether_it_has_a_state():
    class Cache:
        def get_seq_length(self, number):
            raise ValueError("no tokens are counted")

        def has_previous_state(self, number):
            return number == 3

    assert is_filled(Cache(), Cached(3)) and not is_filled(Cache(), Cached(2))


def test_a_cache_of_a_layer_that_holds_nothing_is_empty():
    from transformers.cache_utils import DummyLayer, DynamicLayer, LinearAttentionLayer

    cache = transformers.DynamicCache()
    cache.layers = [DummyLayer(), DynamicLayer(), DummyLayer(), LinearAttentionLayer()]
    assert not any(is_filled(cache, Cached(k)) for k in range(4))
    cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 1)
    cache.update_conv_state(torch.ones(1, 4, 3), 3)
    cache.update_recurrent_state(torch.ones(1, 4), 3)
    assert [is_filled(cache, Cached(k)) for k in (1, 2, 3)] == [True, False, True]


class KeepsItsState(transformers.modeling_layers.GradientCheckpointingLayer):
    """A layer that is its own cache, as those of RecurrentGemma."""

    def __init__(self):
        super().__init__()
        self.linear, self.state, self.told = nn.Linear(4, 4), None, []

    def forward(self, x, mask=None, use_cache=None, *, more=None):
        self.told.append(use_cache)
        if self.state is not None:
            x = x + self.state
        y = self.linear(x)
        self.state = y.detach().sin() if use_cache else None
        return y


@pytest.mark.parametrize("args, kwargs", [((None, True), {}), ((), {"use_cache": True})])
@pytest.mark.parametrize("way", ["every", "L5"])
def test_a_layer_that_is_its_own_cache_keeps_none(way, args, kwargs):
    model = nn.Sequential(KeepsItsState(), KeepsItsState())
    if way == "every":
        headroom.checkpoint_every(model, verify=True)
    else:
        headroom.patch(model, "L5")
    x = torch.randn(2, 4, requires_grad=True)
    model[0](x, *args, **kwargs).sum().backward()
    assert model[0].told == [False, False]
    with torch.no_grad():
        model[0](x, *args, **kwargs)
    assert model[0].told[-1] is True and model[0].state is not None
