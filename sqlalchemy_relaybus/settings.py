"""Every setting of a worker, once: name, default, bounds, variable, flag and meaning.

The command line and ``docs/settings.md`` are made from this module, the latter by ``make docs``.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from sqlalchemy_relaybus.exc import ConfigurationError

if TYPE_CHECKING:
    import click

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})

Kind = Literal["int", "float", "bool", "str"]
_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What there is to know about one setting; :func:`settings` gives them all."""

    name: str
    kind: Kind
    #: ``None`` where each process computes its own; ``default_text`` tells how
    default: int | float | bool | str | None
    default_text: str
    #: ``"s"`` for seconds, else empty
    unit: str
    #: the lowest and highest value allowed; of a string, its length
    low: float
    high: float
    doc: str

    @property
    def flag(self) -> str:
        """The command line's flag; ``--on/--off`` for one that can be switched off."""
        flag = "--" + self.name.replace("_", "-")
        return f"{flag}/--no-{flag[2:]}" if self.default is True else flag

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "RELAYBUS_" + self.name.upper()

    @property
    def bounds(self) -> str:
        """The bounds in words; empty where there are none to state."""
        if self.kind == "bool":
            return ""
        if self.kind == "str":
            return f"{self.low:g} to {self.high:g} characters"
        return f"{self.low:g} to {self.high:g}" + (f" {self.unit}" if self.unit else "")

    def parse(self, text: str) -> int | float | bool | str:
        """The value that *text* (of a variable) stands for; its bounds are not checked here."""
        text = text.strip()
        try:
            if self.kind == "int":
                return int(text)
            if self.kind == "float":
                return float(text)
        except ValueError:
            raise self._refused(text) from None
        if self.kind == "bool":
            lower = text.lower()
            if lower not in _TRUE and lower not in _FALSE:
                raise self._refused(text)
            return lower in _TRUE
        return text

    def check(self, value: object) -> int | float | bool | str:
        """*value*, as a float where the setting is one; else :class:`ConfigurationError`."""
        if self.kind == "bool" and isinstance(value, bool):
            return value
        if self.kind == "str" and isinstance(value, str) and value.isprintable():
            if self.low <= len(value) <= self.high:
                return value
        elif isinstance(value, int) and not isinstance(value, bool):
            if self.kind in ("int", "float") and self.low <= value <= self.high:
                return value if self.kind == "int" else float(value)
        elif (
            self.kind == "float"
            and isinstance(value, float)
            and math.isfinite(value)
            and self.low <= value <= self.high
        ):
            return value
        raise self._refused(value)

    def _refused(self, value: object) -> ConfigurationError:
        wanted = {
            "int": f"a whole number, {self.bounds}",
            "float": f"a number, {self.bounds}",
            "bool": "true or false (1, yes, on; 0, no, off)",
            "str": f"printable text, {self.bounds}",
        }[self.kind]
        return ConfigurationError(
            f"setting {self.name} ({self.flag}, {self.variable}) is {value!r}; it must be {wanted}"
        )


def _setting(
    default: float | bool | str,
    doc: str,
    *,
    low: float = 0,
    high: float = 0,
    unit: str = "",
) -> Any:
    return field(default=default, metadata={"doc": doc, "low": low, "high": high, "unit": unit})


