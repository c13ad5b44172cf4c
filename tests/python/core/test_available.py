"""The memory that a process may take, from files of the system that the test writes."""

import pytest
import torch
from headroom._core.available import available, host_headroom
from headroom._core.cgroups import cgroup_headroom, cgroup_limit

CPU = torch.device("cpu")


def system(root, files):
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"
OWN = {"proc/self/cgroup": "0::/a/b\n"}
OWN1 = {"proc/self/cgroup": "3:cpu:/other\n5:memory,cpu:/a\n1:name=systemd:/x\n"}
LIMITS = {
    "no cgroups": ({}, None),
    "no limit": (OWN | {f"{V2}/a/b/memory.max": "max\n"}, None),
    "own": (OWN | {f"{V2}/a/b/memory.max": "4096\n"}, 4096),
    "that of the parent": (
        OWN | {f"{V2}/a/b/memory.max": "max", f"{V2}/a/memory.max": "512", f"{V2}/x": ""},
        512,
    ),
    "the smallest": (
        OWN | {f"{V2}/a/b/memory.max": "9", f"{V2}/a/memory.max": "7", f"{V2}/memory.max": "8"},
        7,
    ),
    "in a container": (OWN | {f"{V2}/memory.max": "2048"}, 2048),
    "none outside of its own": (OWN | {"sys/fs/memory.max": "1", f"{V2}/c/memory.max": "1"}, None),
    "version 1": (OWN1 | {f"{V1}/a/memory.limit_in_bytes": "640", f"{V1}/a/memory.max": "1"}, 640),
    "version 1, at the top": (OWN1 | {f"{V1}/memory.limit_in_bytes": "99"}, 99),
    "version 1, no limit": (OWN1 | {f"{V1}/a/memory.limit_in_bytes": str(2**63 - 4096)}, None),
    "of another controller": (
        {"proc/self/cgroup": "3:cpu:/a\n", f"{V1}/a/memory.limit_in_bytes": "5"},
        None,
    ),
    "the largest": (OWN | {f"{V2}/memory.max": str(2**60 - 1)}, 2**60 - 1),
    "past the largest": (OWN | {f"{V2}/memory.max": str(2**60)}, None),
}


@pytest.mark.parametrize("files, wanted", LIMITS.values(), ids=LIMITS)
def test_the_limit_of_a_cgroup(files, wanted, tmp_path):
    assert cgroup_limit(system(tmp_path, files)) == wanted


MEMORY = {"proc/meminfo": "MemTotal:  900 kB\nMemAvailable:    40 kB\nMemFree: 7 kB\n"}
STATUS = {"proc/self/status": "Name: x\nVmRSS:\t  3 kB\n"}


def test_what_is_available(tmp_path):
    assert available(CPU, root=system(tmp_path, MEMORY)) == 40 << 10
    assert available(CPU, 100, tmp_path) == (40 << 10) + 100
    system(tmp_path, OWN | {f"{V2}/memory.max": str(30 << 10)})
    assert available(CPU, root=tmp_path) == 30 << 10  # what the process has is not known
    system(tmp_path, STATUS)
    assert available(CPU, 100, tmp_path) == (27 << 10) + 100
    system(tmp_path, {f"{V2}/memory.max": str(2 << 10)})
    assert available(CPU, 100, tmp_path) == 100
    system(tmp_path, {f"{V2}/memory.max": str(1 << 20)})
    assert available(CPU, root=tmp_path) == 40 << 10


def test_a_system_that_says_nothing(tmp_path):
    with pytest.raises(ValueError, match="does not say how much memory is available; give budget="):
        available(CPU, root=system(tmp_path, {"proc/meminfo": "MemFree: 7 kB\n"}))


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_headroom_of_cgroups_of_version_2(tmp_path):
    assert cgroup_headroom(tmp_path) is None
    write(tmp_path / "proc/self/cgroup", "0::/a/b\n")
    inner, top = tmp_path / "sys/fs/cgroup/a/b", tmp_path / "sys/fs/cgroup"
    write(inner / "memory.max", "max\n")
    assert cgroup_headroom(tmp_path) is None
    write(inner / "memory.max", "10000\n")
    assert cgroup_headroom(tmp_path) is None  # its usage is not known
    write(inner / "memory.current", "7000\n")
    assert cgroup_headroom(tmp_path) == 3000
    write(inner / "memory.stat", "anon 3000\nfile 4000\ninactive_file 2500\nactive_file 500\n")
    assert cgroup_headroom(tmp_path) == 6000  # shared memory, 1000 of the files, cannot be dropped
    write(top / "memory.max", "20000\n")
    write(top / "memory.current", "25000\n")
    assert cgroup_headroom(tmp_path) == 0
    write(tmp_path / "proc/meminfo", "MemTotal: 9 kB\nMemAvailable:       3 kB\n")
    assert sorted(host_headroom(tmp_path).values()) == [0, 3072]


def test_headroom_of_cgroups_of_version_1(tmp_path):
    write(tmp_path / "proc/self/cgroup", "7:memory:/docker/abc\n0::/\n")
    folder = tmp_path / "sys/fs/cgroup/memory"
    write(folder / "memory.limit_in_bytes", "10000\n")
    write(folder / "memory.usage_in_bytes", "7000\n")
    write(
        folder / "memory.stat", "active_file 5\ntotal_active_file 500\ntotal_inactive_file 1500\n"
    )
    assert cgroup_headroom(tmp_path) == 5000
    write(folder / "memory.limit_in_bytes", "9223372036854771712\n")
    assert cgroup_headroom(tmp_path) is None
    assert host_headroom(tmp_path) == {}
