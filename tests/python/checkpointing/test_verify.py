"""``verify=True``: values that a checkpoint recomputes otherwise than they were."""

from __future__ import annotations

import copy
import functools
import threading
import weakref

import headroom
import pytest
import torch
from headroom.checkpointing import RecomputeError
from headroom.host.checksums import BLOCK_BYTES, checksums, first_difference
from torch import nn


class Counter(nn.Module):
    """Multiplies by a number that grows with every call, as caches and counters do."""

    def __init__(self, grows: float) -> None:
        super().__init__()
        self.factor, self.grows = 1.0, grows

    def forward(self, x):
        self.factor += self.grows
        return x * self.factor


class Called(nn.Module):
    """Calls the forward of another module, without its hooks, and returns its first result."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        result = self.inner.forward(x)
        return result[0] if isinstance(result, tuple) else result


class Turns(nn.Module):
    """Saves tensors that are conjugate in name, not in memory, and negative ones."""

    def forward(self, x):
        z = torch.complex(x, x.square())
        return (z.conj() * z.mH.mT).real.exp() + z.conj().imag.exp()


class Scales(nn.BatchNorm1d):
    """Multiplies by a running statistic that it moves."""

    def forward(self, x):
        super().forward(x)
        return x.exp() * self.running_var


class Moves(nn.BatchNorm1d):
    """Has other running statistics each time, by which it divides in ``eval()``."""

    def forward(self, x):
        self.running_var = self.running_var * 2
        return super().forward(x)


class Shuffles(nn.Module):
    """Takes rows in another order each time."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return x[torch.arange(len(x)).roll(self.calls)].exp()


class MaskedBatchNorm(torch.autograd.Function):
    """Has the name of an operation of torch's, and a mask in bytes, which its gradient uses."""

    @staticmethod
    def forward(ctx, x, mask):
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


