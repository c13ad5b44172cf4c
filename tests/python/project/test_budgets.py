"""Static budgets of the device code, read from the installed library with cuobjdump."""

import ctypes
import functools
import re
import sys
from collections import Counter
from pathlib import Path

import headroom
import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT))

from benchmarks.instructions import disassembly  # noqa: E402
from benchmarks.instructions.disassembly import MissingTool, kernel_name  # noqa: E402
from benchmarks.instructions.rows import ROWS, find  # noqa: E402

LIBRARY = Path(headroom.get_library_dir()) / "libheadroom.so.0.2"

# Registers per thread at most, on any arch. With 80, three blocks of 256 threads share a
# multiprocessor: enough loads in flight to keep its memory busy.
REGISTERS = {
    "adafactor_apply_kernel": 80,
    "adafactor_sums_kernel": 80,
    "adamw_kernel": 80,
    "adamw8bit_kernel": 80,
    "cross_entropy_entropy_kernel": 80,
    # Two blocks to a multiprocessor: with so many instructions per element, loads take less long.
    "divergence_backward_kernel": 128,
    "divergence_forward_kernel": 128,
    # Gate and up, their gradients, h and q of 8 elements; blocks of 128 threads, a row each.
    "experts_activate_kernel": 128,
    "momentum_codes_kernel": 80,
    # Two blocks to a multiprocessor, for which a tile in shared memory leaves room.
    "muon_momentum_kernel": 128,
    "muon_update_kernel": 128,
    "momentum_kernel": 80,
    "linear_few_kernel": 128,  # the sums of 16 rows of x, and codes a tile ahead
    # x, dy, weights and their sums. Two blocks to a multiprocessor: there are 256 groups of rows.
    "norm_backward_kernel": 128,
    "norm_backward_long_kernel": 128,  # 512 threads a block, for rows longer than 8,192
    "norm_backward_single_kernel": 80,  # rows that are not aligned
}
REGISTERS_OF_OTHERS = 64
# Kernels that handle a few values per tensor; all others must have 128-bit loads and stores.
SCALAR = {
    "adafactor_count_kernel",
    "adafactor_lines_kernel",
    "adafactor_means_kernel",
    "adafactor_total_kernel",
    # Tiny matrices, a thread each, and weights that are not plain, one by one.
    "adafactor_tiny_sums_kernel",
    "adafactor_tiny_norm_kernel",
    "adafactor_tiny_apply_kernel",
    "adafactor_weights_sums_kernel",
    "adafactor_weights_apply_kernel",
    "columns_kernel",  # a column a lane
    "cross_entropy_parts_kernel",
    "cross_entropy_reduce_kernel",
    "cross_entropy_stray_kernel",  # a target a thread and turn
    "dequantize_blocks_kernel",
    "experts_bias_kernel",  # a column a lane
    "experts_count_kernel",  # the expert of a row a thread and turn
    "experts_place_kernel",
    "gemm_finish_kernel",  # beside a product
    "list_count_kernel",
    # A thread an element or a row; all of it is little beside the products that it lies between.
    "lce_count_kernel",
    "lce_end_kernel",
    "lce_list_kernel",
    "lce_move_kernel",
    "lce_parts_kernel",
    "lce_reduce_kernel",
    "lce_scale_kernel",
    "lce_zero_kernel",
    "lora_norms_kernel",  # beside products with the same rows
    "matrix_mean_kernel",  # the scales of a matrix
    "matrix_subtract_kernel",
    "muon_normalize_kernel",  # a row a thread
    "muon_rows_kernel",
    "muon_squares_kernel",
    "newton_schulz_shift_kernel",  # beside products of the same matrices
    "norm_add_groups_kernel",
    "norm_backward_single_kernel",
    "norm_forward_single_kernel",
    "norm_kernel",
    "quantize_blocks_kernel",
    "quantize_matrix_kernel",  # once, when a model is loaded
    "tensor_sums_kernel",
    "update_scale_kernel",
    "weights_kernel",
}


# Of elements, which they do not write.
READERS = {
    "adafactor_sums_kernel",
    "cross_entropy_forward_kernel",
    "divergence_forward_kernel",
    "lce_see_kernel",
    "lce_see_more_kernel",
    "linear_few_kernel",
}
# Of elements, which they read as 4 bits.
WRITERS = {"dequantize_matrix_kernel"}


def build_info():
    library = ctypes.CDLL(str(LIBRARY))
    library.hr_build_info.restype = ctypes.c_char_p
    return dict(part.split("=") for part in library.hr_build_info().decode().split("; "))


