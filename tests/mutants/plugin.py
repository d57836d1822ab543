"""Sends a mutant in a statement's stead, in the process that runs the tests.

``RELAYBUS_MUTANT`` is a file with the statement's text and the mutant's, as JSON.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event

_ORIGINAL, _MUTANT = json.loads(Path(os.environ["RELAYBUS_MUTANT"]).read_text())


@event.listens_for(Engine, "before_cursor_execute", retval=True)
def send_mutant(
    connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
) -> tuple[str, Any]:
    return (_MUTANT if statement == _ORIGINAL else statement), parameters
