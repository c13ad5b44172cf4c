"""Functions of higher packages that lower ones call: the root of the package gives them, so that no
package imports one above it."""

from collections.abc import Callable
from typing import Any

plan: Callable[..., Any]
"""``headroom.plan``, which is imported when it is first called."""
