"""The mutants of one statement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import sqlglot
from sqlglot import exp

#: Columns whose assignment is a fence's: without it the next one would go through.
FENCES = frozenset({"epoch", "holder", "version", "claims", "crashes", "company", "blocks"})


@dataclass(frozen=True, slots=True)
class Mutant:
    """A statement with one clause taken out."""

    #: what was taken out, as it stands in the statement
    clause: str
    sql: str


def mutants(sql: str) -> Iterator[Mutant]:
    """All mutants of *sql*, in the order of its clauses."""
    original = parse(sql)
    # each is made on a copy: by the place of its node in the walk
    for place, node in enumerate(original.walk()):
        for clause, change in _changes(node):
            copy = original.copy()
            target = next(each for n, each in enumerate(copy.walk()) if n == place)
            change(target)
            yield Mutant(clause, copy.sql(dialect="postgres"))


def parse(sql: str) -> exp.Expr:
    """*sql* as a tree."""
    return sqlglot.parse_one(sql, read="postgres")


def same(sql: str) -> str:
    """*sql* written anew without a change: if tests fail with it, it is not for a mutant."""
    return parse(sql).sql(dialect="postgres")


def _changes(node: exp.Expr) -> Iterator[tuple[str, Callable[[exp.Expr], object]]]:
    if isinstance(node, exp.And | exp.Or):
        word = "AND" if isinstance(node, exp.And) else "OR"
        for side, other in (("this", "expression"), ("expression", "this")):
            taken = node.args[side]
            if not isinstance(_bare(taken), type(node)):  # its own conditions come later
                yield f"{word} {_text(taken)}", _keep(other)
    elif isinstance(node, exp.Where) and not isinstance(_bare(node.this), exp.And | exp.Or):
        yield _text(node), lambda target: target.pop()
    elif isinstance(node, exp.Join) and (on := node.args.get("on")) is not None:
        if not isinstance(_bare(on), exp.And | exp.Or | exp.Boolean):
            yield f"ON {_text(on)}", lambda target: target.set("on", exp.true())
    elif isinstance(node, exp.Lock):
        yield _text(node), lambda target: target.pop()
        if node.args.get("wait") is False:
            yield "SKIP LOCKED", lambda target: target.set("wait", None)
    elif isinstance(node, exp.EQ) and isinstance(node.parent, exp.Update):
        if node.arg_key == "expressions" and node.this.name in FENCES:
            yield f"SET {_text(node)}", lambda target: target.pop()
    elif isinstance(node, exp.Not) and isinstance(node.parent, exp.Filter | exp.Where):
        yield f"the NOT of {_text(node)}", lambda target: target.replace(target.this)


def _keep(side: str) -> Callable[[exp.Expr], object]:
    return lambda target: target.replace(target.args[side])


def _bare(node: exp.Expr) -> exp.Expr:
    while isinstance(node, exp.Paren):
        node = node.this
    return node


def _text(node: exp.Expr) -> str:
    text = node.sql(dialect="postgres")
    return text if len(text) <= 120 else f"{text[:80]} ... {text[-35:]}"
