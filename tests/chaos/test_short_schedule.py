"""The schedule is a function of its seed, and a short one holds."""

from tests.chaos.cluster import Cluster
from tests.chaos.faults import TRANSITIONS, Fault, schedule
from tests.chaos.load import Prompt
from tests.chaos.run import waves
from tests.chaos.watch import Text

SEED = 11


def test_a_seed_always_gives_the_same_schedule() -> None:
    assert schedule(SEED, 40) == schedule(SEED, 40)
    assert schedule(SEED, 40)[:10] == schedule(SEED, 10)
    assert schedule(SEED, 40) != schedule(SEED + 1, 40)


def test_every_fault_is_one_its_transition_allows() -> None:
    for fault in schedule(SEED, 500):
        roles, kinds = TRANSITIONS[fault.transition]
        assert fault.kind in kinds
        assert fault.role in roles
        assert Fault.from_json(fault.to_json()) == fault


def test_a_short_schedule_holds(cluster: Cluster, load: list[Prompt], expected: list[Text]) -> None:
    done = list(waves(cluster, load, expected, schedule(SEED, 8)))
    assert sum(wave.happened for wave in done) >= 4
    assert not [problem for wave in done for problem in wave.problems]
