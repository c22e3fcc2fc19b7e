"""The format of pickled masks, layouts and plans. Pickles of other formats are refused, never
misread.
"""

FORMAT = 1  # of all pickles; add 1 whenever the content of one changes


def check_format(kind: str, found: int) -> None:
    """Raise ValueError unless a pickled object has this version's format."""
    if found != FORMAT:
        raise ValueError(
            f"the pickled {kind} has format {found}, this version of Canon reads format {FORMAT}: "
            f"make the masks, layouts and plans again with this version"
        )
