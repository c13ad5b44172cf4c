"""``headroom.patch`` and ``headroom.unpatch``: the log, the levels, the report, and what happens to
a patched model."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from contextlib import contextmanager

import headroom
import pytest
import torch
from headroom.host import default_arena
from headroom.host.saved import trim
from headroom.patching import generic
from headroom.patching.blocks import verified_blocks
from headroom.patching.changes import Changes
from torch import nn

from helpers import foreign_models as models


def everything(model):
    """All that is set on the modules of a model."""
    return {name: dict(vars(module)) for name, module in model.named_modules()}


def kept(model, *inputs) -> int:
    """How many tensors the forward pass keeps that are no parameters."""
    mine = {p.untyped_storage()._cdata for p in model.parameters()}
    found = set()

    def pack(t):
        found.add(t.untyped_storage()._cdata)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(*inputs)
    del y
    return len(found - mine)


def patched(save="L5", **options):
    model = models.llama()
    return model, headroom.patch(model, save, **options)


class TestChanges:
    def test_undone_to_the_bit(self):
        model = models.llama()
        before = everything(model)
        model, report = model, headroom.patch(model, "L5")
        assert everything(model) != before
        report.undo()
        assert everything(model) == before
        headroom.unpatch(model)  # of a model that is not patched
        report.undo()
        assert everything(model) == before

    @pytest.mark.parametrize("earlier", [False, True])
    def test_nothing_is_left_half_patched(self, earlier, monkeypatch):
        model = models.llama()
        if earlier:
            headroom.patch(model, ["L5", "L0"])
        before = everything(model)
        tried = []

        def fails(module, known):
            tried.append(module)
            if len(tried) == 2:
                raise KeyboardInterrupt
            return rule_of(module, known)

        rule_of = generic._tried
        monkeypatch.setattr(generic, "_tried", fails)
        with pytest.raises(KeyboardInterrupt):
            headroom.patch(model, "L5")
        with pytest.raises(ValueError):
            headroom.patch(model, "L2")
        assert everything(model) == before

    def test_a_second_call_starts_anew(self):
        model, report = patched("L5")
        second = headroom.patch(model, {"layers.1": "L5"}, norms=False)
        assert list(report.levels) == ["layers.0", "layers.1"]
        assert second.levels == {"layers.1": "L5"} and not second.swapped
        once = models.llama()
        headroom.patch(once, {1: "L5"}, norms=False)
        assert [*everything(model)] == [*everything(once)]
        for name, attributes in everything(model).items():
            assert attributes.keys() == everything(once)[name].keys()
        headroom.unpatch(model)
        assert everything(model)["layers.1"].keys() == everything(models.llama())["layers.1"].keys()

    def test_a_forward_that_was_there_before_comes_back(self):
        model, x = models.llama(), models.tokens()
        block = model.layers[0]

        def half(x, scale):
            return type(block).forward(block, x, scale) / 2

        block.forward = half
        wanted = model(x)
        headroom.patch(model, "L5")
        assert block.forward is not half and torch.allclose(model(x), wanted, atol=1e-5)
        headroom.unpatch(model)
        assert block.forward is half

    def test_a_forward_that_was_replaced_later_is_not_lost(self):
        model, _ = patched()
        before = model.layers[1].forward
        model.layers[1].forward = lambda *args, **options: before(*args, **options)
        state = everything(model)
        for call in (headroom.unpatch, headroom.patch):
            with pytest.raises(RuntimeError, match="forward of layers.1 was replaced"):
                call(model)
        assert everything(model) == state
        model.layers[1].forward = before
        headroom.unpatch(model)

    def test_parts_can_be_patched_and_unpatched(self):
        model = models.llama()
        headroom.patch(model.layers[0])
        headroom.patch(model.norm)
        assert "forward" in vars(model.norm) and "forward" not in vars(model.layers[1].norm_1)
        headroom.unpatch(model)
        assert not any("forward" in vars(module) for module in model.modules())

    def test_what_is_set_twice_is_restored_to_the_first(self):
        module, changes = nn.Linear(2, 2), Changes()
        module.scale = 1
        for value in (2, 3):
            changes.set(module, "scale", value)
        headroom.unpatch(module)
        assert module.scale == 1
        changes.rollback()
        assert module.scale == 1

    def test_state_is_refused(self):
        with pytest.raises(ValueError, match="weight is in _parameters of Linear"):
            Changes().set(nn.Linear(2, 2), "weight", None)


class TestLevels:
    @pytest.mark.parametrize(
        "save, wanted",
        [
            (None, {}),
            ("L0", {"layers.0": "L0", "layers.1": "L0"}),
            ("L5", {"layers.0": "L5", "layers.1": "L5"}),
            (["L0", "L5"], {"layers.0": "L0", "layers.1": "L5"}),
            ((None, "L5"), {"layers.1": "L5"}),
            ({0: "L5"}, {"layers.0": "L5"}),
            ({"layers.1": "L5", 0: "L0"}, {"layers.0": "L0", "layers.1": "L5"}),
        ],
    )
    def test_chosen(self, save, wanted):
        model, report = patched(save)
        assert report.levels == wanted
        at_l5 = [name for name, level in wanted.items() if level == "L5"]
        for name, block in model.layers.named_children():
            assert ("forward" in vars(block)) == (f"layers.{name}" in at_l5)

    @pytest.mark.parametrize(
        "save, error",
        [
            ("L2", r"save is L2 for layers\.0, a Layer, which can be at L0 or L5; .* Llama"),
            ("L6", "save is 'L6' for layers.0, wanted one of L0, L1"),
            (["L5"], r"save has 1 levels, wanted 2.*layers\.0 to layers\.1"),
            ({2: "L5"}, "save has 2, which is no block of Language"),
            ({"norm": "L5"}, "save has 'norm', which is no block"),
            ([["L5"], "L5"], "wanted one of L0"),
            (5, "save is 5, wanted levels"),
        ],
    )
    def test_refused(self, save, error):
        model = models.llama()
        before = everything(model)
        with pytest.raises(ValueError, match=error):
            headroom.patch(model, save)
        assert everything(model) == before

    def test_other_arguments_are_refused(self):
        model = models.llama()
        before = everything(model)
        with pytest.raises(ValueError, match="checkpoint_options has 'offload', wanted options of"):
            headroom.patch(model, "L5", checkpoint_options={"offload": True})
        with pytest.raises(TypeError, match="model is <class .*Language'>, wanted an instance"):
            headroom.patch(models.Language)
        assert everything(model) == before

    def test_a_model_without_blocks(self):
        model = nn.Linear(3, 3)
        report = headroom.patch(model)
        assert not report.changed and "nothing was recognized" in str(report)
        with pytest.raises(ValueError, match="Linear has no repeated blocks"):
            headroom.patch(model, "L5")

    def test_l5_keeps_the_input_alone_and_computes_the_same(self):
        model, x = models.llama(dropout=0.2), models.tokens()
        headroom.patch(model)
        wanted, before = models.outputs_and_gradients(model, x), kept(model, x)
        headroom.patch(model, "L5")
        assert all(map(torch.equal, models.outputs_and_gradients(model, x), wanted))
        assert kept(model, x) < before / 3
        all_kept = kept(model.eval(), x)
        assert all_kept > before / 2  # in eval() a block runs as before

    def test_options_of_checkpoint(self):
        """A context for each run of a block: this is where offloading attaches."""
        entered = []

        @contextmanager
        def noted(which):
            entered.append(which)
            yield

        def contexts():
            return noted("forward"), noted("backward")

        model, _ = patched(checkpoint_options={"context_fn": contexts})
        model(models.tokens()).sum().backward()
        assert entered == 2 * ["forward"] + 2 * ["backward"]
        headroom.patch(model, "L5", checkpoint_options={"verify": True})
        model(models.tokens()).sum().backward()

    def test_blocks_that_compute_something_else_when_they_run_again(self):
        class Counts(nn.Linear):
            calls = 0

            def forward(self, x):
                self.calls += 1
                return super().forward(x * self.calls)

        model, x = nn.Sequential(*(nn.Sequential(Counts(4, 4)) for _ in range(2))), torch.ones(2, 4)
        headroom.patch(model, "L5")
        with verified_blocks():
            verified = model(x).sum()
        with pytest.raises(headroom.checkpointing.RecomputeError):
            verified.backward()
        model(x).sum().backward()

    @pytest.mark.parametrize("level, held", [("L5", 0), ("L5@host", 256 * 64 * 4)])
    def test_inputs_are_on_the_host_where_the_level_says_so(self, level, held):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(3)))
        headroom.patch(model, level)
        trim()
        before = default_arena().memory().get(("activations", "blocks"), 0)
        y = model(torch.randn(256, 64))
        now = default_arena().memory().get(("activations", "blocks"), 0)
        assert y.requires_grad and now - before == held

    def test_within_a_checkpoint_nothing_is_computed_three_times(self):
        model, _ = patched()
        calls = []
        model.layers[0].attention.register_forward_hook(lambda *_: calls.append(1))
        y = torch.utils.checkpoint.checkpoint(model, models.tokens(), use_reentrant=False)
        y.sum().backward()
        assert len(calls) == 2

    @pytest.mark.parametrize("momentum", [0.1, None])
    def test_running_statistics_move_once(self, momentum):
        model, x = models.Convolutions(), models.images()
        for part in model.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.momentum = momentum
        other = copy.deepcopy(model)
        options = {"verify": True}
        assert [*headroom.patch(other, "L5", checkpoint_options=options).levels.values()] == [
            "L5",
            "L5",
        ]
        for _ in range(2):
            wanted = models.outputs_and_gradients(model, x)
            assert all(map(torch.equal, models.outputs_and_gradients(other, x), wanted))
        theirs = other.state_dict()
        assert all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())
        assert other.layer1[0].bn1.momentum == momentum

    @pytest.mark.parametrize("options", [{}, {"verify": True}, {"use_reentrant": True}], ids=str)
    def test_two_backward_passes_of_one_graph(self, options):
        model, x = models.Convolutions(), models.images()
        other = copy.deepcopy(model)
        headroom.patch(other, "L5", checkpoint_options=options)
        for each in (model, other):
            loss = each(x).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        for (name, wanted), got in zip(model.named_parameters(), other.parameters()):
            assert torch.equal(got.grad, wanted.grad), name
        if not options.get("use_reentrant"):  # whose statistics move in each run, as torch's
            theirs = other.state_dict()
            assert all(torch.equal(v, theirs[name]) for name, v in model.state_dict().items())

    def test_statistics_of_instance_norms_move_once(self):
        def block():
            norm = nn.InstanceNorm1d(5, track_running_stats=True)
            return nn.Sequential(nn.Linear(7, 7), norm, nn.GELU(), nn.Linear(7, 7))

        model, x = nn.Sequential(block(), block()), torch.randn(2, 5, 7)
        other = copy.deepcopy(model)
        headroom.patch(other, "L5", checkpoint_options={"verify": True})
        wanted = models.outputs_and_gradients(model, x)
        assert all(map(torch.equal, models.outputs_and_gradients(other, x), wanted))
        theirs = other.state_dict()
        assert all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())

    def test_lists_in_lists(self):
        model = nn.ModuleList(nn.ModuleList(models.plain_mlp() for _ in range(2)) for _ in range(2))
        assert list(headroom.patch(model, "L5").levels) == ["0.0", "0.1", "1.0", "1.1"]

    def test_blocks_of_headroom_nn(self):
        config = headroom.nn.TransformerConfig(
            vocab_size=40, hidden_size=32, features=48, layers=2, heads=4
        )
        model = headroom.nn.Transformer(config)
        blocks = [part for part in model.modules() if isinstance(part, headroom.nn.Block)]
        report = headroom.patch(model, ["L2", "L4"])
        assert [block.save for block in blocks] == ["L2", "L4"] == [*report.levels.values()]
        assert not report.swapped and not report.left
        blocks[0].save = "L3"  # the dial may be turned at any time
        headroom.unpatch(model)
        assert [block.save for block in blocks] == ["L0", "L0"]


class TestReport:
    def test_text(self):
        model = models.llama()
        model.norm.forward = model.norm.forward
        report = headroom.patch(model, ["L0", "L5"])
        assert str(report).splitlines() == [
            "headroom.patch: Language (not an architecture that Headroom knows)",
            "  4 RMSNorm -> headroom.functional.rms_norm",
            "  1 block (Layer) at L0: layers.0",
            "  1 block (Layer) at L5: layers.1",
            "  left alone: 1 RMSNorm (norm): something else has replaced its forward",
        ]
        assert repr(report) == "PatchReport(Language: 4 swapped, 2 levels, 1 left alone)"

    def test_entries_are_values(self):
        model = models.llama()
        model.norm.forward = model.norm.forward
        report = headroom.patch(model)
        swaps = {swap for one in report.swapped.values() for swap in one}
        assert {swap.name for swap in swaps} == set(report.swapped)
        assert {left.name for left in {*report.left}} == {"norm"}

    def test_switches(self):
        assert not patched(None, norms=False)[1].changed


class TestLater:
    """What happens to a model after it was patched."""

    @pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
    def test_copies_are_models_of_their_own(self, how):
        model, _ = patched()
        if how == "deepcopy":
            other = copy.deepcopy(model)
        elif how == "pickle":
            other = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            other = torch.load(file, weights_only=False)
        x = models.tokens()
        assert torch.equal(other(x), model(x))
        other(x).sum().backward()
        assert all(p.grad is None for p in model.parameters())
        headroom.unpatch(other)
        assert not any("forward" in vars(module) for module in other.modules())
        assert "forward" in vars(model.norm)
        copied = copy.deepcopy(model.norm)  # a part of a model
        nn.init.zeros_(copied.weight)
        assert not copied(torch.randn(2, models.HIDDEN)).any() and model.norm.weight.any()

    def test_state_dict_goes_both_ways(self):
        model, _ = patched()
        plain = models.llama()
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        plain.load_state_dict(torch.load(file))
        x = models.tokens()
        assert torch.allclose(model(x), plain(x), rtol=1e-5, atol=1e-5)
        model.load_state_dict(models.llama().state_dict(), assign=True)
        assert torch.equal(model(x), copy.deepcopy(model)(x))

    @pytest.mark.parametrize(
        "backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)]
    )
    def test_compiled_without_a_break(self, backend):
        model, x = models.llama(), models.tokens()
        headroom.patch(model, [None, "L5"])
        wanted = models.outputs_and_gradients(model, x)
        torch.compiler.reset()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        got = models.outputs_and_gradients(compiled, x)
        for a, b in zip(got, wanted):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
        headroom.unpatch(model)
        assert torch.allclose(compiled(x), wanted[0], rtol=1e-4, atol=1e-5)

    @pytest.mark.slow
    def test_patched_after_it_was_compiled(self):
        model, x = models.llama(), models.tokens()
        torch.compiler.reset()
        compiled = torch.compile(model, backend="eager")
        wanted = compiled(x)
        report = headroom.patch(compiled, "L5")
        assert len(report.levels) == 2 and len(report.swapped) == 5
        assert torch.allclose(compiled(x), wanted, rtol=1e-4, atol=1e-5)

    def test_moved_to_other_dtypes_and_modes(self):
        model, report = patched()
        x = models.tokens()
        for dtype in (torch.bfloat16, torch.float64, torch.float32):
            for training in (True, False):
                model.to(dtype).train(training)
                own = copy.deepcopy(model)
                headroom.unpatch(own)
                got, wanted = model(x), own(x)
                assert got.dtype == wanted.dtype == dtype
                limit = 16 * torch.finfo(dtype).eps * wanted.abs().max()
                assert (got - wanted).abs().max() <= limit

    def test_nothing_keeps_it_alive(self):
        model, report = patched()
        model(models.tokens()).sum().backward()
        headroom.unpatch(model)
        gone = weakref.ref(model.layers[0].norm_1)
        gc.disable()
        try:
            del model
            assert gone() is None
        finally:
            gc.enable()
        report.undo()  # of a model that is gone
        assert len(report.swapped) == 5

    def test_moved_to_the_meta_device(self):
        model, _ = patched()
        assert model.to("meta")(models.tokens().to("meta")).shape == (2, 9, 40)

    @pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
    def test_autocast(self, autocast):
        model, x = models.llama(), models.tokens()
        exact = models.in_float64(model, x)
        with torch.autocast("cpu", autocast):
            theirs = models.outputs_and_gradients(model, x)
            headroom.patch(model, "L5")
            ours = models.outputs_and_gradients(model, x)
        models.assert_as_good(ours, theirs, exact)

    def test_shared_modules_are_swapped_once(self):
        model = models.llama()
        model.layers[1].norm_1 = model.layers[0].norm_1
        x = models.tokens()
        exact, theirs = models.in_float64(model, x), models.outputs_and_gradients(model, x)
        assert len(headroom.patch(model).swapped) == 4
        models.assert_as_good(models.outputs_and_gradients(model, x), theirs, exact)

    @pytest.mark.slow
    def test_lora_added_later(self):
        peft = pytest.importorskip("peft")
        torch.manual_seed(0)
        model = models.llama()
        other = copy.deepcopy(model)
        headroom.patch(model, "L5")
        config = peft.LoraConfig(
            target_modules=["w1", "w2", "qkv"], modules_to_save=["norm"], init_lora_weights=False
        )
        x, results = models.tokens(), []
        for one in (model, other):
            torch.manual_seed(2)
            results.append(models.outputs_and_gradients(peft.get_peft_model(one, config), x))
        assert len(results[0]) == len(results[1]) > 10
        for a, b in zip(*results):
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-4)
        headroom.unpatch(model)
        assert not any("forward" in vars(module) for module in model.modules())

    @pytest.mark.slow
    def test_distributed_data_parallel(self, ranks):
        ranks(_train_in_ddp)

    @pytest.mark.slow
    def test_fully_sharded(self, ranks):
        ranks(_train_in_fsdp)


def _same_on_every_rank():
    model = models.llama()
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(k)) * 0.3)
    return model


def _train_in_fsdp(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model = _same_on_every_rank()
    alone = copy.deepcopy(model)
    late = copy.deepcopy(model)
    headroom.patch(model, [None, "L5"])
    for one in (model, late):
        for layer in one.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(one, mesh=mesh)
    x = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    report = headroom.patch(late, "L5")
    assert not report.swapped and {left.name for left in report.left} > {"norm", "layers.0.norm_1"}
    alone(x).square().mean().backward()
    for one in (model, late):
        one(x[rank : rank + 1]).square().mean().backward()
        for p, q in zip(one.parameters(), alone.parameters()):
            grad = p.grad.full_tensor()
            limit = 1e-4 * q.grad.abs().max().item()
            assert torch.allclose(grad, q.grad, rtol=1e-4, atol=limit)
        headroom.unpatch(one)
        one(x).sum().backward()


def _train_in_ddp(rank):
    model = _same_on_every_rank()
    alone = copy.deepcopy(model)
    headroom.patch(model, "L5")
    wrapped = nn.parallel.DistributedDataParallel(model)
    x = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    wrapped(x[rank : rank + 1]).square().mean().backward()
    alone(x).square().mean().backward()
    for p, q in zip(model.parameters(), alone.parameters()):
        assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-4 * q.grad.abs().max().item())
    headroom.unpatch(wrapped)
    assert "forward" not in vars(model.norm)
