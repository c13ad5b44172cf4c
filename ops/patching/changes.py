"""Sets attributes of modules so that all of it can be undone, to the bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

RECORD = "_headroom_patch"  # the attribute of a module that says what patch() set on it
ABSENT = "absent"  # stands for an attribute that only the class had, or nothing


class _Record:
    """Records what was set on one module: for each name what had been there, and what is now.

    It lives on the module, so that a copy of a patched model, or a part of one, can be unpatched
    too: deep copies and pickles keep the two values beside the attribute itself.
    """

    def __init__(self) -> None:
        self.before: dict[str, tuple[str, Any]] = {}
        self.now: dict[str, Any] = {}
        self.shared: list[tuple[Any, str, tuple[str, Any], Any]] = []  # of objects beside modules


def _get(holder: Any, name: str) -> tuple[str, Any]:
    """Returns where an attribute is kept, and its value."""
    attributes = vars(holder)
    return ("instance", attributes[name]) if name in attributes else (ABSENT, None)


def _put(holder: Any, name: str, held: tuple[str, Any]) -> None:
    kind, value = held
    if kind == ABSENT:
        vars(holder).pop(name, None)
    else:
        vars(holder)[name] = value


class Changes:
    """Logs what one call of patch() did, to take it back."""

    def __init__(self) -> None:
        self._log: list[tuple[Any, str, tuple[str, Any]]] = []
        self._gone: list[tuple[nn.Module, str, Any]] = []  # what restore() took away

    def set(self, module: nn.Module, name: str, value: Any) -> None:
        """Sets an attribute of the instance, such as a ``forward``.

        A ``forward`` should be a :func:`functools.partial` of a function of a module and of the
        module: it is then copied, pickled and compiled with it. Parameters, buffers and modules
        cannot be set, because the ``state_dict`` shall stay as it is.
        """
        for kind in ("_parameters", "_buffers", "_modules"):
            if name in getattr(module, kind):
                raise ValueError(f"Changes.set: {name} is in {kind} of {type(module).__name__}")
        record = self._record(module)
        record.before.setdefault(name, _get(module, name))
        self._write(module, name, ("instance", value))
        record.now[name] = value

    def set_shared(self, module: nn.Module, shared: Any, name: str, value: Any) -> None:
        """Sets an attribute of what modules share and is none, such as a config, until ``module``
        is given back what it had."""
        self._record(module).shared.append((shared, name, _get(shared, name), value))
        self._write(shared, name, ("instance", value))

    def _record(self, module: nn.Module) -> _Record:
        record = vars(module).get(RECORD)
        if record is None:
            record = _Record()
            self._write(module, RECORD, ("instance", record))
        return record

    def _write(self, module: Any, name: str, held: tuple[str, Any]) -> None:
        self._log.append((module, name, _get(module, name)))
        _put(module, name, held)

    def restore(self, module: nn.Module) -> None:
        """Gives a module back what it had before patch() ever set anything on it."""
        record = vars(module).get(RECORD)
        if record is None:
            return
        for name, held in record.before.items():
            if not _is_wrapped(module, name, record.now[name]):
                self._gone.append((module, name, record.now[name]))
                self._write(module, name, held)
        for shared, name, held, value in record.shared:
            if vars(shared).get(name) == value:  # nobody has chosen another since
                self._write(shared, name, held)
        self._write(module, RECORD, (ABSENT, None))

    def finish(self) -> None:
        """Lets values that modules had, and have no others for now, bring back what they have
        moved. There is no way back from here."""
        for module, name, value in self._gone:
            if name not in vars(module) and hasattr(value, "bring_back"):
                value.bring_back()
        self._gone = []

    def rollback(self) -> None:
        """Takes back everything that was done through this log."""
        while self._log:
            module, name, held = self._log.pop()
            _put(module, name, held)


def _is_replaced(module: nn.Module, attribute: str, value: Any) -> bool:
    """Returns whether something else has set a ``forward`` since ``value`` was set."""
    found = vars(module).get(attribute)
    # accelerate leaves it as a method of the module
    return attribute == "forward" and value not in (found, getattr(found, "__func__", None))


def _is_wrapped(module: nn.Module, attribute: str, value: Any) -> bool:
    """Returns whether what has replaced a ``forward`` may stay and call it: it does by itself what
    the class does once the module is no longer patched."""
    return getattr(value, "can_stay", False) and _is_replaced(module, attribute, value)


def is_patched(module: nn.Module) -> bool:
    """Returns whether patch() has set something on this module itself."""
    return RECORD in vars(module)


def patched_names(attributes: Mapping[str, Any]) -> set[str]:
    """Returns the names of those attributes of a module that patch() has set."""
    record = attributes.get(RECORD)
    return set() if record is None else {RECORD, *record.now}


def undo(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Restores named modules as :func:`restore` does, and brings back what was moved for them."""
    changes = Changes()
    restore(modules, changes)
    changes.finish()


def restore(modules: Iterable[tuple[str, nn.Module]], changes: Changes) -> None:
    """Restores named modules, or raises before the first change if something set one of their
    attributes again, after patch(): what it did would be lost, or would call what is gone. A
    ``forward`` around that of a loss stays."""
    patched = [(name, module) for name, module in modules if is_patched(module)]
    for name, module in patched:
        record = vars(module)[RECORD]
        for attribute, value in record.now.items():
            if not _is_replaced(module, attribute, value) or _is_wrapped(module, attribute, value):
                continue
            raise RuntimeError(
                f"headroom.patch: {attribute} of {name or type(module).__name__} was replaced by "
                "something else after it was patched; remove that first"
            )
    for _, module in patched:
        changes.restore(module)
