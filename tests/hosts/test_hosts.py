"""Requests whose prefill, decode and Redis are on three hosts."""

import time

from tests.hosts.stage import WAYS, Stage


def test_it(stage: Stage) -> None:
    for i in range(6):
        t=time.monotonic()
        rid = stage.relay.submit(stage.prompt(i), **WAYS)
        a = stage.relay.wait(rid)
        r = stage.relay.record(rid).timings
        print(round(time.monotonic()-t,3), a.end.state, r.transfer_bytes, r.transfer_us, r.transfer_descriptors, "ready->first", r.first_token-r.ready, "prefill_end->ready", r.ready-r.prefill_end)
