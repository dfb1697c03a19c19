"""Messages of kernels become lines for clients; no kernel runs here."""

import json
import random

import pytest
from basalt_interpreter import events, in_kernel, languages


def test_formats_have_the_names_that_clients_know():
    bundle = {media_type: media_type for media_type in events.FORMATS}
    event = events.result(bundle, is_main=False)
    assert {event[name]: name for name in events.FORMATS.values()} == events.FORMATS
    assert event["is_main_result"] is False and "extra" not in event


def test_other_formats_are_where_either_client_looks():
    event = events.result({"text/plain": "t", "application/x": {"a": 1}}, is_main=True)
    assert event["extra"] == {"application/x": {"a": 1}} and event["application/x"] == {"a": 1}
    hostile = events.result({"type": "stdout", "is_main_result": 1, "text": "x"}, is_main=True)
    assert (hostile["type"], hostile["is_main_result"]) == ("result", True)


def test_pictures_come_without_line_ends():
    assert events.result({"image/png": "aGVs\nbG8=\n"}, is_main=False)["png"] == "aGVsbG8="


@pytest.mark.parametrize("text, sent", [("'a'", "a"), ("'", "'"), ('"it\'s"', '"it\'s"'), ("['a']", "['a']")])
def test_the_text_of_a_string_is_the_string(text, sent):
    assert events.result({"text/plain": text}, is_main=True)["text"] == sent


def test_long_text_comes_in_pieces():
    pieces = events.texts("stdout", "x" * (events.TEXT_LIMIT + 1))
    assert [len(piece["text"]) for piece in pieces] == [events.TEXT_LIMIT, 1]


def test_a_line_that_is_too_long_goes_without_its_largest_formats(monkeypatch):
    monkeypatch.setattr(events, "LINE_LIMIT", 1000)
    sent = events.lines(events.result({"text/plain": "t", "image/png": "x" * 2000, "application/x": "y" * 900}, is_main=True))
    result, note = map(json.loads, sent.splitlines())
    assert result == {"type": "result", "is_main_result": True, "text": "t"} or "png" not in result
    assert note["type"] == "stderr" and "png" in note["text"]
    assert all(len(line) <= 1000 for line in sent.splitlines())


def test_what_json_does_not_have_is_sent_all_the_same():
    (line,) = events.lines({"type": "result", "json": {"a": float("nan"), "b": {1, 2}}}).splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["json"]["a"] == "NaN"


@pytest.mark.parametrize("kind", ["status", "clear_output", "update_display_data", "comm_open"])
def test_what_clients_have_no_use_for_is_left_out(kind):
    assert events.of({"msg_type": kind, "content": {"data": {}, "execution_state": "busy"}}) == []


def test_numbers_become_plain():
    numpy = pytest.importorskip("numpy")
    given = {"a": [numpy.int64(1), numpy.float64("nan"), (True, None)], 2: numpy.array([1.5]), "d": object}
    assert in_kernel.plain(given) == {"a": [1, None, [True, None]], "2": 1.5, "d": str(object)}


def test_figures_that_are_too_large_or_unknown_have_no_chart():
    figure = pytest.importorskip("matplotlib.figure")
    large = figure.Figure()
    large.add_subplot().plot(range(in_kernel.POINTS_LIMIT + 1))
    assert in_kernel._of_figure(large) == {} == in_kernel._of_figure(figure.Figure()) == in_kernel._of_figure(object())
    small = figure.Figure()
    small.add_subplot().plot([1, 2])
    assert in_kernel._of_figure(small)[in_kernel.CHART]["type"] == "line"


def test_tables_have_columns_of_any_kind():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame([[1, object, "a"], [None, 2, {3}]], columns=[1, "b", ("c", "d")])
    data = in_kernel._of_table(table)[in_kernel.DATA]
    assert json.loads(json.dumps(data))["1"] == [1.0, None] and set(data) == {"1", "b", "('c', 'd')"}
    assert in_kernel._of_table(pandas.DataFrame({"a": range(in_kernel.CELLS_LIMIT + 1)})) == {}


def test_languages_have_other_names():
    assert languages.find(None) is languages.find(" PYTHON3 ") is languages.PYTHON and languages.find("sh") is languages.BASH
    with pytest.raises(languages.Refused, match="python, bash"):
        languages.find("javascript")


def test_clones_have_random_numbers_of_their_own_once(monkeypatch):
    monkeypatch.setattr(in_kernel, "_is_begun", False)
    drawn = []
    for _ in range(2):
        random.seed(1)
        in_kernel.begin({})
        drawn.append(random.random())
    random.seed(1)
    seeded = random.random()
    assert drawn[0] != seeded == drawn[1]
