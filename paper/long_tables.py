"""Fill the tables of `in_your_program.md` about long training from their records.

python paper/long_tables.py
"""

import re

from records import DATA, HERE, load, table, tokens

PAGE = HERE / "in_your_program.md"


def runs() -> list[dict]:
    """Return the runs of all records: those with windows first, then by GPUs and tokens."""
    found = [run for path in DATA.glob("long_training_*") for run in load(path.stem)["results"]]
    return sorted(found, key=lambda run: (-run["full_every"], run["ranks"], run["tokens"]))


def times() -> str:
    """Return the table of all runs: measured and predicted seconds and memory."""
    lines = []
    for run in runs():
        causal, predicted = run["layers"] // run["full_every"], run["predicted"]
        lines.append(
            (
                tokens(run["tokens"]),
                str(run["ranks"]),
                f"{causal}, {run['attention']}",
                str(run["steps"]),
                f"{run['seconds_per_step']:.1f} ({predicted['seconds']:.1f})",
                f"{run['peak_bytes'] / 1e9:.1f} ({predicted['peak_bytes'] / 1e9:.1f})",
                tokens(round(run["tokens_per_second"])),
                f"{run['model_tflops_share']:.0%}".replace("%", " %"),
            )
        )
    header = ("tokens", "GPUs", "causal layers", "steps", "s a step", "GB a GPU")
    return table((*header, "tokens a second", "share"), lines)


def largest(count: int = 5) -> str:
    """Return the largest tensors of the longest sequence that all numbers of GPUs trained on, by
    the formula.
    """
    found = [run for run in runs() if run["full_every"] > 1 and run["attention"] != "torch"]
    lengths = [{run["tokens"] for run in found if run["ranks"] == ranks} for ranks in (1, 2)]
    longest = max(set.intersection(*lengths))
    one, two = (
        next(x for x in found if (x["tokens"], x["ranks"]) == (longest, ranks))["predicted"]
        for ranks in (1, 2)
    )
    names = sorted(one["tensors"], key=one["tensors"].__getitem__, reverse=True)[:count]
    cell = lambda entry, name: f"{entry['tensors'][name] / 1e9:.1f}"
    lines = [(name, cell(one, name), cell(two, name)) for name in names]
    return table((f"GB at {tokens(longest)} tokens", "1 GPU", "2 GPUs"), lines)


def filled(page: str) -> str:
    """Return the page with the tables of the records."""
    for start, made in ((r"\| tokens \| GPUs", times()), (r"\| GB at", largest())):
        page, count = re.subn(rf"^{start}.*?(?=\n\n)", made, page, flags=re.MULTILINE | re.DOTALL)
        if count != 1:
            raise ValueError(f"{PAGE.name} must have one table that starts with {start}: {count}")
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
