"""Lets half of what Schemathesis makes up be about something that is there: the template of the node without machines, and sandboxes that were
made before. Requests about nothing alone would never get beyond 404. Knows three names of the document."""

import collections

import schemathesis

# Ids from answers.
KNOWN = collections.deque(maxlen=20)
TEMPLATE = "base"


def is_chosen(value):
    """Half of all values, and always the same ones."""
    return sum(str(value).encode(errors="replace")) % 2 == 0


@schemathesis.hook
def map_body(context, body):
    if isinstance(body, dict) and isinstance(body.get("templateID"), str) and is_chosen(body):
        body["templateID"] = TEMPLATE
    return body


@schemathesis.hook
def map_path_parameters(context, path_parameters):
    if path_parameters and KNOWN and "sandboxID" in path_parameters and is_chosen(path_parameters["sandboxID"]):
        path_parameters["sandboxID"] = KNOWN[sum(str(path_parameters["sandboxID"]).encode(errors="replace")) % len(KNOWN)]
    return path_parameters


@schemathesis.hook
def after_call(context, case, response):
    if response.status_code == 201 and case.method == "POST" and case.path.endswith("sandboxes"):
        KNOWN.append(response.json()["sandboxID"])
