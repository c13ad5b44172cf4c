"""What the documents show runs, and what they name exists."""

import inspect
import pkgutil
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import headroom
import pytest
import torch
from torch import nn

from helpers.software_device import CAN_REHEARSE

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "benchmarks/README.md", *PAGES]
INDEXES = ["README.md", "docs/README.md"]
# Pages about programs of this repository, which have commands and tables in place of code.
WITHOUT_CODE = ["docs/README.md", "docs/benchmarks.md", "docs/convergence.md", "docs/status.md"]
WITHOUT_CODE += ["docs/memory-ladder.md"]


def read(document):
    return (ROOT / document).read_text()


def blocks(document, language="python"):
    """(first line, source) of each fenced block of a language."""
    text = read(document)
    for match in re.finditer(rf"^```{language} *\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, match.start(1)) + 1, match[1]


def snippets(language, of):
    return [
        pytest.param(source, document, line, id=f"{document}:{line}")
        for document in DOCUMENTS
        for line, source in blocks(document, language)
        if of(source)
    ]


def is_whole(source):
    """Whether a snippet imports what it needs; else it is a fragment of a reader's program."""
    return re.search(r"^import headroom\b", source, re.MULTILINE) is not None


def run(source, document, line, names):
    """Runs a snippet with the line numbers of its document. Skips it without the packages that it
    imports beside ours and torch."""
    for package in re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE):
        pytest.importorskip(package)
    if "headroom_rehearsal" in source and not CAN_REHEARSE:
        pytest.skip("needs a torch for CUDA and no GPU")
    exec(compile("\n" * (line - 1) + source, ROOT / document, "exec"), names)


def examples():
    """(name, source) of each `Example::` in a docstring of the package."""
    seen = set()
    for info in pkgutil.walk_packages(headroom.__path__, "headroom."):
        if info.name.rpartition(".")[2].startswith("_C"):
            continue
        try:
            module = __import__(info.name, fromlist=["_"])
        except ImportError as error:
            if "needs the package" in str(error):  # such as axolotl, which no test environment has
                continue
            raise
        for name, thing in [("", module), *inspect.getmembers(module)]:
            doc = inspect.getdoc(thing) if callable(thing) or thing is module else None
            home = getattr(thing, "__module__", info.name) or ""
            if not doc or not home.startswith("headroom") or (home, name) in seen:
                continue
            seen.add((home, name))
            for match in re.finditer(r"^Examples?::\n\n((?:    .*\n?|\n)+)", doc, re.MULTILINE):
                yield f"{home}.{name}".rstrip("."), textwrap.dedent(match[1])


EXAMPLES = [pytest.param(source, name, id=name) for name, source in examples()]


# ---- Snippets ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_state_of_accelerate_is_left():
    """Its settings are those of the process, and the next snippet or test may want others."""
    yield
    if "accelerate" in sys.modules:
        sys.modules["accelerate"].state.AcceleratorState._reset_state(True)


@pytest.mark.parametrize("source, document, line", snippets("python", is_whole))
def test_a_snippet_runs_as_it_stands(source, document, line, tmp_path, monkeypatch):
    """In an empty namespace and folder: what it needs, it imports."""
    monkeypatch.chdir(tmp_path)
    run(source, document, line, {"__name__": "__main__"})


class Model(nn.Module):
    """A reader's model, which returns its loss as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 128)

    def forward(self, x, labels):
        return {"loss": (self.up(x) - labels).square().mean()}


def readers_module():
    """The class that a fragment of Lightning derives its own from; it lacks an optimizer."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch, _):
            return self.model(**batch)["loss"]

    return Module


def train(names):
    """Trains with what a fragment made: with a trainer that has run, a module, or an optimizer."""
    if "trainer" in names:
        return names["trainer"].optimizer.optimizer
    if "Module" in names:
        trainer = pytest.importorskip("lightning").Trainer(max_steps=2, logger=False)
        trainer.fit(names["Module"](), names["loader"])
        return trainer.optimizers[0]
    for batch in names["loader"]:
        names["model"](**batch)["loss"].backward()
        names["optimizer"].step()
    return getattr(names["optimizer"], "optimizer", names["optimizer"])


