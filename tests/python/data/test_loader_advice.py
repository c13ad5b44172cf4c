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
from headroom.data import LoaderAdvice, LoaderTrial, Settings, advise, trials, tuned
from headroom.data.advice import _advised
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

MS = 1e-3


@dataclasses.dataclass
class Simulated:
    """Trials of a machine whose times are known. A batch takes ``load`` to make, of which ``cpu``
    on a processor; a step takes ``step``."""

    load: float = 10 * MS
    cpu: float = 10 * MS
    step: float = 20 * MS
    cpus: float = 8.0
    start: float = 20 * MS  # of each worker
    receive: float = 0.2 * MS
    batches: int | None = 1000
    batch_bytes: int = 1 << 20
    is_pinned: bool = False
    loader: DataLoader = dataclasses.field(default_factory=lambda: DataLoader(torch.arange(4)))
    tries: list = dataclasses.field(default_factory=list)

    def tried(self, settings):
        self.tries.append(settings)
        workers = settings.num_workers
        if not workers:
            return LoaderTrial(settings, self.step + self.load, self.step, 0.0, self.load)
        on_cpus = (self.cpu + self.receive) / self.cpus
        steady = max(self.step + self.receive, self.load / workers, on_cpus)
        return LoaderTrial(settings, steady, self.step, workers * self.start, 2 * self.load)


def advised(room=None, most=16, has_gpu=False, **known):
    return _advised(Simulated(**known), room, most, has_gpu)


def workers(**known):
    return advised(**known).settings.num_workers


# ---- which trial is advised ----------------------------------------------------------------------


def test_workers_are_as_many_as_hide_the_loading():
    assert workers() == 1
    assert workers(load=50 * MS) == 4
    assert workers(load=50 * MS, most=2) == 2


def test_what_is_fast_already_needs_none_and_no_trial_of_workers():
    machine = Simulated(load=0.3 * MS)
    assert _advised(machine, None, 16, False).settings == Settings()
    assert machine.tries == [Settings()]


def test_workers_that_gain_nothing_end_the_trials():
    machine = Simulated(load=100 * MS, cpu=100 * MS, cpus=2)
    assert _advised(machine, None, 64, False).settings.num_workers == 2
    assert max(one.num_workers for one in machine.tries) == 4
    assert workers(load=100 * MS, cpu=1 * MS, cpus=2) == 8  # they wait, for files


def test_batches_that_take_longer_to_send_than_to_make_are_made_here():
    assert workers(load=5 * MS, receive=30 * MS) == 0


def test_a_short_epoch_is_not_worth_the_start_of_workers():
    assert workers(batches=4, start=100 * MS) == 0
    found = advised(batches=40).settings
    assert found.num_workers == 1 and found.persistent_workers
    assert not advised(batches=100_000).settings.persistent_workers
    has_epochs = DataLoader(torch.utils.data.TensorDataset(torch.arange(4)))
    has_epochs.dataset.set_epoch = print
    assert not advised(batches=40, loader=has_epochs).settings.persistent_workers


def test_seconds_are_of_an_epoch_of_which_workers_that_persist_start_once():
    trial = LoaderTrial(Settings(2, 2), 10 * MS, 9 * MS, 600 * MS, 100 * MS)
    assert trial.seconds(10) == pytest.approx(80 * MS)
    lasting = dataclasses.replace(trial, settings=Settings(2, 2, persistent_workers=True))
    assert lasting.seconds(10) == pytest.approx(40 * MS)  # of three epochs
    assert trial.seconds(None) == 10 * MS


def test_memory_of_the_host_bounds_the_batches_made_ahead():
    found = advised(load=50 * MS, room=4 << 20)
    assert found.settings == Settings(4, 1) or found.settings == Settings(4, 1, False, True)
    found = advised(load=50 * MS, room=3 << 20)
    assert found.settings.num_workers == 2 and found.settings.prefetch_factor == 1
    assert "no memory for the batches of 4 workers" in str(found)
    assert workers(load=50 * MS, room=1000) == 0


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
    monkeypatch.setattr(trials, "SECONDS", 0.05)


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
    data, before = Slow(9600), torch.get_rng_state()
    loader = DataLoader(data, batch_size=16, shuffle=True)
    found = advise(loader, lambda batch: time.sleep(0.004), root=tmp_path)
    assert torch.equal(torch.get_rng_state(), before) and data.file is None
    assert isinstance(found, LoaderAdvice)
    assert found.current == Settings() and found.settings.num_workers >= 2
    assert found.batch_bytes == 64
    here = found.trials[0]
    assert here.settings == Settings() and here.steady_seconds > 36 * MS
    assert 4 * MS <= here.work_seconds < here.steady_seconds - 32 * MS
    assert found.seconds < found.current_seconds
    assert found.saved_seconds == pytest.approx(600 * (found.current_seconds - found.seconds))
    text = str(found)
    assert str(found.settings) in text and "\n2 workers   a step" in text
    assert max(map(len, text.splitlines())) <= 100
    again = json.loads(json.dumps(found.as_dict()))
    assert again["settings"]["num_workers"] == found.settings.num_workers
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.seconds = 0


def test_what_is_made_at_once_stays_in_this_process():
    loader = DataLoader(torch.arange(64.0), batch_size=8)
    found = advise(loader, step=1.0)
    assert found.settings == Settings() == found.current and found.saved_seconds == 0
    assert len(found.trials) == 1


def test_the_current_settings_are_tried_too():
    loader = DataLoader(Slow(), batch_size=8, num_workers=3, prefetch_factor=4)
    found = advise(loader, lambda batch: None)
    assert found.trials[-1].settings == Settings(3, 4) == found.current
    assert 16 * MS < found.trials[0].steady_seconds < 200 * MS


class OnlyHere(Slow):
    def __getitem__(self, i):
        if get_worker_info() is not None:
            raise RuntimeError("a handle that no worker has")
        return super().__getitem__(i)


def test_a_dataset_that_workers_cannot_read_stays_here():
    found = advise(DataLoader(OnlyHere(), batch_size=4), step=0.001)
    assert found.settings.num_workers == 0
    assert "Workers cannot be used: RuntimeError: a handle that no worker has" in str(found)


class Stream(IterableDataset):
    def __iter__(self):
        for i in range(64):
            time.sleep(0.002)
            yield torch.tensor(float(i))


def test_an_iterable_dataset_keeps_its_number_of_workers():
    found = advise(DataLoader(Stream(), batch_size=4), step=0.001)
    assert found.settings.num_workers == 0 and len(found.trials) == 1
    assert found.saved_seconds is None and "The dataset is iterable" in str(found)


@pytest.mark.slow
def test_a_worker_init_fn_keeps_a_worker():
    loader = DataLoader(torch.arange(64.0), num_workers=1, worker_init_fn=lambda number: None)
    assert advise(loader, step=1.0).settings.num_workers == 1


def test_gpus_want_pinned_memory():
    loader = DataLoader(torch.arange(64.0), pin_memory=True)
    on_gpu = advised(loader=loader, has_gpu=True)
    assert on_gpu.settings.pin_memory
    on_cpu = advised(loader=loader)
    assert not on_cpu.settings.pin_memory and "no GPU" in str(on_cpu)
    pinned = advised(loader=loader, has_gpu=True, is_pinned=True)
    assert not pinned.settings.pin_memory and "pinned already" in str(pinned)


def test_a_profile_says_how_long_steps_take():
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
    assert 3 * MS < found.trials[0].work_seconds < 100 * MS
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
    advice = advised(loader=loader)
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
