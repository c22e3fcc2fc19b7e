"""Figures of notebook 12: an exchange of tokens for heads, and the time of a mesh's messages."""

import torch
from drawing import INK, RANKS, matrix, plt, rank_legend


def exchange(layout, rows, heads):
    """Draw the tokens and heads that each rank holds: its own part of ``layout`` with all heads,
    then all tokens of its row of ``rows`` with a part of the heads.
    """
    columns = layout.ranks // rows.ranks
    before, after = (torch.zeros(heads, layout.tokens, dtype=torch.long) for _ in range(2))
    for rank in range(layout.ranks):
        row, column = divmod(rank, columns)
        share = slice(column * heads // columns, (column + 1) * heads // columns)
        before[:, layout.positions(rank)] = 1 + rank
        after[share, rows.positions(row)] = 1 + rank
    figure, axes = plt.subplots(1, 2, figsize=(8, 2.1), layout="constrained")
    titles = "shards: some tokens, all heads", "after the exchange: more tokens, some heads"
    for ax, values, title in zip(axes, (before, after), titles, strict=True):
        matrix(ax, values, RANKS[: layout.ranks], title)
        ax.set(xticks=range(layout.tokens), yticks=range(heads), xlabel="token", ylabel="head")
        ax.tick_params(labelbottom=True, labelleft=True)
    rank_legend(figure, layout.ranks, loc="outside right center")
    plt.show()


def messages(shares, crossovers):
    """Draw the part of the time due to messages, shares[mesh][tokens of a GPU], and the crossover
    of each mesh as a vertical line.
    """
    _, ax = plt.subplots(figsize=(6, 2.8))
    for place, (mesh, by_tokens) in enumerate(shares.items()):
        percent = [100 * share for share in by_tokens.values()]
        ax.plot(list(by_tokens), percent, marker="o", color=RANKS[place], label=mesh)
        ax.axvline(crossovers[mesh], color=RANKS[place], linewidth=1, linestyle=(0, (4, 3)))
        ax.text(1.04 * crossovers[mesh], 55, f"{crossovers[mesh]:,.0f}", color=INK)
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(by_tokens), [f"{tokens:,}" for tokens in by_tokens])
    ax.set(xlabel="tokens of a GPU", ylabel="messages, % of both passes", ylim=(0, 60))
    ax.legend()
    plt.show()
