"""`kvrelay chat`."""

import sys

import click

from app.commands.answer import conclude
from app.commands.api_client import ApiAway, ApiClient, ApiRefused, Object
from app.commands.options import gateway, no_color, sampling


@click.command()
@click.option("--system", help="A message of the system before the first one.")
@sampling
@gateway
@no_color
def chat(client: ApiClient, system: str | None, fields: Object) -> int:
    """Talk with the model.

    Ctrl-C cancels the answer that is being written, Ctrl-D ends, and a line with /new forgets what was said.
    Where there is no terminal each line of the standard input is a message. The exit status is that of the
    last answer.

    \b
    Examples:
      kvrelay chat --system "You are brief."
      printf 'My name is Ada.\\nWhat is my name?\\n' | kvrelay chat
    """
    conversation = Conversation(client, system, fields)
    status = 0
    while (text := _line()) is not None:
        if text == "/new":
            conversation.forget()
        elif text.strip():
            status = conversation.say(text)
    return status


class Conversation:
    """What was said so far, which goes with every message. `fields`: of each request's body."""

    def __init__(self, client: ApiClient, system: str | None, fields: Object) -> None:
        self._client = client
        self._fields = fields
        self._first = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._first)

    def forget(self) -> None:
        self._messages = list(self._first)

    def say(self, text: str) -> int:
        """Print the answer as it comes. The status it would be as a command; an interrupted one is none."""
        asked = {"role": "user", "content": text}
        request_id = ""
        words: list[str] = []
        status = 0
        try:
            body = {"messages": [*self._messages, asked]} | self._fields
            request_id = self._client.post("/v1/requests", body)["id"]
            for item in self._client.follow(request_id):
                words.append(item["text"])
                click.echo(item["text"], nl=False)
                if "status" in item:
                    click.echo()
                    status = conclude(item)
        except KeyboardInterrupt:
            click.echo()
            self._cancel(request_id)
        except (ApiRefused, ApiAway) as error:
            click.secho(f"{error}", fg="red", err=True)
            return 1
        if words:
            self._messages += [asked, {"role": "assistant", "content": "".join(words)}]
        return status

    def _cancel(self, request_id: str) -> None:
        try:
            if request_id:
                self._client.delete(f"/v1/requests/{request_id}")
        except (ApiRefused, ApiAway) as error:
            click.secho(f"{error}", fg="red", err=True)


def _line() -> str | None:
    """What is said next; None at the end. On a terminal with history and editing."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    import readline  # noqa: F401 - input() then has them

    while True:
        try:
            return input("> ")
        except KeyboardInterrupt:
            click.echo()
        except EOFError:
            click.echo()
            return None
