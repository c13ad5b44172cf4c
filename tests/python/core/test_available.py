"""The memory that a process may take, from files of the system that the test writes."""

import pytest
import torch
from headroom._core.available import available
from headroom._core.cgroups import cgroup_limit

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
