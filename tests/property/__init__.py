"""Stores against a model of the bus, and the worker's pure parts, under random histories."""
