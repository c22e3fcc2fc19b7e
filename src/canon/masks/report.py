"""The quality of a plan: the work and the traffic of each rank, and their ratios to the bounds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PlanReport:
    """The quality of a plan: areas in visible cells, traffic in tokens. K and V of each token move."""

    tokens: int
    areas: tuple[int, ...]  # by rank
    received: tuple[int, ...]
    sent: tuple[int, ...]
    largest_chunk: int  # the largest area of a chunk, which a plan may not divide

    @property
    def balance(self) -> float:
        """The largest area divided by its lower bound; 1 is perfect."""
        return max(self.areas) / self.lower_bound if self.lower_bound else 1.0

    @property
    def lower_bound(self) -> float:
        """max(mean area, largest chunk): no plan of these chunks can have a smaller largest area."""
        return float(max(sum(self.areas) / len(self.areas), self.largest_chunk))

    @property
    def volume(self) -> float:
        """The tokens that all ranks receive, divided by those that an all-gather moves."""
        return sum(self.received) / self._all_gather if self._all_gather else 0.0

    @property
    def worst_receive(self) -> float:
        """The most tokens that a rank receives, divided by those that it receives in an all-gather."""
        return max(self.received) * len(self.areas) / self._all_gather if self._all_gather else 0.0

    @property
    def worst_send(self) -> float:
        """The most tokens that a rank sends, divided by those that it sends in an all-gather."""
        return max(self.sent) * len(self.areas) / self._all_gather if self._all_gather else 0.0

    @property
    def _all_gather(self) -> int:
        return (len(self.areas) - 1) * self.tokens

    def __str__(self) -> str:
        lines = [
            f"{self.tokens} tokens on {len(self.areas)} ranks",
            f"balance        {self.balance:.3f}   largest area / max(mean, largest chunk)",
            f"volume         {self.volume:.3f}   of an all-gather",
            f"worst receive  {self.worst_receive:.3f}   of a rank's part of it",
            f"worst send     {self.worst_send:.3f}",
        ]
        return "\n".join(lines)

    def picture(self, width: int = 24) -> str:
        """Draw a line for each rank: bars of its area and of the tokens that it receives and sends."""
        columns = [("area", self.areas), ("receives", self.received), ("sends", self.sent)]
        lines = ["rank  " + "  ".join(f"{name:<{width + 2}}" for name, _ in columns).rstrip()]
        for rank in range(len(self.areas)):
            bars = (_bar(values[rank], max(values), width) for _, values in columns)
            lines.append(f"{rank:>4}  " + "  ".join(f"|{bar:<{width}}|" for bar in bars))
        return "\n".join(lines)


def _bar(value: int, most: int, width: int) -> str:
    """Return a bar in steps of an eighth of a character. A bar of ``width`` characters is ``most``."""
    eighths = 8 * width * value // most if most else 0
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
