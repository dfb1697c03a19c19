// The gateway's API, asked with the key of who is here. The key is in this tab's session storage and nowhere else: no cookie, so no other
// page can ask in this user's name. Knows no element.

const KEY = 'basalt.key'

/** How long a question may take, and a change, which may write a machine's memory. */
const QUESTION = 20_000
const CHANGE = 600_000

/** Told of what happens to all requests: `offline` with a reason, `online`, `signed-out` with a reason. */
export const events = new EventTarget()

/** Why a request failed. `status` is 0 when there was no answer. */
export class Failure extends Error {
  constructor(status, message, after) {
    super(message)
    this.status = status
    this.after = after
  }
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null
}

export function signIn(key) {
  sessionStorage.setItem(KEY, key)
}

/** Forgets the key and all that is kept of sandboxes. */
export function signOut(why = '') {
  sessionStorage.clear()
  events.dispatchEvent(new CustomEvent('signed-out', { detail: why }))
}

/** Asks. The answer's JSON, or nothing; with `whole` the answer's headers too. */
export async function ask(method, path, { body, whole, key, signal } = {}) {
  const limit = AbortSignal.timeout(method === 'GET' ? QUESTION : CHANGE)
  const headers = { 'X-API-Key': key ?? sessionStorage.getItem(KEY) ?? '' }
  if (body !== undefined) headers['Content-Type'] = 'application/json'
  let response
  let json
  try {
    response = await fetch(path, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: 'no-store',
      credentials: 'omit',
      signal: signal ? AbortSignal.any([limit, signal]) : limit,
    })
    const text = await response.text()
    json = text === '' ? undefined : JSON.parse(text)
  } catch (error) {
    if (signal?.aborted) throw error
    if (response?.ok === false || error instanceof SyntaxError)
      throw new Failure(response.status, `The answer to ${path} is no JSON`)
    const failure = new Failure(0, limit.aborted ? 'The gateway takes too long to answer.' : 'The gateway does not answer.')
    if (key === undefined) offline(failure.message)
    throw failure
  }
  online()
  if (response.ok) return whole ? { json, headers: response.headers } : json
  const failure = new Failure(
    response.status,
    json?.message ?? `status ${response.status}`,
    Number(response.headers.get('retry-after')),
  )
  if (response.status === 401 && key === undefined)
    signOut('The gateway takes this key no more: it was revoked, or the gateway is another one.')
  throw failure
}

let isOffline = false

function offline(why) {
  isOffline = true
  events.dispatchEvent(new CustomEvent('offline', { detail: why }))
}

function online() {
  if (isOffline) events.dispatchEvent(new CustomEvent('online'))
  isOffline = false
}

/** All sandboxes, running and paused, up to `most` of them; whether there are more. */
export async function sandboxes(most = 500) {
  const all = []
  let token = ''
  do {
    const page = await ask('GET', `/v2/sandboxes?limit=100${token && `&nextToken=${encodeURIComponent(token)}`}`, { whole: true })
    all.push(...page.json)
    token = page.headers.get('x-next-token') ?? ''
  } while (token !== '' && all.length < most)
  return { all, isCut: token !== '' }
}

/** What these use now, by their ids. */
export async function metrics(ids) {
  const found = {}
  for (let at = 0; at < ids.length; at += 100) {
    const some = ids.slice(at, at + 100).join(',')
    Object.assign(found, (await ask('GET', `/sandboxes/metrics?sandbox_ids=${some}`)).sandboxes)
  }
  return found
}

/** What one has used for so many seconds. */
export function history(id, seconds) {
  const start = Math.floor(Date.now() / 1000) - seconds
  return ask('GET', `/sandboxes/${id}/metrics?start=${start}`)
}

/** The longest pause of what fails, whatever the gateway asks for. */
const LONGEST = 60_000

/** Does something again and again as long as the page is looked at: not beside itself, and less often while it fails. `signal` ends it.
 *  What it gives does it at once; or once more when it is being done, as that may have asked before what there is to see now. */
export function repeat(milliseconds, signal, work) {
  let timer
  let failed = 0
  let runs = false
  let isAsked = false
  const go = async () => {
    clearTimeout(timer)
    if (signal.aborted || document.hidden) return
    isAsked = runs
    if (runs) return
    runs = true
    let wait = milliseconds
    try {
      await work()
      failed = 0
    } catch (error) {
      if (!signal.aborted && !(error instanceof Failure)) console.error(error)
      failed = Math.min(failed + 1, 4)
      const told = error.after > 0 ? error.after * 1000 : 0
      wait = Math.min(LONGEST, Math.max(told, milliseconds, 1000 * 2 ** (failed - 1)))
    }
    runs = false
    if (!signal.aborted) timer = setTimeout(go, isAsked && failed === 0 ? 0 : wait)
    isAsked = false
  }
  document.addEventListener('visibilitychange', go, { signal })
  signal.addEventListener('abort', () => clearTimeout(timer))
  go()
  return go
}
