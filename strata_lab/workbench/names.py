"""What a request is called and which colour it has, the same in every panel. Knows neither engine nor widgets."""

from __future__ import annotations

NUM_COLOURS = 8  # --s-r0 to --s-r7 of the theme
MAX_KEPT = 2048


class Names:
    """Titles and colours of requests; the oldest are forgotten."""

    def __init__(self) -> None:
        self._titles: dict[str, tuple[str, int]] = {}
        self._count = 0

    def give(self, request_id: str, title: str) -> None:
        """Call a request so; its colour is the next one."""
        if request_id not in self._titles:
            if len(self._titles) >= MAX_KEPT:
                del self._titles[next(iter(self._titles))]
            self._titles[request_id] = (title, self._count % NUM_COLOURS)
            self._count += 1

    def title(self, request_id: str) -> str:
        """What it is called; its own id for one that nobody named."""
        self.give(request_id, request_id)
        return self._titles[request_id][0]

    def color(self, request_id: str) -> int:
        """0 to 7."""
        self.give(request_id, request_id)
        return self._titles[request_id][1]
