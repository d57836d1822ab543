from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from sqlalchemy_relaybus.exc import ConfigurationError
from sqlalchemy_relaybus.settings import (
    Settings,
    as_markdown,
    click_options,
    settings,
    unknown_variables,
)

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"

DEFAULTS = {
    "concurrency": 100,
    "threads": 32,
    "batch": 200,
    "prefetch": 200,
    "pool_size": 16,
    "poll_interval": 0.05,
    "max_poll_interval": 1.5,
    "lease_duration": 30.0,
    "completion_window": 0.002,
    "grace": 30.0,
    "lane_linger": 2.0,
    "setup": False,
    "listen": True,
}
# a value other than the default, as text and as it is
OTHERS = {
    "concurrency": ("7", 7),
    "threads": ("7", 7),
    "batch": ("7", 7),
    "prefetch": ("0", 0),
    "pool_size": ("7", 7),
    "poll_interval": ("0.5", 0.5),
    "max_poll_interval": ("5", 5.0),
    "lease_duration": ("1", 1.0),
    "completion_window": ("0", 0.0),
    "grace": ("0", 0.0),
    "lane_linger": ("1e1", 10.0),
    "owner": ("mail-1", "mail-1"),
    "setup": ("yes", True),
    "listen": ("off", False),
}


def as_dict(made: Settings) -> dict[str, Any]:
    return {field.name: getattr(made, field.name) for field in fields(made)}


def test_the_defaults() -> None:
    made = as_dict(Settings())
    assert made.pop("owner").endswith(f":{os.getpid()}")
    assert made == DEFAULTS
    assert {name: type(value) for name, value in made.items()} == {
        name: type(value) for name, value in DEFAULTS.items()
    }


def test_every_setting_is_covered_here() -> None:
    assert [s.name for s in settings()] == [f.name for f in fields(Settings)]
    assert set(OTHERS) == {s.name for s in settings()}


def test_settings_are_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        Settings().batch = 1  # type: ignore[misc]


def test_from_env_reads_every_variable() -> None:
    environ = {f"RELAYBUS_{name.upper()}": text for name, (text, _) in OTHERS.items()}
    made = Settings.from_env(environ | {"RELAYBUS_URL": "sqlite://", "BATCH": "1"})
    assert as_dict(made) == {name: value for name, (_, value) in OTHERS.items()}


def test_overrides_go_before_variables_and_none_is_not_given() -> None:
    environ = {"RELAYBUS_BATCH": "7", "RELAYBUS_THREADS": "7", "RELAYBUS_GRACE": " "}
    made = Settings.from_env(environ, batch=9, threads=None, listen=False)
    assert (made.batch, made.threads, made.listen, made.grace) == (9, 7, False, 30.0)


def test_an_override_that_is_no_setting() -> None:
    with pytest.raises(ConfigurationError, match="'btach'.*batch"):
        Settings.from_env({}, btach=1)


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("concurrency", 0, "1 to 10000"),
        ("concurrency", 10_001, "1 to 10000"),
        ("concurrency", 1.5, "whole number"),
        ("concurrency", True, "whole number"),
        ("batch", "7", "whole number"),
        ("prefetch", -1, "0 to 10000"),
        ("lease_duration", 0.99, "1 to 3600 s"),
        ("lease_duration", float("nan"), "1 to 3600 s"),
        ("grace", float("inf"), "0 to 86400 s"),
        ("grace", True, "a number"),
        ("grace", None, "a number"),
        ("poll_interval", 0, "0.001 to 60 s"),
        ("completion_window", -0.001, "0 to 0.25 s"),
        ("owner", "", "1 to 200 characters"),
        ("owner", "x" * 201, "1 to 200 characters"),
        ("owner", "a\0", "printable"),
        ("owner", 7, "printable"),
        ("setup", 1, "true or false"),
        ("listen", "on", "true or false"),
    ],
)
def test_an_error_names_setting_value_and_bound(name: str, value: Any, bound: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Settings(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"setting {name} (--{name.replace('_', '-')}")
    assert f"RELAYBUS_{name.upper()}" in message
    assert repr(value) in message
    assert bound in message


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("BATCH", "many"),
        ("BATCH", "1.5"),
        ("GRACE", "1 min"),
        ("GRACE", "nan"),
        ("LISTEN", "maybe"),
    ],
)
def test_a_variable_that_cannot_be_read(variable: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"RELAYBUS_{variable}.*{text}"):
        Settings.from_env({f"RELAYBUS_{variable}": text})


