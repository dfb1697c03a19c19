// Elements, made of text and never of markup: whatever a guest or another user has written is shown and does nothing.

const SVG = 'http' + '://www.w3.org/2000/svg'

/** An element with properties, listeners and children; a child that is a string becomes text. */
export function h(name, properties = {}, ...children) {
  return fill(document.createElement(name), properties, children)
}

/** The same of a drawing. */
export function svg(name, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, name), properties, children)
}

function fill(element, properties, children) {
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue
    if (key === 'on') {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener)
    } else if (key === 'vars') {
      for (const [name, text] of Object.entries(value)) element.style.setProperty(name, text)
    } else {
      element.setAttribute(key, value === true ? '' : String(value))
    }
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false))
  return element
}

/** Says something in an element, and leaves alone what says it already: what is not changed is not drawn anew, nor read aloud again. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text
}

/** Sets an attribute, or takes it away, if that is a change. */
export function set(element, name, value) {
  if (value === null || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name)
  } else if (element.getAttribute(name) !== String(value)) {
    element.setAttribute(name, value === true ? '' : String(value))
  }
}

/** Puts these children into an element in this order, moving only those that are elsewhere. */
export function arrange(parent, children) {
  const wanted = new Set(children)
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove()
  children.forEach((child, index) => {
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null)
  })
}

/** A button. */
export function button(text, click, properties = {}) {
  return h('button', { type: 'button', ...properties, on: { click } }, text)
}

/** Code with a button that copies it. */
export function snippet(text) {
  const copy = button(
    'Copy',
    async () => {
      try {
        await navigator.clipboard.writeText(text)
        copy.textContent = 'Copied'
      } catch {
        // Without https a browser has no clipboard for pages: then the text is selected, to be copied by hand.
        getSelection().selectAllChildren(code)
        copy.textContent = 'Selected'
      }
      setTimeout(() => {
        copy.textContent = 'Copy'
      }, 2000)
    },
    { class: 'small', 'aria-label': 'Copy the code' },
  )
  const code = h('code', {}, text)
  return h('div', { class: 'snippet' }, h('pre', { tabindex: 0 }, code), copy)
}

/** What is shown where there is nothing: what that means, and what to do. */
export function empty(title, text, ...more) {
  return h('div', { class: 'empty' }, h('h2', {}, title), h('p', {}, text), ...more)
}

/** Asks before something that cannot be undone. */
export function confirm(title, text, verb) {
  return new Promise((resolve) => {
    const cancel = button('Cancel', () => dialog.close())
    const yes = button(verb, () => dialog.close('yes'), { class: 'danger' })
    const heading = h('h2', { id: 'dialog-title' }, title)
    const dialog = h(
      'dialog',
      { 'aria-labelledby': 'dialog-title' },
      heading,
      h('p', {}, text),
      h('div', { class: 'buttons' }, cancel, yes),
    )
    dialog.addEventListener('close', () => {
      dialog.remove()
      resolve(dialog.returnValue === 'yes')
    })
    document.body.append(dialog)
    dialog.showModal()
    yes.focus()
  })
}

/** Tells something for a moment; a failure stays until it is dismissed. */
export function note(text, isFailure = false) {
  const place = document.getElementById('notes')
  const dismiss = button('×', () => one.remove(), { class: 'plain', 'aria-label': 'Dismiss' })
  const one = h('div', { class: isFailure ? 'note failure' : 'note' }, h('span', {}, text), dismiss)
  while (place.children.length > 3) place.firstElementChild.remove()
  place.append(one)
  if (!isFailure) setTimeout(() => one.remove(), 5000)
}
