"""Text for tables of a fixed width."""

__all__ = ["shortened"]


def shortened(text: str, width: int, keep: str = "end") -> str:
    """Returns text of at most ``width`` characters, with ``..`` in the place of what is left out.

    Of names of modules the end says more than the beginning, which is kept with
    ``keep="beginning"``.
    """
    if len(text) <= width:
        return text
    return text[: width - 2] + ".." if keep == "beginning" else ".." + text[2 - width :]
