// What a program does that knows E2B_DOMAIN and no address, by the JavaScript SDK that the variable SDK names: `e2b`, or `e2b-1`, the last 1.x.

import assert from 'node:assert/strict'
import { after, before, describe, test } from 'node:test'

const { Sandbox } = await import(process.env.SDK)

const DOMAIN = process.env.E2B_DOMAIN
const TIMEOUT_MS = 600_000

describe(`names with ${process.env.SDK}`, () => {
  let sandbox
  before(async () => {
    assert(DOMAIN && !process.env.E2B_API_URL && !process.env.E2B_SANDBOX_URL)
    sandbox = await Sandbox.create('base', { timeoutMs: TIMEOUT_MS, envs: { A: 'b' } })
  })
  after(() => sandbox?.kill())

  test('a sandbox is of the domain', async () => {
    assert.equal(await sandbox.isRunning(), true)
    const listed = await Sandbox.list()
    const found = Array.isArray(listed) ? listed : await listed.nextItems()
    assert(found.some((one) => one.sandboxId === sandbox.sandboxId))
    const again = await Sandbox.connect(sandbox.sandboxId)
    assert.equal((await again.commands.run('echo $A')).stdout, 'b\n')
    await sandbox.setTimeout(TIMEOUT_MS)
  })

  test('commands have users', async () => {
    assert.equal((await sandbox.commands.run('id -un')).stdout, 'user\n')
    assert.equal((await sandbox.commands.run('id -un', { user: 'root' })).stdout, 'root\n')
  })

  test('files are written, read and listed', async () => {
    await sandbox.files.write('names/a', 'grüße')
    assert.equal(await sandbox.files.read('names/a'), 'grüße')
    assert.deepEqual(
      (await sandbox.files.list('names')).map((entry) => entry.name),
      ['a']
    )
  })

  test('the address of a file is all that it takes', async () => {
    await sandbox.files.write('/home/user/signed', 'content')
    const url = await sandbox.downloadUrl('/home/user/signed', { useSignatureExpiration: 300 })
    assert(url.startsWith(`https://49983-${sandbox.sandboxId}.${DOMAIN}/`), url)
    assert.equal(await (await fetch(url)).text(), 'content')
    assert.equal((await fetch(url.replace('signed', 'other'))).status, 401)
  })

  test('a port has a name', async () => {
    await sandbox.commands.run('mkdir -p web && echo hello > web/index.html')
    const server = await sandbox.commands.run('cd web && exec python3 -m http.server 8000', { background: true })
    const host = sandbox.getHost(8000)
    assert.equal(host, `8000-${sandbox.sandboxId}.${DOMAIN}`)
    const end = Date.now() + 60_000
    let answer = await fetch(`https://${host}/`)
    while (answer.status === 502 && Date.now() < end) {
      await new Promise((resolve) => setTimeout(resolve, 200))
      answer = await fetch(`https://${host}/`)
    }
    assert.equal(await answer.text(), 'hello\n')
    await server.kill()
  })

  test('a sandbox is killed', async () => {
    const one = await Sandbox.create('base', { timeoutMs: 60_000 })
    assert.equal(await Sandbox.kill(one.sandboxId), true)
    assert.equal(await one.isRunning(), false)
    assert.equal(await Sandbox.kill(one.sandboxId), false)
  })
})
