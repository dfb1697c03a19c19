// Volumes by the JavaScript SDK: their files, asked for without a sandbox and by one.

import assert from 'node:assert/strict'
import { randomBytes } from 'node:crypto'
import { test } from 'node:test'

import { Sandbox, Volume, VolumeNotFoundError, VolumePathNotFoundError } from 'e2b'

async function withVolume(use) {
  const volume = await Volume.create(`test-${randomBytes(6).toString('hex')}`)
  try {
    return await use(volume)
  } finally {
    await Volume.destroy(volume.volumeId)
  }
}

test('a volume is made, found, listed and removed', () =>
  withVolume(async (volume) => {
    assert((await Volume.list()).some((one) => one.volumeId === volume.volumeId))
    const again = await Volume.connect(volume.volumeId)
    await again.writeFile('/kept', 'x')
    assert.equal(await volume.readFile('/kept'), 'x')
    await assert.rejects(Volume.create(volume.name), /already/)
    assert.equal(await Volume.destroy(volume.volumeId), true)
    assert.equal(await Volume.destroy(volume.volumeId), false)
    await assert.rejects(Volume.getInfo(volume.volumeId), VolumeNotFoundError)
  }))

test('files of a volume', () =>
  withVolume(async (volume) => {
    const made = await volume.writeFile('/a', 'one', { uid: 1000, gid: 1001, mode: 0o640 })
    assert.deepEqual([made.size, made.uid, made.gid, made.mode], [3, 1000, 1001, 0o640])
    await assert.rejects(volume.writeFile('/a', 'two', { force: false }), /already/)
    await volume.writeFile('/a', 'two', { force: true })
    assert.deepEqual(Buffer.from(await volume.readFile('/a', { format: 'bytes' })).toString(), 'two')
    await volume.writeFile('/empty', '')
    assert.equal(await volume.readFile('/empty'), '')
    await volume.makeDir('/d/e', { force: true })
    await volume.writeFile('/d/e/f', 'deep')
    assert.deepEqual(
      (await volume.list('/d', { depth: 2 })).map((one) => one.path),
      ['/d/e', '/d/e/f']
    )
    assert.equal((await volume.updateMetadata('/d/e/f', { mode: 0o600 })).mode, 0o600)
    assert.equal(await volume.exists('/d'), true)
    await volume.remove('/d')
    assert.equal(await volume.exists('/d'), false)
    await assert.rejects(volume.readFile('/d'), VolumePathNotFoundError)
  }))

test('a sandbox has a volume', () =>
  withVolume(async (volume) => {
    const sandbox = await Sandbox.create('base', { volumeMounts: { '/mnt/data': volume } })
    try {
      await sandbox.files.write('/mnt/data/hello.txt', 'from the sandbox')
      assert.equal(await volume.readFile('/hello.txt'), 'from the sandbox')
    } finally {
      await sandbox.kill()
    }
  }))
