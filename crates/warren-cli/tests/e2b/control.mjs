// The control plane, by the JavaScript SDK beside this file.
import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { Sandbox } from 'e2b'

const mark = randomUUID()
const metadata = { 'a b': '1&2+3', mark }
async function listed(query = {}) {
  const pages = Sandbox.list({ query: { metadata, ...query }, limit: 1 })
  const found = []
  while (pages.hasNext) found.push(...(await pages.nextItems()).map((one) => one.sandboxId))
  return found
}

const one = await Sandbox.create('base', { timeoutMs: 120_000, metadata, envs: { X: 'y' } })
const two = await Sandbox.create({ timeoutMs: 120_000, metadata })
const info = await one.getInfo()
assert.equal(info.state, 'running')
assert.deepEqual(await listed(), [two.sandboxId, one.sandboxId])
assert.deepEqual(await listed({ state: ['paused'] }), [])
assert.equal((await one.commands.run('echo $X $(whoami) $(sudo whoami)')).stdout, 'y user root\n')
await one.files.write('/home/user/kept', 'kept')

await one.connect({ timeoutMs: 10_000 })
assert.equal(+(await one.getInfo()).endAt, +info.endAt)
await one.setTimeout(60_000)
assert.ok((await one.getInfo()).endAt < info.endAt)

assert.ok(await one.pause())
assert.equal(await one.isRunning(), false)
assert.deepEqual(await listed({ state: ['paused'] }), [one.sandboxId])
await one.connect({ timeoutMs: 60_000 })
assert.equal(await one.files.read('/home/user/kept'), 'kept')

const snapshot = await one.createSnapshot()
const made = await Sandbox.create(snapshot.snapshotId, { timeoutMs: 60_000 })
assert.equal(await made.files.read('/home/user/kept'), 'kept')
await made.kill()
assert.ok(await Sandbox.deleteSnapshot(snapshot.snapshotId))
assert.ok((await one.getMetrics()).length > 0)

assert.ok(await two.kill())
assert.equal(await two.kill(), false)
assert.ok(await one.kill())
assert.deepEqual(await listed(), [])
await assert.rejects(Sandbox.create('no-such-template'), /404/)
console.log('done')
