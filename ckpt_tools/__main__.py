"""`checkpoint-inspector`, and `python -m ckpt_tools`: signals are answered before the long imports begin."""

import os
import signal
from contextlib import suppress
from types import FrameType

_ENDED = {
    signal.SIGINT: b"error: interrupted; nothing was published.\n",
    signal.SIGTERM: b"error: terminated.\n",
}


def main() -> None:
    """Run the command line and leave the process with the exit code of the result."""
    process = os.getpid()

    def leave(number: int, _frame: FrameType | None) -> None:
        """End here and now, with a word: while modules are imported there is nothing to clean up.

        SIGTERM stays so: code that has something to clean up handles it (`StopSignals`).
        """
        if os.getpid() == process:  # not a forked worker: its parent reports
            with suppress(OSError):
                os.write(2, _ENDED[signal.Signals(number)])
        os._exit(128 + number)

    heard = [number for number in _ENDED if signal.getsignal(number) != signal.SIG_IGN]  # as for `nohup`
    for number in heard:
        signal.signal(number, leave)
    from ckpt_tools.cli.app import main as run

    if signal.SIGINT in heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which `run` makes an exit code of
    run()


if __name__ == "__main__":
    main()
