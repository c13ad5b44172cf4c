"""benchmarks.instructions: what it finds in a listing that was counted by hand."""

import sys
from dataclasses import replace
from pathlib import Path

import headroom
import pytest
from headroom.profiling import rates

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT))

from benchmarks.instructions import __main__ as command  # noqa: E402
from benchmarks.instructions import calls, disassembly, gpus, head, rows  # noqa: E402
from benchmarks.instructions.call import Call, Step  # noqa: E402
from benchmarks.instructions.loops import hot_loops  # noqa: E402
from benchmarks.instructions.model import DEVICES, GAP, Device, Launch, predict  # noqa: E402

# A loop over four f32 elements, whose square root calls a function for denormal numbers, and which
# threads that have diverged go through elsewhere. Then one over single elements.
LISTING = """
arch = sm_90
		Function : _Z11root_kernel4args
        /*0000*/                   LDC R1, c[0x0][0x28] ;      /* 0x00000a00ff017b82 */
                                                               /* 0x000fc60000000800 */
        /*0010*/              @!P1 BRA 0x120 ;
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/                   LDG.E.128 R8, desc[UR4][R12.64] ;
        /*0040*/                   FADD R4, R4, R8 ;
        /*0050*/                   MUFU.RSQ R16, R4 ;
        /*0060*/               @P0 BRA 0x0a0 ;
        /*0070*/                   MOV R20, 0x90 ;
        /*0080*/                   CALL.REL.NOINC 0x1d0 ;
        /*0090*/                   BRA 0xc0 ;
        /*00a0*/                   FMUL R4, R4, R16 ;
        /*00b0*/               @P2 STG.E.128 desc[UR4][R14.64], R4 ;
        /*00c0*/                   STG.E.128 desc[UR4][R12.64], R4 ;
        /*00d0*/                   IADD3 R2, R2, 0x1000, RZ ;
        /*00e0*/                   NOP ;
        /*00e8*/                   BRA.DIV ~URZ 0x1f0 ;
        /*00f0*/                   ISETP.LT.AND P0, PT, R2, R3, PT ;
        /*0100*/              @!P0 CALL.REL.NOINC 0x120 ;
        /*0110*/                   BRA 0x20 ;
        /*0120*/                   LDG.E R4, desc[UR4][R2.64] ;
        /*0130*/                   FMUL R4, R4, R4 ;
        /*0140*/                   STG.E desc[UR4][R2.64], R4 ;
        /*0150*/               @P1 BRA 0x120 ;
        /*0160*/                   EXIT ;
        /*01d0*/                   MUFU.RSQ R0, R0 ;
        /*01e0*/                   RET.REL.NODEC R20 0x0 ;
        /*01f0*/                   CALL.REL.NOINC 0x1d0 ;
        /*0200*/                   BRA 0xf0 ;
"""
LEAVES = """\
        /*0010*/                   BRA 0x120 ;
        /*0018*/                   MOV R2, R3 ;
"""
EXTRA = "        /*0048*/                   FMUL R5, R5, R5 ;\n"


@pytest.fixture
def listing(monkeypatch):
    texts = [LISTING]
    monkeypatch.setattr(disassembly, "dump", lambda library, *options: texts[0])

    def read(text=LISTING):
        texts[0] = text
        return disassembly.instructions(Path("libheadroom.so"))

    return read


def test_a_loop_behind_a_table_of_branches(listing):
    """The table is not in the listing: the loop is one because nothing else leads to it."""
    jumps = "        /*0008*/                   BRXU UR4 -0x10 ;\n"
    hidden = [
        loop[0].accesses("load")
        for loop in hot_loops(next(iter(listing(in_front(jumps + LEAVES)).values())))
    ]
    without = hot_loops(next(iter(listing(in_front(LEAVES)).values())))
    assert sorted(hidden) == ["1x4", "2x16"] and len(without) == 1


def in_front(text):
    """The listing with instructions in front of its hot loop."""
    lines = LISTING.splitlines(keepends=True)
    at = next(n for n, line in enumerate(lines) if "/*0010*/" in line)
    return "".join([*lines[:at], text, *lines[at + 1 :]])


def worse(text):
    """The listing with one more instruction in the hot loop."""
    lines = text.splitlines(keepends=True)
    at = next(n for n, line in enumerate(lines) if "/*0050*/" in line)
    return "".join([*lines[:at], EXTRA, *lines[at:]])


