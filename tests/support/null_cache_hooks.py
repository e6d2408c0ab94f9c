"""Hooks of the compilation cache for a process without other hosts."""


class NullCacheHooks:
    """Nothing is fetched, and nothing is reported."""

    def fetch(self, key: str) -> bytes | None:
        return None

    def missed(self, key: str, seconds: float) -> None:
        pass

    def finished(self) -> None:
        pass
