"""Advice on loaders: the model on costs that are given, measurements that leave no trace, and the
loaders that it is set on."""

import dataclasses
import json
import os
import time

import headroom
import pytest
import torch
from headroom._core.available import allowed_cpus
from headroom._core.cgroups import cgroup_cpus
from headroom.data import LoaderAdvice, LoaderCosts, Settings, advise, costs, tuned
from headroom.data.advice import _advised
from headroom.data.model import Host, Model
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

MS = 1e-3


def costs_of(**changes):
    """Costs of a batch of 10 ms, which a processor makes, and of a step of 20 ms on a GPU."""
    known = LoaderCosts(
        load_seconds=10 * MS,
        slowest_seconds=10 * MS,
        worker_seconds=11 * MS,
        worker_cpu_seconds=10 * MS,
        receive_seconds=0.2 * MS,
        start_seconds=20 * MS,
        first_seconds=30 * MS,
        worker_bytes=10 << 20,
        batch_bytes=1 << 20,
        is_pinned=False,
        step_seconds=20 * MS,
        step_cpu_seconds=1 * MS,
        blocked_seconds=10 * MS,
        batches=1000,
    )
    return dataclasses.replace(known, **changes)


def model_of(cpus=8.0, free=None, shared=None, least=0, can_persist=True, **changes):
    return Model(costs_of(**changes), Host(cpus, free, shared, 1), least, can_persist)


def workers(**given):
    return model_of(**given).best(False).num_workers


# ---- the model -----------------------------------------------------------------------------------


def test_workers_are_as_many_as_hide_the_loading():
    assert workers() == 1
    assert workers(worker_seconds=55 * MS, worker_cpu_seconds=55 * MS, load_seconds=50 * MS) == 3
    assert workers(step_seconds=0.0, step_cpu_seconds=0.0) == 9  # as fast as it can be


def test_what_is_fast_already_needs_none():
    assert workers(load_seconds=0.3 * MS, worker_seconds=1 * MS) == 0


def test_one_processor_that_is_busy_needs_none():
    assert workers(cpus=1.0, step_cpu_seconds=20 * MS) == 0
    assert workers(cpus=1.0, step_cpu_seconds=1 * MS) == 1  # the step is on a GPU


def test_workers_that_wait_may_be_more_than_processors():
    slow = {"load_seconds": 70 * MS, "worker_seconds": 70 * MS, "worker_cpu_seconds": 2 * MS}
    assert workers(cpus=2.0, **slow) == 4
    assert workers(cpus=2.0, **slow | {"worker_cpu_seconds": 70 * MS}) == 2


def test_batches_that_take_longer_to_send_than_to_make_are_made_here():
    sent = {"worker_seconds": 30 * MS, "worker_cpu_seconds": 30 * MS, "receive_seconds": 12 * MS}
    assert workers(cpus=2.0, **sent) == 0


def test_a_short_epoch_is_not_worth_the_start_of_workers():
    assert workers(batches=4, start_seconds=100 * MS) == 0
    found = model_of(batches=40).best(False)
    assert found.num_workers == 1 and found.persistent_workers
    assert not model_of(batches=100_000).best(False).persistent_workers
    assert not model_of(batches=40, can_persist=False).best(False).persistent_workers


def test_more_batches_are_made_ahead_where_some_take_long():
    assert model_of().best(False).prefetch_factor == 2
    slow = model_of(slowest_seconds=100 * MS).best(False)
    assert slow.num_workers * slow.prefetch_factor >= 5


@pytest.mark.parametrize("limit", ["free", "shared"])
def test_memory_of_the_host_bounds_workers_and_what_they_make_ahead(limit):
    busy = {"load_seconds": 50 * MS, "worker_seconds": 55 * MS, "worker_bytes": 0}
    assert model_of(**busy).best(False).num_workers == 3
    tight = model_of(**busy, **{limit: 2 << 20})
    found = tight.best(False)
    assert found.num_workers == 2 and found.prefetch_factor == 1
    assert tight.host_bytes(found) <= 2 << 20
    assert model_of(**busy, **{limit: 1000}).best(False).num_workers == 0


def test_pinned_memory_counts_the_batch_in_use():
    model = model_of(worker_seconds=55 * MS, worker_cpu_seconds=55 * MS, load_seconds=50 * MS)
    found = model.best(True)
    assert model.pinned_bytes(found) == (found.num_workers * found.prefetch_factor + 1) << 20
    assert model.host_bytes(found) == found.num_workers * (10 << 20) + model.batch_bytes(found)


# ---- what the system allows ----------------------------------------------------------------------


