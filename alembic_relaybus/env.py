"""Alembic's entry point. What it does is in :mod:`alembic_relaybus.environment`."""

from alembic_relaybus.environment import run

run()
