"""Writes what memory is for as the text that torch's memory_viz shows, and reads it again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..events import KINDS, PHASES, Allocation

__all__ = ["OURS", "Tag", "is_ours", "tag_of"]

OURS = "<headroom>"
"""The file name of the frame that says in words what memory is for."""

_CATEGORIES = {  # of torch.profiler
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer_state": "optimizer_state",
    "activation": "activations",
    "input": "batch",
}
_MOST = 1 << 16  # characters of JSON that are read


class Tag(NamedTuple):
    """The purpose of memory, its module and op, and when it was allocated."""

    kind: str
    module: str | None = None
    op: str | None = None
    phase: str = "other"
    step: int = 0

    @classmethod
    def of(cls, allocation: Allocation) -> Tag:
        return cls(*(getattr(allocation, name) for name in cls._fields))

    def metadata(self, user: str = "") -> str:
        """Returns the tag as the text of ``user_metadata``. ``user`` is kept in it."""
        about = self._asdict() | ({"user": user} if user else {})
        return json.dumps(about, separators=(",", ":"), ensure_ascii=False)

    def frame(self) -> dict[str, Any]:
        """Returns the frame that says it in words."""
        module = "" if self.module is None else f" of {self.module or '(model)'}"
        op = "" if self.op is None else f" ({self.op})"
        words = f"{self.kind}{module}{op}, {self.phase} of step {self.step}"
        return {"name": words, "filename": OURS, "line": self.step}


def is_ours(text: Any) -> bool:
    """Returns whether a ``user_metadata`` is that of a tag."""
    return isinstance(text, str) and text.startswith('{"kind":') and len(text) <= _MOST


def tag_of(entry: Mapping[str, Any]) -> Tag | None:
    """Returns the tag of an entry or block. Of one that torch's profiler or others gave a category
    it has the kind alone, and without either it is None."""
    text = entry.get("user_metadata")
    if is_ours(text):
        try:
            tag = Tag(**{key: v for key, v in json.loads(text).items() if key in Tag._fields})
        except (ValueError, TypeError, RecursionError):
            return None
        return tag if _is_sound(tag) else None
    category = entry.get("category")
    if isinstance(category, str):
        kind = _CATEGORIES.get(category, category)
        return Tag(kind if kind in KINDS else "temporaries")
    return None


def _is_sound(tag: Tag) -> bool:
    texts = all(name is None or isinstance(name, str) for name in (tag.module, tag.op))
    step = isinstance(tag.step, int) and not isinstance(tag.step, bool) and tag.step >= 0
    # A list as kind or phase cannot be looked up.
    known = isinstance(tag.kind, str) and tag.kind in KINDS and tag.phase in PHASES
    return texts and step and known
