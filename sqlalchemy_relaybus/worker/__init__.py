"""The worker: takes lanes, runs handlers, writes down how it went.

One thread talks to the store (:mod:`.pump`), following rules about which lanes to hold
(:mod:`.takeover`); handlers run in others (:mod:`.dispatch`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .worker import Worker

__all__ = ["Worker"]


def __getattr__(name: str) -> Any:
    # when it is asked for: see __main__
    if name == "Worker":
        from .worker import Worker

        return Worker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
