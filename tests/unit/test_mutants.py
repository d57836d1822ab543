"""The mutants of a statement are all there are, and each differs by its clause alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.mutate import mutants, parse, same
from tests.mutants.statements import EQUIVALENT, STATEMENTS

SQL = """
WITH free AS MATERIALIZED (
  SELECT l.lane FROM lanes AS l
  WHERE l.lane = %(lane)s::SMALLINT
    AND (l.holder IS NULL OR l.ends < clock() AND l.holder != %(me)s)
  FOR UPDATE OF l SKIP LOCKED
)
UPDATE lanes SET epoch = lanes.epoch + 1, started = NULL FROM free WHERE lanes.lane = free.lane
"""


def test_every_condition_lock_and_term_of_a_fence_is_taken_out_once() -> None:
    clauses = [mutant.clause for mutant in mutants(SQL)]
    assert sorted(clauses) == sorted(
        [
            "AND l.lane = CAST(%(lane)s AS SMALLINT)",
            "AND (l.holder IS NULL OR l.ends < CLOCK() AND l.holder <> %(me)s)",
            "OR l.holder IS NULL",
            "OR l.ends < CLOCK() AND l.holder <> %(me)s",
            "AND l.ends < CLOCK()",
            "AND l.holder <> %(me)s",
            "FOR UPDATE OF l SKIP LOCKED",
            "SKIP LOCKED",
            "SET epoch = lanes.epoch + 1",
            "WHERE lanes.lane = free.lane",
        ]
    )


def test_a_mutant_lacks_its_clause_and_nothing_else() -> None:
    by_clause = {mutant.clause: mutant.sql for mutant in mutants(SQL)}
    assert by_clause["SKIP LOCKED"] == same(SQL).replace(" SKIP LOCKED", "")
    assert by_clause["OR l.holder IS NULL"] == same(SQL).replace("l.holder IS NULL OR ", "")
    assert by_clause["WHERE lanes.lane = free.lane"] == same(SQL).replace(
        " WHERE lanes.lane = free.lane", ""
    )


@pytest.mark.parametrize("name", STATEMENTS)
def test_each_statement_has_mutants_and_they_differ(name: str) -> None:
    sql = STATEMENTS[name].sql
    made = [mutant.sql for mutant in mutants(sql)]
    assert made
    assert same(sql) not in made
    assert parse(same(sql)) == parse(sql)


def test_what_is_said_to_change_nothing_is_still_there() -> None:
    every = {
        (name, mutant.clause)
        for name, statement in STATEMENTS.items()
        for mutant in mutants(statement.sql)
    }
    assert EQUIVALENT.keys() <= every


def test_the_tests_that_have_to_notice_are_there() -> None:
    for statement in STATEMENTS.values():
        for test in statement.tests:
            assert Path(test.partition("::")[0]).exists(), test
