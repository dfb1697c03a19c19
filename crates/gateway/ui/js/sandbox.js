// One sandbox: what it is, what it uses, a terminal in it, its log, and what its start was made of.

import { Failure, ask, history, repeat } from './api.js'
import { Chart } from './chart.js'
import { button, empty, h, say, set } from './dom.js'
import { age, bytes, duration, moment, percent } from './format.js'
import { act, isSure, left } from './list.js'
import { logs } from './logs.js'
import { terminal } from './terminal.js'
import { trace } from './trace.js'

const TABS = [
  { name: 'overview', title: 'Overview', show: overview },
  { name: 'terminal', title: 'Terminal', show: terminal },
  { name: 'logs', title: 'Logs', show: (root, signal, sandbox) => logs(root, signal, sandbox.sandboxID) },
  { name: 'trace', title: 'Start', show: (root, signal, sandbox) => trace(root, signal, sandbox.sandboxID) },
]

const RANGES = [
  [600, '10 min'],
  [3600, '1 h'],
  [86400, '24 h'],
]

/** Shows it. */
export function sandbox(root, signal, id, wanted) {
  const state = h('span', { class: 'state' })
  const title = h('h1', { class: 'mono' }, id)
  const facts = h('p', { class: 'counts' })
  const hold = button('Pause', () => run(known.state === 'running' ? 'pause' : 'resume'))
  const kill = button('Kill', () => run('kill'), { class: 'danger' })
  const link = (tab) => h('a', { href: `#/sandboxes/${id}/${tab.name}`, 'data-tab': tab.name }, tab.title)
  const tabs = h('nav', { class: 'tabs', 'aria-label': 'Parts of the sandbox' }, ...TABS.map(link))
  const place = h('div', { class: 'tab' })
  const top = h(
    'div',
    { class: 'bar' },
    h('a', { href: '#/sandboxes', class: 'back', 'aria-label': 'All sandboxes' }, '‹'),
    state,
    title,
    facts,
    h('div', { class: 'tools' }, hold, kill),
  )
  root.append(top, tabs, place)
  top.hidden = tabs.hidden = true

  let known
  let open = ''
  let opened = []
  signal.addEventListener('abort', () => closeAll())

  async function run(verb) {
    if (verb === 'kill' && !(await isSure(id))) return
    hold.disabled = kill.disabled = true
    const done = await act(verb, id)
    hold.disabled = kill.disabled = false
    if (done && verb === 'kill') location.hash = '#/sandboxes'
    else refresh()
  }

  function tick() {
    if (known === undefined) return
    const { text, isSoon } = left(known)
    const parts = [known.alias ?? known.templateID.slice(0, 12), `${duration(age(known.startedAt))} old`]
    if (known.state === 'running') parts.push(text === 'no limit' ? text : `${text} left`)
    say(facts, parts.join(' · '))
    set(facts, 'class', isSoon ? 'counts soon' : 'counts')
  }

  /** Opens the tab that is wanted. The terminal stays behind the others as it is, as long as the sandbox's state does. */
  function show() {
    const tab = TABS.find((one) => one.name === wanted) ?? TABS[0]
    for (const one of tabs.children) set(one, 'aria-current', one.dataset.tab === tab.name ? 'page' : null)
    const key = tab.name === 'terminal' ? `${tab.name} ${known.state}` : tab.name
    if (key === open) return
    open = key
    closeAll((one) => one.key.startsWith('terminal') && (one.key === key || tab.name !== 'terminal'))
    for (const one of opened) one.content.hidden = one.key !== key
    if (opened.some((one) => one.key === key)) return
    const one = { key, content: h('div', { class: tab.name }), life: new AbortController() }
    opened.push(one)
    place.append(one.content)
    tab.show(one.content, one.life.signal, known, () => run('resume'))
  }

  /** Closes all tabs but those that are to be kept. */
  function closeAll(isKept = () => false) {
    for (const one of opened.filter((one) => !isKept(one))) {
      one.life.abort()
      one.content.remove()
    }
    opened = opened.filter(isKept)
  }

  const main = document.getElementById('main')
  main.addEventListener(
    'tab',
    (event) => {
      event.preventDefault()
      wanted = location.hash.split('/')[3]
      if (known) show()
    },
    { signal },
  )

  function gone() {
    closeAll()
    open = ''
    known = undefined
    top.hidden = tabs.hidden = true
    place.replaceChildren(
      empty(
        'This sandbox is not there any more',
        `${id} was killed, or its time was over. What it has written is gone with it.`,
        h('a', { href: '#/sandboxes', class: 'button' }, 'See all sandboxes'),
      ),
    )
  }

  const refresh = repeat(2500, signal, async () => {
    try {
      known = await ask('GET', `/sandboxes/${id}`)
    } catch (failure) {
      if (failure instanceof Failure && failure.status === 404 && !signal.aborted) gone()
      throw failure
    }
    if (signal.aborted) return
    top.hidden = tabs.hidden = false
    set(state, 'class', `state ${known.state}`)
    say(state, known.state)
    say(hold, known.state === 'running' ? 'Pause' : 'Resume')
    tick()
    show()
  })
  const clock = setInterval(tick, 1000)
  signal.addEventListener('abort', () => clearInterval(clock))
}

