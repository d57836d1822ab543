"""Everything that can be done wrong with the library, and what its user is told.

The cases are code, as a user would write it; ``docs/misuse.md`` is made from them and the tests run
them.
"""
