// What programs do wrong: an error that says what is the matter, by the JavaScript SDK.

import assert from 'node:assert/strict'
import { after, before, describe, test } from 'node:test'

import { AuthenticationError, FileNotFoundError, NotFoundError, NotEnoughSpaceError, Sandbox, SandboxError } from 'e2b'

const NOBODY = `e2b_${'0'.repeat(64)}`

describe('what cannot be', () => {
  let sandbox
  before(async () => (sandbox = await Sandbox.create('base', { timeoutMs: 600_000 })))
  after(() => sandbox.kill())

  test('a key that nobody has', async () => {
    await assert.rejects(Sandbox.create('base', { apiKey: NOBODY }), AuthenticationError)
    await assert.rejects(Sandbox.connect(sandbox.sandboxId, { apiKey: NOBODY }), AuthenticationError)
    assert.equal(await sandbox.isRunning(), true)
  })

  test('an id that nobody has', async () => {
    await assert.rejects(Sandbox.connect('0123456789ab'), NotFoundError)
    await assert.rejects(Sandbox.getInfo('../x'), SandboxError)
  })

  test('a template that is not there', async () => {
    await assert.rejects(Sandbox.create('no-such-template'), /no-such-template/)
  })

  test('a sandbox whose time is over', async () => {
    const over = await Sandbox.create('base', { timeoutMs: 600_000 })
    await over.setTimeout(0)
    const end = Date.now() + 60_000
    while (await over.isRunning()) assert(Date.now() < end, 'it does not end')
    await assert.rejects(over.commands.run('true'), SandboxError)
    await assert.rejects(Sandbox.connect(over.sandboxId), NotFoundError)
  })

  test('an upload that is larger than the disk', async () => {
    await sandbox.commands.run('mkdir -p /tmp/small && mount -t tmpfs -o size=1m,mode=777 none /tmp/small', { user: 'root' })
    await assert.rejects(sandbox.files.write('/tmp/small/large', 'x'.repeat(3_000_000)), NotEnoughSpaceError)
  })

  test('a file that is not there, and a path that climbs', async () => {
    await assert.rejects(sandbox.files.read('nothing'), FileNotFoundError)
    await assert.rejects(sandbox.files.read(`${'../'.repeat(40)}var/lib/basalt/gateway.sock`), FileNotFoundError)
  })

  test('a client that gives up', async () => {
    const command = await sandbox.commands.run('while :; do echo tick; sleep 0.05; done', { background: true, timeoutMs: 0 })
    await command.disconnect()
    await assert.rejects(sandbox.commands.run('sleep 100', { timeoutMs: 1000 }))
    assert.equal((await sandbox.commands.run('echo well')).stdout, 'well\n')
    await sandbox.commands.kill(command.pid)
  })
})
