"""``python -m tests.misuse > docs/misuse.md``: the page of the cases."""

from __future__ import annotations

from . import publishing, registering, running
from .case import Case

SECTIONS = {**publishing.CASES, **registering.CASES, **running.CASES}

HEAD = """\
# What can be done wrong

<!-- Made by `python -m tests.misuse > docs/misuse.md`. Change the cases there, not this page. -->

Every mistake that the library knows, and what it says. All of its errors are a `RelayBusError`; \
those of `publish()` are a `PublishError`, and leave session and transaction as they were. \
In the code, `engine`, `session` and `bus` are what they are called; the bus has a handler \
`mail.confirm` for `order.placed`.

| what | code | error | message |
| --- | --- | --- | --- |
"""


def page() -> str:
    """The page as Markdown."""
    lines = []
    for section, cases in SECTIONS.items():
        lines.append(f"| **{section}** | | | |\n")
        lines.extend(map(_row, cases))
    return HEAD + "".join(lines)


def _row(case: Case) -> str:
    code = "<br>".join(_code(line) for line in case.code.splitlines())
    return f"| {case.what} | {code} | `{case.error.__name__}` | {_code(case.message)} |\n"


def _code(text: str) -> str:
    # a table ends a cell at every other pipe, even in code
    return f"`{text}`".replace("|", r"\|")


if __name__ == "__main__":
    print(page(), end="")
