"""What a process that a test starts does with signals, whatever the tests themselves were started with.

A process inherits which signals are ignored: SIGHUP under `nohup`. Each function is for `preexec_fn`.
"""

from __future__ import annotations

import signal

ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)


def as_from_a_terminal() -> None:
    """Every signal that ends a process does so, and none is blocked."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def under_nohup() -> None:
    """The same, but a terminal that is closed is ignored."""
    as_from_a_terminal()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
