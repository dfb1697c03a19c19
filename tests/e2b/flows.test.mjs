// What the JavaScript SDK does with a sandbox: the gateway that E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY lead to, and its template `base`.

import assert from 'node:assert/strict'
import { after, before, describe, test } from 'node:test'

import { ApiClient, CommandExitError, ConnectionConfig, FilesystemEventType, FileType, NotFoundError, Sandbox } from 'e2b'

const TIMEOUT_MS = 600_000

/** Asks again and again until the answer is true, and gives it. */
async function eventually(ask, what, ms = 60_000) {
  const end = Date.now() + ms
  for (;;) {
    const answer = await ask()
    if (answer) return answer
    assert(Date.now() < end, `${what}: not within ${ms} ms`)
    await new Promise((resolve) => setTimeout(resolve, 100))
  }
}

async function withSandbox(options, use) {
  const sandbox = await Sandbox.create('base', { timeoutMs: TIMEOUT_MS, ...options })
  try {
    return await use(sandbox)
  } finally {
    await sandbox.kill()
  }
}

describe('a sandbox', () => {
  test('lives and ends', async () => {
    const sandbox = await Sandbox.create('base', { timeoutMs: 120_000, metadata: { who: 'js' }, envs: { A: 'b' } })
    let killed
    try {
      assert.equal(await sandbox.isRunning(), true)
      const info = await sandbox.getInfo()
      assert.deepEqual([info.sandboxId, info.metadata, info.state], [sandbox.sandboxId, { who: 'js' }, 'running'])
      assert.equal((await sandbox.commands.run('echo $A')).stdout, 'b\n')
      await sandbox.setTimeout(300_000)
      assert((await sandbox.getInfo()).endAt > info.endAt)
    } finally {
      killed = await sandbox.kill()
    }
    assert.equal(killed, true)
    assert.equal(await sandbox.isRunning(), false)
    assert.equal(await Sandbox.kill(sandbox.sandboxId), false)
  })

  test('is listed by its metadata', () =>
    withSandbox({ metadata: { mark: `js-${process.pid}` } }, async (sandbox) => {
      const found = []
      const pages = Sandbox.list({ query: { metadata: { mark: `js-${process.pid}` } }, limit: 1 })
      while (pages.hasNext) found.push(...(await pages.nextItems()))
      assert.deepEqual(
        found.map((one) => one.sandboxId),
        [sandbox.sandboxId]
      )
    }))

  test('reaches what its rules let it', () =>
    withSandbox({}, async (sandbox) => {
      await sandbox.updateNetwork({ allowInternetAccess: false })
      assert.equal((await sandbox.getInfo()).allowInternetAccess, false)
      const reach = 'timeout 2 bash -c "echo > /dev/tcp/198.51.100.2/7000" 2>/dev/null && echo reached || echo not'
      assert.equal((await sandbox.commands.run(reach)).stdout, 'not\n')
      await sandbox.updateNetwork({})
      await eventually(async () => (await sandbox.commands.run(reach)).stdout === 'reached\n', 'a way out')
    }))

  test('is paused and goes on', () =>
    withSandbox({}, async (sandbox) => {
      await sandbox.files.write('x', 'y')
      await sandbox.commands.run('echo in memory > /dev/shm/kept')
      await sandbox.pause()
      const again = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: TIMEOUT_MS })
      assert.equal(await again.files.read('x'), 'y')
      assert.equal((await again.commands.run('cat /dev/shm/kept')).stdout, 'in memory\n')
    }))

  test('is made of a snapshot', () =>
    withSandbox({}, async (sandbox) => {
      await sandbox.files.write('state', 'before')
      const snapshot = await sandbox.createSnapshot()
      await sandbox.files.write('state', 'after')
      const twin = await Sandbox.create(snapshot.snapshotId, { timeoutMs: TIMEOUT_MS })
      try {
        assert.equal(await twin.files.read('state'), 'before')
      } finally {
        await twin.kill()
      }
      assert((await sandbox.listSnapshots().nextItems()).some((one) => one.snapshotId === snapshot.snapshotId))
      assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
    }))

  test('is forked, and has metrics', () =>
    withSandbox({}, async (sandbox) => {
      await sandbox.files.write('tree', 'root')
      const [fork] = await sandbox.fork({ count: 1 })
      try {
        assert.equal(await fork.files.read('tree'), 'root')
      } finally {
        await fork.kill()
      }
      assert((await eventually(async () => (await sandbox.getMetrics()).at(-1), 'metrics')).memTotal > 0)
    }))

  test('is asked by every operation that its types have', () =>
    withSandbox({}, async (sandbox) => {
      const { api } = new ApiClient(new ConnectionConfig())
      const path = { sandboxID: sandbox.sandboxId }
      const ask = async (method, operation, options, status) => {
        const { data, error, response } = await api[method](operation, options)
        assert.equal(response.status, status, `${method} ${operation}: ${JSON.stringify(error)}`)
        return data
      }
      const made = await ask('POST', '/sandboxes', { body: { templateID: 'base', timeout: 600 } }, 201)
      await ask('DELETE', '/sandboxes/{sandboxID}', { params: { path: { sandboxID: made.sandboxID } } }, 204)
      assert((await ask('GET', '/sandboxes', {}, 200)).some((one) => one.sandboxID === sandbox.sandboxId))
      const metrics = await ask('GET', '/sandboxes/metrics', { params: { query: { sandbox_ids: [sandbox.sandboxId] } } }, 200)
      assert(sandbox.sandboxId in metrics.sandboxes)
      assert((await ask('GET', '/sandboxes/{sandboxID}/logs', { params: { path } }, 200)).logs)
      assert((await ask('GET', '/v2/sandboxes/{sandboxID}/logs', { params: { path } }, 200)).logs)
      await ask('POST', '/sandboxes/{sandboxID}/refreshes', { params: { path }, body: { duration: 900 } }, 204)
      await ask('POST', '/sandboxes/{sandboxID}/pause', { params: { path }, body: {} }, 204)
      await ask('POST', '/sandboxes/{sandboxID}/resume', { params: { path }, body: { timeout: 900 } }, 201)
      await ask('POST', '/sandboxes/{sandboxID}/connect', { params: { path }, body: { timeout: 900 } }, 200)
      assert((await ask('GET', '/templates', {}, 200)).some((one) => one.aliases.includes('base')))
      assert((await ask('GET', '/v2/templates', {}, 200)).some((one) => one.aliases.includes('base')))
      const { templateID } = await ask('GET', '/templates/aliases/{alias}', { params: { path: { alias: 'base' } } }, 200)
      assert((await ask('GET', '/templates/{templateID}', { params: { path: { templateID } } }, 200)).builds.length > 0)
    }))
})