class Masks(nn.Module):
    """Leaves out other columns each time."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        mask = torch.arange(x.shape[1]) % (self.calls + 1) == 0
        return MaskedBatchNorm.apply(x, mask.to(torch.uint8))


def block(middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 700), middle, nn.GELU(), nn.Linear(700, 8))


def train(module, reentrant=False, **options):
    torch.manual_seed(1)
    x = torch.randn(5, 8, requires_grad=True)
    headroom.checkpoint(module, x, use_reentrant=reentrant, verify=True, **options).sum().backward()
    return x.grad


@pytest.mark.parametrize("reentrant", [False, True])
class TestBoth:
    def test_what_repeats_itself_passes_and_has_the_gradients_of_no_checkpoint(self, reentrant):
        module = block(nn.Dropout(0.5))
        got = train(module, reentrant)
        torch.manual_seed(1)
        x = torch.randn(5, 8, requires_grad=True)
        module(x).sum().backward()
        assert torch.equal(got, x.grad)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: block(nn.BatchNorm1d(700)),
            lambda: block(nn.BatchNorm1d(700)).eval(),
            lambda: block(Called(nn.BatchNorm1d(700))),
            lambda: nn.BatchNorm1d(8),
            lambda: nn.InstanceNorm1d(5, track_running_stats=True),
            lambda: Called(nn.GRU(8, 24)),
            lambda: Called(nn.LSTM(8, 24)),
            lambda: Turns(),
        ],
    )
    def test_what_gradients_do_not_depend_on_is_not_compared(self, reentrant, make):
        """Such as running statistics that both runs move."""
        torch.manual_seed(0)
        module = make()
        plain = copy.deepcopy(module)
        got = train(module, reentrant)
        torch.manual_seed(1)
        x = torch.randn(5, 8, requires_grad=True)
        plain(x).sum().backward()
        assert torch.equal(got, x.grad)

    def test_dropout_whose_generator_is_not_restored_is_caught(self, reentrant):
        first = "result 0" if reentrant else "saved tensor 2, of 1,"  # its mask, not what follows
        with pytest.raises(RecomputeError, match=f"{first} .*preserve_rng_state=True"):
            train(block(nn.Dropout(0.5)), reentrant, preserve_rng_state=False)

    def test_torch_itself_is_silent_about_it(self, reentrant):
        x = torch.randn(5, 8, requires_grad=True)
        module = block(nn.Dropout(0.5))
        torch.utils.checkpoint.checkpoint(
            module, x, use_reentrant=reentrant, preserve_rng_state=False
        ).sum().backward()

    def test_hidden_state_is_caught(self, reentrant):
        assert train(block(Counter(0.0)), reentrant) is not None
        with pytest.raises(RecomputeError, match="other values"):
            train(block(Counter(0.5)), reentrant)


def test_workspaces_are_not_compared():
    """Of which oneDNN does not write all bytes."""
    torch.manual_seed(0)
    module = Called(nn.LSTM(8, 24, num_layers=2, bidirectional=True))
    for seed in range(3):
        torch.full((1 << 20,), seed, dtype=torch.uint8)  # freed, for the workspaces to come
        assert train(module) is not None


def test_what_a_function_in_python_saves_is_compared():
    with pytest.raises(RecomputeError, match=r"saved tensor 0, .*uint8"):
        train(Masks())


@pytest.mark.parametrize("middle", [Scales(700), Shuffles()])
def test_what_gradients_depend_on_is_compared(middle):
    with pytest.raises(RecomputeError, match="other values"):
        train(block(middle))


def test_statistics_that_are_divided_by_are_compared():
    with pytest.raises(RecomputeError, match=r"float32 \[8\].*other values"):
        train(Moves(8).eval())


def test_the_error_names_module_tensor_and_elements():
    with pytest.raises(
        RecomputeError,
        match=r"saved tensor 2, of 2, \(float32 \[5, 700\]\) .* elements 0 to 2047",
    ):
        train(block(Counter(0.5)))


@pytest.mark.parametrize("way", ["method", "partial", "partial of a method", "call", "every"])
def test_the_error_names_modules_as_the_region_does(way):
    module = block(Counter(0.5))
    x = torch.randn(5, 8, requires_grad=True)
    with pytest.raises(RecomputeError, match="of 2,"):
        if way == "every":
            model = nn.Sequential(module, block(nn.Identity()))
            headroom.checkpoint_every(model, n=2, verify=True)
            model(x).sum().backward()
        else:
            regions = {
                "method": module.forward,
                "partial": functools.partial(module),
                "partial of a method": functools.partial(type(module).forward, module),
                "call": functools.partial(type(module).forward, module, x),
            }
            given = () if way == "call" else (x,)
            headroom.checkpoint(regions[way], *given, verify=True).sum().backward()


class Outer(nn.Module):
    """Saves what has changed after an inner module, and while one runs in another thread."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter(0.5)

    def forward(self, x):
        x = self.counter(x)
        running, ends = threading.Event(), threading.Event()

        class Waits(nn.Module):
            def forward(self):
                running.set()
                ends.wait(10)

        other = threading.Thread(target=Waits())
        other.start()
        running.wait(10)
        x = x.exp()
        ends.set()
        other.join()
        return x


def test_the_error_names_the_module_that_runs_in_this_thread():
    with pytest.raises(RecomputeError, match="of Outer,"):
        train(Outer())


