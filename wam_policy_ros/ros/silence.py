"""Publishers that are known, and from which nothing comes: discovery works, the way of the data does not."""

from __future__ import annotations

SILENT_S = 5.0
"""A publisher may not have published yet."""


class Silence:
    """Of one stream.

    Args:
        look_s: between two looks.
    """

    def __init__(self, look_s: float) -> None:
        self._look_s, self._silent_s = look_s, 0.0

    def look(self, publishers: int, received: int) -> str:
        """What may be wrong, or empty. ``publishers``: of the wanted type, known now; ``received``: messages so far."""
        if received or not publishers:
            self._silent_s = 0.0
            return ""
        self._silent_s += self._look_s
        if self._silent_s < SILENT_S:
            return ""
        return (
            f"{publishers} publisher(s) known, but nothing has come for {self._silent_s:.0f} s: either they publish "
            "nothing, or the data take a way that this process cannot go, such as shared memory of another user or "
            "container: run both sides as one user and with --ipc=host, or FASTDDS_BUILTIN_TRANSPORTS=UDPv4 for both"
        )
