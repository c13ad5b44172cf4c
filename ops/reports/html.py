"""One HTML file with the parts of a report: it asks for nothing from the network, and what is in it
cannot make it do so.

Texts from files are data of the page: JSON in which ``<`` is written as an escape, which the script
sets as text. A policy in the page allows this one script and style sheet, by their hashes, and no
request at all, so that even markup that came through would do nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from pathlib import Path

from .._core.binaries import VERSION
from .files import Part
from .kinds import COLORS, UNKNOWN, color_of

__all__ = ["page_of"]

FOLDER = Path(__file__).parent / "page-files"
SCRIPTS = (
    "base.js",
    "timeline.js",
    "breakdown.js",
    "tables.js",
    "profile.js",
    "rehearsal.js",
    "main.js",
)
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main></main>
<noscript>The pictures need JavaScript; headroom report --json prints the numbers.</noscript>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def page_of(parts: Sequence[Part], title: str) -> str:
    """Returns the page, the same text for the same parts."""
    style = (FOLDER / "report.css").read_text(encoding="utf-8")
    # One file after the other, each without its first line, which is "use strict" for all.
    bodies = [(FOLDER / name).read_text(encoding="utf-8").partition("\n")[2] for name in SCRIPTS]
    script = '"use strict";\n' + "\n".join(bodies)
    data = {
        "title": title,
        "version": VERSION,
        "colors": COLORS | {UNKNOWN: color_of(UNKNOWN)},
        "parts": [
            {"kind": part.kind, "file": part.file, "title": part.title, "content": part.content}
            for part in parts
        ],
    }
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return PAGE.format(
        policy=policy, title=html.escape(title), style=style, script=script, data=text
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
