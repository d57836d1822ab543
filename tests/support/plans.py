"""Execution plans of the store's statements, as a worker's connection gets them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import ClientCursor
from sqlalchemy import Connection, event

#: What a statement that touches few rows may use to find them.
DIRECT = frozenset({"Index Scan", "Index Only Scan", "Tid Scan"})


class _Caught(Exception):
    """Carries a statement out of the call that was to send it."""


def caught(
    connection: Connection, act: Callable[[], object], nth: int = 1
) -> tuple[str, dict[str, Any]]:
    """The *nth* statement that *act* sends on *connection*, with its parameters; it is not sent."""
    left = [nth]

    def catch(conn: object, cursor: object, statement: str, parameters: Any, *more: object) -> None:
        left[0] -= 1
        if not left[0]:
            raise _Caught(statement, parameters)

    event.listen(connection, "before_cursor_execute", catch)
    try:
        act()
    except _Caught as error:
        statement, parameters = error.args
        return statement, dict(parameters)
    finally:
        event.remove(connection, "before_cursor_execute", catch)
    raise AssertionError("no statement was sent")


@dataclass
class Plan:
    """A plan that was run, and rolled back."""

    root: dict[str, Any]
    text: str = field(repr=False)

    def nodes(self) -> Iterator[dict[str, Any]]:
        """Every node of it."""
        pending = [self.root]
        while pending:
            node = pending.pop()
            pending += node.get("Plans", ())
            yield node

    def scans(self) -> Iterator[dict[str, Any]]:
        """The nodes that read a table."""
        return (n for n in self.nodes() if "Relation Name" in n and "Scan" in n["Node Type"])

    @property
    def buffers(self) -> int:
        """Shared buffers that were read or hit; what nobody reads of runs after the rest, apart."""
        read = {node.get("CTE Name") for node in self.nodes()}
        apart = (
            node
            for node in self.nodes()
            if node["Node Type"] == "ModifyTable"
            and (name := node.get("Subplan Name", "")).startswith("CTE ")
            and name.removeprefix("CTE ") not in read
        )
        return sum(
            int(node["Shared Hit Blocks"] + node["Shared Read Blocks"])
            for node in (self.root, *apart)
        )

    @property
    def removed(self) -> int:
        """Rows that were read from tables in vain."""
        return sum(
            round(node.get(name, 0) * node["Actual Loops"])
            for node in self.scans()
            for name in ("Rows Removed by Filter", "Rows Removed by Index Recheck")
        )

    def paths(self) -> set[tuple[str, str]]:
        """Which table is read by what."""
        return {
            (node["Relation Name"], node.get("Index Name", node["Node Type"]))
            for node in self.scans()
        }

    def __str__(self) -> str:
        return self.text


class Planner:
    """Keeps a statement prepared on *connection*, which is in AUTOCOMMIT mode."""

    def __init__(self, connection: Connection, statement: str, names: Sequence[str]) -> None:
        driver: Any = connection.connection.driver_connection
        self._driver: psycopg.Connection[Any] = driver
        self._names = names
        numbered = statement % {name: f"${n}" for n, name in enumerate(names, 1)}
        self._driver.execute("DEALLOCATE ALL")
        self._driver.execute(f"PREPARE planned AS {numbered}".encode())

    def explain(self, parameters: Mapping[str, Any]) -> Plan:
        """Run it; the plan with what it cost. What it wrote is rolled back."""
        given = ", ".join(f"%({name})s" for name in self._names)
        call = f"EXECUTE planned ({given})" if given else "EXECUTE planned"
        with ClientCursor(self._driver) as cursor:
            cursor.execute("BEGIN")
            try:
                cursor.execute(
                    f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {call}".encode(), parameters
                )
                [(explained,)] = cursor.fetchall()
            finally:
                cursor.execute("ROLLBACK")
        root = explained[0]["Plan"]
        return Plan(root, json.dumps(_brief(root), indent=1))


_TOLD = (
    "Node Type",
    "Subplan Name",
    "Relation Name",
    "Index Name",
    "Index Cond",
    "TID Cond",
    "Filter",
    "Rows Removed by Filter",
    "Actual Rows",
    "Actual Loops",
    "Shared Hit Blocks",
    "Shared Read Blocks",
    "Plans",
)


def _brief(node: dict[str, Any]) -> dict[str, Any]:
    told = {name: node[name] for name in _TOLD if name in node}
    if "Plans" in told:
        told["Plans"] = [_brief(each) for each in told["Plans"]]
    return told
