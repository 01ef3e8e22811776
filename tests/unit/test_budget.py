"""How many tokens a new leg may need, while the engine has not seen all that was sent to it."""

from relay.request import Leg
from tests.desk import claimed
from workers.budget import Budget
from workers.engine.messages import Drop, Headroom, Prefill, Reserve, Work

FREE = Headroom(100, 1600, 0, 0, 0, 0, 0, 0, 100, admitted=0)


class Engine:
    headroom = FREE


def prefill(tokens: int, emitted: int = 0) -> Prefill:
    leg = claimed(Leg.PREFILL, tokens=tokens, emitted=range(emitted))
    return Prefill(Work("key", "req_1", leg.prompt_ids, leg.emitted, leg.params), relay=True)


def test_what_the_engine_has_not_seen_is_taken_off() -> None:
    engine = Engine()
    budget = Budget(lambda: engine.headroom)
    budget.count(prefill(20, emitted=5))
    budget.count(Reserve(prefill(25, emitted=5).work))
    assert budget.free_tokens == 100 - 26 - 31


def test_what_the_engine_has_seen_is_in_its_own_word() -> None:
    engine = Engine()
    budget = Budget(lambda: engine.headroom)
    budget.count(prefill(20))
    budget.count(prefill(30))
    engine.headroom = FREE._replace(free_tokens=79, admitted=1)
    assert budget.free_tokens == 79 - 31
    engine.headroom = FREE._replace(free_tokens=48, admitted=2)
    assert budget.free_tokens == 48


def test_other_commands_need_nothing() -> None:
    budget = Budget(lambda: FREE)
    budget.count(Drop("key"))
    assert budget.free_tokens == 100


def test_it_may_be_overdrawn() -> None:
    budget = Budget(lambda: FREE)
    budget.count(prefill(200))
    assert budget.free_tokens < 0
