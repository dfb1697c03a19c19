// The frame of the page: who is here, which part of it is shown, and whether the gateway answers. Each part is a module with a function
// that shows it and ends with a signal.

import { events, hasKey, repeat, signOut, ask } from './api.js'
import { button, h, note } from './dom.js'
import { list } from './list.js'
import { login } from './login.js'
import { pools } from './pools.js'
import { sandbox } from './sandbox.js'
import { snapshots } from './snapshots.js'
import { templates } from './templates.js'

const main = document.getElementById('main')
const head = document.getElementById('top')
const trouble = document.getElementById('trouble')

const PARTS = [
  { path: 'sandboxes', title: 'Sandboxes', show: list },
  { path: 'templates', title: 'Templates', show: templates },
  { path: 'snapshots', title: 'Snapshots', show: snapshots },
  { path: 'pools', title: 'Pools', show: pools },
]

let current = new AbortController()
let retry = new AbortController()

/** The part that the address names; a sandbox is `#/sandboxes/ID/TAB`. */
function route() {
  const [, path, id, tab] = location.hash.split('/')
  const part = PARTS.find((one) => one.path === path) ?? PARTS[0]
  if (part.path === 'sandboxes' && /^[0-9a-f]{12}$/.test(id ?? '')) {
    return { part, title: id, same: `sandbox/${id}`, show: (root, signal) => sandbox(root, signal, id, tab) }
  }
  return { part, title: part.title, show: part.show }
}

let shown

function show() {
  const { part, title, same, show: fill } = route()
  for (const link of head.querySelectorAll('nav a')) {
    link.toggleAttribute('aria-current', false)
    if (link.dataset.path === part.path) link.setAttribute('aria-current', 'page')
  }
  document.title = `${title} · Basalt`
  // Another tab of the same sandbox is its own affair.
  if (same !== undefined && same === shown && !main.dispatchEvent(new CustomEvent('tab', { cancelable: true }))) return
  shown = same
  current.abort()
  current = new AbortController()
  const root = h('div', { class: 'part' })
  main.replaceChildren(root)
  fill(root, current.signal)
}

function frame() {
  const link = ({ path, title }) => h('a', { href: `#/${path}`, 'data-path': path }, title)
  head.replaceChildren(
    h(
      'a',
      { class: 'brand', href: '#/sandboxes', 'aria-label': 'Basalt, all sandboxes' },
      h('img', { src: 'icon.svg', alt: '', width: 20, height: 20 }),
      'Basalt',
    ),
    h('nav', { 'aria-label': 'Parts of the page' }, ...PARTS.map(link)),
    button('Sign out', () => signOut(), { class: 'plain' }),
  )
}

function begin(why = '') {
  current.abort()
  shown = undefined
  if (!hasKey()) {
    trouble.hidden = true
    head.replaceChildren()
    document.title = 'Basalt'
    login(main, why, begin)
    return
  }
  frame()
  show()
}

events.addEventListener('signed-out', (event) => begin(event.detail))

events.addEventListener('offline', (event) => {
  if (!trouble.hidden || !hasKey()) return
  trouble.replaceChildren(
    h('strong', {}, event.detail),
    ' What you see is from before. It is asked again by itself; see whether ',
    h('code', {}, 'basalt-gateway'),
    ` runs at ${location.host}.`,
  )
  trouble.hidden = false
  retry = new AbortController()
  // Whatever is shown may ask nothing by itself.
  repeat(2000, retry.signal, () => ask('GET', '/health'))
})

events.addEventListener('online', () => {
  retry.abort()
  if (trouble.hidden) return
  trouble.hidden = true
  note('The gateway answers again.')
})

addEventListener('hashchange', () => hasKey() && show())
begin()
