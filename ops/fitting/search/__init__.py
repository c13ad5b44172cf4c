"""Finds the fastest choice within a budget: from the costs of blocks, through the candidates and
their frontier, to a plan."""
