"""How `mtsp` starts and ends: the order of its commands, one-line errors, `--debug`, output that can be piped."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from modelopt_spec import interrupts, noise
from modelopt_spec.consoles import PIPE_WIDTH
from modelopt_spec.errors import SpecError
from modelopt_spec.progress import heartbeat

__all__ = ["PATH", "CommandPath", "fit_to_pipe", "run", "take_debug"]

PATH = (
    "train",
    "evaluate",
    "generate",
    "calibrate",
    "profile",
    "simulate",
    "export",
    "export-beside",
    "quantize",
    "distill",
    "check",
    "import",
    "data",
    "compare",
    "plan",
    "report",
    "engines",
    "heads",
)
"""Commands in the order in which somebody meets them."""

USER_MISTAKE, FAILED, INTERRUPTED = 2, 1, interrupts.STATUS
"""Exit statuses: a mistake that the user can fix, a defect of this package, Ctrl-C."""

_USAGE: type[Exception] = typer.BadParameter.__mro__[1]
"""Click's UsageError, wherever typer takes Click from."""


class CommandPath(TyperGroup):
    """Lists the commands in the order of :data:`PATH`; others follow by name."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands."""
        place = {name: i for i, name in enumerate(PATH)}
        return sorted(self.commands, key=lambda name: (place.get(name, len(PATH)), name))


def take_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """The arguments without ``--debug``, which may stand anywhere before ``--``, and whether it was there."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    head = [argument for argument in arguments[:end] if argument != "--debug"]
    return [*head, *arguments[end:]], len(head) < end or bool(os.environ.get("MTSP_DEBUG"))


def fit_to_pipe(console: Console, arguments: Sequence[str]) -> None:
    """Give tables their full width where output is piped, and leave standard output to JSON where ``--json -`` asks."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    if any(pair == ("--json", "-") for pair in itertools.pairwise(arguments)) or "--json=-" in arguments:
        console.file = sys.stderr


def run(application: Callable[..., Any], arguments: Sequence[str], *, debug: bool) -> int:
    """Run a typer application and return its exit status.

    Args:
        application: the typer app. arguments: without the program's name. debug: let errors through, with traceback.

    Returns:
        0; 2 with one line on standard error for a mistake that the user can fix (unknown options, :class:`SpecError`,
        files that cannot be read or written, YAML that is none); 130 with one line after Ctrl-C, whatever error the
        interrupted code made of it. Anything else is a defect and keeps its traceback.
    """
    quiet = any(word in ("--quiet", "-q", "--help") for word in arguments)
    command = next((word for word in arguments if not word.startswith("-")), "")
    try:
        with (
            noise.filtered(everything=debug),
            noise.own_warnings_as(_warn),
            heartbeat(f"mtsp {command}".rstrip(), quiet=quiet),
        ):
            status = _run(application, arguments, debug)
        if status != INTERRUPTED:
            return status
    except BaseException as error:
        if not (interrupts.pressed() or isinstance(error, KeyboardInterrupt | typer.Abort)):
            raise
    training = command == "train" and "--dry-run" not in arguments
    interrupts.tell("the same command with --resume goes on from the newest checkpoint" if training else "")
    return INTERRUPTED


def _run(application: Callable[..., Any], arguments: Sequence[str], debug: bool) -> int:
    from yaml import YAMLError

    try:
        status = application(args=list(arguments), prog_name="mtsp", standalone_mode=False)
    except (_USAGE, SpecError, YAMLError, OSError) as error:
        if debug or interrupts.pressed():
            raise
        if isinstance(error, _USAGE):
            if type(error).__name__ == "NoArgsIsHelpError":
                typer.echo(str(error))
                return USER_MISTAKE
            return _complain(_usage(error, arguments))
        if isinstance(error, OSError):
            if error.filename is None:
                raise
            return _complain(f"{error.filename}: {error.strerror or error}")
        return _complain(str(error))
    return status if isinstance(status, int) else 0


def _usage(error: Any, arguments: Sequence[str]) -> str:
    """One line for a command line that does not parse: what is wrong, and where the options are explained."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "mtsp"
    message = error.format_message().rstrip(".")
    names = getattr(getattr(error, "param", None), "opts", ())
    given = [value for name, value in itertools.pairwise(arguments) if name in names]
    if given and given[-1] not in message:
        message += f" (got {given[-1]!r})"
    return f"{message} ({command} --help lists what there is)" if message else f"{command} --help lists what there is"


def _warn(message: str) -> None:
    Console(stderr=True).print(f"[yellow]warning:[/] {_escape(message)}", highlight=False, soft_wrap=True)


def _complain(message: str) -> int:
    """Print an error as one line: continuation lines of a message are joined."""
    line = " ".join(part.strip() for part in message.splitlines() if part.strip())
    Console(stderr=True).print(f"[bold red]error:[/] {_escape(line)}", highlight=False, soft_wrap=True)
    return USER_MISTAKE


def _escape(text: str) -> str:
    """Square brackets are text here, not rich's markup."""
    from rich.markup import escape

    return escape(text)
