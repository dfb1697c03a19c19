// A shell in a sandbox: a process with a terminal, whose output is a stream and whose input is sent piece by piece. It runs on when the
// page is left, and is found again by its number. What comes out of it is a guest's: the terminal shows it, and follows no link in it.

import { FitAddon } from '../vendor/xterm/addon-fit.mjs'
import { Terminal } from '../vendor/xterm/xterm.mjs'
import { button, empty, h, note, say } from './dom.js'
import { Processes, fromBase64, toBase64 } from './process.js'

/** bash, where there is one. */
const SHELL = 'command -v bash >/dev/null 2>&1 && exec bash -il; exec sh -il'

const THEME = {
  background: '#101214',
  foreground: '#dfe2e5',
  cursor: '#f0885a',
  cursorAccent: '#101214',
  selectionBackground: '#3b4754',
  black: '#20242a',
  red: '#f47067',
  green: '#6bc46d',
  yellow: '#daaa3f',
  blue: '#6cb6ff',
  magenta: '#dcbdfb',
  cyan: '#76c7c7',
  white: '#c9d1d9',
  brightBlack: '#6e7681',
  brightRed: '#ff938a',
  brightGreen: '#8ddb8c',
  brightYellow: '#eac55f',
  brightBlue: '#96d0ff',
  brightMagenta: '#e9d2fd',
  brightCyan: '#9fe3e3',
  brightWhite: '#f0f3f6',
}

/** Does `work`, in which the terminal makes elements with rules of style, which the page's policy refuses: it is given others, which hand
 *  the rules to the browser as style sheets. They go with `signal`. */
function withStyleSheets(signal, work) {
  const make = document.createElement
  document.createElement = (tag, options) =>
    tag === 'style' ? sheetElement(make.call(document, 'span'), signal) : make.call(document, tag, options)
  try {
    work()
  } finally {
    delete document.createElement
  }
}

function sheetElement(element, signal) {
  const sheet = new CSSStyleSheet()
  document.adoptedStyleSheets.push(sheet)
  signal.addEventListener('abort', () => {
    document.adoptedStyleSheets = document.adoptedStyleSheets.filter((one) => one !== sheet)
  })
  element.hidden = true
  Object.defineProperty(element, 'textContent', {
    get: () => '',
    set: (text) => {
      sheet.replaceSync(text)
    },
  })
  return element
}

function kept(id) {
  return `basalt.shell.${id}`
}

/** A shell, from its start or from when it is found again to its end. */
class Shell {
  constructor(processes, id, view, tell, signal) {
    Object.assign(this, { processes, id, view, tell, signal, pid: Number(sessionStorage.getItem(kept(id))) || 0 })
    this.input = []
    this.sends = false
    this.tries = 0
  }

  size() {
    return { cols: this.view.cols, rows: this.view.rows }
  }

  /** Starts one or finds it again, and again when the connection is lost, until it ends. */
  async run() {
    while (!this.signal.aborted) {
      try {
        const again = this.pid !== 0
        this.tell(again ? 'connecting to the shell that runs' : 'starting a shell')
        const each = (message) => this.message(message.event)
        if (again) {
          await this.processes.stream('Connect', { process: { pid: this.pid } }, each, this.signal)
        } else {
          const envs = { TERM: 'xterm-256color', COLORTERM: 'truecolor', LANG: 'C.UTF-8' }
          const process = { cmd: '/bin/sh', args: ['-c', SHELL], envs }
          await this.processes.stream('Start', { process, pty: { size: this.size() } }, each, this.signal)
        }
        return this.ended('the shell has ended')
      } catch (error) {
        if (this.signal.aborted) return undefined
        if (error.status === 404) return this.ended('that shell has ended')
        if (error.status === 401 || error.status === 403) return this.ended(`refused: ${error.message}`)
        if (this.pid === 0 && error.status >= 400 && error.status < 500) return this.ended(`no shell: ${error.message}`)
        await this.pause(error)
      }
    }
    return undefined
  }

