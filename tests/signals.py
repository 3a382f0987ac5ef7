"""What a process that a test starts does with signals, whatever the tests themselves were started with."""

from __future__ import annotations

import signal

ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)


def as_from_a_terminal() -> None:
    """Let every signal end the process, also where the tests run under `nohup`; for `preexec_fn`."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