function fact(name, value, mono = false) {
  return [h('dt', {}, name), h('dd', { class: mono ? 'mono' : null }, value)]
}

function overview(root, signal, first) {
  let seconds = age(first.startedAt) < 600 ? 600 : 3600
  const cpu = new Chart('CPU', 'cpu', percent)
  const memory = new Chart('Memory', 'memory', bytes)
  const ranges = h(
    'div',
    { class: 'ranges', role: 'group', 'aria-label': 'Time' },
    ...RANGES.map(([value, text]) => button(text, () => choose(value), { 'data-range': value, class: 'small' })),
  )
  const disk = h('dd')
  const details = h(
    'dl',
    { class: 'facts' },
    ...fact('Template', first.alias ? `${first.alias} (${first.templateID.slice(0, 12)})` : first.templateID),
    ...fact('Machine', `${first.cpuCount} vCPU${first.cpuCount === 1 ? '' : 's'}, ${bytes(first.memoryMB * 1024 * 1024)} memory`),
    h('dt', {}, 'Disk'),
    disk,
    ...fact('Made', moment(first.startedAt)),
    ...fact('At its end', first.lifecycle?.onTimeout === 'pause' ? 'paused' : 'killed'),
    ...fact('Ports', first.network?.allowPublicTraffic === false ? 'with the traffic token' : 'public'),
    ...fact('envd', first.envdVersion),
  )
  const metadata = Object.entries(first.metadata ?? {})
  const about =
    metadata.length === 0
      ? h('p', { class: 'quiet' }, 'None: Sandbox.create(metadata={…}) gives it some.')
      : h('dl', { class: 'facts' }, ...metadata.flatMap(([key, value]) => fact(key, value, true)))
  root.append(
    h('div', { class: 'charts' }, h('div', { class: 'chart-head' }, h('h2', {}, 'Use'), ranges), cpu.element, memory.element),
    h('aside', {}, h('h2', {}, 'About'), details, h('h2', {}, 'Metadata'), about),
  )

  const refresh = repeat(5000, signal, async () => {
    const wanted = seconds
    const points = await history(first.sandboxID, wanted)
    if (signal.aborted || wanted !== seconds) return
    const of = (key) => points.map((point) => ({ at: point.timestampUnix, value: point[key] }))
    cpu.draw(of('cpuUsedPct'), 100, seconds)
    memory.draw(of('memUsed'), points.at(-1)?.memTotal ?? first.memoryMB * 1024 * 1024, seconds)
    const last = points.at(-1)
    say(disk, last ? `${bytes(last.diskUsed)} of ${bytes(last.diskTotal)}` : `${bytes(first.diskSizeMB * 1024 * 1024)}`)
  })
  function choose(value) {
    seconds = value
    for (const one of ranges.children) set(one, 'aria-pressed', String(Number(one.dataset.range) === value))
    refresh()
  }
  choose(seconds)
  signal.addEventListener('abort', () => {
    cpu.end()
    memory.end()
  })
}
