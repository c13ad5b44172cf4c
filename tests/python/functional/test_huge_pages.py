"""Large results on the CPU: the kernel is asked for huge pages for their memory."""

import pathlib

import pytest
import torch
from headroom.functional import glu, rope, rope_tables

HUGE_PAGES = pathlib.Path("/sys/kernel/mm/transparent_hugepage")
pytestmark = pytest.mark.skipif(not HUGE_PAGES.exists(), reason="a kernel without huge pages")


def flags_at(address):
    """Returns what the kernel knows of the mapping that holds an address."""
    inside = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            begin, end = (int(bound, 16) for bound in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return rest
    raise AssertionError(f"no mapping holds {address:#x}")


def in_huge_pages(tensor):
    middle = tensor.data_ptr() + tensor.nbytes // 2
    return "hg" in flags_at(middle)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_large_results_are_in_huge_pages(dtype):
    gate = torch.ones(4096, 2560, dtype=dtype)  # with a mapping of its own in either dtype
    assert in_huge_pages(glu(gate))


def test_rotated_heads_too():
    q = torch.ones(1, 4, 8192, 320)
    rotated = rope(q, None, *rope_tables(64, 8192))
    assert in_huge_pages(rotated)