def test_polling_cannot_back_off_to_less() -> None:
    assert Settings(poll_interval=2, max_poll_interval=2).poll_interval == 2.0
    with pytest.raises(ConfigurationError, match="max_poll_interval is 1.5 s, below poll_interval"):
        Settings(poll_interval=2)


def test_variables_that_nothing_reads() -> None:
    known = {setting.variable: "x" for setting in settings()}
    assert unknown_variables({**known, "RELAYBUS_URL": "x", "RELAY": "x"}) == {}
    assert unknown_variables(dict.fromkeys(["RELAYBUS_UL", "RELAYBUS_CONCURENCY"], "x")) == {
        "RELAYBUS_CONCURENCY": "RELAYBUS_CONCURRENCY",
        "RELAYBUS_UL": "RELAYBUS_URL",
    }
    assert unknown_variables({"RELAYBUS_SERVICE_HOST": "x"}) == {"RELAYBUS_SERVICE_HOST": None}


# The command line


def run(*args: str, env: dict[str, str] | None = None) -> tuple[Settings | None, str]:
    made: list[Settings] = []

    @click.command()
    @click_options()
    def worker(**values: Any) -> None:
        made.append(Settings.from_env({}, **values))

    result = CliRunner().invoke(worker, args, env=env)
    return (made[0] if made else None), result.output


def test_the_command_line_without_options_gives_the_defaults() -> None:
    assert run()[0] == Settings()


def test_every_setting_has_an_option() -> None:
    args: list[str] = []
    for name, (text, value) in OTHERS.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            args.append(flag if value else f"--no-{name}")
        else:
            args += [flag, text]
    made, output = run(*args)
    assert made is not None, output
    assert as_dict(made) == {name: value for name, (_, value) in OTHERS.items()}


def test_options_read_the_variables_and_go_before_them() -> None:
    env = {f"RELAYBUS_{name.upper()}": text for name, (text, _) in OTHERS.items()}
    made, output = run("--batch", "9", "--listen", env=env)
    assert made is not None, output
    expected = {name: value for name, (_, value) in OTHERS.items()}
    assert as_dict(made) == expected | {"batch": 9, "listen": True}


def test_help_tells_variable_default_and_meaning() -> None:
    output = " ".join(run("--help")[1].split())
    for setting in settings():
        assert setting.flag.split("/")[0] in output
        assert setting.variable in output
    assert "default: 0.002" in output
    assert "(host:pid)" in output
    assert output.index("--concurrency") < output.index("--listen")


def test_an_option_out_of_bounds_is_refused() -> None:
    made, output = run("--lease-duration", "0.5")
    assert made is None
    assert "--lease-duration" in output


# The page


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == as_markdown(), "run: make docs"


def test_make_docs_writes_the_page(tmp_path: Path) -> None:
    page = tmp_path / "settings.md"
    here = [f"BIN={Path(sys.executable).parent}", "STAMP=", f"SETTINGS_PAGE={page}"]
    made = subprocess.run(
        ["make", "--silent", "docs", *here],
        cwd=PAGE.parents[1],
        env={**os.environ, "PYTHONWARNINGS": "error", "MAKEFLAGS": ""},
        capture_output=True,
        text=True,
    )
    assert (made.returncode, made.stderr) == (0, "")
    assert page.read_text(encoding="utf-8") == as_markdown()


def test_the_page_has_every_setting() -> None:
    page = as_markdown()
    for setting in settings():
        assert f"\n## {setting.name}\n\n{setting.doc}\n" in page
        assert f"| `{setting.flag}` | `{setting.variable}` |" in page
    assert "| 0.05 s | 0.001 to 60 s |" in page
