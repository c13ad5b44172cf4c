"""``headroom.checkpoint`` as torch's own, over a model's blocks and over a Sequential."""

from __future__ import annotations

import contextlib
import copy
import inspect

import headroom
import pytest
import torch
from headroom.checkpointing import CheckpointedBlocks
from torch import nn

from helpers.bits import assert_same_bits
from helpers.dropping import WRITTEN_LATE, WrittenLate, gradients_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 6)
        self.drop = nn.Dropout(0.2)
        self.calls = 0

    def forward(self, x, scale=1.0):
        self.calls += 1
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(x)))) * scale


class Model(nn.Module):
    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 6)
        self.body = nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(depth))})

    positional = False  # a reentrant checkpoint takes no keywords

    def forward(self, x):
        x = self.embed(x)
        for layer in self.body["layers"]:
            x = layer(x, 0.5) if self.positional else layer(x, scale=0.5)
        return x


def model_and_input() -> tuple[Model, torch.Tensor]:
    torch.manual_seed(3)
    return Model(), torch.randn(7, 3)


def gradients(model, x):
    torch.manual_seed(4)
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def saved_elements(model, x) -> int:
    """Of the tensors that the forward pass keeps and that are not parameters."""
    kept: dict[int, int] = {}
    mine = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(t):
        if t.untyped_storage().data_ptr() not in mine:
            kept[t.untyped_storage().data_ptr()] = t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x)
    return sum(kept.values())


class TestEvery:
    @pytest.mark.parametrize("options", [{}, {"verify": True}, {"use_reentrant": True}])
    @pytest.mark.parametrize("n", [1, 2, 5])
    def test_gradients_stay_and_one_in_n_blocks_runs_twice(self, n, options):
        model, x = model_and_input()
        model.positional = "use_reentrant" in options
        wanted = gradients(model, x)
        handle = headroom.checkpoint_every(model, n, **options)
        assert handle.names == [f"body.layers.{k}" for k in range(0, 5, n)]
        assert len(handle.names) + len(handle.kept) == 5
        for layer in model.body["layers"]:
            layer.calls = 0
        assert all(map(torch.equal, gradients(model, x), wanted))
        calls = [layer.calls for layer in model.body["layers"]]
        assert calls == [2 if k % n == 0 else 1 for k in range(5)]

    def test_kept_bytes_fall_to_one_input_per_block(self):
        model, x = model_and_input()
        before = saved_elements(model, x)
        headroom.checkpoint_every(model)
        assert before > 5 * 7 * 24
        assert saved_elements(model, x) == 5 * 7 * 6 + 7 * 3

    def test_the_input_of_the_last_block_stays_on_the_device(self, monkeypatch):
        left = []
        monkeypatch.setattr(
            "headroom.checkpointing.regions.saved_on_host",
            lambda stay: contextlib.nullcontext(left.append(stay)),
        )
        model, x = model_and_input()
        headroom.checkpoint_every(model, host=True)
        model(x)
        assert len(left) == 4

    def test_names_and_evaluation_stay_and_remove_undoes_it(self):
        model, x = model_and_input()
        names = list(model.state_dict())
        handle = headroom.checkpoint_every(model, 2)
        assert type(handle) is CheckpointedBlocks
        assert list(model.state_dict()) == names
        assert "3 of 5 blocks" in repr(handle)
        model.eval()
        first = model.body["layers"][0]
        first.calls = 0
        model(x).sum().backward()
        assert first.calls == 1
        handle.remove()
        handle.remove()
        assert "forward" not in vars(first) and not hasattr(first, "_checkpoint_options")
        headroom.checkpoint_every(model)

    def test_a_copy_of_the_model_runs_its_own_blocks(self):
        model, x = model_and_input()
        headroom.checkpoint_every(model)
        other = copy.deepcopy(model)
        for layer in model.body["layers"]:
            layer.calls = 0
        gradients(other, x)
        assert all(layer.calls == 0 for layer in model.body["layers"])
        assert all(layer.calls == 2 for layer in other.body["layers"])

    def test_traced_by_compile(self):
        model, x = model_and_input()
        for layer in model.body["layers"]:
            layer.drop.p = 0.0
        wanted = gradients(model, x)
        headroom.checkpoint_every(model, 2)
        Block.forward, own = (
            lambda self, x, scale=1.0: x + self.down(torch.nn.functional.gelu(self.up(x))) * scale,
            Block.forward,
        )
        try:
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
            torch.manual_seed(4)
            model.zero_grad()
            compiled(x).square().sum().backward()
        finally:
            Block.forward = own
        torch.testing.assert_close([p.grad for p in model.parameters()], wanted)

    def test_refusals(self):
        model, _ = model_and_input()
        with pytest.raises(ValueError, match="n is 0, wanted 1 or more"):
            headroom.checkpoint_every(model, 0)
        listed = nn.Sequential(Block(), Block(), Block())
        assert headroom.checkpoint_every(listed, 2).names == ["0", "2"]
        with pytest.raises(ValueError, match="Linear has no repeated blocks"):
            headroom.checkpoint_every(nn.Linear(2, 2))
        headroom.checkpoint_every(model)
        with pytest.raises(ValueError, match=r"body\.layers\.0 has a forward of its own"):
            headroom.checkpoint_every(model)


