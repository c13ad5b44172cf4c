"""A few seconds of each fuzz driver, with a seed that stays. A longer run by hand finds more:
``python -m tests.python.fuzz.convert --seconds 600 --seed 7``."""

import importlib
import random
import re
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[2]
sys.path.append(str(ROOT))

from headroom._core.row_ops import ROW_OPS  # noqa: E402
from tests.python.fuzz import _driver, _header, c_abi, torch_ops  # noqa: E402

from helpers.fresh import run_fresh  # noqa: E402

DRIVERS = sorted(path.stem for path in FOLDER.glob("[!_]*.py") if path.stem != "test_fuzz")
SECONDS = 4  # a quarter of it where parameters are sampled too
FEWEST = 20  # cases: with fewer a driver tries nothing to speak of


def drive(name, *arguments):
    """Runs the cases of a driver."""
    return _driver.main(importlib.import_module(name).case, list(arguments))


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_driver_finds_nothing(driver, request, tmp_path):
    seconds = SECONDS / 4 if request.config.getoption("--sample") else SECONDS
    name = f"tests.python.fuzz.{driver}"
    limits = "--seconds", str(seconds), "--least", str(FEWEST)
    status, printed = run_fresh(tmp_path, drive, name, *limits)
    assert status == 0, printed
    tried = re.search(r"^([\d,]+) cases in", printed, re.MULTILINE)
    assert tried and int(tried[1].replace(",", "")) >= FEWEST, printed
    print(printed)


def test_every_function_is_called():
    """What takes lists of one size and a config is found in the header; the others are written."""
    rng = random.Random(0)
    called = {make(rng, c_abi.Memory(rng)).name for make in c_abi.CALLS for _ in range(20)}
    declared = set(_header.status_functions(_header.HEADER.read_text()))
    assert called == declared - {"hr_set_parallel_for", "hr_set_cpu_level", "hr_set_gemm"}


def test_lists_beside_an_empty_one_are_refused():
    """Such as moments without parameters: nothing would be updated, and nothing said."""
    rng, tried = random.Random(0), set()
    for make in {*torch_ops.CALLS}:
        for _ in range(20):
            call = make(rng)
            lists = [value for value in call.lists.values() if isinstance(value, list)]
            if lists and lists[0] and any(lists[1:]):
                lists[0].clear()
                tried.add(call.op._schema.name)
                with pytest.raises(RuntimeError, match="has [0-9]+ tensors, wanted"):
                    call.run()
    assert tried >= {"headroom::adamw8bit_", "headroom::join_weights_", "headroom::accumulate_"}


def test_every_op_that_writes_is_called():
    rng = random.Random(0)
    called = {make(rng).op._schema.name for make in torch_ops.CALLS for _ in range(20)}
    ops = {schema.name for schema in torch._C._jit_get_all_schemas()}
    writing = {name for name in ops if re.fullmatch(r"headroom::[a-z]\w*_", name)}
    of_rows = {f"headroom::{name}" for op in ROW_OPS.values() for name in op.ops}
    assert called - of_rows == writing - of_rows | {"headroom::grad_norm"}
    assert called & of_rows >= writing & of_rows


@pytest.mark.parametrize(
    "body, said",
    [
        ("assert number != 7, 'seven'", "case 7 failed"),
        ("if number == 7: os.kill(os.getpid(), 11)", "case 7 ended the process with SIGSEGV"),
    ],
)
def test_the_loop_names_the_case_that_fails(body, said, tmp_path, monkeypatch):
    (tmp_path / "fake.py").write_text(
        "import itertools, os\n"
        "numbers = itertools.count()\n"
        "def case(rng):\n"
        "    number = next(numbers)\n"
        f"    {body}\n"
        "    return 'accepted'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    status, printed = run_fresh(tmp_path, drive, "fake", "--cases", "9")
    assert status == 1 and said in printed
    assert "--seed 0 --first 7 --cases 1" in printed
    status, printed = run_fresh(tmp_path, drive, "fake", "--cases", "7")
    assert status == 0 and "7 cases in" in printed
