"""Compares E2B's API, as its unmodified SDKs have it, with Basalt's own document: each operation is served or answers 501, each field that an
SDK needs of an answer is in it, and each field that it sends is read or refused. What differs stands in differences.toml with its reason; a
difference that does not, and a reason that has become useless, are failures.

    basalt-gateway openapi > DOCUMENT && python compare.py --modules NODE_MODULES --document DOCUMENT
"""

import argparse
import json
import pathlib
import sys
import tomllib

import facts

LISTED = pathlib.Path(__file__).with_name("differences.toml")
# Deeper than any model.
DEPTH = 8


class Document:
    """An OpenAPI document."""

    def __init__(self, document):
        self.document = document
        self.operations = {}
        # The same with the names that their paths have: `GET /a/{}` as `GET /a/{b}`.
        self.names = {}
        for path, item in document["paths"].items():
            for method in facts.METHODS:
                if method in item:
                    key = f"{method.upper()} {facts.shape(path)}"
                    self.operations[key] = item[method]
                    self.names[key] = f"{method.upper()} {path}"

    def unserved(self, key):
        """Why an operation is answered with 501, if it is."""
        answers = self.operations[key]["responses"]
        is_served = any(status.startswith("2") for status in answers)
        return None if is_served or "501" not in answers else answers["501"]["description"]

    def parameters(self, key, place):
        return {one["name"].lower() for one in self.operations[key].get("parameters", []) if one["in"] == place}

    def schema_of(self, content):
        return next(iter(content.get("content", {}).values()), {}).get("schema", {})

    def whole(self, schema, depth=0):
        """A schema with what it refers to: its properties, which of them are always there, its items, its types."""
        if depth > DEPTH:
            return {}
        if "$ref" in schema:
            names = schema["$ref"].removeprefix("#/").split("/")
            found = self.document
            for name in names:
                found = found[name]
            return self.whole(found, depth + 1)
        parts = schema.get("allOf", [])
        some = [part for part in schema.get("oneOf", schema.get("anyOf", [])) if part.get("type") != "null"]
        parts = parts + some if len(some) == 1 else parts
        kinds = schema.get("type", [])
        merged = {
            "properties": dict(schema.get("properties", {})),
            "required": set(schema.get("required", [])),
            "items": schema.get("items", {}),
            "types": {kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind != "null"},
            "open": "additionalProperties" in schema,
        }
        for part in (self.whole(part, depth + 1) for part in parts):
            merged["properties"] |= part["properties"]
            merged["required"] |= part["required"]
            merged["items"] = merged["items"] or part["items"]
            merged["types"] |= part["types"]
            merged["open"] |= part["open"]
        return merged


def differences(document, modules):
    """All of them, each as a line."""
    operations = facts.operations()
    javascript, _ = facts.types_of_javascript(modules)
    for key in sorted(javascript | set(operations)):
        if key not in document.operations:
            yield f"{key}: is not there"
        elif key in operations and not document.unserved(key):
            yield from (f"{key}: {what}" for what in differs(document, key, operations[key]))


def differs(document, key, operation):
    ours = document.operations[key]
    for place, names in (("query", operation.query), ("header", operation.headers)):
        for name in names:
            if name.lower() not in document.parameters(key, place):
                yield f"{place} {name} is not read"
    if operation.body and "requestBody" not in ours:
        yield "body is not read"
    elif operation.body:
        schema = document.schema_of(ours["requestBody"])
        yield from (f"body {what}" for what in sent(document, operation.body, schema))
    for status, (model, is_list) in operation.answers.items():
        if str(status) not in ours["responses"]:
            yield f"answer {status} is not there"
        elif model:
            schema = document.whole(document.schema_of(ours["responses"][str(status)]))
            if is_list:
                schema = document.whole(schema["items"])
            yield from (f"answer {status} {what}" for what in needed(document, model, schema))


def sent(document, model, schema, place="", depth=0):
    """Fields of a request that nothing here reads."""
    schema = document.whole(schema)
    # What is taken as any object is handed on or refused as a whole.
    if depth > DEPTH or not schema["properties"]:
        return
    for field in facts.fields(model):
        ours = schema["properties"].get(field.name)
        name = f"{place}{field.name}"
        if ours is None:
            yield f"{name} is not read"
        elif field.model:
            inner = document.whole(ours)
            yield from sent(document, field.model, inner["items"] or ours, f"{name}.", depth + 1)


def needed(document, model, schema, place="", depth=0):
    """Fields of an answer that an SDK needs and that are not in it, or are something else."""
    for field in facts.fields(model):
        ours, name = schema["properties"].get(field.name), f"{place}{field.name}"
        if field.required and (ours is None or field.name not in schema["required"]):
            yield f"{name} may be missing"
        if ours is None or depth > DEPTH:
            continue
        ours = document.whole(ours)
        if field.kind != "any" and ours["types"] and not ours["types"] & like(field.kind):
            yield f"{name} is {'/'.join(sorted(ours['types']))} and not {field.kind}"
        elif field.model:
            inner = document.whole(ours["items"]) if field.kind == "array" else ours
            yield from needed(document, field.model, inner, f"{name}.", depth + 1)


def like(kind):
    """What may be where this is expected."""
    return {"number", "integer"} if kind == "number" else {kind}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modules", required=True, help="the directory node_modules with the npm package e2b")
    parser.add_argument("--document", required=True, type=pathlib.Path, help="what `basalt-gateway openapi` prints")
    asked = parser.parse_args()
    modules, document = asked.modules, Document(json.loads(asked.document.read_text()))
    reasons = tomllib.loads(LISTED.read_text())
    found = set(differences(document, modules))
    failures = [f"not listed: {one}" for one in sorted(found - set(reasons))]
    failures += [f"listed, and no difference any more: {one}" for one in sorted(set(reasons) - found)]
    failures += [f"listed without a reason: {one}" for one, reason in sorted(reasons.items()) if not str(reason).strip()]
    for failure in failures:
        print(failure)
    compared = len(facts.operations())
    unserved = sum(1 for key in document.operations if document.unserved(key))
    print(f"{compared} operations compared, {unserved} answer 501, {len(found)} differences, {len(failures)} to mend in {LISTED.name} or the API")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
