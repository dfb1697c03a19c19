"""What kernels say (docs of jupyter_client, "Messaging in Jupyter"), as the lines that a client of the code interpreter reads.

Knows neither kernels nor HTTP. A line is ASCII: the JavaScript SDK decodes every piece of a stream for itself, so that a character of
several bytes would break where two pieces meet.
"""

import json
import time

from .in_kernel import CHART, DATA

# Text comes in pieces of at most so many characters, and a line is never longer than the second.
TEXT_LIMIT = 256 * 1024
LINE_LIMIT = 32 * 1024 * 1024

FORMATS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    DATA: "data",
    CHART: "chart",
}
BASE64 = ("png", "jpeg", "pdf")

Event = dict[str, object]


def of(message: dict) -> list[Event]:
    """The events of one message of the channel `iopub`; none for what a client has no use for."""
    kind, content = message["msg_type"], message["content"]
    if kind == "stream":
        return texts(content["name"], content["text"])
    if kind in ("execute_result", "display_data"):
        return [result(content["data"], is_main=kind == "execute_result")]
    if kind == "error":
        return [error(content["ename"], content["evalue"], "\n".join(content["traceback"]))]
    if kind == "execute_input":
        return [{"type": "number_of_executions", "execution_count": content["execution_count"]}]
    return []


def texts(stream: str, text: str) -> list[Event]:
    """Output, in pieces."""
    kind = "stderr" if stream == "stderr" else "stdout"
    now = time.time_ns()
    pieces = (text[start : start + TEXT_LIMIT] for start in range(0, len(text), TEXT_LIMIT))
    return [{"type": kind, "text": piece, "timestamp": now} for piece in pieces]


def error(name: str, value: str, traceback: str = "") -> Event:
    """What went wrong. A shell's kernel gives no name but the exit status alone."""
    return {
        "type": "error",
        "name": name[:TEXT_LIMIT] or "ExitStatus",
        "value": value[:TEXT_LIMIT],
        "traceback": traceback[:TEXT_LIMIT],
    }


def result(bundle: dict, is_main: bool) -> Event:
    """A value or something displayed, in all its formats."""
    event: Event = {"type": "result", "is_main_result": is_main}
    extra = {}
    for media_type, value in bundle.items():
        field = FORMATS.get(media_type)
        if field is None:
            extra[media_type] = value
        else:
            event[field] = "".join(value.split()) if field in BASE64 and isinstance(value, str) else value
    text = event.get("text")
    # As with E2B the text of a string is the string.
    if isinstance(text, str) and len(text) > 1 and text[0] == text[-1] == "'":
        event["text"] = text[1:-1]
    if extra:
        # The Python SDK reads the one, the JavaScript SDK the other.
        event.update({media_type: value for media_type, value in extra.items() if media_type not in event})
        event["extra"] = extra
    return event


END = {"type": "end_of_execution"}
UNEXPECTED_END = {"type": "unexpected_end_of_execution"}
# Both SDKs pass over what they do not know; it keeps connections from being taken for dead ones.
KEEPALIVE = {"type": "keepalive"}


def lines(event: Event) -> bytes:
    """An event as a line, and a second one if the first had to go without some of its formats."""
    line = _line(event)
    if len(line) <= LINE_LIMIT:
        return line
    event, left_out = dict(event), []
    while len(line) > LINE_LIMIT:
        largest = max((key for key in event if key not in ("type", "is_main_result")), key=lambda key: len(_line(event[key])))
        if largest != "extra":
            left_out.append(largest)
        del event[largest]
        line = _line(event)
    note = f"left out of a result, as it has more than {LINE_LIMIT} bytes: {', '.join(left_out) or 'extra'}\n"
    return line + b"".join(map(_line, texts("stderr", note)))


def _line(value: object) -> bytes:
    try:
        text = json.dumps(value, allow_nan=False, default=str)
    except ValueError:
        # NaN, which is no JSON: strings in its place.
        text = json.dumps(json.loads(json.dumps(value, default=str), parse_constant=str))
    return text.encode() + b"\n"
