"""A clock that stands still until it is advanced."""


class ManualClock:
    """A `Clock` whose two times are the same."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def monotonic_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "a clock cannot go back"
        self._now_s += seconds
