"""The site: mkdocs builds it from the pages as they stand, without a warning."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = ROOT / ".venv-site"  # kept for the next run

pytestmark = pytest.mark.slow


def run(*command):
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def mkdocs():
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        code, said = run(sys.executable, "-m", "venv", ENVIRONMENT)
        assert code == 0, said
    wanted = re.search(r'^docs = \["(.+)"\]', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    code, said = run(python, "-m", "pip", "install", "--quiet", wanted)
    assert code == 0, said
    return ENVIRONMENT / "bin" / "mkdocs"


def test_the_site_builds_without_a_warning(mkdocs, tmp_path):
    code, said = run(mkdocs, "build", "--strict", "--site-dir", tmp_path / "site")
    assert code == 0 and "WARNING" not in said, said
    pages = {path.parent.name for path in (tmp_path / "site").glob("*/index.html")}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README"} <= pages
    first = (tmp_path / "site" / "index.html").read_text()
    assert 'src="repository/examples/ladder.png"' in first and "fonts.googleapis" not in first
    assert "Traceback" not in (tmp_path / "site/notebooks/first-minutes/index.html").read_text()


def test_a_link_that_leads_nowhere_is_a_warning(mkdocs, tmp_path):
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path)
    for name in (".ci", "docs", "benchmarks", "examples", "capi", "tests/loops"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "docs" / "new.md").write_text("# New\n\n[nothing](plan.md#no-such-heading)\n")
    config = tmp_path / "mkdocs.yml"
    site = tmp_path / "site"
    code, said = run(mkdocs, "build", "--strict", "-f", config, "--site-dir", site)
    assert code != 0 and "no-such-heading" in said
