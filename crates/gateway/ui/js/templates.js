// The templates that sandboxes are made of.

import { ask, repeat } from './api.js'
import { arrange, button, empty, h, note, say, snippet } from './dom.js'
import { age, bytes, duration } from './format.js'

/** Makes a sandbox and shows it. */
export async function start(templateID, name, self) {
  self.disabled = true
  try {
    const made = await ask('POST', '/v2/sandboxes', { body: { templateID, timeout: 300 } })
    location.hash = `#/sandboxes/${made.sandboxID}`
    note(`${made.sandboxID} was made of ${name}; it runs for 5 minutes if nobody asks for more.`)
  } catch (failure) {
    note(`No sandbox could be made of ${name}: ${failure.message}`, true)
  } finally {
    self.disabled = false
  }
}

function machine(one) {
  const mib = 1024 * 1024
  const disk = one.diskSizeMB ? `${bytes(one.diskSizeMB * mib)} disk` : 'no disk'
  return `${one.cpuCount} vCPU${one.cpuCount === 1 ? '' : 's'} · ${bytes(one.memoryMB * mib)} · ${disk}`
}

function row(one) {
  const name = one.names[0] ?? one.templateID.slice(0, 12)
  const create = button('Start a sandbox', () => start(one.templateID, name, create), {
    class: 'small',
    'aria-label': `Start a sandbox of ${name}`,
  })
  const state = h('span', { class: `state ${one.buildStatus === 'ready' ? 'running' : 'failed'}` }, one.buildStatus)
  const cell = (name_, ...content) => h('td', { class: name_, role: 'cell' }, ...content)
  return h(
    'tr',
    { role: 'row' },
    cell(
      'c-id',
      h(
        'div',
        { class: 'id' },
        state,
        h('strong', {}, name),
        h('span', { class: 'tags' }, ...one.names.slice(1, 4).map((text) => h('span', { class: 'tag' }, text))),
      ),
    ),
    cell('c-template', h('span', { class: 'mono quiet', title: one.templateID }, one.templateID.slice(0, 12))),
    cell('c-size', machine(one)),
    cell('c-age', h('span', { class: 'number' }, duration(age(one.createdAt)))),
    cell('c-actions', create),
  )
}

/** Shows them. */
export function templates(root, signal) {
  const counts = h('p', { class: 'counts' })
  const body = h('tbody', { role: 'rowgroup' })
  const heads = ['Name', 'Id', 'Machine', 'Age', ''].map((text) =>
    h(
      'th',
      { scope: 'col', role: 'columnheader', class: text === 'Age' ? 'right' : null },
      text || h('span', { class: 'unseen' }, 'Actions'),
    ),
  )
  const table = h(
    'table',
    { class: 'templates', role: 'table', 'aria-label': 'Templates', hidden: true },
    h('thead', { role: 'rowgroup' }, h('tr', { role: 'row' }, ...heads)),
    body,
  )
  const place = h('div')
  root.append(h('div', { class: 'bar' }, h('h1', {}, 'Templates'), counts), table, place)
  const rows = new Map()
  repeat(15_000, signal, async () => {
    const all = await ask('GET', '/templates')
    if (signal.aborted) return
    for (const one of all) {
      const text = JSON.stringify(one)
      if (rows.get(one.templateID)?.text !== text) rows.set(one.templateID, { text, element: row(one) })
    }
    arrange(
      body,
      all.map((one) => rows.get(one.templateID).element),
    )
    say(counts, all.length === 0 ? '' : `${all.length}, for all keys of this gateway`)
    table.hidden = all.length === 0
    place.replaceChildren(
      ...(all.length
        ? []
        : [
            empty(
              'No templates yet',
              'The gateway’s operator makes them on its host. This makes “base”, which SDKs ask for when they name none:',
              snippet(
                'images/base/recipe.sh /tmp/base\nbasalt import --name base /tmp/base/oci\nbasalt template build --name base --from base',
              ),
            ),
          ]),
    )
  })
}
