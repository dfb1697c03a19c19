// Signing in: a key is pasted, tried once, and kept for this tab.

import { ask, signIn } from './api.js'
import { h, say, snippet } from './dom.js'

/** Shows the form until a key is good; `done` is called then. */
export function login(root, why, done) {
  const input = h('input', {
    id: 'key',
    type: 'password',
    name: 'key',
    autocomplete: 'off',
    spellcheck: 'false',
    placeholder: 'e2b_…',
    required: true,
    'aria-describedby': 'key-error',
  })
  const error = h('p', { class: 'error', id: 'key-error', role: 'alert' }, why)
  const enter = h('button', { type: 'submit', class: 'primary' }, 'Sign in')
  const form = h(
    'form',
    { class: 'login', novalidate: true },
    h('img', { src: 'icon.svg', alt: '', width: 40, height: 40 }),
    h('h1', {}, 'Basalt'),
    h('label', { for: 'key' }, 'API key'),
    input,
    error,
    enter,
    h('p', { class: 'quiet' }, 'The key stays in this tab and is gone when you close it. A new one is made on the gateway’s host:'),
    snippet('basalt-gateway keys create'),
  )
  form.addEventListener('submit', async (event) => {
    event.preventDefault()
    const key = input.value.trim()
    if (key === '') {
      say(error, 'Paste a key first.')
      input.focus()
      return
    }
    enter.disabled = true
    say(error, '')
    try {
      await ask('GET', '/v2/sandboxes?limit=1', { key })
      signIn(key)
      done()
    } catch (failure) {
      say(error, explain(failure))
      input.select()
    } finally {
      enter.disabled = false
    }
  })
  root.replaceChildren(form)
  input.focus()
}

function explain(failure) {
  if (failure.status === 401 || failure instanceof TypeError)
    return 'The gateway does not know this key. Paste all of it, or make a new one.'
  if (failure.status === 0) return `${failure.message} See whether basalt-gateway runs, then try again.`
  return failure.message
}
