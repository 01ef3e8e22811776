"""How the calls of `rooms.lua` and their replies are written: lists as JSON, records as flat pairs."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from relay.answers import Claim, Emission, Left, Milestone, Moved
from relay.geometry import Geometry
from relay.marks import marks
from relay.packed import pack_ints, unpack_ints
from relay.prompt_logprobs import PromptLogprobs
from relay.request import Claimed, Hold, Leg, Record, Ring, State, Submission, Timings
from relay.sampling import SamplingParams
from relay.server_clock import ServerClock
from relay.stamps import Stamps
from relay.trace_context import TraceContext
from relay.worker_card import Incarnation, Load, WorkerCard


def pairs(flat: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(flat[::2], flat[1::2])


# ---- what is sent


def pack_hold(hold: Hold) -> tuple[str, str, str, str]:
    return hold.request_id, hold.leg, str(hold.fence), hold.nonce


def pack_held(hold: Hold, progress: Mapping[str, Stamps]) -> tuple[str, ...]:
    return (*pack_hold(hold), progress[hold.nonce].pack()) if hold.nonce in progress else pack_hold(hold)


def pack_load(load: Load) -> str:
    return json.dumps(load._asdict())


def pack_card(card: WorkerCard) -> list[str | bytes | int]:
    """Field, value, field, value, as `unpack_card` reads them."""
    fields: dict[str, str | bytes | int] = {
        "incarnation": card.incarnation.to_json(),
        "name": card.name,
        "role": card.role,
        "geometry": card.geometry.to_json(),
        "capacity_tokens": card.capacity_tokens,
        "agent_metadata": card.agent_metadata,
        "load": pack_load(card.load),
        "metrics": card.metrics,
    }
    return [part for pair in fields.items() for part in pair]


def pack_member(s: Submission) -> tuple[str | bytes | int, ...]:
    """As `submit` in rooms.lua reads it: the prompt of a fork is that of its leader."""
    prompt_tokens = len(s.prompt_ids)
    prompt = b"" if s.leader else pack_ints(s.prompt_ids)
    # The prefix cache has no logits, so a scored prompt is computed as a whole wherever it goes.
    known_by = marks(prompt, s.params.cache_salt) if s.params.prompt_logprobs is None else ""
    limit_tokens = prompt_tokens + s.params.max_tokens
    wanted = s.params.prompt_logprobs
    scores_bytes = 0 if wanted is None else PromptLogprobs.packed_bytes(prompt_tokens, wanted)
    trace, leader = s.trace.pack() if s.trace else "", s.leader or ""
    params = s.params.to_json()
    return s.request_id, prompt, known_by, params, scores_bytes, prompt_tokens, limit_tokens, leader, trace


def pack_emission(emission: Emission) -> str:
    """As `emit` in rooms.lua reads it: absent is absent, never null."""
    tokens = [
        [t.token_id, t.text] if t.logprobs is None else [t.token_id, t.text, json.dumps(t.logprobs)]
        for t in emission.tokens
    ]
    message: dict[str, Any] = {
        "hold": pack_hold(emission.hold),
        "start": emission.start_position,
        "tokens": tokens,
    }
    if emission.prefilled:
        message["prefilled"] = emission.prefilled.told
    if emission.finish:
        finish = emission.finish
        message["finish"] = {"reason": finish.reason, "text": finish.text}
        if finish.stop_reason is not None:
            message["finish"]["stop_reason"] = json.dumps(finish.stop_reason)
    return json.dumps(message)


# ---- what is answered


def unpack_rings(reply: list[Any]) -> list[Ring]:
    return [Ring(Leg(leg.decode()), request_id.decode(), int(tokens)) for leg, request_id, tokens in reply]


def unpack_moved(reply: list[Any]) -> Moved:
    ok, rings = reply
    return Moved(bool(ok), unpack_rings(rings))


def unpack_milestone(reply: list[Any]) -> Milestone | None:
    if not reply:
        return None
    first, *times, prompt_tokens, cached_tokens, tokens = (float(part or 0) for part in reply)
    submitted, claimed, prefill_start, prefill_end, first_token, ended = times
    return Milestone(
        bool(first),
        submitted,
        claimed,
        prefill_start,
        prefill_end,
        first_token,
        ended,
        int(prompt_tokens),
        int(cached_tokens),
        int(tokens),
    )


def unpack_claim(leg: Leg, reply: list[Any]) -> Claim | Left:
    if len(reply) == 1:
        return Left(reply[0])
    return Claim(unpack_claimed(leg, reply), unpack_rings(reply[-1]))


def unpack_claimed(leg: Leg, reply: list[Any]) -> Claimed:
    request_id, fence, nonce, *rest = reply
    room, attempt, solo, prompt, emitted, params, prefill_boot, left, submitted, forks, now, trace, _ = rest
    return Claimed(
        hold=Hold(request_id.decode(), leg, int(fence), nonce.decode()),
        room=int(room),
        attempt=int(attempt),
        solo=solo == b"1",
        prompt_ids=unpack_ints(prompt),
        emitted=tuple(map(int, emitted)),
        params=SamplingParams.from_json(params),
        prefill_boot=prefill_boot.decode() if leg is Leg.DECODE else None,
        left_ms=float(left),
        submitted_ms=float(submitted),
        forks=forks,
        clock=ServerClock(float(now), time.monotonic()),
        trace_id=TraceContext.unpack(trace.decode()).trace_id if trace else None,
    )


def unpack_card(fields: dict[bytes, bytes]) -> WorkerCard:
    return WorkerCard(
        incarnation=Incarnation.from_json(fields[b"incarnation"]),
        name=fields[b"name"].decode(),
        role=fields[b"role"].decode(),
        geometry=Geometry.from_json(fields[b"geometry"]),
        capacity_tokens=int(fields[b"capacity_tokens"]),
        agent_metadata=fields[b"agent_metadata"],
        load=Load(**json.loads(fields[b"load"])),
        metrics=fields.get(b"metrics", b"").decode(),
    )


def unpack_record(request_id: str, flat: Sequence[bytes]) -> Record | None:
    if not flat:
        return None
    fields = {name.decode(): value for name, value in pairs(flat)}

    def text(name: str) -> str | None:
        return fields[name].decode() if name in fields else None

    def time_ms(name: str) -> float:
        return float(fields.get(name, 0))

    return Record(
        request_id=request_id,
        state=State(fields["state"].decode()),
        kind=fields["kind"].decode(),
        owner=fields.get("owner", b"").decode(),
        params=SamplingParams.from_json(fields["params"]),
        prompt_tokens=int(fields["prompt_tokens"]),
        completion_tokens=int(fields["tokens"]),
        cached_tokens=int(fields["cached_tokens"]),
        attempts=int(fields["attempt"]),
        retractions=int(fields["retractions"]),
        finish_reason=text("finish_reason"),
        stop_reason=json.loads(fields["stop_reason"]) if "stop_reason" in fields else None,
        error_code=text("error_code"),
        error_message=text("error_message"),
        timings=Timings(
            submitted=time_ms("submitted"),
            claimed=time_ms("claimed"),
            published=time_ms("published"),
            prefill_start=time_ms("prefill_start"),
            prefill_end=time_ms("prefill_end"),
            ready=time_ms("ready"),
            decode_claimed=time_ms("decode_claimed"),
            first_token=time_ms("first_token"),
            ended=time_ms("ended"),
            transfer_us=int(fields.get("transfer_us", 0)),
            transfer_bytes=int(fields.get("transfer_bytes", 0)),
            transfer_descriptors=int(fields.get("transfer_descriptors", 0)),
            spared_bytes=int(fields.get("spared_bytes", 0)),
        ),
        trace=TraceContext.unpack(fields["trace"].decode()) if "trace" in fields else None,
    )
