// What a sandbox's own command has written.

import { ask, repeat } from './api.js'
import { empty, h, say } from './dom.js'
import { clock } from './format.js'

const MOST = 1000

const NO_MATCH = () => empty('No such lines', 'Nothing that was written has this.')
const NOTHING = () =>
  empty(
    'Nothing was written',
    'Here is what a sandbox’s own command writes. One that was made of a template has none: ' +
      'what its commands write goes to who started them.',
  )

function line(one) {
  return h(
    'div',
    { class: `line ${one.level}` },
    h('time', { datetime: one.timestamp, title: one.timestamp }, clock(new Date(one.timestamp))),
    h('span', { class: 'stream' }, one.fields?.stream ?? one.level),
    h('span', { class: 'text' }, one.message),
  )
}

/** Shows them, and follows them. */
export function logs(root, signal, id) {
  const search = h('input', {
    type: 'search',
    placeholder: 'Lines with',
    'aria-label': 'Only lines with this text',
    on: { input: () => refresh() },
  })
  const option = (value, text) => h('option', { value }, text)
  const level = h(
    'select',
    { 'aria-label': 'Level', on: { change: () => refresh() } },
    option('', 'All lines'),
    option('warn', 'Errors only'),
  )
  const count = h('span', { class: 'quiet', role: 'status' })
  const lines = h('div', { class: 'lines', tabindex: 0, role: 'log', 'aria-label': 'Lines', hidden: true })
  const place = h('div')
  root.append(h('div', { class: 'tools left' }, search, level, count), lines, place)
  let shown = ''
  const refresh = repeat(3000, signal, async () => {
    const query = new URLSearchParams({ direction: 'backward', limit: MOST })
    if (level.value) query.set('level', level.value)
    if (search.value) query.set('search', search.value)
    const found = (await ask('GET', `/v2/sandboxes/${id}/logs?${query}`)).logs.reverse()
    const text = JSON.stringify(found)
    if (signal.aborted || text === shown) return
    shown = text
    const isAtEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40
    lines.hidden = found.length === 0
    lines.replaceChildren(...found.map(line))
    if (isAtEnd) lines.scrollTop = lines.scrollHeight
    say(count, found.length === 0 ? '' : found.length === MOST ? `the last ${MOST} lines` : `${found.length} lines`)
    const isAsked = search.value !== '' || level.value !== ''
    place.replaceChildren(...(found.length === 0 ? [isAsked ? NO_MATCH() : NOTHING()] : []))
  })
}
