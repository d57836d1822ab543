"""Chaos: publishers and workers under load while processes, network and server fail.

``python -m tests.chaos`` runs it; what happened is judged by ledgers that are kept outside the bus.
"""
