"""The plans of the worker's statements on full tables: by key, index or address, and bounded.

Also those that were made while the tables were empty: a worker that starts with the application
keeps its prepared statements while the tables fill up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
from sqlalchemy import Connection, Engine, text

from sqlalchemy_relaybus.stores.base import Delivery, Pair
from tests.support.plans import DIRECT, Plan, Planner, caught
from tests.support.stores import EXPIRED, Bench, Holder, eventually, key_on, new_event, parked

#: The lanes that the worker holds, and of what it claims.
HELD = range(224, 240)
BATCH = 200
READY, WAITING = 20_000, 10_000

_SEED = """
INSERT INTO relaybus_events (id, type, payload, handlers, key)
SELECT CAST(lpad(to_hex(n), 32, '0') AS uuid), 'test.happened', '{}', '{a}', 'key-' || n % 5000
FROM generate_series(1, :ready + :waiting) AS n;

-- in front of what is ready, half of it on the lanes that are held; a tenth blocks nobody
INSERT INTO relaybus_parked (event_id, lane, handler, key, blocks, status, available_at)
SELECT CAST(lpad(to_hex(n), 32, '0') AS uuid),
  CASE WHEN n % 2 = 0 THEN :held + n / 2 % 16 ELSE n % 256 END,
  'a', 'parked-' || n % 2500, n % 10 <> 0, CASE WHEN n % 10 = 0 THEN 'dead' ELSE 'retrying' END,
  CASE WHEN n % 10 <> 0 THEN now() + CASE WHEN n % 100 = 1 THEN -1 ELSE 1 END * interval '1 h' END
FROM generate_series(1, :waiting) AS n;

INSERT INTO relaybus_parked (event_id, lane, handler, key, blocks, status)
SELECT CAST(lpad(to_hex(n), 32, '0') AS uuid), n % 256, 'a', 'behind-' || n % 256, true, 'behind'
FROM generate_series(1, :waiting / 2) AS n;

INSERT INTO relaybus_suspects (lane, id, crashes, company)
SELECT lane, id, 1, 1 FROM relaybus_parked WHERE id % 5 = 0;