class TestSequential:
    @pytest.mark.parametrize("segments", [1, 2, 3, 5])
    @pytest.mark.parametrize("verify", [False, True])
    def test_gradients_stay_and_all_but_the_last_segment_run_twice(self, segments, verify):
        torch.manual_seed(0)
        modules = nn.Sequential(*(Block() for _ in range(5)))
        x = torch.randn(4, 6)
        wanted = gradients(modules, x)
        for module in modules:
            module.calls = 0

        def run(x):
            return headroom.checkpoint_sequential(modules, segments, x, verify=verify)

        run.zero_grad, run.parameters = modules.zero_grad, modules.parameters
        assert all(map(torch.equal, gradients(run, x), wanted))
        dropped = 5 // segments * (segments - 1)
        assert [module.calls for module in modules] == [2] * dropped + [1] * (5 - dropped)

    def test_refusals(self):
        with pytest.raises(ValueError, match="segments is 3, wanted 1 to 2"):
            headroom.checkpoint_sequential([nn.Identity(), nn.Identity()], 3, torch.ones(1))
        with pytest.raises(TypeError):
            headroom.checkpoint_sequential([nn.Identity()] * 4, 2, torch.ones(1), verfy=True)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_segments_are_checkpointed_as_asked_for(self, use_reentrant):
        grads = []  # whether they are recorded

        def noted(x):
            grads.append(torch.is_grad_enabled())
            return x.exp()

        x = torch.ones(1, requires_grad=True)
        y = headroom.checkpoint_sequential([noted, torch.sin], 2, x, use_reentrant=use_reentrant)
        y.backward()
        assert grads == [not use_reentrant, True]

    @pytest.mark.parametrize("functions", [[], [nn.Identity()], nn.Sequential(nn.Identity())])
    def test_one_function_or_none_is_one_segment(self, functions):
        x = torch.ones(1)
        assert torch.equal(headroom.checkpoint_sequential(functions, 1, x), x)
        for segments in (0, 2):
            with pytest.raises(ValueError, match=f"segments is {segments}, wanted 1 to 1"):
                headroom.checkpoint_sequential(functions, segments, x)


def test_options_that_a_reentrant_checkpoint_does_not_have_are_refused_as_in_torch():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="debug"):
        headroom.checkpoint(torch.exp, x, use_reentrant=True, debug=True)


def test_defaults_are_torchs_but_for_the_older_way():
    ours = inspect.signature(headroom.checkpoint).parameters
    theirs = inspect.signature(torch.utils.checkpoint.checkpoint).parameters
    known = {name: option.default for name, option in ours.items() if name in theirs}
    assert known.pop("use_reentrant") is False and len(known) == 8
    assert known == {name: theirs[name].default for name in known}


def test_options_reach_torch():
    ends = []

    def grows(x, more):
        y = x[: 1 + len(ends)] if more else x
        y = (y * y).exp()
        ends.append(None)
        return y.sum()

    def run(more, **options):
        ends.clear()
        x = torch.randn(3, requires_grad=True)
        headroom.checkpoint(grows, x, more, **options).backward()
        return len(ends)

    for verify in (False, True):
        assert run(False, verify=verify) == 1
        assert run(False, verify=verify, early_stop=False) == 2
    error = torch.utils.checkpoint.CheckpointError
    with pytest.raises(error, match="different metadata") as plain:
        run(True)
    with pytest.raises(error, match="aten.mul.Tensor"):
        run(True, debug=True)
    assert "aten.mul.Tensor" not in str(plain.value)


WAYS = {
    "call": lambda layer, x: headroom.checkpoint(layer, x),
    "verify": lambda layer, x: headroom.checkpoint(layer, x, verify=True),
    "verify the older way": lambda layer, x: headroom.checkpoint(
        layer, x, verify=True, use_reentrant=True
    ),
    "debug": lambda layer, x: headroom.checkpoint(layer, x, debug=True),
    "host": lambda layer, x: headroom.checkpoint(layer, x, host=True, verify=True),
    "nested": lambda layer, x: headroom.checkpoint(lambda y: headroom.checkpoint(layer, y), x),
    "sequential": lambda layer, x: headroom.checkpoint_sequential([layer, nn.Identity()], 2, x),
}


