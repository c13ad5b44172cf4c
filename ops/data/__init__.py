"""Feeds training steps: the settings that a loader should have, and batches that are on the device
before they are needed."""

from .advice import LoaderAdvice, advise, tuned
from .costs import LoaderCosts
from .prefetch import DevicePrefetcher
from .settings import Settings

__all__ = ["DevicePrefetcher", "LoaderAdvice", "LoaderCosts", "Settings", "advise", "tuned"]
