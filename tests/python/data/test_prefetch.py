"""Batches one ahead: what a device sees of them, errors, states, and what is passed on."""

import contextlib
import dataclasses
import gc
import typing

import headroom
import pytest
import torch
from headroom.data import DevicePrefetcher, prefetch
from torch.utils.data import DataLoader, Dataset

from helpers.copies import POLICIES, adversary
from helpers.late_engine import Late


@contextlib.contextmanager
def copying_with(engine, monkeypatch):
    monkeypatch.setattr(prefetch, "engine_of", lambda device: engine)
    yield engine
    gc.collect()


def batches(count=6):
    return [torch.full((3, 4), float(i)) for i in range(count)]


class Noted:
    """A loader that notes what it has been asked for, and makes each batch when it is asked."""

    def __init__(self, count=6, fails_at=()):
        self.count, self.fails_at, self.asked = count, fails_at, 0

    def __len__(self):
        return self.count

    def __iter__(self):
        return Asked(self)


class Asked:
    def __init__(self, loader):
        self.loader, self.i = loader, 0

    def __iter__(self):
        return self

    def __next__(self):
        i, self.i = self.i, self.i + 1
        if i >= self.loader.count:
            raise StopIteration
        self.loader.asked += 1
        if i in self.loader.fails_at:
            raise ValueError(f"batch {i}")
        return torch.full((3, 4), float(i))


# ---- copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_reads_its_batch_however_late_or_early_copies_run(policy, monkeypatch):
    engine, seen = adversary(policy), []
    with copying_with(engine, monkeypatch):
        for batch in DevicePrefetcher(batches(), "cpu"):
            engine.compute(lambda batch=batch: seen.append(batch.clone()))
        engine.finish_compute()
    assert torch.equal(torch.stack(seen), torch.stack(batches()))


def test_one_batch_is_copied_ahead_and_no_more(monkeypatch):
    loader = Noted()
    with copying_with(Late(), monkeypatch) as engine:
        iterator = iter(DevicePrefetcher(loader, "cpu"))
        assert loader.asked == 0
        for i in range(6):
            assert next(iterator)[0, 0] == i
            assert loader.asked == min(6, i + 2)
            assert engine.bytes_up == 48 * loader.asked
        with pytest.raises(StopIteration):
            next(iterator)
    assert engine.errors == []


@pytest.mark.parametrize("taken", [0, 1, 3, 6])
def test_memory_is_not_freed_before_its_copy_is_done(taken, monkeypatch):
    """Also that of a loop which is left early."""
    with copying_with(Late(), monkeypatch) as engine:
        for i, _ in enumerate(DevicePrefetcher(Noted(), "cpu")):
            if i == taken:
                break
        gc.collect()
        engine.finish()
    assert engine.errors == []


@pytest.mark.parametrize("policy", POLICIES)
def test_a_loader_may_write_its_memory_again_two_batches_later(policy, monkeypatch):
    def reusing():
        buffers = torch.empty(2, 3, 4)
        for i in range(6):
            yield buffers[i % 2].fill_(i)

    engine, seen = adversary(policy), []
    with copying_with(engine, monkeypatch):
        for batch in DevicePrefetcher(reusing(), "cpu"):
            engine.compute(lambda batch=batch: seen.append(batch.clone()))
        engine.finish_compute()
    assert torch.equal(torch.stack(seen), torch.stack(batches()))


@pytest.mark.parametrize(
    "batch",
    [
        [3, "words", None],
        {"ids": torch.empty(0, 4)},
        torch.ones(2, requires_grad=True),
        torch.eye(3).to_sparse(),
    ],
    ids=["no tensors", "an empty one", "a leaf", "a sparse one"],
)
def test_batches_of_which_nothing_is_copied_by_the_engine(batch, monkeypatch):
    engine = adversary("late")
    with copying_with(engine, monkeypatch):
        found = list(DevicePrefetcher([batch, torch.ones(3), batch], "cpu"))
        engine.finish_compute()
    assert engine.bytes_up == 12 and str([found[0], found[2]]) == str([batch, batch])


def test_memory_of_a_batch_that_cannot_be_copied_whole_is_waited_for(monkeypatch):
    class Bad:
        def to(self, device):
            raise ValueError("cannot move")

    def loader():
        yield torch.ones(3)
        yield [torch.ones(3), Bad()]

    with copying_with(Late(), monkeypatch) as engine:
        iterator = iter(DevicePrefetcher(loader(), "cpu"))
        next(iterator)
        with pytest.raises(ValueError, match="cannot move"):
            next(iterator)
        del iterator
        gc.collect()
        engine.finish()
    assert engine.errors == []


