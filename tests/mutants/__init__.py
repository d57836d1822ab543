"""Do the tests notice when a clause is taken out of a statement? ``make mutants`` tries each.

The mutants are made from the statements themselves: every condition of an AND or OR, every lock
and its SKIP LOCKED, and every term that a fence is written with. A mutant is killed if a test fails
with it; one that survives is a clause that is not tested, or that is not needed.
"""
