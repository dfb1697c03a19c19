// The snapshots of this key's tenant.

import { ask, repeat } from './api.js'
import { arrange, button, confirm, empty, h, note, say, snippet } from './dom.js'
import { start } from './templates.js'

async function all() {
  const found = []
  let token = ''
  do {
    const page = await ask('GET', `/snapshots?limit=100${token && `&nextToken=${encodeURIComponent(token)}`}`, { whole: true })
    found.push(...page.json)
    token = page.headers.get('x-next-token') ?? ''
  } while (token !== '' && found.length < 500)
  return found
}

function row(one, refresh) {
  const id = one.snapshotID
  const create = button('Start a sandbox', () => start(id, id, create), {
    class: 'small',
    'aria-label': `Start a sandbox of ${id}`,
  })
  const remove = button(
    'Delete',
    async () => {
      if (
        !(await confirm(
          'Delete this snapshot?',
          `${id} is deleted. Sandboxes that were made of it run on. This cannot be undone.`,
          'Delete it',
        ))
      )
        return
      remove.disabled = true
      try {
        await ask('DELETE', `/templates/${encodeURIComponent(id)}`)
        note(`${id} was deleted.`)
      } catch (failure) {
        note(`${id} could not be deleted: ${failure.message}`, true)
        remove.disabled = false
      }
      refresh()
    },
    { class: 'small danger', 'aria-label': `Delete ${id}` },
  )
  const cell = (name, ...content) => h('td', { class: name, role: 'cell' }, ...content)
  return h(
    'tr',
    { role: 'row' },
    cell('c-id', h('span', { class: 'mono' }, id)),
    cell(
      'c-names',
      h('span', { class: 'tags' }, ...one.names.filter((name) => name !== id).map((name) => h('span', { class: 'tag' }, name))),
    ),
    cell('c-actions', create, remove),
  )
}

/** Shows them. */
export function snapshots(root, signal) {
  const counts = h('p', { class: 'counts' })
  const body = h('tbody', { role: 'rowgroup' })
  const heads = ['Snapshot', 'Names', ''].map((text) =>
    h('th', { scope: 'col', role: 'columnheader' }, text || h('span', { class: 'unseen' }, 'Actions')),
  )
  const table = h(
    'table',
    { class: 'snapshots', role: 'table', 'aria-label': 'Snapshots', hidden: true },
    h('thead', { role: 'rowgroup' }, h('tr', { role: 'row' }, ...heads)),
    body,
  )
  const place = h('div')
  root.append(h('div', { class: 'bar' }, h('h1', {}, 'Snapshots'), counts), table, place)
  const rows = new Map()
  const refresh = repeat(10_000, signal, async () => {
    const found = await all()
    if (signal.aborted) return
    for (const one of found) {
      const text = JSON.stringify(one)
      if (rows.get(one.snapshotID)?.text !== text) rows.set(one.snapshotID, { text, element: row(one, () => refresh()) })
    }
    arrange(
      body,
      found.map((one) => rows.get(one.snapshotID).element),
    )
    say(counts, found.length === 0 ? '' : String(found.length))
    table.hidden = found.length === 0
    place.replaceChildren(
      ...(found.length
        ? []
        : [
            empty(
              'No snapshots yet',
              'A snapshot keeps a sandbox as it is, with all that runs in it; others go on from there, as often as you like:',
              snippet('snapshot = sandbox.create_snapshot()\nanother = Sandbox.create(snapshot.snapshot_id)'),
            ),
          ]),
    )
  })
}
