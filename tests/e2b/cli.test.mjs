// What E2B's own command line, `e2b` of the package @e2b/cli, does with sandboxes and templates: a program of its own for each command, which
// finds the gateway by its environment, by addresses or by E2B_DOMAIN alone. No command asks who is logged in: the key is all that it takes.

import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, describe, test } from 'node:test'
import { fileURLToPath } from 'node:url'

const CLI = fileURLToPath(new URL('node_modules/@e2b/cli/dist/index.js', import.meta.url))
// An image that tenants can build on.
const IMAGE = process.env.BASALT_E2B_IMAGE ?? 'base'
// Sandboxes of tests that were killed go by themselves.
const TIMEOUT = '1800'

describe('the command line of E2B', () => {
  let directory, id

  /** Runs a program; what it says, and how it ends. */
  function run(program, args, input = '') {
    // Nobody's settings are read, and no registry is asked for a newer version.
    const env = { ...process.env, HOME: directory, NO_UPDATE_NOTIFIER: '1', NO_COLOR: '1', NODE_OPTIONS: '' }
    const child = spawn(program, args, { env, cwd: directory })
    const said = { out: '', err: '' }
    child.stdout.on('data', (bytes) => (said.out += bytes))
    child.stderr.on('data', (bytes) => (said.err += bytes))
    // One that has ended does not read.
    child.stdin.on('error', () => {})
    child.stdin.end(input)
    return new Promise((resolve, reject) => {
      child.on('error', reject)
      child.on('close', (code) => resolve({ code, ...said }))
    })
  }

  const cli = (args, input) => run(process.execPath, [CLI, ...args], input)

  /** The same of one that must succeed; what it says. */
  async function done(...args) {
    const { code, out, err } = await cli(args)
    assert.equal(code, 0, `e2b ${args.join(' ')}: ${out}${err}`)
    return out
  }

  before(async () => {
    directory = mkdtempSync(join(tmpdir(), 'e2b-cli-'))
    id = (await done('sandbox', 'create', 'base', '--detach', '--timeout', TIMEOUT)).trim()
    assert.match(id, /^[0-9a-f]{12}$/)
  })
  after(async () => {
    if (id) await cli(['sandbox', 'kill', id])
    rmSync(directory, { recursive: true })
  })

  test('lists sandboxes, and tells of one', async () => {
    const all = JSON.parse(await done('sandbox', 'list', '--format', 'json'))
    const one = all.find((sandbox) => sandbox.sandboxId === id)
    assert.deepEqual([one.name, one.state], ['base', 'running'])
    assert((await done('sandbox', 'list')).includes(id))
    const info = JSON.parse(await done('sandbox', 'info', id, '--format', 'json'))
    assert.equal(info.sandboxId, id)
  })

  test('runs commands with their input and exit codes', async () => {
    const { code, out, err } = await cli(['sandbox', 'exec', id, '--', 'sh', '-c', 'cat; echo err >&2; exit 3'], 'piped')
    assert.equal(code, 3)
    assert.equal(out, 'piped')
    assert(err.startsWith('err\n'), err)
    assert.equal(await done('sandbox', 'exec', '--cwd', '/tmp', '-e', 'A=b c', id, '--', 'sh', '-c', 'echo $A; pwd'), 'b c\n/tmp\n')
  })

  test('has a terminal', async () => {
    // script(1) gives it one.
    const words = [process.execPath, CLI, 'sandbox', 'connect', id].map((word) => `'${word}'`).join(' ')
    const typed = `{ sleep 3; echo 'echo of-the-''terminal; exit'; sleep 3; } | script -qec "${words}" /dev/null`
    const { out } = await run('sh', ['-c', typed])
    assert(out.includes('of-the-terminal'), out)
  })

  test('shows metrics and logs', async () => {
    const metrics = await done('sandbox', 'metrics', id, '--format', 'json')
    assert(metrics.includes('cpuCount'), metrics)
    // A sandbox of a template has no command of its own, whose lines these would be; a node without machines has some.
    const lines = (await done('sandbox', 'logs', id, '--format', 'json')).split('\n').filter((line) => line)
    for (const line of lines.map((text) => JSON.parse(text))) assert.equal(typeof line.message, 'string')
  })

  test('pauses and resumes', async () => {
    await done('sandbox', 'pause', id)
    const paused = JSON.parse(await done('sandbox', 'list', '--state', 'paused', '--format', 'json'))
    assert(paused.some((sandbox) => sandbox.sandboxId === id))
    await done('sandbox', 'resume', id)
    assert.equal(await done('sandbox', 'exec', id, 'echo', 'again'), 'again\n')
  })

  test('keeps snapshots, and makes sandboxes of them', async () => {
    const made = await done('sandbox', 'snapshot', 'create', id)
    const snapshot = made.match(/snapshot (\S+) from/)[1]
    try {
      assert((await done('sandbox', 'snapshot', 'list', id)).includes(snapshot))
      const copy = (await done('sandbox', 'create', snapshot, '--detach', '--timeout', TIMEOUT)).trim()
      assert.equal(await done('sandbox', 'exec', copy, 'echo', 'copy'), 'copy\n')
      await done('sandbox', 'kill', copy)
    } finally {
      await done('sandbox', 'snapshot', 'delete', snapshot)
    }
    assert(!(await done('sandbox', 'snapshot', 'list')).includes(snapshot))
  })

  test('builds, lists and deletes templates', async () => {
    const name = `cli-${process.pid}`
    writeFileSync(join(directory, 'Dockerfile'), `FROM ${IMAGE}\nRUN echo built > /of-the-build\nENV COLOUR=blue\n`)
    const built = await done('template', 'create', name, '--cpu-count', '1', '--memory-mb', '512')
    assert(built.includes(`${name} finished`), built)
    try {
      const all = JSON.parse(await done('template', 'list', '--format', 'json'))
      assert(all.some((template) => template.names.includes(name)))
      const sandbox = (await done('sandbox', 'create', name, '--detach', '--timeout', TIMEOUT)).trim()
      assert.equal(await done('sandbox', 'exec', sandbox, '--', 'sh', '-c', 'cat /of-the-build; echo $COLOUR'), 'built\nblue\n')
      await done('sandbox', 'kill', sandbox)
      const { code, out, err } = await cli(['template', 'publish', '-y', name])
      assert.equal(code, 1)
      assert((out + err).includes('basalt template build'), out + err)
    } finally {
      await done('template', 'delete', '-y', name)
    }
  })

  test('says what is wrong', async () => {
    const missing = await cli(['sandbox', 'exec', '000000000000', 'true'])
    assert.notEqual(missing.code, 0)
    assert((missing.out + missing.err).includes('000000000000'), missing.out + missing.err)
    const failed = await cli(['sandbox', 'create', 'no-such-template', '--detach'])
    assert.notEqual(failed.code, 0)
    assert((failed.out + failed.err).includes('no-such-template'), failed.out + failed.err)
  })

  test('kills sandboxes', async () => {
    await done('sandbox', 'kill', id)
    const all = JSON.parse(await done('sandbox', 'list', '--format', 'json', '--state', 'running,paused'))
    assert(!all.some((sandbox) => sandbox.sandboxId === id))
    id = undefined
  })
})
