"""The API reference of the site, made from docstrings: griffe reads the source and imports nothing.

``pages`` says what each page of the reference shows. ``Headroom`` is griffe's extension, which
mkdocs.yml names: it turns what docstrings have of reStructuredText into Markdown, and gives griffe
what it cannot read.
"""

import re
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "build" / "reference"  # where the package has the name that it is imported by
SIGNATURES = ROOT / "tests" / "python" / "project" / "signatures.txt"
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`~?(?P<name>[^`]+)`")


def link_sources():
    """Makes the folder in which griffe finds the package ``headroom``."""
    SOURCES.mkdir(parents=True, exist_ok=True)
    link = SOURCES / "headroom"
    if not link.is_symlink():
        link.symlink_to(ROOT / "ops")


def packages(root):
    """Returns the root and the public packages in it, and the modules that these offer."""
    inner = [one for name, one in sorted(root.modules.items()) if not name.startswith("_")]
    # headroom_rehearsal is another package, whose source is in the same folder.
    found = [one for one in inner if one.exports and one.name != "rehearsal"]
    return [root, *(page for one in found for page in (one, *offered(one)))]


def offered(package):
    modules = (definition(package, name) for name in package.exports)
    return [one for one in modules if one and one.is_module and one.parent is package]


def definition(module, name):
    """Returns what a name of a module stands for; None for what comes from another package. A
    module of the name of a function that is imported from it does not hide the function here."""
    path = module.imports.get(name, "")
    if not path or path == f"{module.path}.{name}":
        value = module.members.get(name)
        other = str(value.value) if value is not None and value.is_attribute else ""
        return module.members.get(other, value)  # profile = Profile
    if not path.startswith("headroom."):
        return None
    place, last = path.rsplit(".", 1)
    parent = module.package
    for part in place.split(".")[1:]:
        parent = parent.members[part]
    return definition(parent, last)


def public(root):
    """Yields the pages of the reference and for each what it shows: the place of a name, and what
    it stands for. A name that several packages offer is on the first of their pages."""
    seen = set()
    for page in packages(root):
        found = {}
        for name in sorted(page.exports):
            value = definition(page, name)
            if value is not None and not value.is_module and value.path not in seen:
                seen.add(value.path)
                found[f"{page.path}.{name}"] = value
        yield page, found


def pages():
    """Returns what each page of the reference shows, by the package that it is about: the first
    sentence of its docstring, and names."""
    link_sources()
    root = griffe.load("headroom", search_paths=[SOURCES], allow_inspection=False)
    found = {}
    for page, names in public(root):
        first = re.split(r"\.\s", " ".join(page.docstring.value.split()) + " ")[0]
        if names:
            found[page.path] = ROLE.sub(r"`\g<name>`", first), list(names)
    return found


class Headroom(griffe.Extension):
    def on_package(self, *, pkg, loader, **options):
        if pkg.path != "headroom":
            return
        shown = list(public(pkg))
        listed = dict(row.split("(", 1) for row in SIGNATURES.read_text().splitlines())
        for _, found in shown:
            for place, value in found.items():
                give_arguments(value, listed.get(place))
        rewrite(pkg)
        for _, found in shown:
            for place, value in found.items():
                inherit(place, value, listed)
        for page, found in shown:  # hides modules of the name of a function: the last of all
            for place, value in found.items():
                if value.parent is not page:
                    name = place.rpartition(".")[2]
                    page.members[name] = griffe.Alias(name, target=value, parent=page)


def inherit(place, kind, listed):
    """Gives a class the methods that are listed and that it has from bases which are not public."""
    prefix = f"{place}."
    names = (name.removeprefix(prefix) for name in listed if name.startswith(prefix))
    for name in [name for name in names if name not in kind.members]:
        bases = (base.members[name] for base in kind.mro() if name in base.members)
        kind.set_member(name, griffe.Alias(name, target=next(bases), parent=kind))


def give_arguments(kind, listed):
    """Gives a class whose constructor griffe cannot read, because it is a NamedTuple's, torch's or
    the result of a call, the arguments that are listed, with the types of its base or fields."""
    places = [kind, *kind.mro()] if kind.is_class and listed else []
    constructors = [one.members["__init__"] for one in places if "__init__" in one.members]
    if not places or (constructors and constructors[0].is_function):
        return
    base = next((one.parameters for one in constructors if one.is_function), ())
    types = {one.name: one.annotation for one in (*kind.attributes.values(), *base)}
    code = f"def __init__(self, {listed}: pass"
    made = griffe.visit("listed", Path("listed.py"), code).members["__init__"]
    for parameter in made.parameters:
        parameter.annotation = types.get(parameter.name)
    kind.set_member("__init__", made)


def rewrite(place):
    """Makes Markdown of the docstrings of a module or class and of all that is in it. A method
    without one has that of the method which it overrides; an attribute without one is not shown."""
    for name, value in list(place.members.items()):
        if value.is_alias:
            continue
        if value.is_function and place.is_class and not value.docstring:
            bases = (base.members.get(name) for base in place.mro())
            value.docstring = next((one.docstring for one in bases if one and one.docstring), None)
        if value.is_attribute and place.is_class and not value.docstring:
            del place.members[name]
        else:
            rewrite(value)
    if place.docstring:
        text = place.docstring.value.replace("::\n\n", ":\n\n")
        place.docstring.value = ROLE.sub(lambda role: link(place, role["name"]), text)


def link(place, name):
    """Returns a name, with a link to its entry where it has one."""
    kind = place if place.is_class else place.parent
    bases = [kind, *kind.mro()] if kind is not None and kind.is_class else []
    path = next((base.members[name].path for base in bases if name in base.members), name)
    if path == name and not name.startswith("headroom."):
        try:
            path = place.resolve(name)
        except griffe.NameResolutionError:
            pass
    return f'<autoref identifier="{path}" optional><code>{name}</code></autoref>'
