"""When a replica that died is started again."""

from __future__ import annotations

from collections import defaultdict

FIRST_SECONDS = 0.5
LONGEST_SECONDS = 30.0
WINDOW_SECONDS = 600.0


class Restarts:
    """Counts the deaths of each replica.

    Args:
        most: deaths within `WINDOW_SECONDS` after which a replica is given up.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._deaths = defaultdict[int, list[float]](list)

    def died(self, number: int, now: float) -> float | None:
        """The replica died at `now`, seconds. How long to wait before it is started, twice as long each time; None = it is given up."""
        deaths = [one for one in self._deaths[number] if one > now - WINDOW_SECONDS]
        self._deaths[number] = [*deaths, now]
        if len(deaths) >= self._most:
            return None
        return min(FIRST_SECONDS * 2.0 ** len(deaths), LONGEST_SECONDS)
