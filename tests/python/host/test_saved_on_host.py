"""What autograd saves, in the host arena: the same bits, each storage once, and nothing left."""

import copy
import gc

import headroom
import pytest
import torch
from headroom._core.recompute import Dropping
from headroom.host import HostArena, HostMemoryError, default_arena, saved
from headroom.host.engines import engine_of
from headroom.host.saved import saved_on_host, trim
from headroom.host.slabs import Slabs
from headroom.nn.steps import LEVELS
from headroom.techniques.levels import RaisedLevels
from torch import nn

from helpers.dropping import WRITTEN_LATE, Part, WrittenLate, gradients_of, transformer
from helpers.late_engine import Late

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(saved, "MIN_BYTES", 64)
    trim()
    yield
    gc.collect()
    trim()
    assert default_arena().memory() == {}


@pytest.fixture
def late(monkeypatch):
    engine = Late()
    monkeypatch.setattr(saved, "_slabs", Slabs(saved._taken, lambda device: engine))
    yield engine
    gc.collect()
    engine.finish()
    assert engine.errors == []


def parts():
    torch.manual_seed(0)
    return nn.Sequential(*[Part() for _ in range(4)])


def gradients(model, *inputs, times=1, **options):
    torch.manual_seed(3)
    for _ in range(times):
        out = model(*inputs, **options)
        loss = out if out.dim() == 0 else out.square().sum()
        loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted):
        assert torch.equal(one, other)


def copied_down(run):
    engine = engine_of(CPU)
    before = engine.bytes_down
    result = run()
    return engine.bytes_down - before, result


# ---- the same bits ------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("level", LEVELS)
def test_a_transformer_has_the_same_gradients(level, dropout):
    ids = torch.randint(50, (2, 19), generator=torch.Generator().manual_seed(1))
    wanted = gradients(transformer(level, dropout=dropout), ids, labels=ids, times=2)
    size, found = copied_down(
        lambda: gradients(transformer(f"{level}@host", dropout=dropout), ids, labels=ids, times=2)
    )
    assert_same(found, wanted)
    assert size > 0


@pytest.mark.parametrize("level", LEVELS)
def test_copies_that_come_late_change_nothing(level, late):
    ids = torch.randint(50, (2, 19), generator=torch.Generator().manual_seed(1))
    wanted = gradients(transformer(level, dropout=0.2), ids, labels=ids, times=3)
    model = transformer(f"{level}@host", dropout=0.2)
    assert_same(gradients(model, ids, labels=ids, times=3), wanted)
    assert late.bytes_down > late.bytes_up > 0


def test_each_wait_is_needed(monkeypatch):
    """Without one of them gradients change, or memory is used while it is copied."""
    ids = torch.randint(50, (2, 19), generator=torch.Generator().manual_seed(1))

    def run(engine):
        with monkeypatch.context() as patched:
            patched.setattr(saved, "_slabs", Slabs(saved._taken, lambda device: engine))
            model = transformer("L3@host")
            first = model(ids, labels=ids)  # is fetched and not used when the second goes back
            found = gradients(model, ids, labels=ids, times=2)
            first.backward()
            engine.finish()
        return found

    engine = Late()
    wanted = run(engine)
    assert len(engine.waits) == 3 and not engine.errors
    for line in engine.waits:
        broken = Late(line)
        same = all(map(torch.equal, run(broken), wanted))
        assert broken.errors or not same, line


@pytest.mark.parametrize("level", ["L0", "L5"])
def test_blocks_of_any_class(level):
    x = torch.randn(5, 8)
    wanted = gradients(parts(), x, times=2)
    model = parts()
    report = headroom.patch(model, save=f"{level}@host", norms=False)
    assert report.levels == {**{str(k): f"{level}@host" for k in range(3)}, "3": level}
    size, found = copied_down(lambda: gradients(model, x, times=2))
    assert_same(found, wanted)
    # At L5 the inputs of three blocks; the first requires no gradient, and stays.
    assert size == 2 * 2 * x.nbytes if level == "L5" else size > 6 * x.nbytes
    headroom.unpatch(model)
    assert copied_down(lambda: gradients(model, x))[0] == 0


