"""Blocks at L5 choose the experts of the forward pass when they are computed again."""

import gc
import weakref

import headroom
import pytest
import torch
from headroom.patching import routing

from helpers.bits import assert_same_bits
from helpers.moe_models import CHOSEN, FAMILIES, TOKENS, moe_of, step, tokens_of


def routers_of(model):
    """Returns the modules that return logits, weights and indices."""
    return [m for m in model.modules() if type(m).__name__.lower().endswith("router")]


def tie(model):
    """Makes the scores of all experts of a router the same, but for what a second run adds: whom
    it would choose then is another."""
    calls = dict.fromkeys(routers_of(model), 0)
    for router in calls:
        matrix = router.weight if hasattr(router, "weight") else router.proj.weight
        generator = torch.Generator().manual_seed(1)
        noise = torch.randn(matrix.shape, generator=generator) * 1e-5
        with torch.no_grad():
            matrix.copy_(matrix[:1].expand_as(matrix) + noise)

    def before(router, args):
        calls[router] += 1
        return (args[0] + 3.0 * (calls[router] - 1), *args[1:])

    handles = [router.register_forward_pre_hook(before) for router in calls]
    return calls, handles


def chosen_by(model):
    """Returns what routers choose in the calls to come."""
    seen = []
    for router in routers_of(model):
        router.register_forward_hook(lambda _, args, out: seen.append(out[2].clone()))
    return seen


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_second_run_chooses_what_the_first_has_chosen(name, reentrant):
    model = moe_of(name)
    calls, _ = tie(model)
    seen = chosen_by(model)
    options = {"use_reentrant": True} if reentrant else {}
    headroom.patch(model, "L5", norms=False, checkpoint_options=options)
    if reentrant:
        model.get_input_embeddings().weight.requires_grad_()
    step(model, tokens_of())
    layers = len(calls)
    assert set(calls.values()) == {2} and len(seen) == 2 * layers
    first, second = seen[:layers], seen[layers:]
    assert all(map(torch.equal, first, reversed(second)))


def test_without_it_another_would_be_chosen(monkeypatch):
    """What the test above relies on."""
    monkeypatch.setattr(headroom.patching.blocks, "keeping_choices", lambda run: run)
    model = moe_of("Mixtral")
    calls, _ = tie(model)
    seen = chosen_by(model)
    headroom.patch(model, "L5", norms=False)
    step(model, tokens_of())
    layers = len(calls)
    assert not any(map(torch.equal, seen[:layers], reversed(seen[layers:])))


def test_gradients_are_those_of_the_chosen_experts():
    """Weights are computed again, from the scores of the second run."""
    model, inputs = moe_of("Qwen3Moe"), tokens_of()
    _, handles = tie(model)
    for handle in handles:
        handle.remove()
    want = step(model, inputs)
    headroom.patch(model, "L5", norms=False)
    calls = dict.fromkeys(routers_of(model), 0)

    def before(router, args):
        calls[router] += 1
        return (args[0] + 1e-4 * (calls[router] - 1), *args[1:])

    for router in calls:
        router.register_forward_pre_hook(before)
    got = step(model, inputs)
    for key, x in want.items():
        assert (got[key] - x).norm() <= 1e-3 * x.norm() + 1e-6, key


def test_groups_of_experts_are_chosen_again():
    """DeepSeek-V2 masks the scores of the groups that are not chosen, and with them weights."""
    model = moe_of("DeepseekV2")
    calls, _ = tie(model)
    seen = []
    for router in calls:
        router.register_forward_hook(lambda _, args, out: seen.append(out[1].detach().clone()))
    headroom.patch(model, "L5", norms=False)
    step(model, tokens_of())
    assert len(seen) == 2 * len(calls) and all((weights > 0).all() for weights in seen)


def choices():
    """Returns what is kept of choices, by whomever."""
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is routing._Choices and one._kept]


def test_few_bytes_are_kept():
    model = moe_of("Mixtral")
    headroom.patch(model, "L5", norms=False)
    others = {id(one) for one in choices()}
    out = model(**tokens_of())
    kept = [one for one in choices() if id(one) not in others]
    assert len(kept) == 2
    for one in kept:
        (index,) = one._kept
        assert index.shape == (2 * TOKENS, CHOSEN) and index.dtype == torch.uint8
    held = [weakref.ref(one) for one in kept]
    del kept, one
    out.loss.backward()
    del out
    assert not any(ref() for ref in held)


def test_several_backward_passes():
    model, inputs = moe_of("Phimoe"), tokens_of()
    headroom.patch(model, "L5", norms=False)
    torch.manual_seed(1)
    loss = model(**inputs).loss
    first, second = (
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
        for _ in range(2)
    )
    assert_same_bits([x for x in first if x is not None], [x for x in second if x is not None])


def test_verified_blocks_and_a_checkpoint_around():
    model, inputs = moe_of("Mixtral"), tokens_of()
    want = step(model, inputs)
    headroom.patch(model, "L5", norms=False, experts=False)
    assert_same_bits(step(model, inputs).values(), want.values())
    headroom.patch(model, "L5", norms=False, checkpoint_options={"verify": True})
    got = step(model, inputs)
    torch.testing.assert_close(got, want)
    headroom.unpatch(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    headroom.patch(model, norms=False)
    calls = []
    model.model.layers[0].mlp.experts.register_forward_pre_hook(lambda *_: calls.append(1))
    assert_same_bits(step(model, inputs).values(), got.values())
    assert len(calls) == 2  # the checkpoint is that of transformers


class TestChoices:
    """What a router may call, and what is none of its choices."""

    def run(self, function, *scores):
        """Returns the results of two runs, for which scores differ."""
        module = torch.nn.Module()
        results = iter(scores)
        module.forward = None
        own = lambda: function(next(results))  # noqa: E731
        called = routing.keeping_choices(lambda: routing.choosing_forward(module, own, 300))
        return called(), called()

    def scores(self, *shape):
        return torch.randn(*shape), torch.randn(*shape)

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: torch.topk(x, 3),
            lambda x: x.topk(3, dim=-1, sorted=False),
            lambda x: torch.topk(input=x, k=3, dim=1),
            lambda x: x.max(dim=-1),
            lambda x: torch.max(x, 1, keepdim=True),
        ],
    )
    @pytest.mark.parametrize("columns", [300, 6])  # experts, or groups of them
    def test_functions(self, function, columns):
        one, two = self.scores(8, columns)
        first, second = self.run(function, one, two)
        assert type(first) is type(second) is type(function(one))
        assert torch.equal(first.values, function(one).values)
        assert torch.equal(first.indices, function(one).indices)
        assert torch.equal(second.indices, first.indices) and first.indices.dtype == torch.int64
        index = first.indices if first.indices.dim() == 2 else first.indices[:, None]
        assert torch.equal(second.values.view(-1), two.gather(1, index).view(-1))

    @pytest.mark.parametrize(
        "function, shape",
        [
            (lambda x: x.topk(3, dim=0), (300, 300)),
            (lambda x: x.topk(3), (8, 299)),
            (lambda x: x.view(8, 2, 150).topk(3), (8, 300)),
            (lambda x: x.max(), (8, 300)),
            (lambda x: torch.max(x, x), (8, 300)),
        ],
    )
    def test_others(self, function, shape):
        one, two = self.scores(*shape)
        first, second = self.run(function, one, two)
        for got, x in ((first, one), (second, two)):
            want = function(x)
            pairs = zip(got, want) if isinstance(want, tuple) else [(got, want)]
            assert all(torch.equal(*pair) for pair in pairs)
