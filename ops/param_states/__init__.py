"""The states of an optimizer's parameters: their declaration, what is loaded into them, the buckets
of parameters that one op takes with them, and, in ``paging``, states that lie on the host."""
