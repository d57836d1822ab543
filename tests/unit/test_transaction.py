"""Which texts end the transaction that a handler was given."""

from __future__ import annotations

import pytest

from sqlalchemy_relaybus.worker.transaction import _ends_transaction


@pytest.mark.parametrize(
    "text",
    [
        "commit",
        "  -- now\n/* really */ COMMIT AND CHAIN",
        "END",
        "abort",
        "ROLLBACK",
        "rollback work",
        "PREPARE TRANSACTION 'x'",
        "SELECT 1; COMMIT",
        "SELECT 'it''s; so'; rollback; BEGIN",
        'SELECT ";" FROM t; -- and; now\n END',
        "SELECT E'\\'; x'; COMMIT",
        "DO $body$ BEGIN; END $body$; COMMIT",
    ],
)
def test_it_ends(text: str) -> None:
    assert _ends_transaction(text)


@pytest.mark.parametrize(
    "text",
    [
        "SELECT 1",
        "UPDATE commit SET n = 1",
        "rollback to a",
        "ROLLBACK TRANSACTION TO SAVEPOINT a; RELEASE a",
        "INSERT INTO notes VALUES ('first; commit; then')",
        'SELECT 1 AS "a; commit"',
        "SELECT E'\\'; commit'; SELECT 2",
        "SELECT 1; -- commit; not\nSELECT 2",
        "SELECT 1 /* ; commit */; SELECT 2",
        "DO $$ BEGIN PERFORM 1; END $$; SELECT 1",
        "CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT 1; SELECT 2; END",
        "SAVEPOINT commit",
    ],
)
def test_it_does_not(text: str) -> None:
    assert not _ends_transaction(text)