ARCHS = [arch for arch in build_info()["archs"].split(";") if arch]
pytestmark = pytest.mark.skipif(not ARCHS, reason="the library is built for the CPU only")


def dumped(read, *arguments):
    try:
        return read(LIBRARY, *arguments)
    except MissingTool as error:
        pytest.skip(str(error))


@functools.cache
def cuobjdump(option):
    return dumped(disassembly.dump, option)


@pytest.fixture(scope="module")
def resources():
    """{(arch, symbol): {"REG": ..., "STACK": ..., "LOCAL": ...}}"""
    return dumped(disassembly.resources)


@pytest.fixture(scope="module")
def code():
    """{(arch, symbol): instructions}"""
    return dumped(disassembly.instructions)


@pytest.fixture(scope="module")
def instructions(code):
    """{(arch, symbol): Counter of opcodes such as LDG.E.128}"""
    return {key: Counter(i.opcode for i in listing) for key, listing in code.items()}


def test_every_source_has_device_code_for_every_arch():
    machine_code = Counter(re.findall(r"sm_(\d+)\.cubin", cuobjdump("--list-elf")))
    assert set(machine_code) == set(ARCHS)
    assert len(set(machine_code.values())) == 1, machine_code
    ptx = Counter(re.findall(r"sm_(\d+)\.ptx", cuobjdump("--list-ptx")))
    assert {max(ARCHS, key=int), "100"} & set(ARCHS) <= set(ptx)
    assert set(ptx.values()) == set(machine_code.values())


@pytest.mark.slow
def test_every_kernel_is_there_for_every_arch(resources, instructions):
    symbols = {symbol for _, symbol in resources}
    assert symbols and set(resources) == set(instructions)
    assert set(resources) == {(arch, symbol) for arch in ARCHS for symbol in symbols}
    assert {*REGISTERS, *SCALAR} <= {kernel_name(symbol) for symbol in symbols}


def test_every_kernel_over_elements_has_a_budget(resources):
    """In the file of its op in benchmarks."""
    names = {kernel_name(symbol) for _, symbol in resources}
    without = names - SCALAR - {row.kernel for row in ROWS}
    # In a turn of linear_few_kernel some threads load x for all: it has no bytes per element. Those
    # of Muon have one loop for all types, and newton_schulz_scale_kernel has none. Those of experts
    # lie between products of the same rows, each of which takes tens of times as long.
    muon = {"muon_momentum_kernel", "muon_update_kernel", "newton_schulz_scale_kernel"}
    experts = {f"experts_{name}_kernel" for name in ("activate", "add", "gather")}
    assert without == {"linear_few_kernel", *muon, *experts}


def test_registers(resources):
    over = {
        key: usage["REG"]
        for key, usage in resources.items()
        if usage["REG"] > REGISTERS.get(kernel_name(key[1]), REGISTERS_OF_OTHERS)
    }
    assert not over


def test_no_spills_and_no_local_memory(resources, instructions):
    assert not {key: usage for key, usage in resources.items() if usage["STACK"] or usage["LOCAL"]}
    for key, opcodes in instructions.items():
        assert not [op for op in opcodes if op.startswith(("LDL", "STL"))], key


@pytest.mark.parametrize("access", ["LDG", "STG"])
def test_vector_loads_and_stores(instructions, access):
    without = [
        key
        for key, opcodes in instructions.items()
        if kernel_name(key[1]) not in SCALAR | (WRITERS if access == "LDG" else READERS)
        # Element by element, at addresses that need it.
        and not re.search("(rope|dequantize_matrix|lce_add)_kernelILi1E", key[1])
        # Stores codes, and elements of a tile.
        and not (access == "STG" and "muon_momentum_kernelILb1ELb1E" in key[1])
        and not any(re.match(rf"{access}\..*\b(128|256)\b", op) for op in opcodes)
    ]
    assert not without


@pytest.mark.slow
@pytest.mark.release  # a minute and a half, and only kernels change it
def test_instructions_per_element(code):
    """Every loop that `python -m benchmarks.instructions` prints, beside its budget."""
    archs = {arch for row in ROWS for arch in row.budget}
    found = find({key: listing for key, listing in code.items() if key[0] in archs})
    missing, over = [], []
    for row in ROWS:
        for arch, most in row.budget.items():
            if arch not in ARCHS:
                continue
            one = found.get((arch, row.kernel, row.mix))
            if one is None:
                missing.append(f"{row.kernel}, {row.mix}, sm_{arch}")
            elif one.instructions > most:
                over.append(f"{row.kernel}, {row.mix}, sm_{arch}: {one.instructions:.1f} > {most}")
    assert not missing and not over
