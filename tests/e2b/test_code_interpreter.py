"""The code interpreter's SDK, unmodified: sandboxes of the template `code-interpreter-v1`, which docs/how-to/code-interpreter.md builds."""

import asyncio
import base64
import time

import pytest
from conftest import TIMEOUT
from e2b.exceptions import InvalidArgumentException, NotFoundException, SandboxException, TimeoutException
from e2b_code_interpreter import AsyncSandbox, Sandbox
from e2b_code_interpreter.charts import BarChart, ChartType, LineChart, PieChart, SuperChart

PNG = b"\x89PNG\r\n"


@pytest.fixture(scope="module")
def interpreter():
    """One that the tests share; `SANDBOX_VARIABLE` is its own."""
    sandbox = Sandbox.create(timeout=TIMEOUT, envs={"SANDBOX_VARIABLE": "of the sandbox"})
    try:
        yield sandbox
    finally:
        sandbox.kill()


@pytest.fixture
def context(interpreter):
    context = interpreter.create_code_context()
    yield context
    interpreter.remove_code_context(context)


def test_output_result_and_what_is_kept(interpreter, context):
    execution = interpreter.run_code("import sys\nx = 20\nprint('out')\nprint('err', file=sys.stderr)\nx + 1", context=context)
    assert (execution.text, execution.error, execution.execution_count) == ("21", None, 1)
    assert ("".join(execution.logs.stdout), "".join(execution.logs.stderr)) == ("out\n", "err\n")
    execution = interpreter.run_code("x * 2", context=context)
    assert (execution.text, execution.execution_count) == ("40", 2)
    assert interpreter.run_code("'text'").text == "text"
    assert interpreter.run_code("None").results == []


def test_text_that_is_not_ascii(interpreter):
    execution = interpreter.run_code("print('grüße 世界 🦀' * 1000); '世界'")
    assert "".join(execution.logs.stdout) == "grüße 世界 🦀" * 1000 + "\n"
    assert execution.text == "世界"


def test_an_error(interpreter):
    seen = []
    execution = interpreter.run_code("def f():\n    return 1 / 0\nf()", on_error=seen.append)
    assert (execution.error.name, execution.error.value) == ("ZeroDivisionError", "division by zero")
    assert "f()" in execution.error.traceback and seen == [execution.error]
    assert interpreter.run_code("if").error.name == "SyntaxError"
    assert interpreter.run_code("1").text == "1"


def test_what_is_displayed_has_all_its_formats(interpreter):
    code = """
    from IPython.display import HTML, JSON, Latex, Markdown, SVG, Javascript, display
    for one in (HTML("<b>x</b>"), Markdown("*x*"), Latex("$x$"), JSON({"a": [1]}), Javascript("1"), SVG("<svg></svg>")):
        display(one)
    display({"text/plain": "t", "application/geo+json": {"type": "Point"}}, raw=True)
    """
    results = interpreter.run_code(code).results
    assert [result.html for result in results][0] == "<b>x</b>"
    assert (results[1].markdown, results[2].latex, results[3].json) == ("*x*", "$x$", {"a": [1]})
    assert results[4].javascript == "1" and "svg" in results[5].svg
    assert results[6].text == "t" and results[6].extra == {"application/geo+json": {"type": "Point"}}
    assert not any(result.is_main_result for result in results)


def test_a_table_has_its_data(interpreter):
    code = "import pandas as pd\npd.DataFrame({'n': [1, 2.5, None], 'when': pd.to_datetime(['2024-01-02'] * 3), 's': list('abc')})"
    (result,) = interpreter.run_code(code).results
    assert result.data["n"] == [1, 2.5, None] and result.data["s"] == ["a", "b", "c"]
    assert result.data["when"][0].startswith("2024-01-02T00:00:00")
    assert "<table" in result.html and result.is_main_result


def test_a_line_plot_is_a_picture_and_a_chart(interpreter):
    code = """
    import matplotlib.pyplot as plt
    plt.plot([1, 2, 3], [2, 4, float("nan")], label="growth")
    plt.title("Growth"); plt.xlabel("Time (s)"); plt.ylabel("Size")
    plt.show()
    """
    (result,) = interpreter.run_code(code).results
    assert base64.b64decode(result.png).startswith(PNG)
    chart = result.chart
    assert isinstance(chart, LineChart) and chart.type == ChartType.LINE
    assert (chart.title, chart.x_label, chart.x_unit, chart.y_label) == ("Growth", "Time (s)", "s", "Size")
    (line,) = chart.elements
    assert line.label == "growth" and line.points == [(1, 2), (2, 4), (3, None)]


def test_charts_of_other_kinds(interpreter):
    def chart(code):
        (result,) = interpreter.run_code("import matplotlib.pyplot as plt\n" + code + "\nplt.show()").results
        assert base64.b64decode(result.png).startswith(PNG)
        return result.chart

    bars = chart("plt.bar(['a', 'b'], [3, 4])")
    assert isinstance(bars, BarChart) and [(bar.label, bar.value) for bar in bars.elements] == [("a", 3), ("b", 4)]
    pie = chart("plt.pie([1, 3], labels=['a', 'b'])")
    assert isinstance(pie, PieChart) and [wedge.angle for wedge in pie.elements] == [90, 270]
    both = chart("f, (a, b) = plt.subplots(1, 2); a.plot([1, 2]); b.scatter([1], [2]); f.suptitle('Both')")
    assert isinstance(both, SuperChart) and both.title == "Both"
    assert [one.type for one in both.elements] == [ChartType.LINE, ChartType.SCATTER]
    assert chart("plt.imshow([[1, 2], [3, 4]])").type == ChartType.UNKNOWN


