"""``python -m sqlalchemy_relaybus.worker``: one worker process. See :mod:`.command`."""

import os
import signal


def _end(number: int, frame: object) -> None:
    os._exit(128 + number)


if __name__ == "__main__":
    # First of all: the kernel keeps signals from process 1, as which a container runs the worker,
    # unless it has a handler for them, and importing takes half a second.
    for _number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(_number, _end)

    from sqlalchemy_relaybus.worker.command import main

    main()
