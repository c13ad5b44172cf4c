"""Collects gradients in buckets as they become ready, and hands full buckets to a strategy."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .._core.dtensor import local_part
from .._core.text import shortened
from ..optim.base import Optimizer
from .strategy import Strategy


class Engine:
    """Hooks on the parameters of an optimizer, and the buckets that they fill.

    There is a bucket for each stream on which gradients become ready. It is handed over when it has
    ``bucket_bytes`` of gradients, and at the end of the backward.
    """

    def __init__(self, optimizer: Optimizer, strategy: Strategy, bucket_bytes: int) -> None:
        self._optimizer, self._strategy, self._bucket_bytes = optimizer, strategy, bucket_bytes
        self._hooked: set[Tensor] = set()
        self._hooks: list[Any] = []
        self._lock = threading.RLock()  # gradients of several devices come on several threads
        self._forget()
        self.add_hooks()

    @property
    def active(self) -> bool:
        return bool(self._hooks)

    def add_hooks(self) -> None:
        """Adds hooks to the parameters that are new, or require grad since the last call."""
        # Weak: torch's hooks on parameters are out of the garbage collector's sight, and would keep
        # the optimizer, and with it the parameters, for good. The optimizer keeps the handle.
        method = weakref.WeakMethod(self._ready)

        def ready(param: Tensor) -> None:
            if (call := method()) is not None:
                call(param)

        for index, group in enumerate(self._optimizer.param_groups):
            for param in group["params"]:
                if param.requires_grad and param not in self._hooked:
                    self._hooks.append(param.register_post_accumulate_grad_hook(ready))
                    self._hooked.add(param)
                self._strategy.places[param] = index

    def add_hook(self, hook: Any) -> None:
        """Adds the handle of a hook that :meth:`remove` removes with the others."""
        self._hooks.append(hook)

    def remove(self) -> None:
        """Removes all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # ---- in backward ----------------------------------------------------------------------------

    def _ready(self, param: Tensor) -> None:
        """Runs when a parameter has its gradient."""
        if param.grad is None:
            return
        if param.grad.requires_grad:
            raise RuntimeError(
                "release_gradients() frees gradients, but create_graph=True wants to differentiate "
                "them; remove() the handle before"
            )
        with self._lock:
            if self._task not in (-1, torch._C._current_graph_task_id()):
                self._strategy.unfinished = self._strategy.unfinished or ""
            self._strategy.admit(param, any(param in bucket for bucket in self._buckets.values()))
            self._wait(param)

    def _wait(self, param: Tensor) -> None:
        """Puts a parameter into a bucket, and hands the bucket over if it is full."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._task):
            torch.autograd.Variable._execution_engine.queue_callback(self.flush)
            self._task = task
        grad = local_part(param.grad)
        if grad is not param.grad and not grad.is_cuda and grad.is_pinned():
            # FSDP2 copies it to the host, and older releases of torch do not wait for hooks.
            torch.cuda.current_stream().synchronize()
        stream = torch.cuda.current_stream(grad.device) if grad.is_cuda else None
        self._buckets.setdefault(stream, {})[param] = None
        size = param.grad.numel() * grad.element_size()  # of all shards: ranks flush together
        self._bytes[stream] = self._bytes.get(stream, 0) + size
        if self._bytes[stream] >= self._bucket_bytes or task == -1:
            self._hand_over(stream)

    def flush(self) -> None:
        """Hands all buckets over. The current streams wait for what is done with them."""
        with self._lock:
            self._task, self._strategy.unfinished = -1, None
            for stream in list(self._buckets):
                if stream is None:
                    self._hand_over(stream)
                    continue
                with torch.cuda.stream(stream):
                    self._hand_over(stream)
                torch.cuda.current_stream(stream.device).wait_stream(stream)

    @torch.no_grad()
    def _hand_over(self, stream: Any) -> None:
        params = [param for param in self._buckets.get(stream, ()) if param.grad is not None]
        if params:
            try:
                self._strategy.take(params)
            except BaseException as error:  # without what it holds, which may be much memory
                text = f"{type(error).__name__}: {error}"
                self._strategy.unfinished = shortened(text, 200, keep="beginning")
                raise
            for param in params:
                param.grad = None
        self._buckets.pop(stream, None)  # not before: what raises is dropped with what waits
        self._bytes[stream] = 0

    # ---- around backward ------------------------------------------------------------------------

    @contextlib.contextmanager
    def dropping_on_error(self) -> Iterator[None]:
        """Drops the gradients that wait if the block raises."""
        try:
            yield
        except BaseException:
            self._drop()
            self._strategy.drop()
            raise

    def abandon(self) -> None:
        """Drops the gradients that wait, and begins the step anew."""
        with self._lock:
            self._drop()
            self._strategy.restart()

    def _drop(self) -> None:
        for bucket in self._buckets.values():
            for param in bucket:
                param.grad = None
        self._forget()

    @torch.no_grad()
    def finish(self) -> bool:
        """Finishes the step that backward has begun, and returns whether it had begun one. Also
        steps parameters whose gradients were set in another way."""
        self.add_hooks()
        if not self._strategy.has_begun:
            return False
        self._forget()
        self._strategy.finish()
        return True

    def _forget(self) -> None:
        self._buckets: dict[Any, dict[Tensor, None]] = {}  # parameters that wait, by stream
        self._bytes: dict[Any, int] = {}  # of their gradients
        # The backward at whose end all buckets are handed over.
        self._task, self._strategy.unfinished = -1, None
