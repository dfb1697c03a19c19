"""The languages: how a kernel of each is started, and the code by which variables get into its environment and out of it.

Knows no kernel that runs, and no HTTP.
"""

import re
import shlex
import sys
from dataclasses import dataclass
from typing import Callable

Environment = dict[str, str]

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What Linux takes as one string of an environment (MAX_ARG_STRLEN in execve(2)), less the name.
VALUE_LIMIT = 128 * 1024 - 256
VARIABLES_LIMIT = 256


class Refused(ValueError):
    """What a client asked for that is not to be had."""


@dataclass(frozen=True)
class Language:
    """One language. `begin` comes before the first code of a client and sets the sandbox's variables for good; `enter` sets variables for
    a while, and `leave` gives back what was there before."""

    name: str
    aliases: tuple[str, ...]
    command: tuple[str, ...]
    begin: Callable[[Environment], str]
    enter: Callable[[Environment], str]
    leave: Callable[[Environment], str]
    preload: Callable[[list[str]], str] | None = None


def _launcher(*module_and_options: str) -> tuple[str, ...]:
    """Linux ends a kernel of Jupyter's with the server (PR_SET_PDEATHSIG). It is told that its parent is init, so that it does not look
    every second whether it still has one, as ipykernel does: that would keep an idle machine busy."""
    return (
        "setpriv",
        "--pdeathsig",
        "KILL",
        sys.executable,
        "-m",
        *module_and_options,
        "-f",
        "{connection_file}",
        "--IPKernelApp.parent_handle=1",
        "--HistoryManager.enabled=False",
    )


def _in_python(function: str, argument: object) -> str:
    """A call that leaves no name behind in the namespace of what is run."""
    return f"__import__('basalt_interpreter.in_kernel', fromlist=['_']).{function}({argument!r})"


def _bash_begin(variables: Environment) -> str:
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items())


def _bash_enter(variables: Environment) -> str:
    lines = []
    for name, value in variables.items():
        lines.append(f"__was_{name}=$(declare -p {name} 2>/dev/null)")
        lines.append(f"export {name}={shlex.quote(value)}")
    return "\n".join(lines)


def _bash_leave(variables: Environment) -> str:
    return "\n".join(f'unset {name}; eval "$__was_{name}"; unset __was_{name}' for name in variables)


PYTHON = Language(
    name="python",
    aliases=("python3", "py"),
    command=_launcher("ipykernel_launcher", "--ext=basalt_interpreter.in_kernel"),
    begin=lambda variables: _in_python("begin", variables),
    enter=lambda variables: _in_python("enter", variables),
    leave=lambda variables: _in_python("leave", list(variables)),
    preload=lambda modules: _in_python("preload", modules),
)

BASH = Language(
    name="bash",
    aliases=("sh", "shell"),
    command=_launcher("bash_kernel"),
    begin=_bash_begin,
    enter=_bash_enter,
    leave=_bash_leave,
)

LANGUAGES = (PYTHON, BASH)


def find(name: str | None) -> Language:
    """The one of that name; Python if none was said."""
    asked = (name or PYTHON.name).strip().lower()
    for language in LANGUAGES:
        if asked == language.name or asked in language.aliases:
            return language
    there = ", ".join(language.name for language in LANGUAGES)
    raise Refused(f"there is no kernel for the language '{asked[:64]}'; there are kernels for: {there}")


def checked(variables: object) -> Environment:
    """An environment as a client sent it."""
    if variables is None:
        return {}
    if not isinstance(variables, dict):
        raise Refused("env_vars must be an object of names and values")
    if len(variables) > VARIABLES_LIMIT:
        raise Refused(f"env_vars has {len(variables)} variables; at most {VARIABLES_LIMIT} are taken")
    for name, value in variables.items():
        if not NAME.fullmatch(name):
            raise Refused(f"env_vars: '{name[:64]}' cannot be the name of a variable: letters, digits and '_', no digit first")
        if not isinstance(value, str) or "\0" in value:
            raise Refused(f"env_vars: the value of '{name[:64]}' must be a string without NUL")
        if len(name) + len(value.encode(errors="replace")) > VALUE_LIMIT:
            raise Refused(f"env_vars: '{name[:64]}' is longer than {VALUE_LIMIT} bytes")
    return variables
