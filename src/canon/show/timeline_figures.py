"""Pictures of rings and schedules over time: as planned, as sent, and as measured."""

from matplotlib.patches import Patch, Rectangle

from canon.show.spans import KIND_NAMES
from canon.show.style import RANKS, bare, plt, styled

KIND_COLOURS = dict(zip(KIND_NAMES, (RANKS[0], RANKS[3], "#8f8f8a", RANKS[1]), strict=True))


def measured(results):
    """Draw the results of `real_ranks`, one panel for each call."""
    panels = {}
    for name, ranks in results.items():
        drawn = [one for one in ranks if one.spans]
        shared = len(drawn) < len(ranks)  # one GPU runs the kernels of all ranks
        panels[name] = {"all ranks" if shared else f"rank {one.rank}": one.spans for one in drawn}
    return measured_spans(panels)


@styled
def measured_spans(panels):
    """Draw measured spans. panels[title][rank] lists objects with kind, start and stop: kernels
    above, messages below.
    """
    figure, axes = plt.subplots(
        1, len(panels), figsize=(3.4 * len(panels) + 1, 3), squeeze=False, layout="constrained"
    )
    ends = [
        max(span.stop for spans in ranks.values() for span in spans) for ranks in panels.values()
    ]
    for ax, own_end, (title, ranks) in zip(axes.flat, ends, panels.items(), strict=True):
        for row, spans in enumerate(ranks.values()):
            for span in spans:
                place, height = (row + 0.2, 0.16) if span.kind == "message" else (row - 0.4, 0.54)
                box = {"facecolor": KIND_COLOURS[span.kind], "edgecolor": "white", "linewidth": 0.4}
                ax.add_patch(Rectangle((span.start, place), span.stop - span.start, height, **box))
        ax.set(ylim=(len(ranks) - 0.5, -0.6), xlabel="milliseconds", title=title)
        # one scale for panels of similar length
        end = max(ends) if max(ends) < 2 * min(ends) else own_end
        ax.set_xlim(0, 1.02 * end)
        ax.set_yticks(range(len(ranks)), ranks)
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
    handles = [Patch(color=colour, label=kind) for kind, colour in KIND_COLOURS.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), handlelength=1)
    return figure


@styled
def timelines(schedules, hop):
    """Draw rings over time. schedules[name][step][rank] is (owner of the keys, cells). The largest
    sets the step's length.

    The thin bar below a rank's computation is the hop that it sends in this step. ``hop`` is its
    length in cells."""
    figure, axes = plt.subplots(
        len(schedules), 1, figsize=(9, 2.1 * len(schedules)), sharex=True, squeeze=False
    )
    for ax, (name, steps) in zip(axes.flat, schedules.items(), strict=True):
        ranks, now = len(steps[0]), 0
        perfect = sum(cells for step in steps for _, cells in step) / ranks
        for number, step in enumerate(steps):
            length = max(cells for _, cells in step) / perfect
            for rank, (owner, cells) in enumerate(step):
                waiting = {
                    "facecolor": "white",
                    "edgecolor": "#c9c9c4",
                    "hatch": "////",
                    "linewidth": 0,
                }
                ax.add_patch(Rectangle((now, rank - 0.4), length, 0.54, **waiting))
                share, sent = (
                    cells / perfect,
                    {"facecolor": RANKS[owner], "alpha": 0.6, "linewidth": 0},
                )
                ax.add_patch(
                    Rectangle(
                        (now, rank - 0.4), share, 0.54, facecolor=RANKS[owner], edgecolor="white"
                    )
                )
                if share > 0.03:
                    ax.text(
                        now + share / 2,
                        rank - 0.13,
                        f"K{owner}",
                        ha="center",
                        va="center",
                        color="white",
                        fontsize=8,
                    )
                if number + 1 < len(steps):
                    ax.add_patch(Rectangle((now, rank + 0.2), hop / perfect, 0.16, **sent))
            ax.axvline(now, color="#9a9a9a", linewidth=0.6, linestyle=(0, (2, 2)), zorder=0)
            ax.text(
                now + length / 2,
                -0.72,
                f"step {number}",
                ha="center",
                va="center",
                fontsize=8,
                color="#6a6a6a",
            )
            now += length
        ax.set(
            ylim=(ranks - 0.4, -1.0),
            yticks=range(ranks),
            yticklabels=[f"rank {r}" for r in range(ranks)],
        )
        ax.set_title(f"{name}: {100 / now:.0f} % busy", loc="left")
        ax.tick_params(length=0)
        ax.spines["left"].set_visible(False)
        ax.set_xlim(0, max(now, ax.get_xlim()[1] if ax is not axes[0, 0] else 0) * 1.005)
    axes[-1, 0].set_xlabel(
        "time; 1 is perfect balance (hatched: waiting for the slowest rank; thin: the hop that "
        "the rank sends)"
    )
    figure.tight_layout()
    return figure


@styled
def hops(panels, ranks):
    """Draw the messages of rings. panels[title] lists (step, sender, owner of the data, thick).

    Rank 0 appears again below the last rank, so that every hop goes one row down and one step to
    the right.
    """
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.7 * len(panels), 3.1), sharey=True, squeeze=False
    )
    longest = 1 + max(step for messages in panels.values() for step, *_ in messages)
    for ax, (title, messages) in zip(axes.flat, panels.items(), strict=True):
        for step, sender, owner, thick in messages:
            style = {"linewidth": 6, "alpha": 0.35} if thick else {"linewidth": 1.4}
            ax.plot(
                [step, step + 1],
                [sender, sender + 1],
                color=RANKS[owner],
                solid_capstyle="round",
                **style,
            )
        last = max(step for step, *_ in messages) + 1
        for step in range(ranks):
            for rank in range(ranks):
                owner = (rank - step) % ranks
                box = {"facecolor": RANKS[owner], "edgecolor": "white", "zorder": 3}
                ax.add_patch(Rectangle((step - 0.17, rank - 0.27), 0.34, 0.54, **box))
                ax.text(
                    step,
                    rank,
                    f"K{owner}",
                    ha="center",
                    va="center",
                    color="white",
                    fontsize=8,
                    zorder=4,
                )
        if last == ranks:
            for rank in range(ranks):
                box = {
                    "facecolor": "white",
                    "edgecolor": RANKS[rank],
                    "linewidth": 1.5,
                    "zorder": 3,
                }
                ax.add_patch(Rectangle((last - 0.22, rank - 0.27), 0.44, 0.54, **box))
                ax.text(
                    last,
                    rank,
                    f"dK{rank}",
                    ha="center",
                    va="center",
                    color=RANKS[rank],
                    fontsize=8,
                    zorder=4,
                )
        ax.axhline(ranks - 0.5, color="#9a9a9a", linewidth=0.6, linestyle=(0, (2, 2)))
        ax.set(xlim=(-0.4, longest + 0.4), ylim=(ranks + 0.3, -0.5), xlabel="step")
        # the gradients end at their owners
        steps = [*range(ranks), *(["end"] if last == ranks else [])]
        ax.set_xticks(range(len(steps)), steps)
        ax.set_yticks(range(ranks + 1), [*(f"rank {rank}" for rank in range(ranks)), "rank 0"])
        ax.set_title(title, loc="left")
        bare(ax)
    figure.tight_layout()
    return figure
