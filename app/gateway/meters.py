"""What one gateway or batch processor counts."""

from prometheus_client import Counter, Gauge, Histogram

from app.gateway.follow import Follower
from relay.exposition import process_registry

_FIRST_TOKEN_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_BETWEEN_TOKENS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
_WHOLE_S = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800)


class Meters:
    """Of this process alone. Latencies are those of requests that it streamed or waited for, as their client
    saw them."""

    def __init__(self, model: str, role: str, follower: Follower) -> None:
        self.registry = registry = process_registry(model, role)
        self.http_requests = Counter(
            "kvrelay_http_requests", "HTTP requests", ["route", "status"], registry=registry
        )
        self.submitted = Counter(
            "kvrelay_requests",
            "Requests accepted, or replayed by their key",
            ["kind", "outcome"],
            registry=registry,
        )
        self.streamed_tokens = Counter("kvrelay_streamed_tokens", "Tokens sent", registry=registry)
        self.disconnects = Counter(
            "kvrelay_client_disconnects", "Clients that left before the end", registry=registry
        )
        self.first_token_s = Histogram(
            "kvrelay_gateway_time_to_first_token_seconds",
            "From arrival to first token",
            ["kind"],
            buckets=_FIRST_TOKEN_S,
            registry=registry,
        )
        self.between_tokens_s = Histogram(
            "kvrelay_gateway_inter_token_latency_seconds",
            "Between two tokens",
            ["kind"],
            buckets=_BETWEEN_TOKENS_S,
            registry=registry,
        )
        self.whole_s = Histogram(
            "kvrelay_gateway_request_latency_seconds",
            "From arrival to end",
            ["kind", "state"],
            buckets=_WHOLE_S,
            registry=registry,
        )
        watched = Gauge("kvrelay_followed_streams", "Streams and polls that wait", registry=registry)
        watched.set_function(follower.waiting)
