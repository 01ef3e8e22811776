"""Requests share computed pages only with those of the same `cache_salt`."""

from relay.sampling import SamplingParams
from tests.engine_rig import PAGE_SIZE, Rig, unified

PROMPT = list(range(1, 14))


def salted(salt: str | None) -> SamplingParams:
    return SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, cache_salt=salt)


def test_nobody_finds_what_was_computed_under_another_salt() -> None:
    rig = Rig()
    for key, salt in (("a", "x"), ("b", None), ("c", "y"), ("d", ""), ("e", "x"), ("f", None)):
        rig.submit(unified(key, PROMPT, params=salted(salt)))
        rig.run()
    found = [rig.admitted(key).cached_tokens for key in "abcdef"]
    assert found == [0, 0, 0, 0, 12, 12]
    assert len({tuple(rig.text(key)) for key in "abcdef"}) == 1


def test_output_is_shared_under_its_own_salt_only() -> None:
    rig = Rig()
    rig.submit(unified("a", PROMPT, params=salted("x")))
    rig.run()
    longer = PROMPT + rig.text("a")
    for key, salt in (("b", None), ("c", "x")):
        rig.submit(unified(key, longer, params=salted(salt)))
        rig.run()
    whole = (len(longer) - 1) // PAGE_SIZE * PAGE_SIZE
    assert [rig.admitted(key).cached_tokens for key in "bc"] == [0, whole]
