"""The host arena: slabs of exact size, an account of them, limits, forks and copies."""

import copy
import faulthandler
import gc
import mmap
import os
import pickle

import headroom.host.arena as arena_module
import pytest
import torch
from headroom.host import HostArena, HostMemoryError, default_arena
from headroom.host.pinning import pinned

GIB = 1 << 30


@pytest.fixture(params=["memory", "file"])
def arena(request, tmp_path):
    return HostArena(file=tmp_path if request.param == "file" else None)


def take(arena, size, kind="state", owner="test"):
    return arena.take(size, kind=kind, owner=owner)


# ---- slabs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 511, 4096, 1_000_003])
def test_slabs_are_exact_aligned_and_zero(arena, size):
    slab = take(arena, size)
    assert slab.dtype == torch.uint8 and slab.shape == (size,) and slab.device.type == "cpu"
    assert slab.data_ptr() % arena_module.ALIGNMENT == 0
    assert not slab.any()
    slab.fill_(7)
    assert slab.sum() == 7 * size
    assert arena.bytes == size


def test_nothing_is_an_empty_tensor(arena):
    assert take(arena, 0).numel() == 0 and arena.bytes == 0


@pytest.mark.parametrize(("size", "error"), [(-1, ValueError), (1.5, TypeError), ("1", TypeError)])
def test_sizes_that_are_none(arena, size, error):
    with pytest.raises(error, match=f"^size is {size!r}, wanted"):
        take(arena, size)
    assert arena.bytes == arena.peak == 0 and not arena.memory()


def test_torch_does_not_count_a_slab(arena):
    with torch.profiler.profile(profile_memory=True) as profile:
        slab = take(arena, 1 << 20)
    counted = [event.self_cpu_memory_usage for event in profile.events()]
    assert sum(counted) < slab.numel() // 2


def resident():
    """Bytes of pages that are this process's own: the system makes those huge ones."""
    with open("/proc/self/statm") as file:
        _, every, shared = map(int, file.read().split()[:3])
    return (every - shared) * mmap.PAGESIZE


def test_memory_goes_back_to_the_system():
    arena, size = HostArena(), 64 << 20
    take(arena, 1)  # what the first call of an operation keeps
    before = resident()
    slab = take(arena, size)
    assert size - (1 << 20) < resident() - before < size + (4 << 20)
    del slab
    assert resident() - before < 4 << 20
    assert arena.bytes == 0


def test_a_slab_lives_as_long_as_its_last_view(arena):
    slab = take(arena, 4096)
    view = slab[512:1024].view(torch.float32)
    del slab
    gc.collect()
    view.fill_(1.5)
    assert arena.bytes == 4096 and view.sum() == 192
    other = view.detach().view(8, 16).t()
    del view
    assert arena.bytes == 4096 and other.sum() == 192
    del other
    assert arena.bytes == 0 and arena.memory() == {}


def test_slabs_outlive_their_arena():
    slab = take(HostArena(), 100)
    gc.collect()
    assert not slab.any()


# ---- the account --------------------------------------------------------------------------------


def test_the_account(arena):
    slabs = [take(arena, 1000, "state", "AdamW"), take(arena, 500, "state", "AdamW")]
    slabs.append(take(arena, 30, "activations", "block 3"))
    wanted = {("state", "AdamW"): 1500, ("activations", "block 3"): 30}
    assert arena.memory() == wanted and arena.bytes == 1530
    del slabs[0]
    assert arena.bytes == 530 and arena.peak == 1530
    assert "state of AdamW: 500 B" in repr(arena)
    slabs.clear()
    assert arena.memory() == {} and arena.peak == 1530


# ---- limits -------------------------------------------------------------------------------------


def test_a_budget_is_checked_before_anything_is_taken(arena):
    arena.budget = 10_000
    slab = take(arena, 6_000)
    with pytest.raises(
        HostMemoryError, match="asked for .*5,000 bytes.* for state of test"
    ) as info:
        take(arena, 5_000)
    error = info.value
    assert isinstance(error, MemoryError)
    assert (error.asked, error.held, error.limit) == (5_000, 6_000, 10_000)
    assert error.which == "the budget of the arena" and error.which in str(error)
    assert arena.bytes == arena.peak == 6_000
    take(arena, 4_000)
    del slab


def test_a_budget_of_nothing_is_nothing():
    with pytest.raises(HostMemoryError, match="budget"):
        take(HostArena(0), 1)
    assert HostArena("2 KiB").budget == 2048


