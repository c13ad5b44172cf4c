"""The states of an optimizer's parameters: their declaration, loading and bytes, the buckets of
parameters that one op takes with them, and, in ``paging``, states that lie on the host, and are
stepped on the device or there."""