def test_a_test_notices_a_wait_that_is_left_out(monkeypatch):
    with copying_with(Late(), monkeypatch) as engine:
        list(DevicePrefetcher(Noted(), "cpu"))
    for line in engine.waits:
        with copying_with(Late(skipped=line), monkeypatch):
            iterator = iter(DevicePrefetcher(Noted(), "cpu"))
            first = next(iterator)
            assert not torch.equal(first, torch.zeros(3, 4))


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(24).view(2, 3, 4).transpose(0, 2),
        torch.arange(24.0).view(4, 6)[:, 1:4],
        torch.arange(5.0).expand(3, 5),
        torch.empty(0, 3),
        torch.tensor(3.0),
        torch.tensor([True, False, True]),
        torch.randn(4, 4, dtype=torch.bfloat16)[1:],
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, 3).to_sparse(),
        torch.randn(3, requires_grad=True),
    ],
)
def test_every_kind_of_tensor_arrives(x, monkeypatch):
    with copying_with(Late(), monkeypatch) as engine:
        (got,) = DevicePrefetcher([x], "cpu")
    assert engine.errors == [] and got.dtype == x.dtype and got.requires_grad == x.requires_grad
    assert torch.equal(got.to_dense(), x.to_dense())
    if x.is_contiguous() or x.dim() == 3:
        assert got.stride() == x.stride()


# ---- batches -------------------------------------------------------------------------------------


class Pair(typing.NamedTuple):
    x: torch.Tensor
    name: str


@dataclasses.dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    parts: list


def test_containers_keep_their_classes(monkeypatch):
    transformers = pytest.importorskip("transformers")
    x = torch.arange(6)
    encoding = transformers.BatchEncoding({"input_ids": x, "labels": x})
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    batch = {"pair": Pair(x, "a"), "sample": Sample(x, [x, "b"]), "many": (encoding, packed, 3)}
    with copying_with(Late(), monkeypatch) as engine:
        (got,) = DevicePrefetcher([batch], "cpu")
    assert isinstance(got["pair"], Pair) and got["pair"].name == "a"
    assert isinstance(got["sample"], Sample) and got["sample"].parts[1] == "b"
    encoding, moved, three = got["many"]
    assert isinstance(encoding, transformers.BatchEncoding) and three == 3
    assert type(moved) is type(packed) and torch.equal(moved.data, packed.data)
    assert encoding.input_ids is encoding.labels is got["pair"].x  # copied once
    assert torch.equal(encoding.input_ids, x) and encoding.input_ids is not x
    assert engine.bytes_up == 48 and batch["pair"].x is x


def test_the_cpu_gets_the_batches_of_the_loader_and_nothing_ahead():
    loader = Noted()
    given = batches()
    assert [id(x) for x in DevicePrefetcher(given, "cpu")] == [id(x) for x in given]
    next(iter(DevicePrefetcher(loader, "cpu")))
    assert loader.asked == 1


# ---- errors --------------------------------------------------------------------------------------


