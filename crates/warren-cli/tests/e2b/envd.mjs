// Every call to a sandbox itself, by the JS SDK beside this script.
import assert from 'node:assert/strict'
import { Sandbox, CommandExitError, NotFoundError, TimeoutError, FileType } from 'e2b'

const sandbox = await Sandbox.create({ timeoutMs: 300_000, envs: { FROM: 'sandbox' } })
const { commands, files, pty } = sandbox

const done = await commands.run('echo $FROM $MORE; pwd; echo err >&2', { envs: { MORE: 'more' } })
assert.deepEqual([done.stdout, done.stderr, done.exitCode], ['sandbox more\n/home/user\n', 'err\n', 0])
await assert.rejects(commands.run('exit 3'), (error) => error instanceof CommandExitError && error.exitCode === 3)
await assert.rejects(commands.run('sleep 60', { timeoutMs: 1000 }), TimeoutError)
assert.equal((await commands.run('whoami', { user: 'root' })).stdout, 'root\n')

const cat = await commands.run('cat', { background: true, stdin: true })
// The client may have given `sleep 60` up a moment before that is ended.
let alive = []
for (const end = Date.now() + 10_000; Date.now() < end; ) {
  alive = (await commands.list()).map((one) => one.pid)
  if (alive.length === 1) break
}
assert.deepEqual(alive, [cat.pid])
await commands.sendStdin(cat.pid, 'one\n')
await commands.closeStdin(cat.pid)
assert.equal((await cat.wait()).stdout, 'one\n')
const sleep = await commands.run('sleep 300', { background: true })
assert.equal(await commands.kill(sleep.pid), true)
assert.equal(await commands.kill(99999), false)

let seen = ''
const terminal = await pty.create({ cols: 80, rows: 24, onData: (data) => (seen += new TextDecoder().decode(data)) })
await pty.resize(terminal.pid, { cols: 100, rows: 40 })
await pty.sendInput(terminal.pid, new TextEncoder().encode('stty size; exit 0\n'))
await terminal.wait()
assert.match(seen, /40 100/)

const written = await files.write('a/b.txt', 'hello')
assert.deepEqual([written.path, written.name], ['/home/user/a/b.txt', 'b.txt'])
assert.equal(await files.read('a/b.txt'), 'hello')
await files.write('empty', '')
assert.equal(await files.read('empty'), '')
const several = await files.write([{ path: '/tmp/m/1', data: '1' }, { path: 'm 2', data: '2' }])
assert.deepEqual(several.map((one) => one.path), ['/tmp/m/1', '/home/user/m 2'])
await files.write('/of-root', 'x', { user: 'root' })
assert.equal((await files.getInfo('/of-root')).owner, 'root')
assert.equal(await files.makeDir('d'), true)
assert.equal(await files.makeDir('d'), false)
await files.rename('a/b.txt', 'd/c.txt')
assert.deepEqual((await files.list('d')).map((one) => [one.path, one.type, one.size]), [['/home/user/d/c.txt', FileType.FILE, 5]])
await assert.rejects(files.read('nothing'), NotFoundError)
const events = []
const watch = await files.watchDir('d', (event) => events.push(`${event.name} ${event.type}`))
await files.write('d/new', 'x')
const began = Date.now()
while (events.length < 3 && Date.now() - began < 10_000) await new Promise((resolve) => setTimeout(resolve, 20))
await watch.stop()
assert.deepEqual(events, ['new create', 'new chmod', 'new write'])
await files.remove('d')
assert.equal(await files.exists('d'), false)

const url = await sandbox.downloadUrl('m 2', { useSignatureExpiration: 60 })
assert.equal(await (await fetch(url)).text(), '2')
assert.equal((await fetch(await sandbox.downloadUrl('m 2', { useSignatureExpiration: -10 }))).status, 401)

const running = await commands.run('sleep 300', { background: true })
await sandbox.kill()
await assert.rejects(running.wait())
assert.equal(await sandbox.isRunning(), false)
console.log('done')