@pytest.mark.parametrize("level", ["L0", "L2", "L5"])
def test_layers_of_transformers(level):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    models = [transformers.LlamaForCausalLM(config) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ids = torch.randint(50, (2, 19), generator=torch.Generator().manual_seed(1))
    headroom.patch(models[0], save=level)
    headroom.patch(models[1], save=f"{level}@host")
    results = []
    for model in models:
        model.train()
        model(ids, labels=ids).loss.backward()
        results.append([p.grad for p in model.parameters()])
    assert_same(*results)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("verify", [False, True])
def test_a_checkpoint_holds_its_input_on_the_host(use_reentrant, verify):
    model, x = parts(), torch.randn(5, 8, requires_grad=True)
    options = {"use_reentrant": use_reentrant, "verify": verify}

    def run(**more):
        torch.manual_seed(3)
        y = x.exp()
        out = headroom.checkpoint(model, y, **options, **more)
        del y
        x.grad = None
        out.square().sum().backward()
        return [x.grad]

    size, found = copied_down(lambda: run(host=True))
    assert_same(found, run())
    assert size == x.nbytes


def test_checkpoint_every_leaves_the_last_block_alone():
    x = torch.randn(5, 8)
    wanted = gradients(parts(), x)
    model = parts()
    headroom.checkpointing.checkpoint_every(model, host=True)
    size, found = copied_down(lambda: gradients(model, x))
    assert_same(found, wanted)
    assert size == 2 * x.nbytes  # the input of the model requires no gradient


def test_autocast_weights_stay():
    model = parts()
    x = torch.randn(40, 8)

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            return gradients(model, x)

    wanted = run()
    model.zero_grad()
    headroom.patch(model, save="L0@host", norms=False)
    size, found = copied_down(run)
    assert_same(found, wanted)
    hidden = torch.randn(40, 20, requires_grad=True).exp()
    with saved_on_host(), torch.autocast("cpu", torch.bfloat16):
        size, _ = copied_down(lambda: model[0].second(hidden))
    assert size == 40 * 20 * 2  # its input, and not its weight


# ---- what leaves, and how often -----------------------------------------------------------------


def test_views_of_a_storage_leave_and_come_back_once():
    x = torch.randn(6, 30, requires_grad=True)
    engine = engine_of(CPU)
    with saved_on_host():
        y = x.exp()
        a, b, c = y.split(10, dim=1)
        out = (a * b).sum() + (b.t() * c.t()).sum()
    before = engine.bytes_down, engine.bytes_up
    del y, a, b, c
    (found,) = torch.autograd.grad(out, x)
    assert engine.bytes_down == before[0]
    assert engine.bytes_up - before[1] == x.nbytes
    y = x.exp()
    a, b, c = y.split(10, dim=1)
    (wanted,) = torch.autograd.grad((a * b).sum() + (b.t() * c.t()).sum(), x)
    assert torch.equal(found, wanted)


def test_what_was_saved_last_comes_back_first(late, monkeypatch):
    """What is wanted first arrives first, and memory is taken in the same order in each run."""
    copies = {"down": [], "up": []}

    def heard(run, sizes):
        def copy(target, source, after):
            sizes.append(source.numel())
            return run(target, source, after=after)

        return copy

    monkeypatch.setattr(late, "down", heard(late.down, copies["down"]))
    monkeypatch.setattr(late, "up", heard(late.up, copies["up"]))
    total = 0.0
    for block in range(3):
        with saved_on_host():
            for number in range(9):
                x = torch.randn(20 + 9 * block + number, requires_grad=True)
                total = total + x.exp().sum()
    total.backward()
    assert len(set(copies["down"])) == 27
    assert copies["up"] == copies["down"][::-1][18:]  # of the last two nothing has left


def test_strides_and_offsets_come_back():
    x = torch.randn(7, 9, 4, requires_grad=True)
    seen = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            ctx.save_for_backward(t)
            return t * 2

        @staticmethod
        def backward(ctx, grad):
            (t,) = ctx.saved_tensors
            seen.append((t.size(), t.stride(), t.storage_offset(), t.clone()))
            return grad * 2

    with saved_on_host():
        t = x.exp().transpose(0, 2)[1:, ::3]
        out = Seen.apply(t)
    kept = t.detach().clone()
    size, stride, offset = t.size(), t.stride(), t.storage_offset()
    del t
    out.sum().backward()
    ((found_size, found_stride, found_offset, value),) = seen
    assert (found_size, found_stride, found_offset) == (size, stride, offset)
    assert torch.equal(value, kept)


def test_parameters_small_tensors_and_those_that_shall_stay_do():
    weight = nn.Parameter(torch.randn(40, 40))
    x, mask = torch.randn(40, 40), torch.rand(40, 40)
    with saved_on_host(stay=(mask,)):
        size, out = copied_down(lambda: (x @ weight.t()) * mask)
    assert size == x.nbytes
    out.sum().backward()
    assert torch.equal(weight.grad, mask.t() @ x)
    y = torch.randn(3, requires_grad=True)
    with saved_on_host():
        assert copied_down(lambda: y.exp())[0] == 0


@pytest.mark.parametrize("view", [torch.conj, lambda x: torch.conj(x).imag], ids=["conj", "neg"])
def test_views_that_conjugate_or_negate_stay(view):
    x = torch.randn(20, 20, dtype=torch.complex64, requires_grad=True)

    def found():
        return torch.autograd.grad(view(x.exp()).square().abs().sum(), x)

    wanted = found()
    with saved_on_host():
        assert_same(found(), wanted)


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_nested_tensors_stay():
    rows = [torch.randn(n, 30) for n in (3, 5)]
    x = torch.nested.nested_tensor(rows, requires_grad=True)
    with saved_on_host():
        y = x * torch.nested.nested_tensor(rows)
    torch.nested.to_padded_tensor(y, 0.0).sum().backward()
    assert all(map(torch.equal, x.grad.unbind(), rows))


def test_the_memory_is_used_again_and_given_back():
    x = torch.randn(100, 100, requires_grad=True)
    for _ in range(3):
        with saved_on_host():
            out = x.exp().sin().cos().sum()
        assert default_arena().bytes == 2 * x.nbytes
        out.backward()
    assert default_arena().bytes == 2 * x.nbytes
    del out
    trim()
    assert default_arena().bytes == 0


def test_sizes_that_change_do_not_add_up():
    most = 0
    for rows in range(100, 130):
        x = torch.randn(rows, 100, requires_grad=True)
        with saved_on_host():
            x.exp().sum().backward()
        most = max(most, x.nbytes)
        assert default_arena().bytes <= most


def test_a_size_that_is_new_takes_the_place_of_as_many_bytes():
    slabs = Slabs(lambda size, device: torch.empty(size, dtype=torch.uint8), engine_of)
    stays, *goes = [slabs.take(size, CPU) for size in (50, 100, 100)]
    for slab in (stays, *goes):
        slabs.give(slab, CPU)
    slabs.take(200, CPU)
    assert slabs.take(50, CPU) is stays
    assert slabs.take(100, CPU) is not goes[0]


def test_an_arena_without_room_refuses_and_keeps_nothing(monkeypatch):
    arena = HostArena("10 KiB")
    take = lambda size, device: arena.take(size, kind="activations", owner="blocks")  # noqa: E731
    monkeypatch.setattr(saved, "_slabs", Slabs(take, engine_of))
    x = torch.randn(40, 40, requires_grad=True)
    with pytest.raises(HostMemoryError, match="budget of the arena"), saved_on_host():
        x.exp().sin().cos()
    gc.collect()
    saved._slabs.trim()
    assert arena.bytes == 0
    with saved_on_host():
        x.exp().sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


# ---- graphs -------------------------------------------------------------------------------------


def test_a_graph_that_is_kept_can_be_used_again(late):
    x = torch.randn(20, 20, requires_grad=True)
    for _ in range(2):
        with saved_on_host():
            y = (x.exp() * x.sin()).cos()
        wanted = torch.autograd.grad((x.exp() * x.sin()).cos().sum(), x)
        for _ in range(3):
            assert_same(torch.autograd.grad(y.sum(), x, retain_graph=True), wanted)
        del y


def test_gradients_of_gradients():
    x = torch.randn(20, 20, requires_grad=True)

    def twice(context):
        with context():
            y = x.exp().sin().sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)

    assert_same(twice(saved_on_host), twice(torch.enable_grad))


