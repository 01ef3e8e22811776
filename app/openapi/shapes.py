"""What replies look like: for the document of the API, and the test that replies obey it."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic cannot read that of `typing` before Python 3.12

Names = dict[str, Any]


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    error: ErrorDetail


class PromptDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None


class Links(TypedDict):
    self: str
    stream: str
    timeline: str
    cancel: str


class Submitted(TypedDict):
    id: str
    status: Literal["queued"]
    links: Links


class Request(TypedDict):
    """`text` and what follows come with a poll, not in lists."""

    id: str
    object: Literal["request"]
    kind: str
    model: str
    status: Literal["queued", "prefill", "ready", "decode", "finished", "failed", "cancelled"]
    created: float
    finish_reason: str | None
    stop_reason: str | int | None
    error: Names | None
    usage: Usage
    ledger: Names
    links: Links
    text: NotRequired[str]
    position: NotRequired[int]
    token_ids: NotRequired[list[int]]
    logprobs: NotRequired[list[list[list[float]]]]


class Span(TypedDict):
    """`start_ms` and `end_ms` since the request arrived; `parent` is a place in the list."""

    name: str
    process: str
    attempt: int
    start_ms: float
    end_ms: float | None
    parent: int | None
    attributes: Names


class Timeline(TypedDict):
    id: str
    status: Literal["queued", "prefill", "ready", "decode", "finished", "failed", "cancelled"]
    trace_id: str | None
    arrived: float
    now_ms: float
    attempts: int
    spans: list[Span]


class Requests(TypedDict):
    object: Literal["list"]
    data: list[Request]
    before: str | None


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: Names | None
    finish_reason: str | None
    stop_reason: str | int | None


class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: NotRequired[list[Names]]


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: Names | None
    finish_reason: str | None
    stop_reason: str | int | None


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Generated(TypedDict):
    text: str
    output_ids: list[int]
    meta_info: Names


class Reply(TypedDict):
    """A response of `/v1/responses`; also the fields it was asked with."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: Names | None
    incomplete_details: Names | None
    model: str
    output: list[Names]
    usage: Names | None


class File(TypedDict):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]


class Batch(TypedDict):
    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    created_at: int
    request_counts: Names


class _Page(TypedDict):
    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Files(_Page):
    data: list[File]


class Batches(_Page):
    data: list[Batch]


class Items(_Page):
    data: list[Names]


class Deleted(TypedDict):
    id: str
    object: str
    deleted: Literal[True]


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class Text(TypedDict):
    prompt: str


class Version(TypedDict):
    version: str


class Load(TypedDict):
    server_load: int
    queued_legs: int
    legs_at_workers: int


class Worker(TypedDict):
    name: str
    role: Literal["prefill", "decode", "unified"]
    kv_tokens: int


class Target(TypedDict):
    targets: list[str]
    labels: dict[str, str]


class Server(TypedDict):
    version: str
    served_model_name: str
    max_model_len: int
    workers: list[Worker]


class Queue(TypedDict):
    legs: int
    since: float | None


class Pages(TypedDict):
    free: int
    held: int
    cached: int
    quarantined: int


class PoolWorker(TypedDict):
    id: str
    name: str
    host: str
    role: Literal["prefill", "decode", "unified"]
    running: int
    waiting: int
    slots: int
    page_size: int
    pages: Pages


class Queues(TypedDict):
    prefill: Queue
    decode: Queue


class Pools(TypedDict):
    object: Literal["pools"]
    model: str
    queues: Queues
    workers: list[PoolWorker]


class ModelInfo(TypedDict):
    model_path: str
    is_generation: bool
    max_model_len: int
    vocab_size: int


class Flushed(TypedDict):
    success: Literal[True]
    pages: dict[str, int]


class Health(TypedDict):
    status: Literal["ok"]


class Ready(TypedDict):
    ready: bool
    missing: list[str]
    age_ms: int
