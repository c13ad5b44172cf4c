"""README's table of what fits on which GPU, and that of mixtures: the certificates that they are
made of hold, and some are rehearsed and planned again."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import headroom
import pytest
import torch
from headroom_rehearsal.certificate import verify

from helpers.software_device import CAN_REHEARSE

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT))

from benchmarks._certificates import (  # noqa: E402
    GB,
    MIXTURES,
    WAYS,
    command,
    file_of,
    mixture_row,
    program_of,
    row,
)


def test_the_rows_of_the_table():
    reports = {way: verify(file_of(way)).report for way in WAYS}
    lines = (ROOT / "README.md").read_text().splitlines()
    assert [line for line in lines if " GB | " in line] == [row(gb, reports) for gb in GB]


def test_the_rows_of_mixtures():
    page = (ROOT / "docs" / "experts.md").read_text()
    for way in MIXTURES:
        assert mixture_row(way, verify(file_of(way)).report) in page


@pytest.mark.parametrize("way", WAYS | MIXTURES)
def test_a_certificate_holds(way):
    found = verify(file_of(way))
    assert found.holds and found.report["fits"] is True and found.report["steps"] == 2
    assert found.report["program"][1:] == way.split()
    program = hashlib.sha256(program_of(way).read_bytes()).hexdigest()
    assert json.loads(file_of(way).read_text())["program_sha256"] == program


@pytest.mark.slow
@pytest.mark.skipif(not CAN_REHEARSE, reason="needs a torch for CUDA and no GPU")
@pytest.mark.parametrize("way", ["qlora headroom", "gpt-oss-20b"])
def test_a_row_again(way, tmp_path):
    pytest.importorskip("transformers")
    done = subprocess.run(
        command(way, tmp_path / "again.json"), cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    kept, again = verify(file_of(way)), verify(tmp_path / "again.json")
    names = ("torch", "transformers")
    versions = [[one.report["versions"][name] for name in names] for one in (kept, again)]
    # Other releases may take other temporaries.
    apart = 0 if versions[0] == versions[1] else 0.02
    assert abs(again.allocated / kept.allocated - 1) <= apart
    assert abs(again.reserved / kept.reserved - 1) <= apart


@pytest.mark.slow
def test_a_row_planned():
    """For the GPU of the certificate, which decides how the fused loss divides its rows."""
    pytest.importorskip("transformers")
    import fine_tune_8b

    model = fine_tune_8b.llama("meta")
    headroom.patch(model, save="L5", loss=True)
    ids = torch.zeros(1, fine_tune_8b.TOKENS, dtype=torch.int64)
    plan = headroom.plan(
        model, headroom.optim.AdamW8bit, {"input_ids": ids, "labels": ids}, device="cuda",
        capability=(9, 0), release=True,
    )  # fmt: skip
    kept = verify(file_of("full headroom"))
    assert kept.report["device"]["capability"] == 90
    assert plan.peak_bytes == pytest.approx(kept.allocated, rel=1e-3)


@pytest.mark.slow
def test_a_mixture_planned():
    pytest.importorskip("transformers")
    import fine_tune_mixture

    model = fine_tune_mixture.made("qwen3-30b", "meta")
    headroom.patch(model, save="L5", loss=True)
    optimizer = headroom.optim.AdamW8bit(p for p in model.parameters() if p.requires_grad)
    ids = torch.zeros(1, 4096, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    plan = headroom.plan(model, optimizer, batch, device="cuda", capability=(8, 9))
    kept = verify(file_of("qwen3-30b"))
    assert plan.allocated_bytes == pytest.approx(kept.allocated, rel=1e-5)
