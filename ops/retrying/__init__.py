"""Repeats a training step that has run out of memory, with a setting that needs less."""

from .retry import Retry, RetryingStep, retry_on_oom

__all__ = ["Retry", "RetryingStep", "retry_on_oom"]