INSERT INTO relaybus_deliveries (event_id, lane, handler, key)
SELECT CAST(lpad(to_hex(:waiting + n), 32, '0') AS uuid), n % 256, 'a', 'key-' || n % 5000
FROM generate_series(1, :ready) AS n;
"""


@dataclass
class Act:
    """A statement of the store, and what it may cost on the seeded tables."""

    do: Callable[[Holder, Sequence[Delivery]], object]
    #: table and how it is read
    paths: set[tuple[str, str]]
    buffers: int
    removed: int
    nth: int = 1
    on_taker: bool = False

    def connection(self, holder: Holder) -> Connection:
        return holder.taker if self.on_taker else holder.connection


def exchange(careful: bool) -> Callable[[Holder, Sequence[Delivery]], object]:
    return lambda holder, claimed: holder.exchange(
        finished=claimed[:100],
        started=claimed[100:150],
        prefetched=claimed[150:],
        limit=BATCH,
        per_lane=2 * BATCH // len(HELD),
        careful=careful,
    )


BY_KEY = {
    "deliveries": ("relaybus_deliveries", "relaybus_deliveries_pkey"),
    "parked": ("relaybus_parked", "relaybus_parked_pkey"),
    "lanes": ("relaybus_lanes", "relaybus_lanes_pkey"),
    "events": ("relaybus_events", "relaybus_events_pkey"),
    "suspects": ("relaybus_suspects", "relaybus_suspects_pkey"),
}
BY_ADDRESS = {name: (f"relaybus_{name}", "Tid Scan") for name in ("deliveries", "parked", "lanes")}
DUE = ("relaybus_parked", "relaybus_parked_due_idx")
BEHIND = ("relaybus_parked", "relaybus_parked_behind_idx")
BLOCKING = ("relaybus_parked", "relaybus_parked_blocks_idx")
PUMP = {
    BLOCKING,
    BY_KEY["deliveries"],
    BY_ADDRESS["deliveries"],
    BY_KEY["events"],
    BY_KEY["lanes"],
    BY_ADDRESS["lanes"],
}

ACTS = {
    "pump": Act(exchange(False), PUMP, 2500, 150),
    "careful pump": Act(exchange(True), PUMP, 2800, 150),
    "probe": Act(
        lambda holder, _: holder.bench.store.probe(holder.connection),
        {BY_KEY["deliveries"], DUE, BY_KEY["lanes"]},
        2600,
        0,
    ),
    "complete": Act(
        lambda holder, claimed: holder.complete(claimed[0]),
        {BY_KEY["lanes"], BY_KEY["deliveries"]},
        12,
        0,
    ),
    "park": Act(
        lambda holder, claimed: holder.park(*(parked(each) for each in claimed[:50])),
        {BY_KEY["lanes"], BY_KEY["deliveries"], BY_ADDRESS["deliveries"]},
        1000,
        0,
    ),
    "promote": Act(
        lambda holder, _: holder.promote(), {BY_KEY["lanes"], DUE, BY_ADDRESS["parked"]}, 200, 0
    ),
    "take": Act(
        lambda holder, _: holder.take(*range(16, 24)),
        {BY_KEY["lanes"]},
        80,
        0,
        nth=2,
        on_taker=True,
    ),
    "suspect": Act(
        lambda holder, _: holder.take(*range(240, 256)),
        {BY_KEY["lanes"], BY_KEY["deliveries"], BY_KEY["suspects"]},
        200,
        0,
        nth=3,
        on_taker=True,
    ),
    "suspects": Act(
        lambda holder, _: holder.take(*range(16, 24)),
        {BY_KEY["suspects"], BY_KEY["deliveries"], BY_KEY["parked"]},
        1000,
        100,
        nth=3,
        on_taker=True,
    ),
    "behind": Act(
        lambda holder, _: holder.take(*range(16, 24)), {BEHIND}, 230, 0, nth=4, on_taker=True
    ),
    "blocked lanes": Act(
        lambda holder, _: holder.bench.store.blocked_lanes(holder.connection), {BLOCKING}, 1100, 0
    ),
    "hold back": Act(
        lambda holder, _: holder.bench.store.hold_back(
            holder.connection,
            holder.id,
            list(holder.leases.values()),
            parking=["a"],
            beyond=10,
            limit=100,
        ),
        {BY_KEY["lanes"], BY_KEY["deliveries"], BY_ADDRESS["deliveries"], BLOCKING},
        5000,
        0,
    ),
    "thin out": Act(
        lambda holder, claimed: holder.bench.store.thin_out(
            holder.connection,
            holder.id,
            [holder.leases[HELD[0]]],
            hot={(HELD[0], Pair("a", f"key-{HELD[0]}"))},
            kept=claimed,
            limit=500,
        ),
        {BY_KEY["lanes"], BY_KEY["deliveries"], BY_ADDRESS["deliveries"]},
        350,
        0,
    ),
    "let go": Act(
        lambda holder, _: holder.bench.store.let_go(
            holder.connection, {(n, Pair("a", f"behind-{n}")) for n in HELD}, 20
        ),
        {BLOCKING, BEHIND, BY_ADDRESS["parked"]},
        2900,
        0,
    ),
    "let go everywhere": Act(
        lambda holder, _: holder.bench.store.let_go(holder.connection, None, 2),
        {BLOCKING, BEHIND, BY_ADDRESS["parked"]},
        8000,
        0,
    ),
    "absolve": Act(
        lambda holder, claimed: holder.absolve(*claimed[:50]),
        {BY_KEY["lanes"], BY_KEY["suspects"]},
        160,
        0,
    ),
    "relinquish": Act(
        lambda holder, _: holder.bench.store.relinquish(
            holder.connection, holder.id, list(holder.leases.values())
        ),
        {BY_KEY["lanes"]},
        150,
        0,
    ),
    "release": Act(
        lambda holder, _: holder.bench.store.release(holder.connection, "a", "parked-31"),
        {BLOCKING},
        50,
        50,
    ),
    "read lanes": Act(
        lambda holder, _: holder.bench.store.read_lanes(holder.connection, HELD),
        {BY_KEY["lanes"]},
        50,
        0,
    ),
}


@pytest.fixture
def bench(engine: Engine) -> Iterator[Bench]:
    with Bench(engine) as bench:
        yield bench


def seed(bench: Bench) -> None:
    with bench.engine.begin() as connection:
        for statement in _SEED.split(";\n"):
            numbers = {"ready": READY, "waiting": WAITING, "held": HELD[0]}
            connection.execute(text(statement), numbers)


def orphaned_lanes(bench: Bench) -> None:
    """Lanes whose holder died with deliveries started."""
    dead = bench.holder()
    bench.publish(*(new_event(key_on(lane)) for lane in range(240, 256)))
    dead.take(*range(240, 256), lease=EXPIRED)
    dead.exchange(limit=16, per_lane=1, lease=EXPIRED)


def check(act: Act, plan: Plan) -> None:
    __tracebackhide__ = True
    told = f"{plan}\n{plan.buffers} buffers, {plan.removed} rows removed, {plan.paths()}"
    for scan in plan.scans():
        assert scan["Node Type"] in DIRECT, told
    assert plan.paths() <= act.paths, told
    assert plan.removed <= act.removed, told
    assert plan.buffers <= act.buffers, told


#: When each is planned. An operator's are sent now and then, and planned when they are.
CASES = [
    (planned, name)
    for planned in ("full", "new", "drained")
    for name in ACTS
    if planned == "full" or name != "release"
]


@pytest.mark.parametrize(("planned", "name"), CASES)
def test_rows_are_found_directly(bench: Bench, planned: str, name: str) -> None:
    act = ACTS[name]
    holder = bench.holder("a")
    holder.take(*HELD)
    orphaned_lanes(bench)
    if planned == "full":
        seed(bench)
        with bench.connect("AUTOCOMMIT") as connection:
            connection.execute(text("ANALYZE"))
        claimed = holder.exchange(limit=BATCH, per_lane=BATCH // len(HELD) + 1).startable
        assert len(claimed) == BATCH
        statement, parameters = caught(
            act.connection(holder), lambda: act.do(holder, claimed), act.nth
        )
        plan = Planner(act.connection(holder), statement, list(parameters)).explain(parameters)
    else:
        if planned == "drained":  # the statistics say so
            with bench.connect("AUTOCOMMIT") as connection:
                connection.execute(text("TRUNCATE relaybus_deliveries, relaybus_events"))
                connection.execute(text("VACUUM ANALYZE"))
        nothing = [Delivery(0, 0, 1, 0, 0, "a", None, None)]
        statement, parameters = caught(
            act.connection(holder), lambda: act.do(holder, nothing), act.nth
        )
        planner = Planner(act.connection(holder), statement, list(parameters))
        planner.explain(parameters)
        seed(bench)
        orphaned_lanes(bench)
        claimed = holder.exchange(limit=BATCH, per_lane=BATCH // len(HELD) + 1).startable
        _, parameters = caught(act.connection(holder), lambda: act.do(holder, claimed), act.nth)
        plan = planner.explain(parameters)
    check(act, plan)


@pytest.mark.parametrize("careful", [False, True])
def test_an_old_snapshot_does_not_slow_the_pump_down(bench: Bench, careful: bool) -> None:
    """Its lane's row is not looked for among the dead versions that have to be kept."""
    bench.publish(*(new_event(key_on(0)) for _ in range(BATCH)))
    holder = bench.holder()
    holder.take(0)
    running = holder.claim()

    def exchange(times: int) -> tuple[int, set[str]]:
        """How often dead versions were walked over, and the pages that the row was on."""
        walks, pages = 0, set()
        for _ in range(times):
            walks += not holder.place(0).untidied
            holder.exchange(started=running, claim=False, careful=careful)
            pages.add(holder.place(0).address.partition(",")[0])
        return walks, pages

    with bench.connect("REPEATABLE READ") as old:
        old.execute(text("SELECT count(*) FROM relaybus_lanes"))
        walks, pages = exchange(500)
        assert len(pages) > 50
        assert walks < 40
        while not holder.place(0).untidied:
            exchange(1)
        holder.take(1)  # a row that is looked for, beside one that is not
        statement, parameters = caught(
            holder.connection,
            lambda: holder.exchange(started=running, claim=False, careful=careful),
        )
        plan = Planner(holder.connection, statement, list(parameters)).explain(parameters)
        assert plan.buffers < 50, plan
    del holder.leases[1]
    exchange(110)
    # it is tidied again, as soon as nobody else (statistics being gathered) has a snapshot
    eventually(lambda: len(exchange(100)[1]) == 1, "the row stays on its page")
