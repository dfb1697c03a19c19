"""What the installed SDKs of E2B know of its API: operations with their models, from the generated client inside the Python package `e2b`,
and the paths that the JavaScript package's types have besides. Reads their sources; calls nothing. Knows nothing of Basalt."""

import ast
import dataclasses
import enum
import importlib
import inspect
import pathlib
import re
import textwrap
import types
import typing

import e2b

PACKAGE = pathlib.Path(e2b.__file__).parent
# The generated clients: where each is, and its modules.
CLIENTS = (("api/client", "e2b.api.client"), ("volume/client", "e2b.volume.client"))
# The connectrpc services of envd.
SERVICES = ("process", "filesystem")
METHODS = ("get", "post", "put", "patch", "delete")


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a model as it travels: whether it is always there, and what it is."""

    name: str
    required: bool
    kind: str
    model: type | None = None


@dataclasses.dataclass
class Operation:
    """An operation of the REST API."""

    method: str
    path: str
    query: list[str] = dataclasses.field(default_factory=list)
    headers: list[str] = dataclasses.field(default_factory=list)
    body: type | None = None
    # By status below 300: the model, or None, and whether it is a list of them.
    answers: dict[int, tuple[type | None, bool]] = dataclasses.field(default_factory=dict)

    @property
    def key(self):
        return f"{self.method.upper()} {shape(self.path)}"


def shape(path):
    """A path whatever its names are."""
    return re.sub(r"\{[^}]*\}", "{}", path)


def operations():
    """All that the Python package's generated clients have, by method and path."""
    found = {}
    for place, module in CLIENTS:
        models = importlib.import_module(f"{module}.models")
        for source in sorted((PACKAGE / place / "api").rglob("*.py")):
            if source.name != "__init__.py":
                operation = _operation(ast.parse(source.read_text()), models)
                found[operation.key] = operation
    return found


def _function(tree, name):
    return next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)


def _operation(tree, models):
    asks = _function(tree, "_get_kwargs")
    said = {}
    for node in ast.walk(asks):
        if isinstance(node, ast.Dict):
            said.update({key.value: value for key, value in zip(node.keys, node.values) if isinstance(key, ast.Constant)})
    operation = Operation(said["method"].value, _text(said["url"]))
    for node in ast.walk(asks):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            target = node.targets[0]
            if isinstance(target.value, ast.Name) and isinstance(target.slice, ast.Constant):
                if target.value.id == "params":
                    operation.query.append(target.slice.value)
                if target.value.id == "headers" and target.slice.value != "Content-Type":
                    operation.headers.append(target.slice.value)
    for argument in asks.args.kwonlyargs:
        if argument.arg == "body":
            operation.body = _model_in(argument.annotation, models)
    for node in ast.walk(_function(tree, "_parse_response")):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Compare) and "status_code" in ast.unparse(node.test.left):
            status = node.test.comparators[0].value
            if status < 300:
                calls = [one.func for one in ast.walk(node) if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute)]
                names = [one.value.id for one in calls if one.attr == "from_dict" and isinstance(one.value, ast.Name)]
                is_list = any(isinstance(one, ast.For) for one in ast.walk(node))
                operation.answers[status] = (getattr(models, names[0]) if names else None, is_list)
    return operation


def _text(node):
    """A path: `f"/a/{b}"` as `/a/{b}`."""
    if isinstance(node, ast.Constant):
        return node.value
    return "".join(part.value if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}" for part in node.values)


def _model_in(annotation, models):
    for name in re.findall(r"\w+", ast.unparse(annotation)):
        found = getattr(models, name, None)
        if isinstance(found, type) and hasattr(found, "from_dict"):
            return found
    return None


def fields(model):
    """The fields of a model."""
    module = model.__module__.rsplit(".", 1)[0]
    hints = typing.get_type_hints(model, localns=vars(importlib.import_module(module)))
    tree = ast.parse(textwrap.dedent(inspect.getsource(model.to_dict)))
    names = {}
    for node in ast.walk(tree):
        # `field_dict["name"] = attribute`, and `field_dict.update({"name": attribute})`.
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("field_dict["):
            names[ast.unparse(node.value)] = (node.targets[0].slice.value, False)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "field_dict.update" and isinstance(node.args[0], ast.Dict):
            for key, value in zip(node.args[0].keys, node.args[0].values):
                names[ast.unparse(value)] = (key.value, True)
    return [Field(name, required, *_kind(hints[attribute])) for attribute, (name, required) in names.items()]


def _kind(hint):
    """What a type is in JSON, and the model in it."""
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        known = [one for one in arguments if getattr(one, "__name__", "") not in ("Unset", "NoneType")]
        return _kind(known[0]) if len(known) == 1 else ("any", None)
    if origin is list:
        return "array", _kind(arguments[0])[1]
    if isinstance(hint, type) and hasattr(hint, "from_dict"):
        return "object", hint
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "string", None
    kinds = {str: "string", int: "integer", bool: "boolean", float: "number", dict: "object"}
    name = getattr(hint, "__name__", "")
    return ("string" if name in ("datetime", "date", "UUID") else kinds.get(hint, "any")), None


def types_of_javascript(modules):
    """Operations in the types of the npm package `e2b` in this directory of modules: of the REST API, and of envd's HTTP."""
    rest, envd, path, of = set(), set(), None, None
    for line in (pathlib.Path(modules) / "e2b/dist/index.d.ts").read_text().splitlines():
        if found := re.fullmatch(r"interface paths(\$\d+)? \{", line):
            # The first is the API, the second one envd.
            of = envd if rest else rest
        elif found := re.fullmatch(r'  "(/[^"]*)": \{', line):
            path = found[1]
        elif line == "  };":
            path = None
        elif path and of is not None and (found := re.fullmatch(r"    (\w+): \{", line)) and found[1] in METHODS:
            of.add(f"{found[1].upper()} {shape(path)}")
    return rest, envd


def names(modules):
    """Operations with the names that their paths have: `GET /a/{}` as `GET /a/{b}`."""
    found = {key: f"{one.method.upper()} {one.path}" for key, one in operations().items()}
    text = (pathlib.Path(modules) / "e2b/dist/index.d.ts").read_text()
    for path in re.findall(r'^  "(/[^"]*)": \{', text, re.MULTILINE):
        for method in METHODS:
            found[f"{method.upper()} {shape(path)}"] = f"{method.upper()} {path}"
    return found


def calls():
    """All methods of envd's services: `process.Process/Start`."""
    found = set()
    for service in SERVICES:
        source = (PACKAGE / "envd" / service / f"{service}_connect.py").read_text()
        found.update(f"{its}/{name}" for name, its in re.findall(r'name="(\w+)",\s+service_name="([\w.]+)"', source))
    return sorted(found)
