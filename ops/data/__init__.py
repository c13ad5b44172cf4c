"""Feeds training steps: the settings that a loader should have, batches that are on the device
before they are needed, and the memory that the largest batches of an epoch will take."""

from .advice import LoaderAdvice, advise, tuned
from .forecast import Forecast, Remedy, forecast
from .prefetch import DevicePrefetcher
from .settings import Settings
from .trials import LoaderTrial

__all__ = [
    "DevicePrefetcher",
    "Forecast",
    "LoaderAdvice",
    "LoaderTrial",
    "Remedy",
    "Settings",
    "advise",
    "forecast",
    "tuned",
]
