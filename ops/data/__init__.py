"""Feeds training steps: batches that are on the device before they are needed, and advice on the
workers that make them."""

from .prefetch import DevicePrefetcher

__all__ = ["DevicePrefetcher"]