def cgroup(root, version, group, **files):
    line = f"0::{group}" if version == 2 else f"3:cpu,cpuacct:{group}"
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(line + "\n")
    folder = root / "sys/fs/cgroup" / ("" if version == 2 else "cpu") / group.strip("/")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_the_quota_of_a_cgroup_is_the_least_of_all_that_it_is_in(tmp_path):
    assert cgroup_cpus(tmp_path) is None
    cgroup(tmp_path, 2, "/", cpu__max="300000 100000")
    cgroup(tmp_path, 2, "/pods/one", cpu__max="max 100000")
    assert cgroup_cpus(tmp_path) == 3
    cgroup(tmp_path, 2, "/pods", cpu__max="150000 100000")
    cgroup(tmp_path, 2, "/pods/one", cpu__max="max 100000")
    assert cgroup_cpus(tmp_path) == 1.5
    cgroup(tmp_path, 1, "/job", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    assert cgroup_cpus(tmp_path) == 0.5 == allowed_cpus(tmp_path)
    cgroup(tmp_path, 1, "/job", cpu__cfs_quota_us="-1")
    assert cgroup_cpus(tmp_path) is None
    assert allowed_cpus(tmp_path) == len(os.sched_getaffinity(0))


# ---- measured ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(costs, "SECONDS", 0.05)


class Slow(Dataset):
    """Samples that take 2 ms to wait for."""

    def __init__(self, count=96):
        self.count, self.file = count, None

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        self.file = self.file or object()
        time.sleep(0.002)
        return torch.tensor(float(i))


def read(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_advice_on_a_loader_that_waits(tmp_path):
    """With a quota of one processor, which such workers do not need."""
    cgroup(tmp_path, 2, "/", cpu__max="100000 100000")
    read(tmp_path / "proc/meminfo", "MemAvailable: 1000000 kB\n")
    data, before = Slow(), torch.get_rng_state()
    loader = DataLoader(data, batch_size=4, shuffle=True)
    found = advise(loader, lambda batch: time.sleep(0.004), root=tmp_path)
    assert torch.equal(torch.get_rng_state(), before) and data.file is None
    assert isinstance(found, LoaderAdvice) and found.cpus == 1
    assert found.current == Settings() and found.settings.num_workers >= 2
    assert found.costs.batch_bytes == 16 and found.costs.batches == 24
    assert 8 * MS < found.costs.load_seconds and 4 * MS < found.costs.step_seconds
    assert found.costs.worker_cpu_seconds < 0.5 * found.costs.worker_seconds
    assert found.seconds < found.current_seconds
    assert found.saved_seconds == pytest.approx(24 * (found.current_seconds - found.seconds))
    text = str(found)
    assert str(found.settings) in text and "needs no processor" in text and "4 per GPU" in text
    assert max(map(len, text.splitlines())) <= 100
    again = json.loads(json.dumps(found.as_dict()))
    assert again["settings"]["num_workers"] == found.settings.num_workers
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.seconds = 0


def test_what_is_made_at_once_stays_in_this_process():
    loader = DataLoader(torch.arange(64.0), batch_size=8)
    found = advise(loader, step=1.0)
    assert found.settings == Settings() == found.current and found.saved_seconds == 0
    assert "which is little beside a step" in str(found)


def test_the_time_that_a_loader_with_workers_blocks_is_measured():
    loader = DataLoader(Slow(), batch_size=8, num_workers=1)
    found = advise(loader, lambda batch: None)
    assert 8 * MS < found.costs.blocked_seconds < 200 * MS


class OnlyHere(Slow):
    def __getitem__(self, i):
        if get_worker_info() is not None:
            raise RuntimeError("a handle that no worker has")
        return super().__getitem__(i)


def test_a_dataset_that_workers_cannot_read_stays_here():
    found = advise(DataLoader(OnlyHere(), batch_size=4), step=0.001)
    assert found.settings.num_workers == 0 and found.rule_seconds is None
    assert "Workers cannot be used: RuntimeError: a handle that no worker has" in str(found)


class Stream(IterableDataset):
    def __iter__(self):
        for i in range(64):
            time.sleep(0.002)
            yield torch.tensor(float(i))


def test_an_iterable_dataset_keeps_its_number_of_workers():
    found = advise(DataLoader(Stream(), batch_size=4), step=0.001)
    assert found.settings.num_workers == 0 and found.costs.batches is None
    assert found.saved_seconds is None and "The dataset is iterable" in str(found)


@pytest.mark.slow
def test_a_worker_init_fn_keeps_a_worker():
    loader = DataLoader(torch.arange(64.0), num_workers=1, worker_init_fn=lambda number: None)
    assert advise(loader, step=1.0).settings.num_workers == 1


def test_gpus_want_pinned_memory():
    loader = DataLoader(torch.arange(64.0), pin_memory=True)
    on_gpu = _advised(loader, costs_of(), Host(8, None, None, 1), has_gpu=True)
    assert on_gpu.settings.pin_memory and on_gpu.pinned_bytes == 3 << 20
    on_cpu = _advised(loader, costs_of(), Host(8, None, None, 1), has_gpu=False)
    assert not on_cpu.settings.pin_memory and "no GPU" in str(on_cpu)
    pinned = _advised(loader, costs_of(is_pinned=True), Host(8, None, None, 1), has_gpu=True)
    assert not pinned.settings.pin_memory and "pinned already" in str(pinned)


def test_a_profile_says_how_long_steps_take_and_wait():
    data = Slow()
    loader, model = DataLoader(data, batch_size=4), torch.nn.Linear(1, 1)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=3, repeat=1)
    with headroom.profile(model=model, schedule=schedule) as prof:
        for batch in loader:
            model(batch[:, None]).sum().backward()
            time.sleep(0.003)
            prof.step()
            if len(prof.results):
                break
    found = advise(loader, prof)
    assert found.costs.blocked_seconds > 8 * MS
    assert 3 * MS < found.costs.step_seconds < 100 * MS
    assert "headroom.data.advise" in prof.table()


@pytest.mark.parametrize(
    ("loader", "step", "error"),
    [
        ([1, 2], None, "loader is list, wanted a torch.utils.data.DataLoader"),
        (None, "fast", "step is str, wanted a function of a batch, seconds, a profile or None"),
        (None, -1.0, "step is -1.0 seconds, wanted 0 or more"),
    ],
)
def test_what_is_refused(loader, step, error):
    loader = DataLoader(torch.arange(4)) if loader is None else loader
    with pytest.raises((TypeError, ValueError), match=error):
        advise(loader, step)


def test_a_loader_without_batches_is_refused():
    with pytest.raises(ValueError, match="the loader has no batches"):
        advise(DataLoader(torch.empty(0, 3)), 1.0)


# ---- set -----------------------------------------------------------------------------------------


def with_workers(loader, **settings):
    advice = _advised(loader, costs_of(), Host(8, None, None, 1), has_gpu=False)
    return tuned(loader, dataclasses.replace(advice, settings=Settings(**settings)))


@pytest.mark.parametrize("kind", ["shuffle", "batch_sampler", "batch_size=None", "generator"])
def test_batches_and_draws_of_a_tuned_loader_are_those_of_the_loader(kind):
    data = torch.arange(24)
    given = {"batch_size": 4, "shuffle": True, "drop_last": True, "timeout": 60}
    if kind == "batch_sampler":
        given = {"batch_sampler": [[1, 2, 3], [7], [5, 6]]}
    elif kind == "batch_size=None":
        given = {"batch_size": None, "sampler": [3, 1, 2]}
    elif kind == "generator":
        given["generator"] = torch.Generator()
    loader = DataLoader(data, num_workers=1, **given)
    found = []
    for one in (
        loader,
        with_workers(loader, num_workers=2, prefetch_factor=3),
        with_workers(loader),
        with_workers(loader, num_workers=2, prefetch_factor=2, persistent_workers=True),
    ):
        torch.manual_seed(3)
        if loader.generator is not None:
            loader.generator.manual_seed(3)
        epochs = [[batch.tolist() for batch in one] for _ in range(2)]
        found.append((epochs, torch.rand(1).item()))
    assert found[0] == found[1] == found[2]
    assert found[0][0][0] == found[3][0][0]  # torch draws for workers once, where they persist
    assert loader.num_workers == 1 and loader.persistent_workers is False  # it stays as it was


class Mine(DataLoader):
    def __init__(self, data, secret):
        super().__init__(data, batch_size=2, collate_fn=self.sums)
        self.secret = secret

    def sums(self, samples):
        return sum(samples) + self.secret


def test_a_subclass_keeps_its_class_and_what_it_was_made_with():
    loader = Mine(torch.arange(8), secret=100)
    made = tuned(loader, step=1.0)
    assert type(made) is Mine and [x.item() for x in made] == [101, 105, 109, 113]
    made = with_workers(loader, num_workers=2, prefetch_factor=2)
    assert made.num_workers == 2 and [x.item() for x in made] == [101, 105, 109, 113]


def stateful():
    found = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata is not installed"
    )
    return found.StatefulDataLoader(torch.arange(8), batch_size=2)


def test_a_stateful_loader_is_tuned_before_its_state_is_used():
    loader = stateful()
    state = loader.state_dict()  # begins an iterator
    made = with_workers(loader, num_workers=1, prefetch_factor=2)
    assert type(made) is type(loader)
    assert [x.tolist() for x in made] == [x.tolist() for x in loader]
    assert advise(loader, 1.0).settings == Settings()
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match="call tuned.. before load_state_dict"):
        tuned(loader, step=1.0)


def test_the_advice_is_not_taken_for_a_step():
    with pytest.raises(TypeError, match="advice is float, wanted what headroom.data.advise"):
        tuned(DataLoader(torch.arange(4)), 0.01)


def test_accelerates_loaders_are_refused():
    accelerate = pytest.importorskip("accelerate")
    loader = accelerate.Accelerator(cpu=True).prepare(DataLoader(torch.arange(4)))
    with pytest.raises(TypeError, match="give the one that is prepared"):
        tuned(loader)
