"""`kvrelay completion`, in the shells that it is for: commands, options, values and files are completed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BASH = """
    source <(kvrelay completion bash)
    [[ $(complete -p kvrelay) == *_kvrelay_completion* ]] || echo "nothing is registered"
    for typed in "$@"; do
        COMP_WORDS=($typed); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
        _kvrelay_completion kvrelay
        echo "${COMPREPLY[@]}"
    done
"""
FISH = """
    kvrelay completion fish | source
    for typed in $argv
        complete -C $typed
    end
"""
# A zsh on a terminal of its own: Tab completes the line, and the next key shows what it has become.
ZSH = """
    zmodload zsh/zpty
    zpty shell zsh -f -i
    zpty -w shell 'autoload -Uz compinit && compinit -u -D; source <(kvrelay completion zsh)'
    zpty -w shell 'show() { print -rn -- "<$BUFFER>"; BUFFER= }; zle -N show; bindkey "^T" show'
    for typed in "$@"; do
        zpty -w -n shell "$typed"$'\\t\\x14'
        zpty -r shell shown '*<kvrelay*>*'
        print -r -- "${${shown##*<}%%>*}"
    done
    zpty -d shell
"""


def complete(tmp_path: Path, shell: list[str], script: str, *typed: str) -> list[str]:
    """The lines that `script` prints in `shell` for each of `typed`."""
    if not shutil.which(shell[0]):
        if os.environ.get("CI"):
            pytest.fail(f"{shell[0]} is missing, and CI must test its completion: run tests/setup.sh")
        pytest.skip(f"{shell[0]} is not installed: run tests/setup.sh to test its completion")
    (tmp_path / "story.txt").touch()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [*shell, script, *typed],
        cwd=tmp_path,
        env=os.environ | {"PATH": path, "HOME": str(tmp_path), "TERM": "xterm"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_bash_completes(tmp_path: Path) -> None:
    typed = ("kvrelay su", "kvrelay submit --st", "kvrelay worker --role d")
    assert complete(tmp_path, ["bash", "-c"], BASH, "bash", *typed) == ["submit", "--stream", "decode"]


def test_fish_completes(tmp_path: Path) -> None:
    typed = ("kvrelay su", "kvrelay submit --ra", "kvrelay worker --role d", "kvrelay submit --file st")
    assert complete(tmp_path, ["fish", "--no-config", "-c"], FISH, *typed) == [
        "submit\tSubmit a prompt; print its id, or the answer.",
        "--raw\tThe prompt as it is, without the model's chat template.",
        "decode",
        "story.txt",
    ]


def test_zsh_completes(tmp_path: Path) -> None:
    typed = ("kvrelay su", "kvrelay submit --st", "kvrelay worker --role d", "kvrelay submit --file st")
    assert complete(tmp_path, ["zsh", "-f", "-c"], ZSH, "zsh", *typed) == [
        "kvrelay submit ",
        "kvrelay submit --stream ",
        "kvrelay worker --role decode ",
        "kvrelay submit --file story.txt ",
    ]