@pytest.mark.parametrize("place", ["alone", "middle", "end"])
@pytest.mark.parametrize("name", WRITTEN_LATE)
@pytest.mark.parametrize("way", WAYS)
def test_what_an_operation_writes_after_it_saved_it(way, name, place):
    layer = WrittenLate(name, place)
    wanted = gradients_of(lambda layer, x: layer(x), copy.deepcopy(layer))
    assert_same_bits(gradients_of(WAYS[way], layer), wanted)


@pytest.mark.parametrize("verify", [False, True])
def test_what_is_changed_in_place_after_it_was_saved_raises(verify):
    """As without a checkpoint, unless the change is behind all that is computed again."""

    def function(x):
        h = x * 2
        return (h.sin() + h.add_(1)).exp()

    x = torch.randn(4, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        function(x).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation.*version 1; expected"):
        headroom.checkpoint(function, x, verify=verify).sum().backward()


def test_a_run_ends_where_all_is_there():
    """A product with weights that are frozen, the last to save, need not be computed again."""
    ran, weight = [], torch.ones(6, 6)

    def function(x):
        y = torch.nn.functional.linear(x.sin(), weight)
        ran.append("end")
        return y

    headroom.checkpoint(function, torch.randn(2, 6, requires_grad=True)).sum().backward()
    assert ran == ["end"]


def test_decorator():
    calls = []

    @headroom.checkpoint(verify=True)
    def twice(x):
        calls.append(None)
        return (x * 2).exp()

    x = torch.ones(3, requires_grad=True)
    twice(x).sum().backward()
    assert len(calls) == 2 and twice.__name__ == "twice"
    torch.testing.assert_close(x.grad, 2 * torch.full((3,), 2.0).exp())


def test_selective_checkpoints_of_torch_work_with_verify():
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx, op, *args, **kwargs):
        saves = op == torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    module = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6), nn.GELU())
    x = torch.randn(4, 6, requires_grad=True)
    module(x).sum().backward()
    wanted, x.grad = x.grad, None
    headroom.checkpoint(
        module, x, context_fn=lambda: create_selective_checkpoint_contexts(policy), verify=True
    ).sum().backward()
    assert torch.equal(x.grad, wanted)


def test_compiled_calls_trace_and_verify_says_that_it_cannot():
    module = nn.Sequential(nn.Linear(6, 9), nn.GELU())
    x = torch.randn(4, 6, requires_grad=True)

    def step(x, verify):
        return headroom.checkpoint(module, x, verify=verify).sum()

    torch.compile(step, backend="aot_eager", fullgraph=True)(x, False).backward()
    got, x.grad = x.grad, None
    module(x).sum().backward()
    torch.testing.assert_close(got, x.grad)
    with pytest.raises(Exception, match="verify=True compares values"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(x, True)


def test_importing_the_package_does_not_hide_the_function():
    import headroom.checkpointing

    assert headroom.checkpoint is headroom.checkpointing.checkpoint


class Branches(nn.Module):
    """Has keywords with the names of options."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x, debug=False, verify=1.0, function=None, own=0.0):
        return self.up(x).exp() * (2 if debug else 1) * verify + (function or 0) + own


def forwards(x, blocks):
    for block in blocks:
        x = block(x, debug=True, verify=0.5, function=3.0, own=0.25)
    return x


@pytest.mark.parametrize("way", ["checkpoint_every", "patch", "decorator"])
@pytest.mark.parametrize("options", [{}, {"verify": True, "preserve_rng_state": False}])
def test_keywords_of_a_block_are_its_own(way, options):
    model = nn.Module()
    model.blocks = nn.ModuleList(Branches() for _ in range(2))
    x = torch.randn(4, 6)
    wanted = forwards(x, model.blocks)
    if way == "checkpoint_every":
        headroom.checkpoint_every(model, **options)
    elif way == "patch":
        headroom.patch(model, save="L5", checkpoint_options=options)
    else:
        for block in model.blocks:
            block.forward = headroom.checkpoint(**options)(block.forward)
    got = forwards(x, model.blocks)
    assert torch.equal(got, wanted)
    got.sum().backward()


@pytest.mark.parametrize("way", ["checkpoint_every", "patch"])
def test_whole_models_are_saved_copied_and_loaded(way, tmp_path):
    """Each copy checkpoints its own blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))))
    x = torch.randn(4, 6)
    wanted = gradients(model, x)
    if way == "checkpoint_every":
        headroom.checkpoint_every(model, n=2)
    else:
        headroom.patch(model, save="L5")
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for one in (loaded, copy.deepcopy(model)):
        with torch.no_grad():
            assert all(block.forward.args[0] is block for block in (one[1][0], one[1][2]))
            one[1][0].weight.mul_(1)
        assert all(map(torch.equal, gradients(one, x), wanted))
