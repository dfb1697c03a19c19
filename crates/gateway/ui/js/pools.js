// What the node has ready for sandboxes to come.

import { ask, repeat } from './api.js'
import { arrange, empty, h, say } from './dom.js'
import { bytes } from './format.js'

function row(one) {
  const isKnown = one.cached !== null
  const part = one.size === 0 ? 0 : (one.cached ?? 0) / one.size
  const told = isKnown ? `${bytes(one.cached)} of ${bytes(one.size)}` : `of ${bytes(one.size)}: not known`
  const cell = (name, ...content) => h('td', { class: name, role: 'cell' }, ...content)
  return h(
    'tr',
    { role: 'row' },
    cell('c-id', h('strong', {}, one.name)),
    cell('c-template', one.kind),
    cell(
      'c-ready',
      h('meter', { min: 0, max: 1, value: part, 'aria-label': `In memory of ${one.name}` }),
      h('span', { class: 'number' }, told),
    ),
  )
}

function summary({ interfaces, memory }) {
  const known = memory.filter((one) => one.cached !== null)
  const sum = (name) => known.reduce((total, one) => total + one[name], 0)
  const parts = []
  if (interfaces) parts.push(`${interfaces.ready} of ${interfaces.size} network interfaces ready`)
  if (known.length) parts.push(`${bytes(sum('cached'))} of ${bytes(sum('size'))} in memory`)
  return parts.join(' · ')
}

/** Shows it. */
export function pools(root, signal) {
  const counts = h('p', { class: 'counts' })
  const body = h('tbody', { role: 'rowgroup' })
  const heads = ['Template or snapshot', 'Kind', 'In memory'].map((text) => h('th', { scope: 'col', role: 'columnheader' }, text))
  const table = h(
    'table',
    { class: 'pools', role: 'table', 'aria-label': 'Memory that is ready', hidden: true },
    h('thead', { role: 'rowgroup' }, h('tr', { role: 'row' }, ...heads)),
    body,
  )
  const place = h('div')
  root.append(
    h('div', { class: 'bar' }, h('h1', {}, 'Pools'), counts),
    h(
      'p',
      { class: 'lead' },
      'A sandbox goes on from the saved memory of its template or snapshot. What of that is in the host’s memory is there at once; the rest is read from the disk when it is touched.',
    ),
    table,
    place,
  )
  const rows = new Map()
  repeat(10_000, signal, async () => {
    const found = await ask('GET', '/pools')
    if (signal.aborted) return
    const keys = found.memory.map((one, index) => `${one.kind} ${one.name} ${index}`)
    found.memory.forEach((one, index) => {
      const text = JSON.stringify(one)
      if (rows.get(keys[index])?.text !== text) rows.set(keys[index], { text, element: row(one) })
    })
    arrange(
      body,
      keys.map((key) => rows.get(key).element),
    )
    for (const key of rows.keys()) if (!keys.includes(key)) rows.delete(key)
    say(counts, summary(found))
    table.hidden = found.memory.length === 0
    place.replaceChildren(
      ...(found.memory.length ? [] : [empty('Nothing is ready', 'There are no templates and no snapshots of which sandboxes could be made.')]),
    )
  })
}
