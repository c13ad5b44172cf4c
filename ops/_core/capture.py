"""Refuses what a CUDA graph must not capture."""

from __future__ import annotations

import torch


def is_capturing() -> bool:
    """Returns whether the current stream is being captured. Where there is no driver, torch's own
    function raises."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_in_capture(what: str) -> None:
    """Refuses to make tensors that live across steps while a CUDA graph is captured.

    Raises:
        RuntimeError: the current stream is being captured. ``what`` names the tensors.
    """
    if is_capturing():
        raise RuntimeError(
            f"{what} would be made in the capture of a CUDA graph, and set back to the start by "
            "every replay; run one whole step before the capture, on the stream that warms it up"
        )
