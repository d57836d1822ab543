"""The lane of a key: 32-bit FNV-1a over its UTF-8 bytes, modulo 256.

Publishers and workers of every release and language must agree on it, since the lane is stored
with the delivery and carries the order of a key. It therefore never depends on Python's ``hash``.

Only the low byte of the hash is computed. One FNV-1a step is ``h = (h ^ byte) * 0x01000193``, and
the low byte of a product depends on nothing but the low bytes of its factors; so the state modulo
256 goes from 0xC5 (low byte of the offset basis 0x811C9DC5) by ``h = ((h ^ byte) * 0x93) & 0xFF``.
"""

from __future__ import annotations

from uuid import UUID

#: How many lanes there are. Fixed: the stored lanes and their order depend on it.
LANES = 256

_START = 0xC5
_PRIME = 0x93
#: The multiplication, looked up: ``_TIMES[x]`` is ``x * 0x93 % 256``.
_TIMES = bytes(x * _PRIME & 0xFF for x in range(256))


def _transition(text: str) -> bytes:
    """Where each of the 256 states goes when *text* (ASCII) is hashed in."""
    states = range(256)
    for char in text.encode():
        states = bytes(_TIMES[state ^ char] for state in states)  # type: ignore[assignment]
    return bytes(states)


#: One step for a whole byte of a UUID, as its two hexadecimal digits, and the same with the dash
#: that follows some of them: 16 look-ups replace 36 and the making of the string.
_STEPS = {char: _transition(char) for char in "0123456789abcdef-"}
_HEX = [_STEPS[f"{b:02x}"[0]].translate(_STEPS[f"{b:02x}"[1]]) for b in range(256)]
_HEX_DASH = [row.translate(_STEPS["-"]) for row in _HEX]


def lane_of(key: str) -> int:
    """The lane, 0 to 255, of the ordering key *key*.

    A key with a lone surrogate has no UTF-8 form and raises ``UnicodeEncodeError``; ``publish()``
    refuses such keys before it asks for their lane.
    """
    state = _START
    times = _TIMES
    for byte in key.encode():
        state = times[state ^ byte]
    return state


def lane_of_event(id: UUID) -> int:
    """The lane, 0 to 255, of an event without a key: ``lane_of(str(id))``, at a third the cost."""
    a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q = id.bytes
    row, dash = _HEX, _HEX_DASH
    state = dash[d][row[c][row[b][row[a][_START]]]]
    state = dash[h][row[g][dash[f][row[e][state]]]]
    state = row[m][row[k][dash[j][row[i][state]]]]
    return row[q][row[p][row[o][row[n][state]]]]
