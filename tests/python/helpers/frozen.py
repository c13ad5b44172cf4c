"""What tests ask of dataclasses whose values do not change."""

__all__ = ["are_frozen"]


def are_frozen(*values):
    """Returns whether no field of any of these can be set."""
    return all(type(value).__dataclass_params__.frozen for value in values)