@pytest.mark.parametrize("which", ["the cgroup", "available"])
def test_what_the_system_has_left(which, monkeypatch):
    """0.8 of it, and what the arena has counts as if it were free."""
    left = {"what the cgroup has left": 5000, "the memory that is available": 5000}
    name = next(name for name in left if which in name)
    left[name] = 1000
    monkeypatch.setattr(arena_module, "host_headroom", lambda: left)
    arena = HostArena()
    with pytest.raises(HostMemoryError, match=name):
        take(arena, 801)
    slab = take(arena, 800)
    left[name] = 200
    assert arena.limit() == (800, f"0.8 of {name}")
    with pytest.raises(HostMemoryError, match=name):
        take(arena, 1)
    del slab


def test_a_system_that_says_nothing(monkeypatch):
    monkeypatch.setattr(arena_module, "host_headroom", dict)
    assert take(HostArena(), 100).numel() == 100


def test_a_full_disk(tmp_path, monkeypatch):
    def full(descriptor, offset, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    arena = HostArena(file=tmp_path)
    with pytest.raises(HostMemoryError, match="No space left"):
        take(arena, 100)
    assert arena.bytes == 0 and not list(tmp_path.iterdir())
    too_much = arena.limit()[0] + GIB
    with pytest.raises(HostMemoryError, match="of the space in"):
        take(arena, too_much)


# ---- bad arguments, files, forks, copies --------------------------------------------------------


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="budget is '2 apples'"):
        HostArena("2 apples")
    with pytest.raises(ValueError, match='pin must be "auto" or False'):
        HostArena(pin="always")
    with pytest.raises(NotADirectoryError, match="is not a folder"):
        HostArena(file=tmp_path / "missing")


def test_files_have_no_names(tmp_path):
    slab = take(HostArena(file=tmp_path), 4096)
    assert not list(tmp_path.iterdir())
    slab.fill_(3)
    with open("/proc/self/maps") as file:
        assert str(tmp_path) in file.read()
    del slab
    with open("/proc/self/maps") as file:
        assert str(tmp_path) not in file.read()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_processes_have_no_slabs(arena):
    slab = take(arena, 1 << 16)
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        slab[0] = 1  # is not mapped there
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert not slab.any()


def test_copies_share_the_memory_and_pickles_are_new(tmp_path):
    arena = HostArena("1 MiB", file=tmp_path)
    assert copy.deepcopy(arena) is arena
    other = pickle.loads(pickle.dumps(arena))
    assert other is not arena
    assert (other.budget, other.pin, other.file) == (1 << 20, "auto", tmp_path)
    assert pickle.loads(pickle.dumps(default_arena())) is default_arena()


def test_a_pickle_goes_to_a_machine_without_the_folder(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    data = pickle.dumps(HostArena(file=folder))
    folder.rmdir()
    with pytest.warns(UserWarning, match="there is no folder"):
        assert pickle.loads(data).file is None


# ---- CUDA's registration ------------------------------------------------------------------------


class Runtime:
    """Registers ranges as CUDA does, up to a number of bytes."""

    def __init__(self, most):
        self.most, self.ranges = most, {}

    def cudaHostRegister(self, address, size, flags):
        if sum(self.ranges.values()) + size > self.most:
            return 2
        self.ranges[address] = size
        return 0

    def cudaHostUnregister(self, address):
        del self.ranges[address]


def test_slabs_are_registered_once_and_unregistered(monkeypatch):
    runtime, device = Runtime(5000), torch.device("cuda:0")
    cpu = torch.device("cpu")  # stands for the device
    monkeypatch.setattr(arena_module, "pinned", lambda slab, _: pinned(slab, cpu, runtime))
    monkeypatch.setattr("headroom.host.pinning._warned", False)
    arena = HostArena()
    slab = arena.take(4000, kind="state", owner="test", device=device)
    assert runtime.ranges == {slab.data_ptr(): 4000}
    with pytest.warns(UserWarning, match="does not register 1.95 KiB of host memory .error 2"):
        refused = arena.take(2000, kind="state", owner="test", device=device)
    again = arena.take(2000, kind="state", owner="test", device=device)  # no second warning
    assert len(runtime.ranges) == 1 and arena.bytes == 8000
    del slab
    assert runtime.ranges == {} and arena.bytes == 4000
    del refused, again
    unpinned = HostArena(pin=False).take(100, kind="state", owner="test", device=device)
    assert runtime.ranges == {} and unpinned.numel() == 100


def test_the_peak_begins_anew():
    arena = HostArena()
    slab = arena.take(5000, kind="optimizer state", owner="test")
    kept = arena.take(3000, kind="optimizer state", owner="test")
    del slab
    assert (arena.peak, arena.bytes) == (8000, 3000)
    arena.reset_peak()
    assert (arena.peak, arena.bytes) == (3000, kept.numel())
