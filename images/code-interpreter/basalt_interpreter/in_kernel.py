"""What runs inside of a Python kernel: variables that are set for one execution, and the data behind tables and figures as JSON.

An extension of IPython's. Knows neither the server nor the client; what it shows travels as two media types of ours.
"""

import importlib
import json
import math
import os
import random
import sys
import warnings

DATA = "application/vnd.basalt.data+json"
CHART = "application/vnd.basalt.chart+json"

# Of larger ones only what can be looked at is shown.
CELLS_LIMIT = 100_000
POINTS_LIMIT = 20_000

_before: dict[str, str | None] = {}
_is_begun = False


def enter(variables):
    """Sets variables until `leave`."""
    for name, value in variables.items():
        _before.setdefault(name, os.environ.get(name))
        os.environ[name] = value


def leave(names):
    """What was there before `enter` is there again."""
    for name in names:
        value = _before.pop(name, None)
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def begin(variables):
    """Sets variables for good, before the first code that a client sends. Kernels of sandboxes that were cloned with one running are the
    same until then: from then on each has numbers of its own. Again it only sets variables, as clients may have chosen their seeds."""
    global _is_begun
    os.environ.update(variables)
    if not _is_begun:
        random.seed()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
    _is_begun = True


def preload(modules):
    """Imports what is most often wanted before anybody waits for it. What is not installed is nobody's concern here."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError:
            continue


def load_ipython_extension(shell):
    """Called by IPython when the kernel starts."""
    show = shell.display_formatter.mimebundle_formatter
    show.for_type_by_name("pandas.core.frame", "DataFrame", _of_table)
    show.for_type_by_name("pandas", "DataFrame", _of_table)
    show.for_type_by_name("matplotlib.figure", "Figure", _of_figure)


def _of_table(table, include=None, exclude=None):
    """A table's columns: {name: values}, times as ISO 8601, what is missing as null."""
    try:
        if table.size > CELLS_LIMIT:
            return {}
        columns = (table.iloc[:, number] for number in range(table.shape[1]))
        return {DATA: {str(name): _values(column) for name, column in zip(table.columns, columns)}}
    # Whatever is in a table, it is shown without this.
    except Exception:
        return {}


def _values(column):
    try:
        return json.loads(column.to_json(orient="values", date_format="iso"))
    except (ValueError, OverflowError, RecursionError, TypeError):
        return [str(value) for value in column]


def _of_figure(figure, include=None, exclude=None):
    """What is drawn in a figure, as E2B's own package tells it."""
    try:
        if _points(figure) > POINTS_LIMIT:
            return {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from e2b_charts import chart_figure_to_dict

            chart = plain(chart_figure_to_dict(figure))
        return {CHART: chart} if chart else {}
    # There are figures that the package does not expect; they are shown without this.
    except Exception:
        return {}


def _points(figure):
    axes = figure.get_axes()
    lines = sum(len(line.get_xdata(orig=False)) for one in axes for line in one.get_lines())
    marks = sum(len(collection.get_offsets()) for one in axes for collection in one.collections)
    return lines + marks + sum(len(one.patches) for one in axes)


def plain(value):
    """The same in what JSON has: numbers that are none become null, numbers of NumPy and decimals become numbers."""
    if isinstance(value, str):
        return str(value.value) if hasattr(value, "value") else value
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if hasattr(value, "item"):
        return plain(value.item())
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else None
