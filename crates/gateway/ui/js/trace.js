// What a sandbox's last start was made of, as a waterfall.

import { ask, repeat } from './api.js'
import { empty, h } from './dom.js'
import { milliseconds } from './format.js'

function row(span, whole, depth) {
  const start = span.startUs / whole
  const width = Math.min(1 - Math.min(start, 1), span.durationUs / whole)
  const bar = h('span', {
    class: `span ${span.service === 'basaltd' ? '' : 'other'}`,
    vars: { '--start': `${(100 * start).toFixed(2)}%`, '--width': `${(100 * width).toFixed(2)}%` },
  })
  return h(
    'tr',
    {
      role: 'row',
      title: `${span.name}, by ${span.service}: from ${milliseconds(span.startUs)}, for ${milliseconds(span.durationUs)}`,
    },
    h('th', { scope: 'row', role: 'rowheader', vars: { '--depth': String(depth) } }, span.name),
    h('td', { role: 'cell', class: 'number' }, milliseconds(span.startUs)),
    h('td', { role: 'cell', class: 'number' }, milliseconds(span.durationUs)),
    h('td', { role: 'cell', class: 'bars' }, bar),
  )
}

/** Shows it. */
export function trace(root, signal, id) {
  const place = h('div')
  root.append(place)
  let shown = ''
  repeat(5000, signal, async () => {
    const { spans } = await ask('GET', `/sandboxes/${id}/trace`)
    const text = JSON.stringify(spans)
    if (signal.aborted || text === shown) return
    shown = text
    if (spans.length === 0) {
      place.replaceChildren(
        empty(
          'No trace is kept of this start',
          'The node keeps it in memory: it was started anew since this sandbox was. The next sandbox has one.',
        ),
      )
      return
    }
    const whole = Math.max(1, ...spans.map((span) => span.startUs + span.durationUs))
    const heads = ['Step', 'At', 'Took'].map((name) =>
      h('th', { scope: 'col', role: 'columnheader', class: name === 'Step' ? null : 'right' }, name),
    )
    const marks = [0, 0.25, 0.5, 0.75, 1].map((part) => h('span', {}, milliseconds(part * whole)))
    heads.push(
      h(
        'th',
        { scope: 'col', role: 'columnheader', class: 'bars' },
        h('span', { class: 'unseen' }, 'When'),
        h('span', { class: 'scale', 'aria-hidden': 'true' }, ...marks),
      ),
    )
    const first = spans[0]
    place.replaceChildren(
      h('p', { class: 'lead' }, `${first.name[0].toUpperCase()}${first.name.slice(1)}: ${milliseconds(whole)} on the node.`),
      h(
        'table',
        { class: 'trace', role: 'table', 'aria-label': 'Steps of the start' },
        h('thead', { role: 'rowgroup' }, h('tr', { role: 'row' }, ...heads)),
        h('tbody', { role: 'rowgroup' }, ...spans.map((span) => row(span, whole, span.depth))),
      ),
    )
  })
}