def test_two_graphs_at_once(late):
    model = transformer("L2@host")
    first, second = (torch.randint(50, (2, n)) for n in (19, 23))
    plain = transformer("L2")
    for one in (model, plain):
        losses = [one(ids, labels=ids) for ids in (first, second)]
        losses[0].backward()
        losses[1].backward()
        (one(first, labels=first) + one(second, labels=second)).backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_a_forward_that_raises_leaves_nothing():
    class Breaks(Part):
        def forward(self, x):
            return super().forward(x) / (1 // self.divisor)

    model = nn.Sequential(Breaks(), Breaks(), Breaks())
    for k, part in enumerate(model):
        part.divisor = 1 - k  # of the second, 0
    headroom.patch(model, save="L0@host", norms=False)
    with pytest.raises(ZeroDivisionError):
        model(torch.randn(5, 8))
    gc.collect()
    trim()
    assert default_arena().bytes == 0


def test_nothing_leaves_without_gradients_or_within_a_checkpoint():
    model = transformer("L1@host")
    ids = torch.randint(50, (2, 19))
    with torch.no_grad():
        assert copied_down(lambda: model(ids))[0] == 0
    plain = transformer("L1")
    size, found = copied_down(
        lambda: torch.utils.checkpoint.checkpoint(model, ids, use_reentrant=False).sum()
    )
    found.backward()
    assert size == 0
    plain(ids).sum().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_a_tensor_that_is_changed_behind_the_copy_is_saved_as_it_was():
    x = torch.randn(20, 20, requires_grad=True)
    with saved_on_host():
        y = x.exp()
        out = y * y.detach().clone()
    (wanted,) = torch.autograd.grad((x.exp() * x.exp().detach()).sum(), x)
    y.detach().zero_()
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], wanted)


