"""``headroom.reports.report``: from files to one page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from .._core.atomic import replacing
from .._core.progress import progress_bar
from .._core.text import quoted
from .files import Part, read
from .html import page_of

__all__ = ["report"]


def report(
    files: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    title: str | None = None,
    progress: bool = False,
) -> list[Part]:
    """Writes one HTML page about the files, and returns what it shows.

    Args:
        files: snapshots of ``torch.cuda.memory._dump_snapshot``, plans and timelines that were
            saved, ladders, profiles. At least one.
        out: the page, which replaces a file as a whole or stays away.
        title: of the page; by default the names of the files.
        progress: shows a bar.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: a file is none that a report can be made of; nothing is written.
    """
    if not files:
        raise ValueError("there are no files to report on")
    parts: list[Part] = []
    names = [quoted(Path(file).name, 60) for file in files]
    with progress_bar(len(files) + 1, "report", unit="file", shown=progress) as bar:
        for file in files:
            parts += read(file)
            bar.update()
        more = f" and {len(names) - 2} more" if len(names) > 3 else ""
        page = page_of(parts, title or ", ".join(names[: 2 if more else 3]) + more)
        with replacing(out) as file, os.fdopen(os.dup(file), "w", encoding="utf-8") as stream:
            stream.write(page)
        bar.update()
    return parts
