"""The site: mkdocs builds it from the pages as they stand, without a warning, and makes the
reference from docstrings."""

import gzip
import html
import inspect
import os
import re
import shutil
import subprocess
import sys
import zlib
from functools import cache, reduce
from pathlib import Path

import headroom.cli
import pytest

from helpers.browser import Browser, find_browser

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = ROOT / ".venv-site"  # kept for the next run
PATH = f"{ENVIRONMENT / 'bin'}{os.pathsep}{os.environ['PATH']}"  # ruff formats signatures

pytestmark = pytest.mark.slow


def run(*command):
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "PATH": PATH},
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def mkdocs():
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        code, said = run(sys.executable, "-m", "venv", ENVIRONMENT)
        assert code == 0, said
    wanted = re.search(r"^docs = \[(.+)\]", (ROOT / "pyproject.toml").read_text(), re.M)[1]
    code, said = run(python, "-m", "pip", "install", "--quiet", *re.findall('"(.+?)"', wanted))
    assert code == 0, said
    return ENVIRONMENT / "bin" / "mkdocs"


@pytest.fixture(scope="module")
def built(mkdocs, tmp_path_factory):
    """The folder of the site, and what mkdocs said."""
    site = tmp_path_factory.mktemp("site")
    code, said = run(mkdocs, "build", "--strict", "--site-dir", site)
    assert code == 0, said
    return site, said


def test_the_site_builds_without_a_warning(built):
    site, said = built
    assert "WARNING" not in said, said
    pages = {path.parent.name for path in site.glob("*/index.html")}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README"} <= pages
    first = (site / "index.html").read_text()
    assert 'src="frontier-llama-8b.png"' in first and "fonts.googleapis" not in first
    assert "Traceback" not in (site / "notebooks/first-minutes/index.html").read_text()


def entries(site):
    """Returns the page of each name of the reference."""
    lines = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    places = [line.split(" ") for line in lines.splitlines()]
    return {name: place.removesuffix("#$") for name, _, _, place, _ in places if "#$" in place}


def value_of(name):
    return reduce(getattr, name.split(".")[1:], headroom)


def test_the_reference_has_every_public_name_with_its_arguments(built):
    site, _ = built
    listed = (ROOT / "tests/python/project/signatures.txt").read_text().splitlines()
    names = [row.partition("(")[0] for row in listed]
    for name in headroom.functional.__all__:
        if not hasattr(headroom, name):  # else it is on the first page
            names.append(f"headroom.functional.{name}")
    found = entries(site)
    missing = set(names) - set(found)
    assert not missing
    assert not [name for name in found if "._" in name]
    for name in names:
        page = (site / found[name] / "index.html").read_text()
        assert not re.search(":(?:attr|class|data|exc|func|meth|mod):", page)
        entry = page.split(f'id="{name}"', 1)[1].split("</code></pre>", 1)[0]
        shown = set(re.findall(r"\w+", html.unescape(re.sub("<[^>]*>", "", entry))))
        arguments = set(inspect.signature(value_of(name)).parameters) - {"self"}
        assert {one for one in arguments if not one.startswith("_")} <= shown, name


@cache
def sent(path):
    """Returns the bytes in which a file is sent: text is compressed."""
    data = path.read_bytes()
    return len(data if path.suffix == ".png" else gzip.compress(data))


def test_no_page_weighs_a_megabyte(built):
    """With its pictures, and with what the search loads on every page."""
    site, _ = built
    files = [site / "search/search_index.json", *site.glob("assets/javascripts/workers/*.js")]
    pages = [*site.rglob("index.html")]
    assert pages and len(files) == 2
    for page in pages:
        named = re.findall(r'(?:src|href)="([^":?#]+[.](?:css|js|png))"', page.read_text())
        parts = {page, *files, *((page.parent / name).resolve() for name in named)}
        assert sum(map(sent, parts)) < 1e6, page


# Tables that no box around them scrolls.
CUT = """[...document.querySelectorAll('.md-content table')].filter(table => {
    for (let e = table; e; e = e.parentElement)
        if (['auto', 'scroll'].includes(getComputedStyle(e).overflowX)) return false;
    return true;
}).length"""


def test_no_page_is_wider_than_a_phone(built):
    """Wide tables scroll inside a box of their own; every picture is there."""
    if (path := find_browser()) is None:
        pytest.skip("needs Chromium")
    site, _ = built
    with Browser(path) as browser:
        pages = ("", "comparison", "offloading", "notebooks/first-minutes", "api/headroom.optim")
        for page in pages:
            browser.open(site / page / "index.html", width=390, height=844)
            assert browser.run("document.documentElement.scrollWidth") <= 390, page
            assert browser.run(CUT) == 0, page
            assert browser.run("[...document.images].every(image => image.naturalWidth)"), page
        assert all(address.startswith(("file:", "data:")) for address in browser.requests)


def test_a_link_that_leads_nowhere_is_a_warning(mkdocs, tmp_path):
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path)
    folders = [".ci", "docs", "benchmarks", "examples", "capi"]
    for name in [*folders, "tests/loops", "tests/python/project"]:
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "ops").symlink_to(ROOT / "ops")
    (tmp_path / "docs" / "new.md").write_text("# New\n\n[nothing](plan.md#no-such-heading)\n")
    config = tmp_path / "mkdocs.yml"
    site = tmp_path / "site"
    code, said = run(mkdocs, "build", "--strict", "-f", config, "--site-dir", site)
    assert code != 0 and "no-such-heading" in said