  async pause(error) {
    // A browser says in its own words that there was no answer.
    const why = error instanceof TypeError || error.name === 'AbortError' ? 'no answer' : error.message.replace(/\.$/, '')
    const seconds = Math.min(10, 2 ** this.tries)
    this.tries += 1
    this.isConnected = false
    this.tell(`not connected (${why}): tries again in ${seconds} s`, 'wait')
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, seconds * 1000)
      this.signal.addEventListener(
        'abort',
        () => {
          clearTimeout(timer)
          resolve()
        },
        { once: true },
      )
    })
  }

  message(event) {
    if (event.start) {
      const isNew = this.pid === 0
      this.pid = event.start.pid
      this.tries = 0
      this.isConnected = true
      sessionStorage.setItem(kept(this.id), String(this.pid))
      this.tell(`connected, process ${this.pid}`, 'good')
      if (!isNew) this.redraw()
      this.send()
    } else if (event.data?.pty) {
      return this.written(fromBase64(event.data.pty))
    } else if (event.end) {
      const { exitCode = 0, status } = event.end
      this.how = exitCode === 0 ? 'the shell has ended' : `the shell has ended: ${status ?? `exit code ${exitCode}`}`
    }
    return undefined
  }

  /** Until it is on the screen, or nobody looks any more. */
  written(bytes) {
    return new Promise((resolve) => {
      const done = () => {
        this.signal.removeEventListener('abort', done)
        resolve()
      }
      this.signal.addEventListener('abort', done)
      this.view.write(bytes, done)
    })
  }

  /** Ends the shell that runs: nobody finds it again. */
  async kill() {
    if (this.pid === 0 || this.isOver) return
    try {
      await this.processes.call('SendSignal', { process: { pid: this.pid }, signal: 'SIGNAL_SIGKILL' })
    } catch (error) {
      if (error.status !== 404) note(`The old shell may run on: ${error.message}`, true)
    }
  }

  ended(why) {
    sessionStorage.removeItem(kept(this.id))
    this.isConnected = false
    this.isOver = true
    this.tell(this.how ?? why, 'over')
  }

  /** Input goes in the order in which it was typed: one piece is on its way at a time, and what comes meanwhile is the next one. */
  async send(bytes) {
    if (bytes) this.input.push(bytes)
    if (this.sends || !this.isConnected) return
    this.sends = true
    while (this.input.length > 0 && this.isConnected && !this.signal.aborted) {
      const some = this.input.splice(0)
      const all = new Uint8Array(some.reduce((sum, one) => sum + one.length, 0))
      some.reduce((at, one) => {
        all.set(one, at)
        return at + one.length
      }, 0)
      try {
        await this.processes.call('SendInput', { process: { pid: this.pid }, input: { pty: toBase64(all) } })
      } catch (error) {
        // Whether it has arrived is not known: what was typed is not typed twice. The stream says what is wrong.
        if (!this.signal.aborted) this.tell(`what was typed may be lost: ${error.message}`, 'wait')
      }
    }
    this.sends = false
  }

  /** What has the screen draws it again when its width changes. */
  async redraw() {
    await this.resize(this.size().cols - 1)
    await new Promise((resolve) => setTimeout(resolve, 150))
    await this.resize()
  }

  async resize(cols = this.size().cols) {
    if (!this.isConnected) return
    try {
      await this.processes.call('Update', { process: { pid: this.pid }, pty: { size: { ...this.size(), cols } } })
    } catch {
      // The next size, or the next connection, sets it.
    }
  }
}

/** Shows a terminal in a sandbox that runs. */
export function terminal(root, signal, sandbox, resume) {
  if (sandbox.state !== 'running') {
    root.append(
      empty(
        'This sandbox is paused',
        'A terminal needs one that runs. What ran in it goes on where it was.',
        button('Resume', resume, { class: 'primary' }),
      ),
    )
    return
  }
  const id = sandbox.sandboxID
  const processes = new Processes(id, sandbox.envdAccessToken)
  const status = h('span', { class: 'status', role: 'status' })
  const size = h('span', { class: 'quiet number' })
  const again = button('New shell', () => begin(true), { class: 'small' })
  const place = h('div', { class: 'screen' })
  const leave = h('span', { class: 'quiet wide' }, 'Shift+Esc leaves the terminal')
  root.append(h('div', { class: 'tools left' }, status, size, leave, again), place)

  const view = new Terminal({
    cursorBlink: true,
    fontFamily: 'ui-monospace, "SF Mono", "DejaVu Sans Mono", Menlo, Consolas, monospace',
    fontSize: 13,
    lineHeight: 1.15,
    scrollback: 10_000,
    theme: THEME,
    linkHandler: { activate: () => {} },
  })
  const fit = new FitAddon()
  view.loadAddon(fit)
  withStyleSheets(signal, () => view.open(place))
  fit.fit()
  // Tab and Escape are the shell's: this is the way out for who has no mouse.
  view.attachCustomKeyEventHandler((event) => {
    if (event.key !== 'Escape' || !event.shiftKey) return true
    if (event.type === 'keydown') again.focus()
    return false
  })

  let shell
  let life = new AbortController()
  const tell = (text, kind = '') => {
    say(status, text)
    status.className = `status ${kind}`
    again.textContent = kind === 'over' ? 'Start a new shell' : 'New shell'
  }
  const begin = (anew) => {
    life.abort()
    life = new AbortController()
    if (anew) {
      shell?.kill()
      sessionStorage.removeItem(kept(id))
      view.reset()
    }
    shell = new Shell(processes, id, view, tell, life.signal)
    shell.run()
    view.focus()
  }
  const encoder = new TextEncoder()
  view.onData((text) => shell.send(encoder.encode(text)))
  view.onBinary((text) => shell.send(Uint8Array.from(text, (char) => char.charCodeAt(0))))
  let timer
  view.onResize(({ cols, rows }) => {
    say(size, `${cols} × ${rows}`)
    clearTimeout(timer)
    timer = setTimeout(() => shell.resize(), 100)
  })
  say(size, `${view.cols} × ${view.rows}`)
  // Behind another tab it has no size, and keeps the one that it had.
  const watch = new ResizeObserver(() => place.clientWidth > 0 && fit.fit())
  watch.observe(place)
  signal.addEventListener('abort', () => {
    life.abort()
    clearTimeout(timer)
    watch.disconnect()
    view.dispose()
  })
  begin(false)
}
