"""``headroom rehearse``: the ``rehearsed_*`` programs of ``tests/loops``, with the loops of other
people in the releases that they name."""

import pytest

from helpers.loop_programs import LOOPS, environment_of, python_of
from helpers.rehearsals import check_started, check_steps, parameters, rehearse_each
from helpers.software_device import CAN_REHEARSE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CAN_REHEARSE, reason="needs a torch for CUDA and no GPU"),
]
# Program, its arguments, and the options of its rehearsal.
PROGRAMS = {
    "TRL's SFT": ("trl", ["sft"], ["--no-weights"]),
    "TRL's DPO": ("trl", ["dpo"], ["--no-weights"]),
    "TRL's GRPO": ("trl", ["grpo"], ["--no-weights"]),
    "Liger": ("liger", [], []),
    "torchvision's ResNet-50": ("torchvision", [], []),
    "torchtune": ("torchtune", [], []),
    "torchtitan": ("torchtitan", [], ["--devices", "2"]),
    "DeepSpeed ZeRO-2": ("deepspeed", [2], ["--devices", "1"]),
    "DeepSpeed ZeRO-3": ("deepspeed", [3], ["--devices", "1"]),
}
# Each also as `headroom run` starts it, and some with a budget.
RUN = ["-m", "headroom", "run"]
STARTED = [*RUN, "--register", "--snapshot-on-oom", "oom"]
BUDGET = [*RUN, "--budget", "3 GiB"]
FITTED, REFUSED = "TRL's SFT", "TRL's GRPO"
HOW = "", " started", " fitted"
WITH_BUDGET = FITTED, REFUSED


def path_of(name):
    return LOOPS / f"rehearsed_{PROGRAMS[name][0]}.py"


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """Returns a function that rehearses all programs of the environment of one, when it is first
    asked for, and returns what is known of that one: plain, started by `headroom run`, and with
    a budget, or None."""
    done = {}

    def of(name):
        if name not in done:
            path = path_of(name)
            python, versions = python_of(path)
            mine = [n for n in PROGRAMS if environment_of(path_of(n)) == environment_of(path)]
            programs = {n: (path_of(n), *PROGRAMS[n][1:]) for n in mine}
            programs |= {f"{n} started": (*programs[n], STARTED) for n in mine}
            programs |= {f"{n} fitted": (*programs[n], BUDGET) for n in mine if n in WITH_BUDGET}
            folder = tmp_path_factory.mktemp("rehearsed")
            found = rehearse_each(programs, folder, memory="4 GiB", steps=2, python=python)
            print(versions)
            done.update({n: [found.get(n + how) for how in HOW] for n in mine})
        return done[name]

    return of


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "ZeRO" not in name])
def test_a_loop_is_rehearsed(rehearsed, name):
    plain, started, _ = rehearsed(name)
    check_steps(*plain)
    check_steps(*started)
    check_started(plain, started)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "ZeRO" in name])
def test_weights_of_an_engine_are_rehearsed(rehearsed, name):
    """The engine holds float32 weights and two moments on the host, and its weights in 16 bits on
    the device, in one buffer: nothing of that has the kind of the program's own optimizer."""
    plain, started, _ = rehearsed(name)
    for code, report, output in (plain, started):
        assert code == 0 and report["fits"] is True and report["steps"] == 2, output
        assert report["host"]["tensors"] + report["host"]["pinned"] > 3 * parameters(output)
        held = [row for row in report["at_peak"] if 2 * row["bytes"] == parameters(output)]
        assert any("/zero/" in f"/{row['stack'][0]}" for row in held), report["at_peak"]
    check_started(plain, started)


def test_a_loop_is_rehearsed_with_a_budget(rehearsed):
    code, report, output = rehearsed(FITTED)[-1]
    # Steps that it tries count too.
    assert code == 0 and report["fits"] is True and report["steps"] >= 2, output
    code, report, output = rehearsed(REFUSED)[-1]
    assert code != 0 and report["error"] == "TypeError" and "sample_batch=" in output, output
