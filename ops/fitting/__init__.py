"""Fits training into the memory that there is."""

from .retry import Retry, RetryingStep, retry_on_oom

__all__ = ["Retry", "RetryingStep", "retry_on_oom"]
