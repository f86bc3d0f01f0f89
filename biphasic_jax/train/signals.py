"""The flag that SIGTERM and Ctrl-C set, and that the loop reads between two pieces of work."""

import os
import signal
from types import FrameType
from typing import Any


class StopFlag:
    """Installed before anything heavy is imported, so that no moment of a run is without it.

    The first signal sets `requested`; a second Ctrl-C ends the process at once.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self.requested

    def install(self) -> "StopFlag":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def restore(self) -> None:
        """Puts the handlers back that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        name = signal.Signals(number).name
        again = "; Ctrl-C again ends it at once" if number == signal.SIGINT else ""
        message = f"{name}: stopping after a complete checkpoint{again}\n"
        os.write(2, message.encode())  # print could be interrupted inside itself
