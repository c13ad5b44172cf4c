"""Text for tables of a fixed width."""

__all__ = ["shortened"]


def shortened(text: str, width: int, keep: str = "end") -> str:
    """Returns text of at most ``width`` characters, with ``..`` in the place of what is left out.

    Of names of modules the end says more than the beginning, which is kept with
    ``keep="beginning"``; ``keep="both"`` leaves out the middle.
    """
    if len(text) <= width:
        return text
    if keep == "both":
        half = (width - 2) // 2
        return text[: width - 2 - half] + ".." + text[len(text) - half :]
    if keep == "beginning":
        return text[: width - 2] + ".."
    return ".." + text[len(text) - (width - 2) :]