describe('commands', () => {
  let sandbox
  before(async () => (sandbox = await Sandbox.create('base', { timeoutMs: TIMEOUT_MS })))
  after(() => sandbox.kill())

  test('have output and an exit code', async () => {
    const result = await sandbox.commands.run('echo out; echo err >&2')
    assert.deepEqual([result.exitCode, result.stdout, result.stderr], [0, 'out\n', 'err\n'])
    await assert.rejects(sandbox.commands.run('exit 3'), (error) => error instanceof CommandExitError && error.exitCode === 3)
  })

  test('have an environment, a directory and a user', async () => {
    const result = await sandbox.commands.run('echo $A; pwd; id -un', { envs: { A: 'b c' }, cwd: '/tmp', user: 'root' })
    assert.equal(result.stdout, 'b c\n/tmp\nroot\n')
  })

  test('run in the background and are found again', async () => {
    const command = await sandbox.commands.run('while :; do echo tick; sleep 0.1; done', { background: true })
    assert((await sandbox.commands.list()).some((one) => one.pid === command.pid))
    await command.disconnect()
    let seen = ''
    const again = await sandbox.commands.connect(command.pid, { onStdout: (data) => (seen += data) })
    await eventually(() => seen.includes('tick'), 'its output')
    assert.equal(await sandbox.commands.kill(command.pid), true)
    await assert.rejects(again.wait())
    assert.equal(await sandbox.commands.kill(command.pid), false)
  })

  test('take standard input', async () => {
    const command = await sandbox.commands.run('cat; echo end', { background: true, stdin: true })
    await sandbox.commands.sendStdin(command.pid, 'one\n')
    await sandbox.commands.closeStdin(command.pid)
    assert.equal((await command.wait()).stdout, 'one\nend\n')
  })

  test('have terminals', async () => {
    let text = ''
    const decoder = new TextDecoder()
    const terminal = await sandbox.pty.create({ rows: 24, cols: 80, onData: (data) => (text += decoder.decode(data)) })
    await sandbox.pty.resize(terminal.pid, { rows: 40, cols: 120 })
    await sandbox.pty.sendInput(terminal.pid, new TextEncoder().encode('stty size; exit\n'))
    await terminal.wait()
    assert.match(text, /40 120/)
  })
})

