// The code interpreter's JavaScript SDK, unmodified: sandboxes of the template `code-interpreter-v1`, which docs/how-to/code-interpreter.md
// builds.

import assert from 'node:assert/strict'
import { after, before, describe, test } from 'node:test'

import { NotFoundError, Sandbox, SandboxError, TimeoutError } from '@e2b/code-interpreter'

const TIMEOUT_MS = 600_000

describe('code', () => {
  let sandbox
  before(async () => (sandbox = await Sandbox.create({ timeoutMs: TIMEOUT_MS, envs: { SANDBOX_VARIABLE: 'of the sandbox' } })))
  after(() => sandbox.kill())

  test('has output and a result', async () => {
    const execution = await sandbox.runCode("import sys\nprint('out')\nprint('err', file=sys.stderr)\n6 * 7")
    assert.equal(execution.text, '42')
    assert.deepEqual([execution.logs.stdout.join(''), execution.logs.stderr.join('')], ['out\n', 'err\n'])
    assert(execution.executionCount >= 1 && !execution.error)
  })

  test('has text that is not ASCII, whole', async () => {
    const text = 'grüße 世界 🦀'.repeat(5000)
    const execution = await sandbox.runCode("print('grüße 世界 🦀' * 5000, end='')")
    assert.equal(execution.logs.stdout.join(''), text)
  })

  test('fails with an error', async () => {
    const { error } = await sandbox.runCode('1 / 0')
    assert.deepEqual([error.name, error.value], ['ZeroDivisionError', 'division by zero'])
    assert.match(error.traceback, /ZeroDivisionError/)
  })

  test('is told of as it runs', async () => {
    const seen = []
    await sandbox.runCode("import time\nprint('a', flush=True)\ntime.sleep(0.5)\nprint('b')\n7\n1 / 0", {
      onStdout: (message) => seen.push(message.line),
      onError: (error) => seen.push(error.name),
    })
    assert.deepEqual(seen, ['a\n', 'b\n', 'ZeroDivisionError'])
  })

  test('draws a picture, with its chart', async () => {
    const code = "import matplotlib.pyplot as plt\nplt.bar(['a', 'b'], [3, 4])\nplt.title('Sizes')\nplt.show()"
    const { results } = await sandbox.runCode(code)
    assert.equal(results.length, 1)
    assert(Buffer.from(results[0].png, 'base64').subarray(1, 4).equals(Buffer.from('PNG')))
    assert.deepEqual([results[0].chart.type, results[0].chart.title], ['bar', 'Sizes'])
    assert.deepEqual(
      results[0].chart.elements.map((bar) => [bar.label, bar.value]),
      [
        ['a', 3],
        ['b', 4],
      ]
    )
  })

  test('has the data of tables, and formats of its own', async () => {
    const table = await sandbox.runCode("import pandas\npandas.DataFrame({'n': [1, None]})")
    assert.deepEqual(table.results[0].data, { n: [1, null] })
    const own = await sandbox.runCode("display({'application/geo+json': {'type': 'Point'}}, raw=True)")
    assert.deepEqual(own.results[0].extra, { 'application/geo+json': { type: 'Point' } })
  })

  test('has an environment', async () => {
    const code = "import os; (os.environ.get('A'), os.environ['SANDBOX_VARIABLE'])"
    assert.equal((await sandbox.runCode(code, { envs: { A: 'b' } })).text, "('b', 'of the sandbox')")
    assert.equal((await sandbox.runCode(code)).text, "(None, 'of the sandbox')")
  })

  test('is of a language', async () => {
    const execution = await sandbox.runCode('echo $((6 * 7))', { language: 'bash' })
    assert.deepEqual(execution.logs.stdout, ['42\n'])
    await assert.rejects(sandbox.runCode('1', { language: 'cobol', requestTimeoutMs: 10_000 }), SandboxError)
  })

  test('is interrupted when it takes too long', async () => {
    const context = await sandbox.createCodeContext()
    await sandbox.runCode("kept = 'kept'", { context })
    await assert.rejects(sandbox.runCode('import time; time.sleep(3600)', { context, timeoutMs: 1500 }), TimeoutError)
    assert.equal((await sandbox.runCode('kept', { context })).text, 'kept')
    await sandbox.removeCodeContext(context)
  })

  test('runs in contexts that are apart', async () => {
    const context = await sandbox.createCodeContext({ cwd: '/tmp' })
    assert.deepEqual([context.language, context.cwd], ['python', '/tmp'])
    await sandbox.runCode('apart = 1', { context })
    assert.equal((await sandbox.runCode('apart')).error.name, 'NameError')
    assert((await sandbox.listCodeContexts()).some((one) => one.id === context.id))
    await sandbox.restartCodeContext(context)
    assert.equal((await sandbox.runCode('apart', { context })).error.name, 'NameError')
    await sandbox.removeCodeContext(context)
    await assert.rejects(sandbox.runCode('1', { context, requestTimeoutMs: 10_000 }), NotFoundError)
  })
})
