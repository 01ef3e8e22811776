"""Every call of the API: what the document shows, and a test compares with the routes."""

from typing import Any, NamedTuple

from app.api.batches import BatchBody
from app.api.generate import GenerateBody
from app.api.tokenization import DetokenizeBody, TokenizeBody
from app.fields.schema import ChatBody, CompletionBody, NativeBody
from app.openapi import shapes
from app.response.response_body import ResponseBody


class Operation(NamedTuple):
    """`query` maps arguments to JSON types. A reply of None has no body, a text one is a media type."""

    method: str
    path: str
    tag: str
    summary: str
    reply: Any
    body: Any = None
    query: tuple[tuple[str, str], ...] = ()
    status: int = 200
    streams: bool = False  # answers events when the body or the query says stream


_PAGE = (("limit", "integer"), ("after", "string"))

OPERATIONS = (
    Operation("POST", "/v1/requests", "requests", "Submit", shapes.Submitted, NativeBody, status=202),
    Operation(
        *("GET", "/v1/requests", "requests", "List, newest first", shapes.Requests),
        query=(("limit", "integer"), ("before", "string")),
    ),
    Operation(
        *("GET", "/v1/requests/{request_id}", "requests", "Poll, or wait", shapes.Request),
        query=(("wait", "number"), ("after", "integer"), ("token_ids", "boolean")),
    ),
    Operation("DELETE", "/v1/requests/{request_id}", "requests", "Cancel", shapes.Request),
    Operation(
        *("GET", "/v1/requests/{request_id}/stream", "requests", "Follow the tokens", "text/event-stream"),
        query=(("after", "integer"),),
    ),
    Operation(
        "GET", "/v1/requests/{request_id}/timeline", "requests", "Where its time went", shapes.Timeline
    ),
    Operation(
        *("POST", "/v1/completions", "openai", "Go on with a text", shapes.Completion, CompletionBody),
        streams=True,
    ),
    Operation(
        *("POST", "/v1/chat/completions", "openai", "Answer a conversation", shapes.ChatCompletion, ChatBody),
        streams=True,
    ),
    Operation(
        *("POST", "/v1/responses", "openai", "Answer, now or in background", shapes.Reply, ResponseBody),
        streams=True,
    ),
    Operation(
        *("GET", "/v1/responses/{response_id}", "openai", "Poll or follow a response", shapes.Reply),
        query=(("stream", "boolean"), ("starting_after", "integer")),
        streams=True,
    ),
    Operation(
        "POST",
        "/v1/responses/{response_id}/cancel",
        "openai",
        "Cancel a response in background",
        shapes.Reply,
    ),
    Operation("DELETE", "/v1/responses/{response_id}", "openai", "Delete a response", shapes.Deleted),
    Operation(
        *("GET", "/v1/responses/{response_id}/input_items", "openai", "What it was asked", shapes.Items),
        query=(*_PAGE, ("order", "string")),
    ),
    Operation("GET", "/v1/models", "openai", "The model served", shapes.Models),
    Operation("GET", "/v1/models/{name}", "openai", "The same, by name", shapes.Model),
    Operation("POST", "/v1/files", "batches", "Upload a file", shapes.File, "multipart/form-data"),
    Operation(
        *("GET", "/v1/files", "batches", "List files", shapes.Files),
        query=(*_PAGE, ("order", "string"), ("purpose", "string")),
    ),
    Operation("GET", "/v1/files/{file_id}", "batches", "Look at a file", shapes.File),
    Operation("GET", "/v1/files/{file_id}/content", "batches", "Download it", "application/octet-stream"),
    Operation("DELETE", "/v1/files/{file_id}", "batches", "Delete it", shapes.Deleted),
    Operation("POST", "/v1/batches", "batches", "Run the requests of a file", shapes.Batch, BatchBody),
    Operation("GET", "/v1/batches", "batches", "List batches", shapes.Batches, query=_PAGE),
    Operation("GET", "/v1/batches/{batch_id}", "batches", "Poll a batch", shapes.Batch),
    Operation("POST", "/v1/batches/{batch_id}/cancel", "batches", "Stop it", shapes.Batch),
    Operation(
        *(
            "POST",
            "/generate",
            "others",
            "As SGLang's clients ask",
            shapes.Generated | list[shapes.Generated],
        ),
        body=GenerateBody,
        streams=True,
    ),
    Operation("POST", "/tokenize", "others", "Token ids of a text", shapes.Tokens, TokenizeBody),
    Operation("POST", "/detokenize", "others", "The text of token ids", shapes.Text, DetokenizeBody),
    Operation("GET", "/v1/pools", "server", "Workers, their pages, and the queues", shapes.Pools),
    Operation("GET", "/version", "server", "Of kvrelay", shapes.Version),
    Operation("GET", "/load", "server", "Legs that wait and run", shapes.Load),
    Operation("GET", "/server_info", "server", "What is served, and by whom", shapes.Server),
    Operation("GET", "/get_server_info", "server", "The same", shapes.Server),
    Operation("GET", "/model_info", "server", "The model", shapes.ModelInfo),
    Operation("GET", "/get_model_info", "server", "The same", shapes.ModelInfo),
    Operation("POST", "/flush_cache", "admin", "Forget cached prefixes", shapes.Flushed),
    Operation("GET", "/flush_cache", "admin", "The same", shapes.Flushed),
    Operation("POST", "/reset_prefix_cache", "admin", "The same", shapes.Flushed),
    Operation("GET", "/ping", "server", "An empty reply", None),
    Operation("POST", "/ping", "server", "An empty reply", None),
    Operation("GET", "/health", "server", "This process is there", shapes.Health),
    Operation("GET", "/ready", "server", "Could a request be served now?", shapes.Ready),
    Operation("GET", "/metrics", "server", "For Prometheus: of this gateway", "text/plain"),
    Operation("GET", "/metrics/cluster", "server", "For Prometheus: of all", "text/plain"),
    Operation("GET", "/metrics/targets", "server", "Where to ask workers", list[shapes.Target]),
    Operation("GET", "/console", "server", "A page for people", "text/html"),
)
