"""Hooks of mkdocs: the site is the Markdown of docs/ as it stands, with what its pages link to.

The README is the first page. What lies outside docs/ and is linked to, such as files of results,
comes along below repository/; links to folders become plain text. Notebooks become pages, and so do
packages (reference.py).
"""

import json
import posixpath
import re
import sys
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / ".ci"))
import reference  # noqa: E402

reference.link_sources()  # before mkdocstrings looks for it
REFERENCE = "API reference"  # the part of the site that api.md begins
LINK = re.compile(
    r"\[(?P<text>(?:[^][]|\[[^]]*\])*)\]\((?P<target>(?!\w+:)[^)#\s]+)(?P<anchor>#\S*?)?\)"
)


def uri_of(path):
    """Returns the place of a file of the repository in the site's sources."""
    name = path.relative_to(ROOT).as_posix()
    if name in ("README.md", "docs/README.md"):
        return "index.md" if name == "README.md" else "by-question.md"
    name = name.removeprefix("docs/") if name.startswith("docs/") else f"repository/{name}"
    return name.replace(".ipynb", ".md")


def page_of(notebook):
    """Returns the cells of a notebook as Markdown, with what they have printed."""
    parts = []
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        printed = "".join("".join(output["text"]) for output in cell["outputs"])
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def rewritten(path, text):
    """Returns a page whose links lead to where the site has their targets, and these targets."""
    here, found = posixpath.dirname(uri_of(path)), []

    def link(match):
        target = (path.parent / match["target"]).resolve()
        if target.is_dir():
            return match["text"]
        found.append(target)
        place = posixpath.relpath(uri_of(target), here or ".")
        return f"[{match['text']}]({place}{match['anchor'] or ''})"

    return LINK.sub(link, text), found


def page_of_names(package, names):
    """Returns a page of the reference: what a package is for, and its names."""
    what = f"::: {package}\n    options: {{members: false, show_root_heading: false}}"
    return "\n\n".join([f"# {package}", what, *(f"::: {name}" for name in names)]) + "\n"


def on_config(config):
    """Puts pages that mkdocs.yml does not name, because they are new, at the end."""
    named = set(re.findall(r"[\w/-]+\.md", str(config.nav)))
    pages = sorted(path.name for path in Path(config.docs_dir).glob("*.md"))
    others = [page for page in pages if page not in named | {"README.md"}]
    if others:
        config.nav.append({"More": others})
    places = [f"api/{package}.md" for package in reference.pages()]
    next(part for part in config.nav if REFERENCE in part)[REFERENCE] += places
    return config


def on_files(files, config):
    docs = Path(config.docs_dir)
    site = Files([file for file in files if not Path(file.abs_src_path).is_relative_to(docs)])
    site.append(File.generated(config, "site.css", abs_src_path=str(ROOT / ".ci" / "site.css")))
    waiting = [ROOT / "README.md", *(path for path in docs.rglob("*") if path.is_file())]
    contents = ["\n"]
    for package, (what, names) in reference.pages().items():
        text = page_of_names(package, names)
        site.append(File.generated(config, f"api/{package}.md", content=text))
        contents.append(f"- [{package}](api/{package}.md): {what}\n")
    seen = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        if path.suffix in (".md", ".ipynb"):
            text = page_of(path) if path.suffix == ".ipynb" else path.read_text()
            text, found = rewritten(path, text)
            text += "".join(contents) if path == docs / "api.md" else ""
            waiting += found
            site.append(File.generated(config, uri_of(path), content=text))
        else:
            site.append(File.generated(config, uri_of(path), abs_src_path=str(path)))
    return site
