"""The format of pickled masks, layouts and plans. Pickles of other formats are refused, never
misread.
"""

import sys
from importlib.abc import MetaPathFinder

FORMAT = 1  # of all pickles; add 1 whenever the content of one changes
REMEDY = "make the masks, layouts and plans again with this version"
OLD_MODULES = tuple(
    f"canon.reference.{name}" for name in ("band", "layout", "mask", "plan", "prepared_plans")
)


def check_format(kind: str, found: int) -> None:
    """Raise ValueError unless a pickled object has this version's format."""
    if found != FORMAT:
        raise ValueError(
            f"the pickled {kind} has format {found}, this version of Canon reads format {FORMAT}: "
            f"{REMEDY}"
        )


class OldModules(MetaPathFinder):
    """Raise an error with a remedy if a pickle names an old module.
    Python asks this finder last.
    """

    def find_spec(self, name, path=None, target=None):
        """Raise ModuleNotFoundError for the modules that old pickles name."""
        if name in OLD_MODULES:
            raise ModuleNotFoundError(
                f"{name} belongs to an older version of Canon. A pickle of that version cannot be "
                f"read: {REMEDY}. Code imports Band, Layout and Mask from canon",
                name=name,
            )


sys.meta_path.append(OldModules())
