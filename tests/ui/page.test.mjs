// The gateway's page in a real browser, against a real gateway whose node has no machines (crates/gateway/examples/fake_gateway.rs): what a person
// does with it, what a hostile guest writes into it, and a gateway that goes away. UI_SERVE is that program, UI_BROWSER the browser;
// UI_SHOTS is a directory for pictures of all parts.

import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { existsSync, mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { after, before, test } from 'node:test'

import puppeteer from 'puppeteer-core'

/** For what has to come, on a machine that does other things. */
const SOON = 60_000

const HOSTILE = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>'

let server
let browser
let page
/** What the browser has said that it must not: errors, refusals of the policy, requests to others. */
const wrong = []
/** The gateway is away on purpose. */
let isAway = false

/** The program with the gateway. */
class Server {
  static async start() {
    const server = new Server()
    server.state = mkdtempSync(join(tmpdir(), 'basalt-ui-'))
    server.process = spawn(process.env.UI_SERVE, [server.state], { stdio: ['pipe', 'pipe', 'inherit'] })
    server.lines = createInterface({ input: server.process.stdout })[Symbol.asyncIterator]()
    const { url, key } = JSON.parse(await server.line('{'))
    Object.assign(server, { url, key })
    return server
  }

  /** The next line that begins so. */
  async line(beginning) {
    for (;;) {
      const { value, done } = await this.lines.next()
      assert.ok(!done, `the server has ended, and never said ${beginning}`)
      if (value.startsWith(beginning)) return value
    }
  }

  async tell(text) {
    this.process.stdin.write(`${text}\n`)
    await this.line('done')
  }

  async api(method, path, body) {
    const headers = { 'X-API-Key': this.key, 'Content-Type': 'application/json' }
    const response = await fetch(this.url + path, { method, headers, body: body && JSON.stringify(body) })
    const text = await response.text()
    assert.ok(response.ok, `${method} ${path}: ${response.status} ${text}`)
    return text && JSON.parse(text)
  }

  async make(metadata = {}) {
    // A shell is this machine's: it neither reads nor writes what is in its user's home.
    const envVars = { HOME: '/nonexistent' }
    return (await this.api('POST', '/v2/sandboxes', { templateID: 'base', timeout: 3600, metadata, envVars })).sandboxID
  }

  async end() {
    const ended = new Promise((resolve) => this.process.once('exit', resolve))
    this.process.kill()
    await ended
    rmSync(this.state, { recursive: true, force: true })
  }
}

/** Waits until a function of the page's says yes. */
const until = (what, is, ...values) =>
  page.waitForFunction(is, { timeout: SOON, polling: 50 }, ...values).catch(async (error) => {
    await shot('failed')
    assert.fail(`${what} does not happen: ${error.message}; the page says:\n${await text('body')}`)
  })

/** Clicks what has this role and this name, as somebody would who does not see the page. */
const click = async (role, name) => {
  const found = await page.waitForSelector(`aria/${name}[role="${role}"]`, { timeout: SOON, visible: true })
  await found.click()
}

const go = (hash) =>
  page.evaluate((to) => {
    location.hash = to
  }, hash)
const text = (selector) => page.$eval(selector, (element) => element.innerText)
const row = (id) => `tr[data-id="${id}"]`

/** What is on the terminal's screen. */
const screen = () =>
  page.$$eval('.xterm-rows > div', (rows) => rows.map((one) => one.textContent.replaceAll('\u00a0', ' ').trimEnd()).join('\n'))
const onScreen = (what) =>
  until(
    `"${what}" on the screen`,
    (wanted) => {
      const rows = [...document.querySelectorAll('.xterm-rows > div')].map((one) => one.textContent.replaceAll('\u00a0', ' '))
      return rows.some((one) => one.includes(wanted))
    },
    what,
  )
const type = (line) => page.keyboard.type(`${line}\n`)

const shot = async (name) => {
  if (process.env.UI_SHOTS) await page.screenshot({ path: join(process.env.UI_SHOTS, `${name}.png`) })
}

before(async () => {
  server = await Server.start()
  browser = await puppeteer.launch({
    executablePath: process.env.UI_BROWSER ?? '/usr/bin/chromium',
    // Tests run as root, for whom it has no sandbox.
    args: ['--no-sandbox', '--disable-dev-shm-usage', '--disable-gpu', '--lang=en-US'],
  })
  page = await browser.newPage()
  page.setDefaultTimeout(SOON)
  await page.setViewport({ width: 1280, height: 800 })
  page.on('pageerror', (error) => wrong.push(`an error: ${error.message}`))
  page.on('dialog', async (dialog) => {
    wrong.push(`a dialog: ${dialog.message()}`)
    await dialog.dismiss()
  })
  page.on('console', (message) => {
    // A request that is refused or not answered is in the console, too, and is meant here where a test makes it so.
    const isMeant = /status of 40[14]|status of 502/.test(message.text()) || (isAway && /ERR_/.test(message.text()))
    if (message.type() === 'error' && !isMeant) wrong.push(`in the console: ${message.text()}`)
  })
  page.on('request', (request) => {
    if (!request.url().startsWith(server.url)) wrong.push(`a request to ${request.url()}`)
  })
})

after(async () => {
  await browser?.close()
  await server?.end()
})

/** After every test: nothing that a guest has written has done anything, and the browser has refused nothing. */
const nothingWrong = async () => {
  assert.deepEqual(wrong, [])
  assert.equal(await page.evaluate(() => window.hit), undefined)
}

const check = (name, work) =>
  test(name, { timeout: 240_000 }, async () => {
    await work()
    await nothingWrong()
  })

check('a wrong key is refused with what to do, and a right one is kept for this tab alone', async () => {
  await page.goto(`${server.url}/`)
  assert.equal(page.url(), `${server.url}/ui/`)
  await page.waitForSelector('#key')
  assert.equal(await page.evaluate(() => document.activeElement.id), 'key')
  await shot('login')
  await click('button', 'Sign in')
  await until('the first error', () => document.querySelector('.error').textContent.includes('Paste a key'))
  await page.type('#key', `e2b_${'0'.repeat(64)}`)
  await page.keyboard.press('Enter')
  await until('the second error', () => document.querySelector('.error').textContent.includes('does not know this key'))
  assert.equal(await page.evaluate(() => sessionStorage.length), 0)
  await page.type('#key', server.key)
  await page.keyboard.press('Enter')
  await page.waitForSelector('.empty')
  assert.match(await text('.empty'), /No sandboxes yet[^]*Sandbox\.create\("base"\)/)
  await shot('empty')
  const kept = await page.evaluate(() => [sessionStorage.length, localStorage.length, document.cookie])
  assert.deepEqual(kept, [1, 0, ''])
  assert.deepEqual(await browser.cookies(), [])
})

check('the SDKs are told the domain at api.DOMAIN, and the address everywhere else', async () => {
  const told = (address) =>
    page.evaluate(async (text) => (await import('/ui/js/format.js')).variables(new URL(text)).join('; '), address)
  assert.equal(await told('https://api.sb.example:8443/ui/'), 'export E2B_DOMAIN=sb.example:8443')
  const names = ['E2B_API_URL', 'E2B_SANDBOX_URL', 'E2B_VOLUME_API_URL']
  for (const address of ['http://127.0.0.1:3000', 'https://gateway.example', 'http://api.sb.example']) {
    assert.equal(await told(`${address}/ui/`), names.map((name) => `export ${name}=${address}`).join('; '))
  }
})

check('sandboxes appear by themselves, with what they use, and are paused, resumed, found and killed', async () => {
  const id = await server.make({ team: 'search' })
  const other = await server.make({ [HOSTILE]: HOSTILE })
  await page.waitForSelector(row(other))
  const before = await page.$(row(id))
  // What others have written is text.
  assert.ok((await text(row(other))).includes('<img src=x'))
  assert.equal(await page.$(`${row(other)} img`), null)
  await until('a measurement', (selector) => /%/.test(document.querySelector(`${selector} .c-cpu`).textContent), row(id))
  assert.match(await text(`${row(id)} .c-memory`), /\d+ MiB/)
  assert.match(await text(`${row(id)} .c-left`), /5\d m \d\d s/)
  await shot('list')

  await page.type('input[type=search]', 'team=search')
  await until('one row', () => document.querySelectorAll('tr[data-id]').length === 1)
  await page.type('input[type=search]', ' nothing')
  await until('no row', () => document.querySelector('.empty')?.textContent.includes('Nothing matches'))
  await click('button', 'Show all')
  await until('both rows', () => document.querySelectorAll('tr[data-id]').length === 2)

  await click('button', `Pause ${id}`)
  await until('a pause', (selector) => document.querySelector(`${selector} .state`).textContent === 'paused', row(id))
  assert.equal((await server.api('GET', `/sandboxes/${id}`)).state, 'paused')
  await click('button', `Resume ${id}`)
  await until('it goes on', (selector) => document.querySelector(`${selector} .state`).textContent === 'running', row(id))
  // The row is the same element all the time: nothing was drawn anew.
  assert.ok(await page.evaluate((element) => element.isConnected, before))

  await click('button', `Kill ${other}`)
  await page.waitForSelector('dialog[open]')
  await shot('kill')
  await page.keyboard.press('Escape')
  await until('no dialog', () => !document.querySelector('dialog'))
  assert.equal((await server.api('GET', '/v2/sandboxes')).length, 2)
  await click('button', `Kill ${other}`)
  await page.waitForSelector('dialog[open]')
  await page.keyboard.press('Enter')
  await until('its row goes', (selector) => !document.querySelector(selector), row(other))
  assert.deepEqual(
    (await server.api('GET', '/v2/sandboxes')).map((one) => one.sandboxID),
    [id],
  )
})

check('one sandbox tells what it is, what it uses, and what its start was made of', async () => {
  const [{ sandboxID: id }] = await server.api('GET', '/v2/sandboxes')
  await go(`#/sandboxes/${id}`)
  await page.waitForSelector('.chart')
  await until('charts with lines', () =>
    [...document.querySelectorAll('.chart .line')].every((line) => (line.getAttribute('d') ?? '') !== ''),
  )
  assert.match(await text('.charts'), /CPU[^]*%[^]*Memory[^]*MiB/)
  assert.match(await text('aside'), /base[^]*2 vCPUs, 512 MiB[^]*team\s+search/)
  await page.evaluate(() => document.querySelector('.drawing').focus())
  await page.keyboard.press('ArrowLeft')
  assert.match(await text('.chart .value'), /% at \d/)
  await shot('overview')
  await click('link', 'Start')
  await page.waitForSelector('.trace tbody tr')
  const steps = await page.$$eval('.trace tbody th', (all) => all.map((one) => one.textContent))
  assert.deepEqual([steps[0], steps.length, steps.includes('VM restored')], ['create and start', 9, true])
  // A later part begins further to the right.
  const at = await page.$$eval('.span', (all) => all.map((one) => one.getBoundingClientRect().left))
  assert.ok(at[1] < at[2] && at[2] < at[3], String(at))
  await shot('trace')
})

check('a log is shown as it is, whatever is in it', async () => {
  const [{ sandboxID: id }] = await server.api('GET', '/v2/sandboxes')
  await server.tell(`log ${HOSTILE}`)
  await go(`#/sandboxes/${id}/logs`)
  await until('the line', (line) => document.querySelector('.lines .text')?.textContent === line, HOSTILE)
  assert.equal(await page.$('.lines img, .lines script'), null)
  await page.type('.logs input[type=search]', 'not in it')
  await until('no line', () => document.querySelector('.logs .empty')?.textContent.includes('No such lines'))
  await shot('logs')
})

let shell

check('a terminal runs a shell, and follows the size of the window', async () => {
  const [{ sandboxID: id }] = await server.api('GET', '/v2/sandboxes')
  await go(`#/sandboxes/${id}/terminal`)
  await until('a shell', () => document.querySelector('.status.good'))
  await type("PS1='$ '; echo $((6 * 7))x")
  await onScreen('42x')
  await type('stty size')
  const size = async () => (await text('.terminal .number')).split(' × ').map(Number)
  const [columns, rows] = await size()
  await onScreen(`${rows} ${columns}`)
  await page.setViewport({ width: 900, height: 600 })
  await until('another size', (old) => !document.querySelector('.terminal .number').textContent.startsWith(`${old} `), columns)
  const smaller = await size()
  assert.ok(smaller[0] < columns && smaller[1] < rows, `${smaller}`)
  const wanted = `${smaller[1]} ${smaller[0]}`
  await type(`until [ "$(stty size)" = "${wanted}" ]; do sleep 0.1; done; stty size; echo size "is" said`)
  await onScreen('size is said')
  assert.ok((await screen()).includes(`${smaller[1]} ${smaller[0]}`), await screen())
  await page.setViewport({ width: 1280, height: 800 })
  await type("printf '\\033[31mred\\033[0m \\033[38;2;90;200;250mblue\\033[0m\\n'")
  await onScreen('red blue')
  const colour = await page.evaluate(() => {
    const found = [...document.querySelectorAll('.xterm-rows span')].find((one) => one.textContent.startsWith('blue'))
    return getComputedStyle(found).color
  })
  assert.equal(colour, 'rgb(90, 200, 250)')
  await shot('terminal')
  shell = await text('.status')
})

check('what a guest writes to its terminal is text', async () => {
  await type(`printf '%s\\n' '${HOSTILE}'`)
  await onScreen('onerror="window.hit=1"')
  assert.equal(await page.$('.xterm img, .xterm script'), null)
  // A title, a link and a wish for the clipboard.
  await type(
    "printf '\\033]0;owned\\007\\033]8;;javascript:window.hit=1\\033\\\\click me\\033]8;;\\033\\\\\\033]52;c;aGk=\\007 and so on\\n'",
  )
  await onScreen('click me and so on')
  assert.match(await page.title(), /^[0-9a-f]{12} · Basalt$/)
  const link = await page.evaluateHandle(() =>
    [...document.querySelectorAll('.xterm-rows > div')].findLast((one) => one.textContent.startsWith('click')),
  )
  await link.asElement().click({ offset: { x: 10, y: 8 } })
  await new Promise((resolve) => setTimeout(resolve, 300))
  assert.equal((await browser.pages()).filter((one) => one.url() !== 'about:blank').length, 1)
})

check('a shell runs on behind other tabs and when the page is loaded anew, until it ends', async () => {
  await click('link', 'Overview')
  await page.waitForSelector('.charts')
  await click('link', 'Terminal')
  await onScreen('click me')
  await page.focus('.xterm textarea')
  await type('cd /usr; marker=kept; echo it "is" kept')
  await onScreen('it is kept')
  await page.reload()
  await until('the shell again', (old) => document.querySelector('.status')?.textContent === old, shell)
  // What waits for input says so on the new screen.
  await onScreen('$ ')
  await page.focus('.xterm textarea')
  await type('echo $marker in $PWD')
  await onScreen('kept in /usr')
  // Tab is the shell's, and Shift+Escape leads out.
  await page.keyboard.down('Shift')
  await page.keyboard.press('Escape')
  await page.keyboard.up('Shift')
  assert.equal(await page.evaluate(() => document.activeElement.textContent), 'New shell')
  await page.focus('.xterm textarea')
  await type('exit 3')
  await until('its end', () => document.querySelector('.status.over'))
  assert.match(await text('.status'), /ended/)
  await click('button', 'Start a new shell')
  await until(
    'another shell',
    (old) => document.querySelector('.status.good') && document.querySelector('.status').textContent !== old,
    shell,
  )
  shell = await text('.status')
})

check('a new shell ends the one before', async () => {
  await page.focus('.xterm textarea')
  // It ignores what a terminal's end tells it.
  await type("trap '' HUP TERM; echo pid=$$.")
  await until('its number', () => /pid=\d+\./.test(document.querySelector('.xterm-rows').textContent))
  const pid = Number(/pid=(\d+)\./.exec(await screen())[1])
  process.kill(pid, 0)
  await click('button', 'New shell')
  await until(
    'another shell',
    (old) => document.querySelector('.status.good') && document.querySelector('.status').textContent !== old,
    shell,
  )
  shell = await text('.status')
  for (let waits = 0; existsSync(`/proc/${pid}`); waits += 50) {
    assert.ok(waits < SOON, `the shell ${pid} runs on`)
    await new Promise((resolve) => setTimeout(resolve, 50))
  }
})

check('a gateway that goes away is told of, and found again with the shell', async () => {
  await page.focus('.xterm textarea')
  await type('marker=before; echo it "is" set')
  await onScreen('it is set')
  isAway = true
  await server.tell('stop')
  await until('the trouble', () => !document.getElementById('trouble').hidden)
  assert.match(await text('#trouble'), /does not answer[^]*basalt-gateway/)
  assert.match(await text('.status'), /not connected/)
  await shot('away')
  await server.tell('start')
  await until('no trouble', () => document.getElementById('trouble').hidden)
  await until('the shell again', (old) => document.querySelector('.status').textContent === old, shell)
  isAway = false
  await page.focus('.xterm textarea')
  await type('echo $marker and after')
  await onScreen('before and after')
})

check('a sandbox that ends elsewhere is said to be gone', async () => {
  const [{ sandboxID: id }] = await server.api('GET', '/v2/sandboxes')
  await server.api('DELETE', `/sandboxes/${id}`)
  await until('it is gone', () => document.querySelector('.empty')?.textContent.includes('not there any more'))
  await click('link', 'See all sandboxes')
  await until('none', () => document.querySelector('.empty')?.textContent.includes('No sandboxes yet'))
})

check('templates and snapshots start sandboxes', async () => {
  await click('link', 'Templates')
  await page.waitForSelector('table.templates tbody tr')
  await shot('templates')
  await click('button', 'Start a sandbox of base')
  await page.waitForSelector('.charts')
  const [{ sandboxID: id }] = await server.api('GET', '/v2/sandboxes')
  await click('link', 'Snapshots')
  await until('no snapshots', () => document.querySelector('.empty')?.textContent.includes('create_snapshot'))
  const { snapshotID } = await server.api('POST', `/sandboxes/${id}/snapshots`, { name: 'ready' })
  await go('#/templates')
  await go('#/snapshots')
  await until('the snapshot', (name) => document.querySelector('table.snapshots')?.textContent.includes(name), snapshotID)
  await shot('snapshots')
  await click('button', `Delete ${snapshotID}`)
  await page.waitForSelector('dialog[open]')
  await page.keyboard.press('Enter')
  await until('it goes', () => document.querySelectorAll('table.snapshots tbody tr').length === 0)
  assert.deepEqual(await server.api('GET', '/snapshots'), [])
})

check('pools tell what is ready: interfaces, and how much of each template and snapshot is in memory', async () => {
  const [{ sandboxID: id }] = await server.api('GET', '/v2/sandboxes')
  const { snapshotID } = await server.api('POST', `/sandboxes/${id}/snapshots`, { name: 'warm' })
  await click('link', 'Pools')
  await until('three rows', () => document.querySelectorAll('table.pools tbody tr').length === 3)
  assert.match(await text('.counts'), /^5 of 8 network interfaces ready · 75 MiB of 200 MiB in memory$/)
  const told = await page.$$eval('table.pools tbody tr', (all) => all.map((one) => one.innerText.replace(/\s+/g, ' ').trim()))
  assert.deepEqual(told, [
    'base template 75 MiB of 100 MiB',
    'offline template 0 of 100 MiB',
    'warm snapshot of 100 MiB: not known',
  ])
  assert.deepEqual(await page.$$eval('table.pools meter', (all) => all.map((one) => one.value)), [0.75, 0, 0])
  await shot('pools')
  await server.api('DELETE', `/templates/${snapshotID}`)
  // Looked at anew, it is not there any more.
  await go('#/snapshots')
  await go('#/pools')
  await until('two rows', () => document.querySelectorAll('table.pools tbody tr').length === 2)
})

check('it fits a phone, and its text has contrast in both schemes', async () => {
  const [{ sandboxID: id }] = await server.api('GET', '/v2/sandboxes')
  await page.setViewport({ width: 390, height: 800 })
  for (const [hash, wanted] of [
    ['#/sandboxes', row(id)],
    ['#/templates', 'table.templates tr'],
    ['#/snapshots', '.empty'],
    ['#/pools', 'table.pools tr'],
    [`#/sandboxes/${id}`, '.charts'],
    [`#/sandboxes/${id}/terminal`, '.xterm'],
    [`#/sandboxes/${id}/logs`, '.logs'],
    [`#/sandboxes/${id}/trace`, '.trace'],
  ]) {
    await go(hash)
    await page.waitForSelector(wanted)
    const [content, width] = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth])
    assert.ok(content <= width, `${hash} is ${content} wide`)
    await shot(`phone${hash.replaceAll(/[#/]+/g, '-').replace(id, 'one')}`)
  }
  for (const scheme of ['light', 'dark']) {
    await page.emulateMediaFeatures([{ name: 'prefers-color-scheme', value: scheme }])
    const ratios = await page.evaluate(() => {
      const style = getComputedStyle(document.documentElement)
      const light = (name) => {
        const parts = style
          .getPropertyValue(name)
          .trim()
          .match(/[0-9a-f]{2}/gi)
          .map((part) => Number.parseInt(part, 16) / 255)
        const [r, g, b] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
        return 0.2126 * r + 0.7152 * g + 0.0722 * b
      }
      const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05)
      const all = []
      for (const ground of ['--ground', '--raised', '--sunken']) {
        for (const text of ['--text', '--quiet', '--accent', '--good', '--warn', '--bad'])
          all.push([text, ground, ratio(text, ground)])
      }
      all.push(['--on-accent', '--accent', ratio('--on-accent', '--accent')])
      return all
    })
    for (const [text, ground, ratio] of ratios) assert.ok(ratio >= 4.5, `${scheme}: ${text} on ${ground} is ${ratio}`)
  }
})

check('who signs out leaves nothing behind', async () => {
  await page.setViewport({ width: 1280, height: 800 })
  await click('button', 'Sign out')
  await page.waitForSelector('#key')
  assert.equal(await page.evaluate(() => sessionStorage.length), 0)
  await page.reload()
  await page.waitForSelector('#key')
})