def test_the_hot_loop_without_its_cold_parts(listing):
    (key, code), *others = listing().items()
    assert key == ("90", "_Z11root_kernel4args") and not others
    vector, scalar = sorted(hot_loops(code), key=lambda loop: -loop[0].bytes("load"))
    # With the store under P2 and without it: predicated or not, an instruction is issued.
    assert {turn.accesses("store") for turn in vector} == {"1x16", "2x16"}
    for turn in vector:
        assert len(turn.instructions) == 13
        assert turn.branches == 3 and turn.accesses("load") == "2x16"
        assert turn.flights == [2]  # both loads before the first use
        assert turn.count("MUFU.RSQ") == 1
    assert [(len(t.instructions), t.accesses("load"), t.flights) for t in scalar] == [
        (4, "1x4", [1])
    ]


def test_a_load_that_waits_for_another(listing):
    later = LISTING.replace("R12.64] ;\n        /*0040*/", "R4.64] ;\n        /*0040*/")
    (code,) = listing(later).values()
    assert max(hot_loops(code), key=lambda loop: loop[0].bytes("load"))[0].flights == [1, 1]


def test_a_longer_loop_exceeds_its_budget(listing, monkeypatch):
    row = rows.Row("root_kernel", "f32", 12, 8, 4, ("MUFU.RSQ",), 0.25, {"90": 3.25})
    monkeypatch.setattr(rows, "ROWS", [row])
    found = rows.find(listing())["90", "root_kernel", "f32"]
    assert found.elements == 4 and found.instructions == 13 / 4 <= row.budget["90"]
    found = rows.find(listing(worse(LISTING)))["90", "root_kernel", "f32"]
    assert found.instructions == 14 / 4 > row.budget["90"]


def test_the_model():
    """A GPU of one multiprocessor at 1 GHz whose memory brings 32 bytes per ns."""
    device = Device("small", "90", 1, 1e9, 32e9, "")
    assert device.needed(instructions=48, traffic=16) == 2 * 48 / 32
    assert device.fraction(48, 16) == 1
    assert device.fraction(96, 16) == 0.5


def test_gpus_of_one_chip_differ_in_memory_alone():
    h200, h100 = (one for one in DEVICES if one.arch == "90")
    other = {"name": h200.name, "bandwidth": h200.bandwidth, "source": h200.source}
    assert replace(h100, **other) == h200


def test_rates_have_one_table():
    """Of rows of `headroom.profile` for products, those of a GPU in both are the same."""
    table = (ROOT / "capi/core/gpus.h").read_text()
    assert len(gpus.GPUS) == table.count('{"') and all(gpu.source for gpu in gpus.GPUS.values())
    kinds = {"float16": "half", "bfloat16": "half", "tf32": "tf32", "float32": "single"}
    both = [row for row in rates.PUBLISHED if row.name in gpus.GPUS]
    assert {"H100", "H200", "A100"} <= {row.name for row in both}
    for row in both:
        gpu = gpus.GPUS[row.name]
        assert row.rates == {kind: getattr(gpu, name) for kind, name in kinds.items()}


def test_the_prediction_of_a_head():
    """The order that the library chooses is the faster one by the counts too, which are others."""
    library = next(Path(headroom.get_library_dir()).glob("libheadroom.so.*"))
    for gpu in (gpu for gpu in head.ON if gpu.name != "H200"):
        for sizes in ((8192, 4096, 128256), (8192, 2048, 128256), (16384, 8192, 128256)):
            by_mode = {
                mode: head.predicted(library, gpu, sizes, mode)[2]
                for mode in (head.TOKENS, head.VOCABULARY)
            }
            chosen = head.needs_of(library, gpu, *sizes, 0).mode
            assert by_mode[chosen] <= 1.05 * min(by_mode.values()), (gpu.name, sizes)
    h100 = gpus.GPUS["H100"]
    needs, kernels, seconds = head.predicted(library, h100, (8192, 4096, 128256), 0)
    assert seconds <= 58e-3
    assert needs.workspace <= 0.6e9
    of_a_product = 2 * 8192 * 4096 * 128256  # of which one of 14 tiles is computed once less
    assert sum(k.operations for k in kernels) == pytest.approx((4 - 1 / 14) * of_a_product)


def test_the_command_for_a_head(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["head", "--sizes", "8192", "4096", "128256"])
    head.main()
    printed = capsys.readouterr().out
    assert "H100, vocabulary, chosen: 8,192 rows x 9,216 classes at a time" in printed


SMALL = Device("small", "90", 10, 1e9, 100e9, "", latency=500, threads=2048, shared=65536)


