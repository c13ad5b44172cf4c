"""Names and defaults of the arguments of all that is public, beside those in signatures.txt. Who
changes one on purpose runs ``python tests/python/project/test_signatures.py``, which writes that
file, and changes docs/ and CHANGELOG.md. Ops as functions are compared by their own tests."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import headroom

LISTED = Path(__file__).with_name("signatures.txt")
PACKAGES = sorted(
    f"headroom.{folder.name}"
    for folder in Path(headroom.__file__).parent.iterdir()
    if (folder / "__init__.py").is_file() and folder.name not in ("_core", "functional")
)

INTEGRATIONS = [f"headroom.integrations.{name}" for name in headroom.integrations.__all__]


def shown(function) -> str:
    """Returns arguments without their types."""
    arguments = [
        one.replace(annotation=inspect.Parameter.empty)
        for one in inspect.signature(function).parameters.values()
    ]
    return re.sub(r"<function (\w+) at \w+>", r"\1", str(inspect.Signature(arguments)))


def signatures() -> Iterator[str]:
    """Yields a line for each public function, class and method of a class, by its place."""
    seen, listed = {}, [*public()]
    kinds = {value for _, value in listed if inspect.isclass(value)}
    for place, value in listed:
        if not getattr(value, "__module__", "").startswith("headroom") or id(value) in seen:
            continue
        seen[id(value)] = value
        if inspect.isclass(value):
            yield from of_class(place, value, kinds)
        elif callable(value):
            yield f"{place}{shown(value)}"


def public() -> Iterator[tuple[str, Any]]:
    """Yields what packages list, by its place."""
    for package in ["headroom", *PACKAGES, *INTEGRATIONS]:
        try:
            module = importlib.import_module(package)
        except ImportError:  # an integration, without its package
            continue
        for name in sorted(getattr(module, "__all__", ())):
            yield f"{package}.{name}", getattr(module, name)


def of_class(place: str, kind: type, kinds: set[type]) -> Iterator[str]:
    """Yields a class and its methods, with those of bases that are not public themselves."""
    if not issubclass(kind, BaseException):
        yield f"{place}{shown(kind)}"
    hidden = [base for base in kind.__mro__[1:] if base.__module__.startswith("headroom")]
    inherited = {base for one in {*hidden} & kinds for base in one.__mro__}
    owners = [kind, *(base for base in hidden if base not in inherited)]
    found = {}
    for owner in reversed(owners):
        for name, method in vars(owner).items():
            plain = getattr(method, "__func__", method)
            # torch sets what is inherited on the class of an optimizer when one is made.
            own = getattr(plain, "__qualname__", "") == f"{owner.__qualname__}.{name}"
            if not name.startswith("_") and inspect.isfunction(plain) and own:
                found[name] = plain
    yield from (f"{place}.{name}{shown(found[name])}" for name in sorted(found))


def test_signatures_are_those_that_are_listed():
    found = [*signatures()]
    missing = tuple(f"{name}." for name in INTEGRATIONS if name not in sys.modules)
    listed = [line for line in LISTED.read_text().splitlines() if not line.startswith(missing)]
    assert found == listed


if __name__ == "__main__":
    LISTED.write_text("\n".join(signatures()) + "\n")