class Late(nn.Module):
    """Changes one element, far from the first, the second time."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.calls = index, 0

    def forward(self, x):
        self.calls += 1
        bump = torch.zeros_like(x)
        bump.view(-1)[self.index] = float(self.calls)
        return (x + bump).exp()


@pytest.mark.parametrize("index", [0, 2047, 2048, 3499])
def test_one_changed_element_is_found(index):
    block_of_it = index // 2048 * 2048
    with pytest.raises(RecomputeError, match=f"elements {block_of_it} to "):
        train(block(Late(index)))


def test_another_shape_or_dtype_is_named():
    calls = []

    def grows(x):
        calls.append(None)
        return torch.cat([x] * len(calls)).exp()

    x = torch.randn(3, requires_grad=True)
    y = headroom.checkpoint(grows, x, verify=True, determinism_check="none")
    with pytest.raises(RecomputeError, match=r"float32 \[3\].* recomputed as float32 \[6\]"):
        y.sum().backward()


class Experts(nn.Module):
    """Takes another expert each time."""

    def __init__(self, trained: bool, same: bool = False) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(700, 700) for _ in range(3))
        self.experts.requires_grad_(trained)
        self.calls = 0
        if same:
            for expert in self.experts:
                expert.load_state_dict(self.experts[0].state_dict())

    def forward(self, x):
        self.calls += 1
        return self.experts[self.calls % 3](x)


class TestLeaves:
    """Parameters and inputs that require grad are in memory, and are not read."""

    @pytest.mark.parametrize("trained", [False, True])
    def test_another_expert_is_caught(self, trained):
        with pytest.raises(RecomputeError, match=r"of 1\.experts\.1.*other values"):
            train(block(Experts(trained)))

    def test_an_equal_expert_is_none(self):
        assert train(block(Experts(True, same=True))) is not None

    @pytest.mark.parametrize("trained", [False, True])
    def test_a_weight_that_is_written_between_the_passes_is_caught(self, trained):
        """As without a checkpoint, where torch raises."""
        module = block(nn.Identity())
        module[3].requires_grad_(trained)
        x = torch.randn(5, 8, requires_grad=True)
        y = headroom.checkpoint(module, x, verify=True)
        with torch.no_grad():
            module[3].weight.mul_(2)
        with pytest.raises(RecomputeError, match="written between .* version 2, wanted version 1"):
            y.sum().backward()

    def test_another_function_of_a_leaf_is_caught(self):
        calls = []

        def changes(x):
            calls.append(None)
            return x.square() if len(calls) == 1 else x.exp()

        x = torch.randn(5, requires_grad=True)
        y = headroom.checkpoint(changes, x, verify=True)
        with pytest.raises(RecomputeError, match="saved tensor 0, of the function itself"):
            y.sum().backward()

    def test_another_view_of_a_leaf_is_caught(self):
        turned = []

        def turns(x):
            turned.append(None)
            w = x if len(turned) == 1 else x.t()
            return w.square()

        x = torch.randn(5, 5, requires_grad=True)
        y = headroom.checkpoint(turns, x, verify=True)
        with pytest.raises(RecomputeError, match="with strides"):
            y.sum().backward()

    def test_weights_in_other_memory_with_the_same_values_pass(self):
        """As those that are gathered again for the backward pass (``param.data = whole``)."""
        module, kept = block(nn.Identity()), block(nn.Identity())
        x = torch.randn(5, 8, requires_grad=True)
        y = headroom.checkpoint(module, x, verify=True)
        for param in module.parameters():
            param.data = param.data.clone()
        y.sum().backward()
        want = torch.autograd.grad(kept(x).sum(), x)[0]
        assert torch.equal(x.grad, want)

    def test_a_parameter_that_the_function_makes_is_freed_in_between(self):
        """As a frozen one that is unpacked for each call."""
        weights = []

        def makes(x):
            w = nn.Parameter(torch.full((5,), 3.0), requires_grad=False)
            weights.append(weakref.ref(w))
            return (x * w).sin()

        x = torch.randn(5, requires_grad=True)
        y = headroom.checkpoint(makes, x, verify=True)
        assert weights[0]() is None
        y.sum().backward()
        torch.testing.assert_close(x.grad, 3 * torch.cos(3 * x.detach()))

    def test_released_gradients(self):
        """Parameters are stepped in the backward pass, after their block has run again."""
        models = [nn.Sequential(block(nn.Dropout(0.1)), block(nn.Identity())) for _ in range(2)]
        for model, verify in zip(models, (False, True)):
            optimizer = headroom.optim.AdamW(model.parameters(), lr=0.1)
            headroom.release_gradients(model, optimizer, bucket_bytes=0)
            headroom.checkpoint_every(model, verify=verify)
            for step in range(3):
                torch.manual_seed(step)
                model(torch.randn(5, 8)).square().sum().backward()
                optimizer.step()
        for a, b in zip(models[0].parameters(), models[1].parameters()):
            assert torch.equal(a, b)


def test_what_is_turned_is_compared_by_its_order():
    """A square tensor and its transpose are the same memory."""
    turned = []

    def turns(x):
        turned.append(None)
        y = x + 1
        return (y if len(turned) == 1 else y.t()).square()

    x = torch.randn(5, 5, requires_grad=True)
    with pytest.raises(RecomputeError, match="with strides"):
        headroom.checkpoint(turns, x, verify=True).sum().backward()


def test_strides_of_dimensions_with_one_element_do_not_count():
    strides = iter([(1, 1), (1, 9)])

    def strided(x):
        return (x + 1).as_strided((5, 1), next(strides)).square()

    x = torch.randn(5, 1, requires_grad=True)
    headroom.checkpoint(strided, x, verify=True).sum().backward()
    assert torch.equal(x.grad, 2 * (x.detach() + 1))


@pytest.mark.parametrize("rows", [2, 64, 700])
@pytest.mark.parametrize("change", [torch.neg, torch.conj])
def test_flipped_signs_are_caught(change, rows):
    """Of 64-bit words, of which an even number may add up to nothing."""
    calls = []

    def flips(x):
        calls.append(None)
        y = torch.complex(x, x + 1) if change is torch.conj else x + 0
        y = y if len(calls) == 1 else change(y)
        return (y * y * y).abs()

    x = torch.randn(rows, 64, dtype=torch.float64, requires_grad=True)
    y = headroom.checkpoint(flips, x, verify=True)
    with pytest.raises(RecomputeError, match="other values"):
        y.sum().backward()


def test_another_dtype_of_one_width_is_named():
    """Whose bytes could be the same."""
    dtypes = iter([torch.float16, torch.bfloat16])

    def casts(x):
        return torch.zeros(3, dtype=next(dtypes)).exp() * x

    x = torch.randn(3, requires_grad=True)
    y = headroom.checkpoint(casts, x, verify=True, determinism_check="none")
    with pytest.raises(RecomputeError, match=r"float16 \[3\].* recomputed as bfloat16 \[3\]"):
        y.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_decorated_function_is_verified(reentrant):
    decorated = headroom.checkpoint(verify=True, use_reentrant=reentrant)(block(Counter(0.5)))
    with pytest.raises(RecomputeError):
        decorated(torch.randn(5, 8, requires_grad=True)).sum().backward()


def test_a_view_of_what_needs_no_gradient_has_none():
    """As without ``verify``: a reentrant checkpoint looks at its inputs alone."""
    linear = nn.Linear(3, 2)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        y = headroom.checkpoint(
            lambda x: linear(x).t(), torch.ones(5, 3), use_reentrant=True, verify=True
        )
    assert not y.requires_grad


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_are_not_read(monkeypatch, frozen):
    from headroom.checkpointing import verify

    seen = []
    monkeypatch.setattr(verify, "checksums", lambda x: seen.append(x.shape) or None)
    module = block(nn.Identity())
    module[3].requires_grad_(not frozen)
    train(module)
    assert seen and all(700 * 8 != shape.numel() for shape in seen)


def test_nested_checkpoints_and_a_retained_graph():
    inner = block(nn.Dropout(0.1))

    def nested(x):
        return headroom.checkpoint(inner, x, verify=True) * 2

    x = torch.randn(5, 8, requires_grad=True)
    y = headroom.checkpoint(nested, x, verify=True).sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    assert torch.equal(x.grad, 2 * first)


def test_user_contexts_are_entered_and_no_hook_stays():
    from contextlib import contextmanager

    entered = []

    @contextmanager
    def noted(name):
        entered.append(name)
        yield

    hooks = nn.modules.module._global_forward_pre_hooks
    before = len(hooks)
    train(block(nn.Identity()), context_fn=lambda: (noted("first"), noted("second")))
    assert entered == ["first", "second"]
    assert len(hooks) == before
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_an_exception_in_the_function_leaves_no_hook():
    def fails(x):
        raise ValueError("mine")

    before = len(nn.modules.module._global_forward_pre_hooks)
    with pytest.raises(ValueError, match="mine"):
        headroom.checkpoint(fails, torch.ones(2, requires_grad=True), verify=True)
    assert len(nn.modules.module._global_forward_pre_hooks) == before
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_under_no_grad_nothing_is_checked():
    with torch.no_grad():
        assert headroom.checkpoint(block(Counter(1.0)), torch.ones(5, 8), verify=True) is not None


class TestChecksums:
    @pytest.mark.parametrize(
        "dtype",
        [
            torch.float64,
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.int64,
            torch.uint8,
            torch.bool,
            torch.complex64,
        ],
    )
    @pytest.mark.parametrize("numel", [0, 1, 3, 5000, 8192, 8195])
    def test_every_bit_counts(self, dtype, numel):
        raw = torch.randint(0, 2, (numel,)).to(dtype)
        was = checksums(raw)
        blocks = -(-numel * raw.element_size() // BLOCK_BYTES)
        assert was is not None and was.shape == (blocks,) and was.dtype == torch.int64
        for index in {0, numel // 2, numel - 1} if numel else ():
            changed = raw.clone()
            changed[index] = int(raw[index].real == 0)
            now = checksums(changed)
            assert now is not None
            assert first_difference(was, now) == index * raw.element_size() // BLOCK_BYTES
        again = checksums(raw.clone())
        assert again is not None and first_difference(was, again) is None

    def test_views_are_read_in_the_order_of_memory_and_expanded_ones_once(self):
        x = torch.randn(33, 70)
        for view in (x.t(), x[:, ::2], x[3:], x[:, :1].expand(33, 1000), x[:0], x[0, 0]):
            same = view.clone(memory_format=torch.preserve_format)
            one, two = checksums(view), checksums(same)
            assert one is not None and two is not None
            if view.stride() == same.stride():
                assert torch.equal(one, two)
        expanded = checksums(x[:, :1].expand(33, 100000))
        assert torch.equal(expanded, checksums(x[:, 0].clone()))
        blocks = torch.randn(5, 12, 34)
        for other in (blocks.mT, blocks.permute(2, 0, 1), blocks[:1].permute(1, 0, 2)):
            whole = blocks[:1] if other.numel() < blocks.numel() else blocks
            assert torch.equal(checksums(other), checksums(whole))
        for odd in (x.view(-1)[1:3], x.view(-1)[:3], x.bool().view(-1)[3:11]):
            assert torch.equal(checksums(odd), checksums(odd))  # wherever it begins and ends

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
    def test_words_of_every_width_have_wide_sums(self, dtype):
        """Of 1000 rows that are no multiple of 8 bytes, no two have the same sum."""
        info = torch.iinfo(dtype)
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(info.min, info.max, (1000, 101), dtype=dtype, generator=generator)
        sums = [checksums(row) for row in rows]
        assert len({tuple(found.tolist()) for found in sums if found is not None}) == 1000

    @pytest.mark.parametrize("shape", [(3,), (40, 48), (64, 100, 3)])
    def test_the_order_counts(self, shape):
        x = torch.arange(torch.Size(shape).numel()).view(shape)
        for other in (x.roll(1, 0), x.flip(0), x[torch.arange(shape[0]) ^ (shape[0] > 3)]):
            one, two = checksums(x), checksums(other.contiguous())
            assert one is not None and two is not None
            assert torch.equal(x, other) == torch.equal(one, two)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex128])
    @pytest.mark.parametrize("shape", [(2,), (8, 8), (1024,), (37, 1024)])
    def test_an_even_number_of_flipped_signs_counts(self, dtype, shape):
        x = torch.randn(shape, dtype=dtype)
        pairs = torch.cat([x, -x], -1)  # which negation only brings into another order
        for one, other in ((x, -x), (x, x.conj()), (pairs, -pairs), (x, x * 2)):
            was, now = checksums(one), checksums(other)
            assert was is not None and now is not None
            assert torch.equal(one, other) == torch.equal(was, now)
            assert torch.equal(one, other) or bool((was != now).all())

    def test_not_a_number_equals_itself(self):
        x = torch.full((9,), float("nan"))
        one, two = checksums(x), checksums(x.clone())
        assert one is not None and two is not None and first_difference(one, two) is None

    def test_what_has_no_bytes_has_no_checksum(self):
        assert checksums(torch.empty(3, device="meta")) is None
        assert checksums(torch.eye(3).to_sparse()) is None
