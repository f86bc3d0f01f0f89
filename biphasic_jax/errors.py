"""The two ways in which a command ends other than by success.

Every verb raises these; `__main__` turns them into one line on stderr and an exit code.
"""

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 83


class UserError(Exception):
    """Bad input or bad usage: the message names the value, the key and the mend. Exit code 2."""


class Interrupted(Exception):
    """The run stopped by SIGTERM or Ctrl-C after a complete checkpoint. Exit code 83."""
