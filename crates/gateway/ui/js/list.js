// All sandboxes, live: a row each, which is changed in place, so that nothing flickers and the focus stays where it is.

import { ask, history, metrics, repeat, sandboxes } from './api.js'
import { Sparkline } from './chart.js'
import { arrange, button, confirm, empty, h, note, say, set, snippet } from './dom.js'
import { age, bytes, duration, isNever, percent, variables } from './format.js'

/** How often the list is asked for, and what its sandboxes use. */
const LIST = 2500
const USE = 5000

/** So many points are kept of each: ten minutes. */
const POINTS = 120

/** So many histories are asked for at once. */
const AT_ONCE = 4

/** What the SDK is told, where there is nothing. */
export function first() {
  return [
    snippet([...variables(location), 'export E2B_API_KEY=e2b_…   # the key that you signed in with'].join('\n')),
    snippet('from e2b import Sandbox\n\nsandbox = Sandbox.create("base")\nprint(sandbox.commands.run("uname -a").stdout)'),
  ]
}

/** Whether somebody means it. */
export function isSure(id) {
  return confirm('Kill this sandbox?', `${id} ends now, with its files and all that runs in it. This cannot be undone.`, 'Kill it')
}

/** Pauses, resumes or kills, and says what has become of it. */
export async function act(verb, id) {
  try {
    if (verb === 'kill') {
      await ask('DELETE', `/sandboxes/${id}`)
      note(`${id} was killed.`)
    } else if (verb === 'pause') {
      await ask('POST', `/sandboxes/${id}/pause`, { body: {} })
      note(`${id} is paused: it keeps its memory and its files.`)
    } else {
      await ask('POST', `/sandboxes/${id}/resume`, { body: { timeout: 300 } })
      note(`${id} goes on, for 5 minutes if nobody asks for more.`)
    }
    return true
  } catch (failure) {
    note(`${id} could not be ${{ kill: 'killed', pause: 'paused', resume: 'resumed' }[verb]}: ${failure.message}`, true)
    return false
  }
}

/** How long a sandbox has left. */
export function left(sandbox, now = Date.now()) {
  if (sandbox.state !== 'running') return { text: '–', isSoon: false }
  if (isNever(sandbox.endAt)) return { text: 'no limit', isSoon: false }
  const seconds = -age(sandbox.endAt, now)
  return { text: duration(seconds), isSoon: seconds < 60 }
}

class Row {
  constructor(id, refresh) {
    Object.assign(this, { id, refresh, cpu: [], memory: [], busy: null })
    this.state = h('span', { class: 'state' })
    this.link = h('a', { href: `#/sandboxes/${id}`, class: 'mono' }, id)
    this.template = h('span')
    this.tags = h('span', { class: 'tags' })
    this.age = h('span', { class: 'number' })
    this.left = h('span', { class: 'number' })
    this.cpuLine = new Sparkline('cpu')
    this.memoryLine = new Sparkline('memory')
    this.cpuText = h('span', { class: 'number' }, '–')
    this.memoryText = h('span', { class: 'number' }, '–')
    this.hold = button('Pause', () => this.do(this.sandbox.state === 'running' ? 'pause' : 'resume'), { class: 'small' })
    this.kill = button('Kill', () => this.do('kill'), { class: 'small danger', 'aria-label': `Kill ${id}` })
    const cell = (name, ...content) => h('td', { class: name, role: 'cell' }, ...content)
    this.element = h(
      'tr',
      { role: 'row', 'data-id': id },
      cell('c-id', h('div', { class: 'id' }, this.state, this.link, this.tags)),
      cell('c-template', this.template),
      cell('c-age', this.age),
      cell('c-left', this.left),
      cell('c-cpu', this.cpuLine.element, this.cpuText),
      cell('c-memory', this.memoryLine.element, this.memoryText),
      cell('c-actions', this.hold, this.kill),
    )
  }

  async do(verb) {
    if (this.busy !== null || (verb === 'kill' && !(await isSure(this.id)))) return
    this.busy = verb
    this.update(this.sandbox)
    await act(verb, this.id)
    this.busy = null
    this.update(this.sandbox)
    this.refresh()
  }

  update(sandbox) {
    this.sandbox = sandbox
    const runs = sandbox.state === 'running'
    const word = { pause: 'pausing', resume: 'resuming', kill: 'ending' }[this.busy] ?? sandbox.state
    set(this.state, 'class', `state ${this.busy ? 'busy' : sandbox.state}`)
    set(this.state, 'title', word)
    say(this.state, word)
    say(this.template, sandbox.alias ?? sandbox.templateID.slice(0, 12))
    say(this.hold, runs ? 'Pause' : 'Resume')
    set(this.hold, 'aria-label', `${runs ? 'Pause' : 'Resume'} ${this.id}`)
    this.hold.disabled = this.kill.disabled = this.busy !== null
    const tags = Object.entries(sandbox.metadata ?? {}).map(([key, value]) => `${key}=${value}`)
    const text = tags.join('\n')
    if (this.tagText !== text) {
      this.tagText = text
      const shown = tags.slice(0, 2).map((tag) => h('span', { class: 'tag', title: tag }, tag))
      if (tags.length > 2) shown.push(h('span', { class: 'tag', title: tags.slice(2).join('\n') }, `+${tags.length - 2}`))
      this.tags.replaceChildren(...shown)
    }
    set(this.element, 'class', runs ? null : 'paused')
    this.tick()
  }

  tick(now = Date.now()) {
    const { text, isSoon } = left(this.sandbox, now)
    say(this.age, duration(age(this.sandbox.startedAt, now)))
    say(this.left, text)
    set(this.left, 'class', isSoon ? 'number soon' : 'number')
  }