@pytest.mark.parametrize(
    "source, document, line", snippets("python", lambda source: not is_whole(source))
)
def test_a_fragment_trains_what_the_reader_has(source, document, line, tmp_path, monkeypatch):
    """The reader has a model, a dataset and a loader, and has imported headroom."""
    monkeypatch.chdir(tmp_path)
    dataset = [{"x": torch.randn(64), "labels": torch.randn(128)} for _ in range(8)]
    loader = torch.utils.data.DataLoader(dataset, batch_size=4)
    names = {"headroom": headroom, "model": Model(), "dataset": dataset, "loader": loader}
    if "LightningModule" in source:
        names["LightningModule"] = readers_module()
    if "peft" in source:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(target_modules=["up"], r=8)
        names["model"] = peft.get_peft_model(Model(), config)
    run(source, document, line, names)
    optimizer = train(names)
    assert type(optimizer) is headroom.optim.AdamW8bit
    assert all(state["step"] > 0 for state in optimizer.state.values()) and optimizer.state


@pytest.mark.parametrize("source, document, line", snippets("c", lambda source: True))
def test_a_program_of_c_compiles_and_runs(source, document, line, tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("needs cc")
    libraries = headroom.get_library_dir()
    (tmp_path / "program.c").write_text(source)
    command = ["cc", "-std=c99", "-Wall", "-Wextra", "-Werror", f"-I{headroom.get_include()}"]
    command += ["program.c", f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lheadroom", "-lm"]
    subprocess.run([*command, "-o", "program"], cwd=tmp_path, check=True)
    subprocess.run(["./program"], cwd=tmp_path, check=True)


@pytest.mark.parametrize("source, name", EXAMPLES)
def test_an_example_in_a_docstring_runs(source, name, tmp_path, monkeypatch):
    """With a `model` to work on, which the reader is assumed to have, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    exec(
        compile(source, name, "exec"),
        {"torch": torch, "headroom": headroom, "model": torch.nn.Linear(3, 2)},
    )


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize("document", ["README.md", *(p for p in PAGES if p not in WITHOUT_CODE)])
def test_the_document_shows_code(document):
    assert [*blocks(document), *blocks(document, "c")], f"{document} has no Python or C block"


# ---- Links ---------------------------------------------------------------------------------------


def links(document):
    """The files that a document links to, with the heading if it names one, from the root."""
    folder = (ROOT / document).parent
    for target, heading in re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", read(document)):
        path = (folder / target).resolve() if target else ROOT / document
        yield path, heading


def headings(path):
    """The names of a page's headings in links, as GitHub makes them."""
    titles = re.findall(r"^#+ +(.+)$", path.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_exist(document):
    for path, heading in links(document):
        assert path.exists(), f"{document} links to {path}"
        assert not heading or heading in headings(path), f"{document}: {path.name} has no {heading}"
    scripts = re.findall(r"\b(?:bash|python) ([\w.-]+/[\w./-]+\.(?:sh|py))", read(document))
    assert not [name for name in scripts if not (ROOT / name).exists()]


def test_every_page_is_linked_from_an_index():
    linked = {path for index in INDEXES for path, _ in links(index)}
    assert not [page for page in PAGES if ROOT / page not in linked]


def test_every_folder_is_explained():
    """In CONTRIBUTING: what belongs there and what does not."""
    layers = ["kernels", "capi", "torch_ext", "ops", "tests/c", "tests/python"]
    folders = {path.parent.name for layer in layers for path in (ROOT / layer).glob("*/*.*")}
    folders.discard("__pycache__")
    text = read("CONTRIBUTING.md")
    assert not [name for name in sorted(folders) if not re.search(rf"`[\w/]*\b{name}/?`", text)]


def test_what_the_package_offers_is_documented():
    for name in headroom.__all__:
        thing = getattr(headroom, name)
        assert inspect.getdoc(thing), f"headroom.{name} has no docstring"
    for name in headroom.optim.__all__:
        assert inspect.getdoc(getattr(headroom.optim, name)), f"headroom.optim.{name}"