def default_owner() -> str:
    """``host:pid`` of this process, the host cut where it is very long."""
    return f"{socket.gethostname()[:180]}:{os.getpid()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one worker. The defaults are the tuned ones.

    Durations are seconds. A value out of bounds raises :class:`ConfigurationError` with the
    setting, the value and the bounds.
    """

    concurrency: int = _setting(
        100,
        "How many handlers run at once.",
        low=1,
        high=10_000,
    )
    threads: int = _setting(
        32,
        "Threads for handlers that are plain functions. The most of these that run at once.",
        low=1,
        high=1_000,
    )
    batch: int = _setting(
        200,
        "The most deliveries that one statement claims.",
        low=1,
        high=5_000,
    )
    prefetch: int = _setting(
        200,
        "The most deliveries claimed ahead of a free slot. 0 claims only what can start at once.",
        low=0,
        high=10_000,
    )
    pool_size: int = _setting(
        16,
        "Connections for transactional handlers; the most of these that run at once. The worker "
        "needs a few more for itself.",
        low=1,
        high=1_000,
    )
    poll_interval: float = _setting(
        0.05,
        "How long to wait before the first look for work after it has run out.",
        low=0.001,
        high=60,
        unit="s",
    )
    max_poll_interval: float = _setting(
        1.5,
        "Where the waiting between looks, which grows while none finds work, ends. Not below "
        "poll_interval. With listen, work is usually noticed long before.",
        low=0.001,
        high=600,
        unit="s",
    )
    lease_duration: float = _setting(
        30.0,
        "How long a lane belongs to its worker after each renewal. A worker that died or lost the "
        "database is replaced after this time at the latest; a longer stall costs it its lanes.",
        low=1,
        high=3_600,
        unit="s",
    )
    completion_window: float = _setting(
        0.002,
        "How long finished deliveries wait for others, to be written together. 0 writes at once.",
        low=0,
        high=0.25,
        unit="s",
    )
    grace: float = _setting(
        30.0,
        "How long running handlers get to end after a stop was asked for. What still runs then is "
        "cancelled, and delivered again by another worker.",
        low=0,
        high=86_400,
        unit="s",
    )
    lane_linger: float = _setting(
        2.0,
        "How long a lane without work is kept before it is handed back for others to take.",
        low=0,
        high=3_600,
        unit="s",
    )
    owner: str = field(
        default_factory=default_owner,
        metadata={
            "doc": "What this worker is called in the lists of workers and lanes. Only for people: "
            "nothing is decided by it.",
            "low": 1,
            "high": 200,
            "unit": "",
            "default": "host:pid",
        },
    )
    setup: bool = _setting(
        False,
        "Create or upgrade the tables before starting. For development; in production run "
        "`relaybus migrate upgrade` once, before the workers.",
    )
    listen: bool = _setting(
        True,
        "Listen for the wake-up that publishers send after their commit, where the store has one. "
        "Takes one connection. Without it work is found by polling alone.",
    )

    def __post_init__(self) -> None:
        for setting in settings():
            value = setting.check(getattr(self, setting.name))
            object.__setattr__(self, setting.name, value)
        if self.max_poll_interval < self.poll_interval:
            raise ConfigurationError(
                f"setting max_poll_interval is {self.max_poll_interval!r} s, below poll_interval "
                f"({self.poll_interval!r} s); it must be at least that"
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str], **overrides: Any) -> Settings:
        """The settings from the ``RELAYBUS_*`` variables in *environ*.

        *overrides* go before variables; one that is ``None`` counts as not given. So does a
        variable that is empty. Other ``RELAYBUS_*`` variables are left to others. Raises
        :class:`ConfigurationError` for an override that is no setting.
        """
        known = {setting.name: setting for setting in settings()}
        if unknown := sorted(overrides.keys() - known.keys()):
            raise ConfigurationError(
                f"there is no setting {unknown[0]!r}; the settings are {', '.join(known)}"
            )
        values: dict[str, Any] = {}
        for name, setting in known.items():
            if (given := overrides.get(name)) is not None:
                values[name] = given
            elif text := environ.get(setting.variable, "").strip():
                values[name] = setting.parse(text)
        return cls(**values)


def settings() -> tuple[Setting, ...]:
    """All settings, in the order in which they are documented."""
    return _SETTINGS


def _describe(field_: Field[Any]) -> Setting:
    kinds: dict[object, Kind] = {"int": "int", "float": "float", "bool": "bool", "str": "str"}
    computed = field_.default is MISSING
    default: Any = None if computed else field_.default
    meta = field_.metadata
    if computed:
        default_text = meta["default"]
    elif isinstance(default, bool):
        default_text = "on" if default else "off"
    else:
        default_text = f"{default:g} {meta['unit']}".strip()
    return Setting(
        name=field_.name,
        kind=kinds[field_.type],
        default=default,
        default_text=default_text,
        unit=meta["unit"],
        low=meta["low"],
        high=meta["high"],
        doc=meta["doc"],
    )


_SETTINGS = tuple(_describe(each) for each in fields(Settings))


#: The variables that are no settings: of the commands, and of plain Alembic.
_OTHER_VARIABLES = ("APP", "URL", "LOG_LEVEL", "SCHEMA", "PREFIX")


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str | None]:
    """The ``RELAYBUS_*`` variables in *environ* that nothing reads, and the nearest that is read.

    ``None`` where there is none near.
    """
    begin = "RELAYBUS_"
    known = [*_OTHER_VARIABLES, *(setting.name.upper() for setting in settings())]
    unknown: dict[str, str | None] = {}
    for variable in sorted(environ):
        name = variable.removeprefix(begin)
        if name != variable and name not in known:
            # compared without their beginning, which would make any two of them alike
            near = get_close_matches(name, known, 1)
            unknown[variable] = begin + near[0] if near else None
    return unknown


def click_options() -> Callable[[_Command], _Command]:
    """A decorator that adds one option per setting to a click command.

    Each has its flag, ``RELAYBUS_*`` variable, default, bounds and help. The command gets the
    values under the settings' names, for ``Settings.from_env({}, **values)``: click has read the
    variables already, and ``owner`` is ``None`` where it was not given.
    """

    def decorate(command: _Command) -> _Command:
        # click lists options in the order of the decorators from top to bottom: the last first
        for setting in reversed(settings()):
            command = _click_option(setting)(command)
        return command

    return decorate


def _click_option(setting: Setting) -> Callable[[_Command], _Command]:
    import click  # here, so that an embedded worker does not need the command line's library

    options: dict[str, Any] = {}
    if setting.kind == "bool":
        options["is_flag"] = True
    elif setting.kind in ("int", "float"):
        options["type"] = click_number(setting.kind == "int", setting.low, setting.high)
        options["metavar"] = "N" if setting.kind == "int" else "SECONDS"
    return click.option(
        setting.flag,
        setting.name,
        default=setting.default,
        # a text stands in for a default that is only computed when it is needed
        show_default=setting.default_text if setting.default is None else True,
        envvar=setting.variable,
        show_envvar=True,
        help=setting.doc,
        **options,
    )


def click_number(whole: bool, low: float, high: float) -> click.ParamType[Any]:
    """The type of a click option: a whole number, or seconds, from *low* to *high*.

    It refuses in words of its own: click's speak of a "float range".
    """
    import click

    wanted = f"{'a whole number' if whole else 'a number of seconds'} from {low:g} to {high:g}"
    base: Any = click.IntRange if whole else click.FloatRange

    class Number(base):  # type: ignore[misc]
        def convert(self, value: Any, param: Any, ctx: Any) -> Any:
            try:
                return super().convert(value, param, ctx)
            except click.BadParameter:
                self.fail(f"{value!r} is not {wanted}", param, ctx)

    return Number(int(low) if whole else low, int(high) if whole else high)


_MADE_BY = (
    "<!-- Made by `make docs` from sqlalchemy_relaybus/settings.py. Change that, not this page. -->"
)
_INTRODUCTION = (
    "Every setting of a worker has a flag of `python -m sqlalchemy_relaybus.worker`, an "
    "environment variable, and a field of `Settings` of the same name. A flag goes before the "
    "variable, the variable before the default. Durations are in seconds. The command warns of "
    "`RELAYBUS_*` variables that nothing reads, such as misspelled ones."
)


def as_markdown() -> str:
    """The page ``docs/settings.md``."""
    lines = [
        "# Worker settings",
        "",
        _MADE_BY,
        "",
        _INTRODUCTION,
        "",
        "| setting | default | allowed | flag | variable |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| [`{s.name}`](#{s.name}) | {s.default_text} | {s.bounds or 'on, off'} "
        f"| `{s.flag}` | `{s.variable}` |"
        for s in settings()
    ]
    for setting in settings():
        lines += ["", f"## {setting.name}", "", setting.doc]
    return "\n".join(lines) + "\n"