class Broken(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        if i == 7:
            raise ValueError("sample 7")
        return torch.tensor(float(i))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_worker_is_raised_at_its_batch(workers, monkeypatch):
    loader = DataLoader(Broken(), batch_size=2, num_workers=workers)
    seen = []
    with copying_with(Late(), monkeypatch) as engine:
        with pytest.raises(ValueError, match="sample 7"):
            for batch in DevicePrefetcher(loader, "cpu"):
                seen.append(batch[0].item())
    assert seen == [0, 2, 4] and engine.errors == []


def test_a_loader_that_goes_on_after_an_error_does_so(monkeypatch):
    with copying_with(Late(), monkeypatch):
        iterator, seen = iter(DevicePrefetcher(Noted(fails_at=[2, 5]), "cpu")), []
        for _ in range(8):
            try:
                seen.append(next(iterator)[0, 0].item())
            except (ValueError, StopIteration) as error:
                seen.append(type(error).__name__)
    assert seen == [0, 1, "ValueError", 3, 4, "ValueError", "StopIteration", "StopIteration"]


@pytest.mark.parametrize("at", [1, 2])
def test_no_batch_is_lost_when_fetching_the_next_is_interrupted(at, monkeypatch):
    class Interrupted(Noted):
        def __iter__(self):
            for i in range(4):
                if i == at:
                    raise KeyboardInterrupt
                yield torch.tensor(i)

    with copying_with(Late(), monkeypatch):
        iterator = iter(DevicePrefetcher(Interrupted(), "cpu"))
        seen = [next(iterator)] if at == 2 else []
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        assert [*seen, next(iterator)] == [*range(at)]


def test_what_is_no_loader_or_device_is_refused():
    with pytest.raises(ValueError, match="device is 'meta', wanted cpu or cuda"):
        DevicePrefetcher([], "meta")
    with pytest.raises(TypeError, match="loader is int, wanted an iterable of batches"):
        DevicePrefetcher(3, "cpu")


# ---- as a loader ---------------------------------------------------------------------------------


def test_it_is_iterated_again_and_again(monkeypatch):
    loader = DataLoader(torch.arange(8), batch_size=2, shuffle=True)
    with copying_with(Late(), monkeypatch):
        prefetcher = DevicePrefetcher(loader, "cpu")
        for make in (lambda: loader, lambda: prefetcher):
            torch.manual_seed(1)
            epochs = [[x.tolist() for x in make()] for _ in range(3)]
            after = torch.rand(1)
            if make() is loader:
                wanted = epochs, after
        assert (epochs, after) == wanted
        first, second = iter(prefetcher), iter(prefetcher)
        assert len([*first]) == len([*second]) == 4


def test_attributes_and_epochs_reach_the_loader():
    class Sampler(torch.utils.data.SequentialSampler):
        def set_epoch(self, epoch):
            self.epoch = epoch

    data = torch.arange(8)
    loader = DataLoader(data, batch_size=2, sampler=Sampler(data))
    prefetcher = DevicePrefetcher(loader, "cpu")
    assert len(prefetcher) == 4 and prefetcher.batch_size == 2
    assert prefetcher.dataset is data and prefetcher.sampler is loader.sampler
    prefetcher.set_epoch(3)
    assert loader.sampler.epoch == 3
    assert not hasattr(prefetcher, "state_dict") and not hasattr(prefetcher, "load_state_dict")
    with pytest.raises(AttributeError, match="nothing"):
        prefetcher.nothing  # noqa: B018


def test_a_loader_that_accelerate_has_prepared_gets_it_inside(monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = accelerator.prepare(DataLoader(torch.arange(10.0), batch_size=2))
    with pytest.raises(TypeError, match="set loader.base_dataloader = headroom.data"):
        DevicePrefetcher(loader, "cpu")
    with copying_with(Late(), monkeypatch) as engine:
        loader.base_dataloader = DevicePrefetcher(loader.base_dataloader, "cpu")
        model = torch.nn.Linear(1, 1)
        seen, ends = [], []
        for batch in loader:
            with accelerator.accumulate(model):
                seen += batch.tolist()
                ends.append(accelerator.sync_gradients)
    assert seen == list(range(10)) and ends == [False, True, False, True, True]
    assert engine.bytes_up == 40


# ---- states --------------------------------------------------------------------------------------


class Positioned:
    """A loader with a position, which its state holds as an object that it changes."""

    def __init__(self):
        self.state = {"at": 0}

    def __iter__(self):
        while self.state["at"] < 6:
            self.state["at"] += 1
            yield torch.tensor(self.state["at"])
        self.state["at"] = 0

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = dict(state)


def test_the_state_is_that_after_the_batches_given_out(monkeypatch):
    with copying_with(Late(), monkeypatch):
        loader = Positioned()
        prefetcher = DevicePrefetcher(loader, "cpu")
        assert prefetcher.state_dict() == {"at": 0}
        for i, _ in enumerate(prefetcher, 1):
            assert prefetcher.state_dict() == {"at": i}
            assert loader.state == {"at": i + 1 if i < 6 else 0}
        assert prefetcher.state_dict() == {"at": 0}
        for _ in prefetcher:
            break
        assert prefetcher.state_dict() == {"at": 1}  # after the loop was left, too
        prefetcher.load_state_dict({"at": 4})
        assert prefetcher.state_dict() == {"at": 4}
        assert [x.item() for x in prefetcher] == [5, 6]


class Positions(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return i + torch.rand(()).mul(0.5).item()  # the worker's draws resume too where torch's do


def stateful(workers):
    found = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata is not installed"
    )
    generator = torch.Generator().manual_seed(5)
    return found.StatefulDataLoader(
        Positions(20), batch_size=2, shuffle=True, num_workers=workers, generator=generator
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", [1, 4, 9, 10])
def test_a_resumed_run_sees_the_next_batch(workers, taken, tmp_path, monkeypatch):
    model, path = torch.nn.Linear(1, 1), tmp_path / "step-1.safetensors"
    with copying_with(Late(), monkeypatch):
        prefetcher = DevicePrefetcher(stateful(workers), "cpu")
        iterator = iter(prefetcher)
        for _ in range(taken):
            next(iterator)
        headroom.save_state(path, model=model, loader=prefetcher)
        left = [batch.long().tolist() for batch in iterator]

        resumed = DevicePrefetcher(stateful(workers), "cpu")
        headroom.load_state(path, model=model, loader=resumed)
        assert [batch.long().tolist() for batch in resumed] == left
        assert len(left) == 10 - taken


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_is_that_of_the_loader_alone(workers, monkeypatch):
    alone = iter(plain := stateful(workers))
    with copying_with(Late(), monkeypatch):
        ahead = iter(prefetcher := DevicePrefetcher(stateful(workers), "cpu"))
        for _ in range(4):
            torch.manual_seed(0)
            next(alone)
            torch.manual_seed(0)
            next(ahead)
            wanted, got = plain.state_dict(), prefetcher.state_dict()
            counted = "_steps_since_snapshot" if workers else "_num_yielded"
            assert got.keys() == wanted.keys() and got[counted] == wanted[counted]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_batches_that_are_on_the_gpu_already_are_passed_on(device):
    loader = [torch.ones(3, device=device), torch.zeros(0, device=device), 5]
    found = list(DevicePrefetcher(loader, "cuda"))
    assert found[0].device.type == "cuda" and found[0].tolist() == [1, 1, 1]
    assert found[1].shape == (0,) and found[2] == 5
