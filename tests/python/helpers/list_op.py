"""What is asked of every element-wise op on lists of tensors. The test of an op subclasses
ListOpSuite and says how to call it, and what it gives in a few lines of torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from headroom._core.binaries import _C
from headroom._core.list_ops import LIST_OPS

from helpers.bad_inputs import assert_untouched, snapshot
from helpers.bits import assert_same_bits, bits
from helpers.layouts import contiguous, offset, sliced, transposed

SHAPES = ((37, 5), (), (1,), (0, 3), (16385,), (64,))
SMALL = ((3, 4), (), (0, 2), (17,))
LARGE = ((300_000,), (7,), (150_001,), (0,), (90_000,))
SPECIAL = (-0.0, 0.0, float("nan"), float("inf"), 1e-40, 3e38, -65504.0)


def assert_same_values(got, want, name):
    """To the bit, except that any NaN is like any other."""
    for k, (a, b) in enumerate(zip(got, want)):
        kept = ~(a.isnan() & b.isnan())
        assert a.dtype == b.dtype and torch.equal(bits(a[kept]), bits(b[kept])), f"{name}[{k}]"


class ListOpSuite:
    """A subclass says what stands without a value here, and may say more."""

    name: str
    options: list  # functions of a device that give options of a call
    sizes: dict = {}  # how large the values of a list are, where not about 1
    bad_options: dict = {}  # for each the error that it gives

    def run(self, lists, **options):
        """Calls the function that users call."""
        raise NotImplementedError

    def reference(self, lists, **options):
        """The lists that the call should leave, those that it does not write included."""
        raise NotImplementedError

    def written(self, **options):
        """The lists that a call with these options writes."""
        raise NotImplementedError

    # ---- Calls -----------------------------------------------------------------------------------

    def pytest_generate_tests(self, metafunc):
        """``missing``: the lists that a call leaves out. ``option``: a function of the device."""
        optional = sorted(LIST_OPS[self.name].may_be_empty)
        if "missing" in metafunc.fixturenames:
            ways = [
                w for n in range(len(optional) + 1) for w in itertools.combinations(optional, n)
            ]
            ids = ["without " + ", ".join(way) if way else "all lists" for way in ways]
            metafunc.parametrize("missing", ways, ids=ids)
        if "option" in metafunc.fixturenames:
            metafunc.parametrize("option", self.options, ids=range(len(self.options)))

    def lists(self, shapes=SHAPES, device="cpu", missing=(), special=False):
        """The dtypes that a list takes take turns."""
        generator = torch.Generator().manual_seed(0)
        made = {}
        for name, dtypes in LIST_OPS[self.name].lists.items():
            made[name] = []
            for k, shape in enumerate(shapes if name not in missing else ()):
                values = torch.randn(shape, generator=generator) * self.sizes.get(name, 1)
                if special and values.numel() > 100:
                    values.view(-1)[50 : 50 + len(SPECIAL)] = torch.tensor(SPECIAL)
                made[name].append(values.to(device, dtypes[k % len(dtypes)]))
        return made

    def arguments(self, lists, options):
        """The arguments of the torch op: a scalar that is a tensor has a name of its own there."""
        own = {
            f"{key}_tensor" if isinstance(value, torch.Tensor) else key: value
            for key, value in options.items()
        }
        return tuple(lists.values()), own

    def left(self, lists, **options):
        """What a call on a copy leaves."""
        copy = mapped(lambda tensor: tensor.clone(), lists)
        self.run(copy, **options)
        return copy

    # ---- Registration ----------------------------------------------------------------------------

    def test_opcheck(self, missing, option, device):
        op = getattr(torch.ops.headroom, self.name).default
        lists = self.lists(SMALL, device, missing)
        turned = mapped(lambda t: t.t() if t.dim() == 2 else t, lists)
        for each in (lists, turned):
            torch.library.opcheck(op, *self.arguments(each, option(device)))

    def test_what_is_written_grows_a_version(self, option, device):
        lists, options = self.lists(device=device), option(device)
        before = mapped(lambda tensor: tensor._version, lists)
        self.run(lists, **options)
        for name, tensors in lists.items():
            grown = [tensor._version > old for tensor, old in zip(tensors, before[name])]
            assert grown == [name in self.written(**options)] * len(tensors), name

    def test_tensors_that_require_grad_are_refused(self):
        for name in LIST_OPS[self.name].lists:
            lists = self.lists()
            lists[name][1].requires_grad_()
            kept = snapshot(flat(lists))
            with pytest.raises(RuntimeError, match="has no derivative"):
                self.run(lists)
            assert_untouched(kept)
            with torch.no_grad():
                self.run(lists)

    @pytest.mark.parametrize(
        "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
    )
    def test_compiled_whole(self, backend, missing, device):
        torch._dynamo.reset()
        lists, options = self.lists(device=device, missing=missing), self.options[-1](device)
        want = self.left(lists, **options)
        torch.compile(lambda x: self.run(x, **options), backend=backend, fullgraph=True)(lists)
        assert_same_bits(flat(lists), flat(want))

    def test_profiler_knows_the_name(self):
        with torch.profiler.profile() as profile:
            self.run(self.lists())
        assert f"headroom::{self.name}" in {event.key for event in profile.key_averages()}

    # ---- Values ----------------------------------------------------------------------------------

    def test_values_of_the_reference(self, missing, option, device):
        options = option(device)
        lists = self.lists(device=device, missing=missing, special=True)
        want = self.reference(mapped(lambda tensor: tensor.clone(), lists), **options)
        self.run(lists, **options)
        for name in lists:
            assert_same_values(lists[name], want[name], name)

    def test_no_tensors(self):
        self.run(self.lists(()))

    # ---- Layouts and the same bits ---------------------------------------------------------------

    def test_strides_do_not_matter(self, missing, device):
        lists = self.lists(((6, 9), (33, 66), (1, 4)), device, missing)
        options = self.options[-1](device)
        want = self.left(lists, **options)
        layouts = (contiguous, transposed, sliced, offset)
        for ways in itertools.product(layouts, repeat=len(lists) - len(missing)):
            got, remaining = mapped(lambda tensor: tensor.clone(), lists), iter(ways)
            for name in [name for name, tensors in lists.items() if tensors]:
                way = next(remaining)
                got[name] = [way(tensor) for tensor in got[name]]
            self.run(got, **options)
            assert_same_bits(flat(got), flat(want))

    def test_what_is_only_read_may_be_expanded(self, device):
        for name in set(LIST_OPS[self.name].lists) - self.written():
            lists = self.lists(((4, 5),), device)
            lists[name] = [torch.full((), 0.5, device=device).expand(4, 5)]
            copied = lists | {name: [tensor.contiguous() for tensor in lists[name]]}
            want = self.left(copied)
            self.run(lists)
            assert_same_bits(flat(lists), flat(want))

    def test_same_bits_for_any_number_of_threads_and_instruction_set(self, missing):
        lists, options = self.lists(LARGE, missing=missing), self.options[-1]("cpu")
        want = self.left(lists, **options)
        threads, before = torch.get_num_threads(), _C.get_cpu_level()
        try:
            torch.set_num_threads(2)
            for level in (level for level in _C.CpuLevel if level <= before):
                _C.set_cpu_level(level)
                assert_same_bits(flat(self.left(lists, **options)), flat(want))
        finally:
            _C.set_cpu_level(before)
            torch.set_num_threads(threads)

    # ---- Bad inputs ------------------------------------------------------------------------------

    def expect_refused(self, lists, options, message):
        kept = snapshot(flat(lists))
        with pytest.raises(RuntimeError, match=message):
            self.run(lists, **options)
        assert_untouched(kept)

    def test_bad_lists_change_no_byte(self):
        description = LIST_OPS[self.name]
        leader = next(iter(description.lists))
        for name, dtypes in description.lists.items():
            wrong = {torch.float64, torch.bfloat16, torch.float16, torch.int32} - set(dtypes)
            bad = {rf"{name}\[5\]": [torch.zeros(64).to(dtype) for dtype in wrong]}
            if name != leader:
                bad[rf"{name}\[5\] has another shape than {leader}\[5\]"] = [torch.zeros(8, 8)]
            for message, tensors in bad.items():
                for tensor in tensors:
                    lists = self.lists()
                    lists[name][5] = tensor
                    self.expect_refused(lists, {}, message)
            if name != leader:
                lists = self.lists()
                lists[name].pop()
                self.expect_refused(lists, {}, f"{name} has 5 tensors")

    def test_what_is_written_must_not_share_memory(self, option):
        for name in self.written(**option("cpu")):
            lists = self.lists()
            lists[name][5] = torch.zeros(1).expand(64)
            self.expect_refused(lists, option("cpu"), "share memory")

    def test_a_scalar_on_meta_is_refused(self):
        """Torch then runs the fake, which computes nothing."""
        for name in LIST_OPS[self.name].scalars:
            option = {name.removesuffix("_tensor"): torch.ones((), device="meta")}
            self.expect_refused(self.lists(), option, "meta|device")

    def test_bad_options_change_no_byte(self):
        for message, options in self.bad_options.items():
            for option in options:
                self.expect_refused(self.lists(), option, message)


def mapped(function, lists):
    return {name: [function(tensor) for tensor in tensors] for name, tensors in lists.items()}


def flat(lists):
    return [tensor for tensors in lists.values() for tensor in tensors]