def test_variables_are_there_for_one_execution(interpreter, context):
    code = "import os; (os.environ.get('A'), os.environ['SANDBOX_VARIABLE'])"
    assert interpreter.run_code(code, context=context).text == "(None, 'of the sandbox')"
    execution = interpreter.run_code(code, context=context, envs={"A": "it's\n\"b\"", "SANDBOX_VARIABLE": "else"})
    assert execution.text == repr(("it's\n\"b\"", "else"))
    interpreter.run_code("1 / 0", context=context, envs={"A": "1"})
    assert interpreter.run_code(code, context=context).text == "(None, 'of the sandbox')"
    with pytest.raises(SandboxException) as refused:
        interpreter.run_code("1", envs={"A=B": "c"})
    assert "A=B" in str(refused.value)


def test_bash(interpreter):
    execution = interpreter.run_code("cd /tmp; pwd; echo $A", language="bash", envs={"A": "b c"})
    assert "".join(execution.logs.stdout) == "/tmp\nb c\n" and execution.error is None
    execution = interpreter.run_code("pwd; echo [$A] $SANDBOX_VARIABLE; sh -c 'exit 3'", language="bash")
    assert "".join(execution.logs.stdout) == "/tmp\n[] of the sandbox\n" and execution.error.value == "3"


def test_a_language_that_is_not_there_is_refused(interpreter):
    with pytest.raises(SandboxException) as refused:
        interpreter.run_code("1", language="cobol")
    assert "cobol" in str(refused.value) and "python" in str(refused.value)
    with pytest.raises(InvalidArgumentException):
        interpreter.run_code("1", language="python", context=interpreter.list_code_contexts()[0])


def test_contexts_are_made_listed_and_removed(interpreter):
    context = interpreter.create_code_context(cwd="/home/user/some/where", language="python")
    assert (context.language, context.cwd) == ("python", "/home/user/some/where")
    assert interpreter.run_code("import os; os.getcwd()", context=context).text == "/home/user/some/where"
    listed = interpreter.list_code_contexts()
    assert (listed[-1].id, listed[-1].language, listed[-1].cwd) == (context.id, context.language, context.cwd)
    assert "python" in [one.language for one in listed[:-1]]
    interpreter.remove_code_context(context)
    assert context.id not in [one.id for one in interpreter.list_code_contexts()]
    for ask in (interpreter.remove_code_context, interpreter.restart_code_context, lambda gone: interpreter.run_code("1", context=gone)):
        with pytest.raises(NotFoundException) as gone:
            ask(context)
        assert context.id in str(gone.value)


def test_contexts_are_apart_and_start_anew(interpreter, context):
    other = interpreter.create_code_context()
    interpreter.run_code("x = 1", context=context)
    interpreter.run_code("x = 2", context=other)
    assert interpreter.run_code("x", context=context).text == "1"
    interpreter.restart_code_context(other)
    assert interpreter.run_code("x", context=other).error.name == "NameError"
    assert interpreter.run_code("x", context=context).text == "1"
    interpreter.remove_code_context(other.id)


def test_output_is_streamed(interpreter):
    came = []
    code = "import time\nfor number in range(3):\n    print(number, flush=True)\n    time.sleep(0.5)\n7"
    results = []
    interpreter.run_code(code, on_stdout=lambda message: came.append((message.line, time.monotonic())), on_result=results.append)
    assert "".join(line for line, _ in came) == "0\n1\n2\n"
    assert came[-1][1] - came[0][1] > 0.5, "all came at once"
    assert [result.text for result in results] == ["7"]


def test_what_takes_too_long_is_interrupted(interpreter, context):
    interpreter.run_code("kept = 'kept'", context=context)
    with pytest.raises(TimeoutException):
        interpreter.run_code("import time\ntime.sleep(3600)", context=context, timeout=2)
    assert interpreter.run_code("kept", context=context, timeout=60).text == "kept"


def test_a_kernel_that_ends_is_replaced(interpreter, context):
    assert interpreter.run_code("import os\nos._exit(3)", context=context).error.name == "KernelEnded"
    assert interpreter.run_code("1 + 1", context=context).text == "2"


def test_code_of_the_file_system_is_that_of_the_sandbox(interpreter):
    interpreter.files.write("/home/user/numbers.csv", "n\n1\n2\n")
    assert interpreter.run_code("import pandas; int(pandas.read_csv('numbers.csv').n.sum())").text == "3"


async def test_the_same_by_asyncio():
    sandbox = await AsyncSandbox.create(timeout=TIMEOUT)
    try:
        lines = []
        execution = await sandbox.run_code("print('a')\n3 * 4", on_stdout=lambda message: lines.append(message.line))
        assert (execution.text, lines) == ("12", ["a\n"])
        contexts = [await sandbox.create_code_context() for _ in range(2)]
        await asyncio.gather(*(sandbox.run_code(f"x = {number}", context=context) for number, context in enumerate(contexts)))
        kept = await asyncio.gather(*(sandbox.run_code("x", context=context) for context in contexts))
        assert [execution.text for execution in kept] == ["0", "1"]
        # One context runs one after the other, in the order in which they came.
        code = "import time; time.sleep(0.2); seen = globals().setdefault('seen', []); seen.append({0}); len(seen)"
        counts = await asyncio.gather(*(sandbox.run_code(code.format(number), context=contexts[0]) for number in range(3)))
        assert sorted(execution.text for execution in counts) == ["1", "2", "3"]
        with pytest.raises(TimeoutException):
            await sandbox.run_code("while True: pass", timeout=2)
        assert (await sandbox.run_code("1", timeout=60)).text == "1"
        await sandbox.restart_code_context(contexts[0])
        await sandbox.remove_code_context(contexts[1])
        assert contexts[0].id in [context.id for context in await sandbox.list_code_contexts()]
    finally:
        await sandbox.kill()