def test_a_tensor_that_is_changed_before_the_copy_ends_raises(late):
    x = torch.randn(20, 20, requires_grad=True)
    with saved_on_host():
        y = x.exp()
        out = y.sin()
    y.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    late.finish()
    assert late.errors.pop() == "the source was written before it had been copied"


def on_host(layer, x):
    with saved_on_host():
        return layer(x)


def dropped_on_host(layer, x):
    with saved_on_host(), Dropping() as dropping:
        return dropping.run(layer.second, layer.function(layer.first(x)), random=True)


@pytest.mark.parametrize("run", [on_host, dropped_on_host])
@pytest.mark.parametrize("name", WRITTEN_LATE)
@pytest.mark.parametrize("comes_late", [False, True])
def test_what_an_operation_writes_after_it_saved_it(comes_late, name, run, request):
    if comes_late:
        request.getfixturevalue("late")
    layer = WrittenLate(name, "middle")
    wanted = gradients_of(lambda layer, x: layer(x), copy.deepcopy(layer))
    assert_same(gradients_of(run, layer), wanted)


def test_a_mask_is_copied_once():
    x, mask = torch.randn(20, 20, requires_grad=True), torch.ones(20, 20)
    assert copied_down(lambda: on_host(lambda x: x * mask, x))[0] == mask.nbytes


def test_a_storage_that_was_written_leaves_again():
    x = torch.randn(20, 20, requires_grad=True)
    with saved_on_host():
        y = torch.empty(20, 20)
        a = x * y.fill_(2.0)
        b = x * y.fill_(3.0)
    (a + b).sum().backward()
    assert torch.equal(x.grad, torch.full((20, 20), 5.0))


