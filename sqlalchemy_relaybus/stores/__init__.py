"""The stores: one contract (:mod:`.base`), one package a database."""
