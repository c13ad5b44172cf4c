"""A host that comes late to each of its waits for a device."""

import time

from headroom.host.cuda import Streams


def slow_host(monkeypatch, seconds=0.01):
    """Lets the copy engine of a device sleep before the host waits for a copy."""
    sync = Streams.sync

    def late(engine, ticket):
        time.sleep(seconds)
        sync(engine, ticket)

    monkeypatch.setattr(Streams, "sync", late)
