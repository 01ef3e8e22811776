"""What the client's own interpreter runs: calls, checks, and at the end its count of requests and tokens."""

import io
import json
import sys
import time
from typing import Any

from openai import OpenAI

QUESTION: Any = [{"role": "user", "content": "Name three primary colors."}]
COLOR = {
    "type": "object",
    "properties": {"color": {"type": "string", "enum": ["red", "green", "blue"]}},
    "required": ["color"],
    "additionalProperties": False,
}
LIMIT_S = 120.0


class Script:
    """Counts what the server says it has used."""

    def __init__(self, url: str, model: str) -> None:
        self.client = OpenAI(base_url=url, api_key="none", timeout=LIMIT_S, max_retries=0)
        self.model = model
        self.requests = self.prompt_tokens = self.output_tokens = 0

    def count(self, prompt_tokens: int, output_tokens: int, requests: int = 1) -> None:
        self.requests += requests
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens

    def models(self) -> None:
        assert [model.id for model in self.client.models.list()] == [self.model]

    def completions(self) -> None:
        how: Any = {"model": self.model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        whole = self.client.completions.create(**how)
        self.count(whole.usage.prompt_tokens, whole.usage.completion_tokens)
        stream = self.client.completions.create(**how, stream=True, stream_options={"include_usage": True})
        text, usage = "", None
        for chunk in stream:
            text += "".join(choice.text for choice in chunk.choices)
            usage = chunk.usage or usage
        assert text == whole.choices[0].text
        self.count(usage.prompt_tokens, usage.completion_tokens)

    def chat(self) -> None:
        how: Any = {"model": self.model, "messages": QUESTION, "max_completion_tokens": 16, "temperature": 0}
        whole = self.client.chat.completions.create(**how)
        self.count(whole.usage.prompt_tokens, whole.usage.completion_tokens)
        with self.client.chat.completions.stream(**how, stream_options={"include_usage": True}) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.content == whole.choices[0].message.content
        self.count(final.usage.prompt_tokens, final.usage.completion_tokens)

    def structured(self) -> None:
        answer = self.client.chat.completions.create(
            model=self.model,
            messages=QUESTION,
            max_completion_tokens=64,
            temperature=0,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "color", "schema": COLOR, "strict": True},
            },
        )
        assert json.loads(answer.choices[0].message.content)["color"] in ("red", "green", "blue")
        self.count(answer.usage.prompt_tokens, answer.usage.completion_tokens)

    def tools(self) -> None:
        answer = self.client.chat.completions.create(
            model=self.model,
            messages=QUESTION,
            max_completion_tokens=64,
            temperature=0,
            tools=[{"type": "function", "function": {"name": "paint", "parameters": COLOR}}],
            tool_choice={"type": "function", "function": {"name": "paint"}},
        )
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "paint"
        assert json.loads(call.function.arguments)["color"] in ("red", "green", "blue")
        self.count(answer.usage.prompt_tokens, answer.usage.completion_tokens)

    def responses(self) -> None:
        how: Any = {"model": self.model, "input": QUESTION, "max_output_tokens": 16, "temperature": 0}
        whole = self.client.responses.create(**how)
        assert whole.output_text
        self.count(whole.usage.input_tokens, whole.usage.output_tokens)
        later = self.client.responses.create(**how, background=True)
        began = time.monotonic()
        while later.status in ("queued", "in_progress"):
            assert time.monotonic() - began < LIMIT_S
            time.sleep(0.05)
            later = self.client.responses.retrieve(later.id)
        assert later.output_text == whole.output_text
        self.count(later.usage.input_tokens, later.usage.output_tokens)
        self.client.responses.delete(later.id)

    def batches(self) -> None:
        lines = [
            {
                "custom_id": f"line-{i}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"model": self.model, "messages": QUESTION, "max_completion_tokens": 4 + i},
            }
            for i in range(4)
        ]
        content = io.BytesIO("\n".join(map(json.dumps, lines)).encode())
        file = self.client.files.create(file=("lines.jsonl", content), purpose="batch")
        batch = self.client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        began = time.monotonic()
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            assert time.monotonic() - began < LIMIT_S, batch
            time.sleep(0.1)
            batch = self.client.batches.retrieve(batch.id)
        assert batch.status == "completed", batch
        answers = [
            json.loads(line) for line in self.client.files.content(batch.output_file_id).text.splitlines()
        ]
        assert sorted(answer["custom_id"] for answer in answers) == [line["custom_id"] for line in lines]
        for answer in answers:
            usage = answer["response"]["body"]["usage"]
            self.count(usage["prompt_tokens"], usage["completion_tokens"])
        self.client.files.delete(file.id)

    def run(self) -> None:
        parts = (self.models, self.completions, self.chat, self.structured)
        for part in (*parts, self.tools, self.responses, self.batches):
            part()
        counts = {"requests": self.requests, "prompt_tokens": self.prompt_tokens}
        print(json.dumps(counts | {"output_tokens": self.output_tokens}))


if __name__ == "__main__":
    Script(*sys.argv[1:]).run()
