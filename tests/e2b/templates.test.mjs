// Templates by the JavaScript SDK's builder: what is built is there in sandboxes of it.

import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import path from 'node:path'
import { after, before, describe, test } from 'node:test'

import { ApiClient, BuildError, ConnectionConfig, Sandbox, Template, waitForFile } from 'e2b'

const TIMEOUT_MS = 600_000
// A guest of the lab has little.
const SIZE = { cpuCount: 1, memoryMB: 160 }

const unique = (name) => `${name}-${randomUUID().slice(0, 8)}`

/** Deletes a template, by its id or name: by a snapshot's way, as the SDK has no other. */
const remove = (template) => Sandbox.deleteSnapshot(template)

/** What is told of a template and its tags by operations that no method of the SDK asks for. */
async function told(built) {
  const { api } = new ApiClient(new ConnectionConfig())
  const of = (more) => ({ params: { path: { templateID: built.templateId, template_id: built.templateId, ...more } } })
  const ask = async (method, path, options) => {
    const answer = await api[method](path, options)
    assert.equal(answer.response.status, 200, JSON.stringify(answer.error))
    return answer.data
  }
  assert.equal((await ask('GET', '/templates/{template_id}/tags/count', of())).total, 2)
  const query = { tag: 'v1' }
  assert.equal((await ask('GET', '/templates/{template_id}/tags/exists', { params: { ...of().params, query } })).exists, true)
  const groups = await ask('GET', '/templates/{template_id}/tags/groups', of())
  assert.deepEqual(groups.tags.map((group) => group.tag).sort(), ['default', 'v1'])
  const { data } = await ask('GET', '/templates/{template_id}/tags/{tag}/assignments', of({ tag: 'v1' }))
  assert.deepEqual(data.map((one) => one.buildId), [built.buildId])
  const logs = await ask('GET', '/templates/{templateID}/builds/{buildID}/logs', of({ buildID: built.buildId }))
  assert(logs.logs.some((line) => line.message.includes('ready')))
  for (const path of ['/templates/{templateID}', '/v2/templates/{templateID}'])
    await ask('PATCH', path, { ...of(), body: { public: false } })
}

describe('a template', () => {
  let context
  before(() => {
    context = mkdtempSync(path.join(tmpdir(), 'templates-'))
    mkdirSync(path.join(context, 'app/deep'), { recursive: true })
    writeFileSync(path.join(context, 'app/main.txt'), 'main\n')
    writeFileSync(path.join(context, 'app/deep/data.txt'), 'deep\n')
  })
  after(() => rmSync(context, { recursive: true }))

  test('is built, tagged and found', async () => {
    const name = unique('js')
    const template = Template({ fileContextPath: context })
      .fromImage('base')
      .copy('app', '/srv/app/')
      .setEnvs({ GREETING: 'hello' })
      .setWorkdir('/srv/app')
      .runCmd('echo $GREETING > from-run')
      .setStartCmd('touch /tmp/started; sleep infinity', waitForFile('/tmp/started'))
    const lines = []
    const built = await Template.build(template, `${name}:v1`, { ...SIZE, onBuildLogs: (line) => lines.push(line.message) })
    try {
      assert(lines.some((line) => line.includes('the template is ready')), lines.join('\n'))
      assert.equal(await Template.exists(name), true)
      assert.equal(await Template.exists(unique('none')), false)
      await Template.assignTags(`${name}:v1`, ['default'])
      const tags = await Template.getTags(name)
      assert.deepEqual(tags.map((tag) => tag.tag).sort(), ['default', 'v1'])
      const sandbox = await Sandbox.create(name, { timeoutMs: TIMEOUT_MS })
      try {
        const result = await sandbox.commands.run('cat main.txt deep/data.txt from-run; pgrep -c sleep')
        assert.equal(result.stdout, 'main\ndeep\nhello\n1\n')
      } finally {
        await sandbox.kill()
      }
      await told(built)
      await Template.removeTags(name, 'v1')
      await assert.rejects(Sandbox.create(`${name}:v1`), /not found/)
    } finally {
      assert.equal(await remove(built.templateId), true)
    }
    assert.equal(await Template.exists(name), false)
  })

  test('that cannot be built says why', async () => {
    const name = unique('failing')
    const broken = Template().fromTemplate('base').runCmd('echo this is why >&2; exit 3')
    try {
      await assert.rejects(
        Template.build(broken, name),
        (error) => error instanceof BuildError && /step 1 .*code 3: this is why/.test(error.message)
      )
      const started = await Template.buildInBackground(Template().fromTemplate('base').runCmd('true'), name)
      for (;;) {
        const { status, reason } = await Template.getBuildStatus(started)
        assert.notEqual(status, 'error', reason?.message)
        if (status === 'ready') break
        await new Promise((resolve) => setTimeout(resolve, 200))
      }
    } finally {
      // A template of which nothing could be built is there, too.
      assert.equal(await remove(name), true)
    }
  })
})
