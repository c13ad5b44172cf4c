"""Reads the report of an earlier rehearsal, before this one begins and torch is there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["FORMAT", "check_report", "read_report"]

FORMAT = "headroom.rehearsal/1"


def read_report(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns what ``headroom rehearse --report`` has written.

    Raises:
        ValueError: the file is something else, or damaged; says which.
    """
    name, wanted = os.fspath(path), "wanted a file of headroom rehearse --report"
    try:
        found = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}; {wanted}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no JSON; {wanted}") from error
    form = found.get("format") if isinstance(found, dict) else None
    if form != FORMAT:
        raise ValueError(f"{name} has the format {repr(form)[:60]}, not {FORMAT!r}; {wanted}")
    try:
        check_report(found)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{name} is damaged: {reason}; {wanted}") from error
    return found


def check_report(report: Mapping[str, Any]) -> None:
    """Refuses a report whose numbers and texts are of other types.

    Raises:
        KeyError, TypeError, AttributeError, ValueError: something is missing, or another type.
    """
    numbers = [report["peak_allocated"], report["peak_reserved"]]
    numbers += [report["device"]["memory"], report["host"]["peak"]]
    texts = [report["device"]["name"], *report["program"], *report["versions"].values()]
    for row in report["at_peak"]:
        numbers += [row["bytes"], row["count"]]
        texts += [row["kind"] or "", *row["stack"]]
    for kind, values in ((int, numbers), (str, texts)):
        if wrong := [value for value in values if type(value) is not kind]:
            raise ValueError(f"it has {repr(wrong[0])[:60]} in place of {kind.__name__}")
    if report["fits"] not in (True, False, None):
        raise ValueError(f"fits is {repr(report['fits'])[:60]}")