@pytest.mark.parametrize(
    "threads, registers, shared, blocks",
    [
        (256, 32, 0, 8),  # threads
        (256, 33, 0, 6),  # registers: 40 of each, as a warp takes 1,280
        (96, 128, 0, 5),  # 4,096 of a warp, three warps
        (32, 16, 0, 32),  # blocks
        (32, 80, 0, 24),  # six of a scheduler
        (256, 32, 20000, 3),  # shared memory
        (256, 32, 21000, 2),  # of which a block takes 1,024 bytes more
        (1024, 65, 0, 0),  # too many registers for one block
    ],
)
def test_how_many_blocks_are_resident(threads, registers, shared, blocks):
    assert SMALL.resident(threads, registers, shared) == blocks


def test_what_each_limit_would_take():
    found = predict(SMALL, Launch(101, 256, 1e6, 3e6, 2, 128))  # 2 blocks a multiprocessor
    assert found.memory == pytest.approx(1e6 / 100e9)
    assert found.issue == pytest.approx(3e6 / 32 / 10 / 3 / 1e9)
    assert found.latency == pytest.approx(6 * 500 * (2 * 2 + 1) / 1e9)  # the sixth wave has one
    assert found.limit == "latency"
    cubes = found.memory**3 + found.issue**3 + found.latency**3
    assert found.seconds == pytest.approx(cubes ** (1 / 3) + GAP)
    few = predict(SMALL, Launch(4, 256, 1e6, 3e6, 2, 128))
    assert few.issue == pytest.approx(found.issue * 10 / 4)  # the others are idle


def test_a_call_of_counted_kernels(listing, monkeypatch):
    row = rows.Row("root_kernel", "f32", 12, 8, 4, ("MUFU.RSQ",), 0.25)
    monkeypatch.setattr(rows, "ROWS", [row])
    found = rows.find(listing())
    (key,) = listing()
    usage = {key: {"REG": 40, "SHARED": 16}, ("90", "_Z5other4args"): {"REG": 9, "SHARED": 0}}
    step = Step("root_kernel", (("f32", 4000),), 8, 256, 3, 48000, shared=100)
    assert calls.launch(step, SMALL, found, usage) == Launch(
        8, 256, 48000, 4000 * 13 / 4, 3, 40, 116
    )
    plain = Step("other", (), 8, 256, 3, 48000)
    assert calls.launch(plain, SMALL, found, usage) == Launch(8, 256, 48000, 0, 3, 9, 0)
    call = Call("both", 48000, (step, plain))
    assert len(calls.predictions(call, SMALL, found, usage)) == 2
    assert calls.predictions(call, SMALL, {}, usage) == []


def test_a_whole_way_through_a_kernel(listing, monkeypatch):
    """Its accesses of 16 bytes count, and the marker is a least number."""
    row = rows.Row("root_kernel", "f32", 12, 8, 4, ("FMUL",), 0.25, whole=4)
    for enough, per_element in ((True, 0.25), (True, 0.1), (False, 0.75)):
        monkeypatch.setattr(
            rows, "ROWS", [row.__class__(**{**vars(row), "per_element": per_element})]
        )
        assert (("90", "root_kernel", "f32") in rows.find(listing())) == enough


def test_every_row_has_a_name_of_its_own():
    names = [(row.kernel, row.mix) for row in rows.ROWS]
    assert len(set(names)) == len(names)


def test_the_command(listing, monkeypatch, capsys):
    row = rows.Row("root_kernel", "f32", 12, 8, 4, ("MUFU.RSQ",), 0.25, {"90": 3.25}, 2.5)
    for module in (rows, command):
        monkeypatch.setattr(module, "ROWS", [row])
    step = Step("root_kernel", (("f32", 4e6),), 4000, 256, 1, 48e6)
    monkeypatch.setattr(command, "CALLS", [Call("roots", 48e6, (step,))])
    usage = {("90", "_Z11root_kernel4args"): {"REG": 40, "SHARED": 0}}
    monkeypatch.setattr(command, "resources", lambda library: usage)
    listing()
    assert command.main(["--library", "libheadroom.so"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [li for li in lines if li.startswith("  root f32")][:1]
    assert line.split()[2:6] == ["12", "3.2", "3.25", "2.5"]
    assert [li.split()[1] for li in lines if li.startswith("  roots")] == ["H200", "H100"]
    listing("")
    assert command.main(["--library", "libheadroom.so"]) == 1
    assert "no device code" in capsys.readouterr().err


def test_a_missing_disassembler_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(disassembly.importlib.util, "find_spec", lambda name: None)
    assert command.main(["--library", "libheadroom.so"]) == 1
    assert "no cuobjdump" in capsys.readouterr().err
