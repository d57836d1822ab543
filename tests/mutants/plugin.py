"""Sends a mutant in a statement's stead, in the process that runs the tests.

``MUTANT`` is a file with a JSON object: the texts of statements, and what is sent instead.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sqlalchemy import Dialect, Engine, event

from sqlalchemy_relaybus.stores.postgresql.sql import Prepared

_MUTANTS: dict[str, str] = json.loads(Path(os.environ["MUTANT"]).read_text())
_compile = Prepared._compile


def compile_mutant(self: Prepared, dialect: Dialect) -> Any:
    """In front of whatever looks at a statement that is about to be sent, as for its plan."""
    sql, *rest = _compile(self, dialect)
    return _MUTANTS.get(sql, sql), *rest


Prepared._compile = compile_mutant  # type: ignore[method-assign]


@event.listens_for(Engine, "before_cursor_execute", retval=True)
def send_mutant(
    connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
) -> tuple[str, Any]:
    """Where SQLAlchemy compiles the statement itself."""
    return _MUTANTS.get(statement, statement), parameters