  /** What was measured, the oldest first. */
  measured(all) {
    for (const one of all) {
      const at = one.timestampUnix
      if (at <= (this.cpu.at(-1)?.at ?? 0)) continue
      this.cpu.push({ at, value: one.cpuUsedPct })
      this.memory.push({ at, value: one.memUsed })
    }
    this.cpu.splice(0, this.cpu.length - POINTS)
    this.memory.splice(0, this.memory.length - POINTS)
    const last = all.at(-1)
    if (last === undefined) return
    this.cpuLine.draw(this.cpu, 100)
    this.memoryLine.draw(this.memory, last.memTotal)
    say(this.cpuText, percent(last.cpuUsedPct))
    say(this.memoryText, bytes(last.memUsed))
    set(this.memoryText, 'title', `of ${bytes(last.memTotal)}`)
  }

  stopped() {
    say(this.cpuText, '–')
    say(this.memoryText, '–')
  }
}

/** Whether a sandbox has what is looked for in it. */
function matches(sandbox, words, state) {
  if (state !== '' && sandbox.state !== state) return false
  const metadata = Object.entries(sandbox.metadata ?? {}).map(([key, value]) => `${key}=${value}`)
  const text = [sandbox.sandboxID, sandbox.templateID, sandbox.alias ?? '', ...metadata].join(' ').toLowerCase()
  return words.every((word) => text.includes(word))
}

function summary(all, isCut) {
  if (all.length === 0) return ''
  const running = all.filter((one) => one.state === 'running')
  const cpus = running.reduce((sum, one) => sum + one.cpuCount, 0)
  const memory = running.reduce((sum, one) => sum + one.memoryMB, 0)
  const parts = [`${running.length} running`, `${all.length - running.length} paused`]
  if (running.length) parts.push(`${cpus} vCPUs`, bytes(memory * 1024 * 1024))
  if (isCut) parts.push(`the newest ${all.length} are shown`)
  return parts.join(' · ')
}

/** Shows the list. */
export function list(root, signal) {
  const rows = new Map()
  const histories = []
  let all = []
  const counts = h('p', { class: 'counts' }, '')
  const search = h('input', {
    type: 'search',
    placeholder: 'Find by id, template, metadata',
    'aria-label': 'Find sandboxes',
    on: { input: () => draw() },
  })
  const option = (value, text) => h('option', { value }, text)
  const state = h(
    'select',
    { 'aria-label': 'State', on: { change: () => draw() } },
    option('', 'All states'),
    option('running', 'Running'),
    option('paused', 'Paused'),
  )
  const heads = ['Sandbox', 'Template', 'Age', 'Time left', 'CPU', 'Memory', ''].map((text, index) =>
    h(
      'th',
      { scope: 'col', role: 'columnheader', class: index > 1 && index < 4 ? 'right' : null },
      text || h('span', { class: 'unseen' }, 'Actions'),
    ),
  )
  const body = h('tbody', { role: 'rowgroup' })
  const table = h(
    'table',
    { class: 'sandboxes', role: 'table', 'aria-label': 'Sandboxes', hidden: true },
    h('thead', { role: 'rowgroup' }, h('tr', { role: 'row' }, ...heads)),
    body,
  )
  const place = h('div')
  root.append(
    h('div', { class: 'bar' }, h('h1', {}, 'Sandboxes'), counts, h('div', { class: 'tools' }, search, state)),
    table,
    place,
  )

  let drawn = ''
  function draw(isCut = false) {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean)
    const found = all.filter((one) => matches(one, words, state.value))
    arrange(
      body,
      found.map((one) => rows.get(one.sandboxID).element),
    )
    say(counts, summary(all, isCut))
    table.hidden = found.length === 0
    const what = all.length === 0 ? 'none' : found.length === 0 ? 'no match' : ''
    if (what !== drawn) {
      drawn = what
      if (what === 'none') {
        place.replaceChildren(
          empty(
            'No sandboxes yet',
            'They appear here by themselves. Make the first one with the SDK, or from a template:',
            ...first(),
            h('p', {}, h('a', { href: '#/templates' }, 'See the templates')),
          ),
        )
      } else if (what === 'no match') {
        place.replaceChildren(
          empty(
            'Nothing matches',
            'No sandbox has all of these words and this state.',
            button('Show all', () => {
              search.value = ''
              state.value = ''
              draw()
            }),
          ),
        )
      } else {
        place.replaceChildren()
      }
    }
  }

  const refresh = repeat(LIST, signal, async () => {
    const got = await sandboxes()
    if (signal.aborted) return
    all = got.all
    const there = new Set(all.map((one) => one.sandboxID))
    for (const id of rows.keys()) if (!there.has(id)) rows.delete(id)
    for (const one of all) {
      let row = rows.get(one.sandboxID)
      if (row === undefined) {
        row = new Row(one.sandboxID, () => refresh())
        rows.set(one.sandboxID, row)
        histories.push(row)
      }
      row.update(one)
    }
    draw(got.isCut)
    askHistories()
  })

  let asking = 0
  function askHistories() {
    while (asking < AT_ONCE && histories.length > 0 && !signal.aborted) {
      const row = histories.shift()
      asking += 1
      history(row.id, 600)
        .then(
          (points) => row.measured(points),
          () => {},
        )
        .finally(() => {
          asking -= 1
          askHistories()
        })
    }
  }

  repeat(USE, signal, async () => {
    const ids = all.filter((one) => one.state === 'running').map((one) => one.sandboxID)
    const found = ids.length ? await metrics(ids) : {}
    for (const [id, row] of rows) found[id] ? row.measured([found[id]]) : row.stopped()
  })

  const clock = setInterval(() => rows.forEach((row) => row.tick()), 1000)
  signal.addEventListener('abort', () => clearInterval(clock))
}