def test_hooks_that_were_there_before_get_what_stays():
    packed = []
    x = torch.randn(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        with saved_on_host():
            x.exp().sum().backward()
    assert len(packed) == 1 and torch.equal(x.grad, x.detach().exp())


def test_copies_and_files_of_models_know_the_level(tmp_path):
    model = transformer("L2@host")
    assert copy.deepcopy(model).save == model.save == ["L2@host"] * 3 + ["L2"]
    torch.save(model, tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt", weights_only=False).save == model.save


# ---- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", ["host", "@host", "L2@gpu", "L6@host", "L2@host@host"])
def test_levels_that_do_not_exist(save):
    with pytest.raises(ValueError, match="or one of these with '@host' behind it"):
        transformer(save)


@pytest.mark.parametrize("level", ["L0", "L3"])
def test_torch_compile_traces_no_such_level(level):
    ids = torch.randint(50, (2, 19))
    compiled = torch.compile(transformer(f"{level}@host"), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="a level without '@host', or 'L5@host'"):
        compiled(ids, labels=ids)


@pytest.mark.slow
def test_torch_compile_takes_the_last_level_as_its_own_checkpoint():
    ids = torch.randint(50, (2, 19))
    model = transformer("L5@host")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    size, found = copied_down(lambda: gradients(compiled, ids, labels=ids))
    assert size == 0
    for one, other in zip(found, gradients(transformer("L5"), ids, labels=ids)):
        torch.testing.assert_close(one, other)


# ---- plans --------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["L0", "L2", "L4", "L5"])
def test_a_plan_knows_both_peaks_and_the_bytes_that_are_copied(level):
    ids = torch.randint(50, (3, 37))
    model = transformer(f"{level}@host")

    def forward(model, batch):
        return model(batch, labels=batch)

    plan = headroom.plan(model, None, ids, forward=forward)
    loaded = type(plan).from_json(plan.to_json())
    for found in (plan, loaded):
        assert found.host_peak_bytes == plan.host_peak_bytes > 0
        assert found.link_bytes == plan.link_bytes > 0
    engine, arena = engine_of(CPU), default_arena()
    arena.peak = arena.bytes
    with headroom.memory.track(model) as tracked:
        for _ in range(2):
            before = engine.bytes_down + engine.bytes_up
            forward(model, ids).backward()
            model.zero_grad()
    assert tracked.timeline.peak_bytes == plan.peak_bytes
    assert arena.peak == plan.host_peak_bytes
    assert engine.bytes_down + engine.bytes_up - before == plan.link_bytes
    assert "on the host" in str(plan) and "copied per step" in str(plan)
    stays = headroom.plan(transformer(level), None, ids, forward=forward)
    assert stays.host_peak_bytes == stays.link_bytes == 0
    assert "on the host" not in str(stays)
    assert plan.peak_bytes < stays.peak_bytes or level == "L5"
    assert default_arena().bytes == plan.host_peak_bytes  # a plan takes nothing


def test_a_plan_for_cuda_holds_what_is_still_being_copied():
    ids = torch.randint(50, (3, 37))

    def forward(model, batch):
        return model(batch, labels=batch)

    peaks = {
        save: headroom.plan(transformer(save), None, ids, forward=forward, device="cuda")
        for save in ("L0", "L0@host")
    }
    there, away = peaks["L0"], peaks["L0@host"]
    assert away.peak_bytes < there.peak_bytes
    assert 0 < away.link_bytes < 2 * away.host_peak_bytes  # the last two blocks need not come back


@pytest.mark.slow
def test_advice_stays_on_the_host_or_proposes_it():
    ids = torch.randint(50, (3, 37))
    names = {}
    for save in ("L1", "L1@host"):
        plan = headroom.plan(
            transformer(save), None, ids, forward=lambda model, x: model(x, labels=x)
        )
        names[save] = {advice.name: advice for advice in plan.advice()}
    proposed = names["L1"]["save='L1@host' in all blocks"]
    assert proposed.plan.host_peak_bytes > 0 and proposed.bytes > 0
    assert 'model.blocks[-1].save = "L1"' in proposed.code
    assert "save='L2@host' in all blocks" in names["L1@host"]
    assert not any("L2'" in name for name in names["L1@host"])


def test_fit_takes_a_model_whose_blocks_are_on_the_host():
    ids = torch.randint(50, (3, 37))
    model = transformer("L1@host")
    fitted = headroom.fit(
        model, ids, budget="64 MiB", forward=lambda model, x: model(x, labels=x), dry_run=True
    )
    assert len(fitted.choice.levels) == 4 and set(fitted.choice.levels) <= set(LEVELS)


# ---- beside others ------------------------------------------------------------------------------


@pytest.mark.parametrize("release", [False, True])
def test_beside_states_on_the_host(release):
    ids = torch.randint(50, (2, 19), generator=torch.Generator().manual_seed(1))

    def trained(save, offload):
        model = transformer(save, dropout=0.1)
        optimizer = headroom.optim.AdamW8bit(
            model.parameters(), lr=1e-2, min_8bit_size=64, offload=offload
        )
        if release:
            headroom.release_gradients(model, optimizer)
        torch.manual_seed(5)
        for _ in range(3):
            model(ids, labels=ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    assert_same(trained("L2@host", "state"), trained("L2", None))


def test_levels_that_retry_raises_stay_on_the_host():
    model = transformer("L1@host")
    levels = RaisedLevels(model)
    assert "L2@host" in levels.reduce_memory()
    assert model.save == ["L2@host"] * 3 + ["L2"]
    levels.give_up()
    assert model.save == ["L1@host"] * 3 + ["L1"]