describe('files', () => {
  let sandbox
  before(async () => (sandbox = await Sandbox.create('base', { timeoutMs: TIMEOUT_MS })))
  after(() => sandbox.kill())

  test('are written and read', async () => {
    const info = await sandbox.files.write('notes/a.txt', 'grüße\n')
    assert.equal(info.path, '/home/user/notes/a.txt')
    assert.equal(await sandbox.files.read('notes/a.txt'), 'grüße\n')
    const data = crypto.getRandomValues(new Uint8Array(60_000))
    await sandbox.files.write('/tmp/data', data.buffer)
    assert.deepEqual(await sandbox.files.read('/tmp/data', { format: 'bytes' }), data)
    await sandbox.files.write([
      { path: 'many/a', data: '1' },
      { path: 'many/b', data: '2' },
    ])
    assert.equal(await sandbox.files.read('many/b'), '2')
  })

  test('are in directories', async () => {
    assert.equal(await sandbox.files.makeDir('tree/deep'), true)
    assert.equal(await sandbox.files.makeDir('tree/deep'), false)
    assert.deepEqual(
      (await sandbox.files.list('tree')).map((entry) => [entry.name, entry.type]),
      [['deep', FileType.DIR]]
    )
    assert.equal((await sandbox.files.getInfo('tree/deep')).type, FileType.DIR)
    await sandbox.files.rename('tree', 'forest')
    assert.equal(await sandbox.files.exists('tree'), false)
    await sandbox.files.remove('forest')
    await assert.rejects(sandbox.files.list('forest'), NotFoundError)
  })

  test('are put together, and what envd tells is there', async () => {
    const { api } = sandbox.envdApi
    await sandbox.files.write([
      { path: 'part-1', data: 'a' },
      { path: 'part-2', data: 'b' },
    ])
    const body = { source_paths: ['/home/user/part-1', '/home/user/part-2'], destination: '/home/user/whole', username: 'user' }
    const composed = await api.POST('/files/compose', { body })
    assert.equal(composed.response.status, 200, JSON.stringify(composed.error))
    assert.equal(await sandbox.files.read('whole'), 'ab')
    assert((await api.GET('/metrics')).data.mem_total > 0)
    assert.equal((await api.GET('/envs')).response.status, 200)
  })

  test('are watched', async () => {
    await sandbox.files.makeDir('watched')
    const seen = []
    const handle = await sandbox.files.watchDir('watched', (event) => seen.push(`${event.type} ${event.name}`))
    await sandbox.files.write('watched/a', 'x')
    await eventually(() => seen.includes(`${FilesystemEventType.CREATE} a`), 'a file that was made')
    await handle.stop()
  })
})
