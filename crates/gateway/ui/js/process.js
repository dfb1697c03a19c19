// Calls of a sandbox's processes, as the SDKs make them: JSON, in envelopes of five bytes where it streams (the Connect protocol). Knows no
// element.

import { Failure } from './api.js'

const ENCODER = new TextEncoder()
const DECODER = new TextDecoder()

/** Bit of an envelope that is the last one. */
const END = 2

/** The longest message that is taken. */
const MOST = 8 << 20

/** How often the other side says that it is there, and how long it may be silent, in seconds. */
const PING = 15
const SILENCE = 50

/** The processes of one sandbox, asked with its token. */
export class Processes {
  constructor(id, token) {
    this.path = `/ui/process/${id}`
    this.token = token
  }

  post(method, type, body, signal) {
    const headers = {
      'Content-Type': type,
      'X-Access-Token': this.token,
      'Connect-Protocol-Version': '1',
      'Keepalive-Ping-Interval': String(PING),
    }
    return fetch(`${this.path}/${method}`, { method: 'POST', headers, body, signal, cache: 'no-store', credentials: 'omit' })
  }

  /** One question, one answer. */
  async call(method, message) {
    const response = await this.post(method, 'application/json', JSON.stringify(message), AbortSignal.timeout(20_000))
    if (!response.ok) throw await refusal(response)
    return response.json()
  }

  /** One question, and each message of the answer to `each`, which is waited for, so that no more comes than is taken; until that ends or
   *  `signal` is set. The connection ends with it, however that is. */
  async stream(method, message, each, signal) {
    const own = new AbortController()
    let timer
    const heard = () => {
      clearTimeout(timer)
      timer = setTimeout(() => own.abort(), SILENCE * 1000)
    }
    try {
      heard()
      const both = AbortSignal.any([signal, own.signal])
      const response = await this.post(method, 'application/connect+json', envelope(message), both)
      if (!response.ok) throw await refusal(response)
      const pieces = new Pieces()
      const reader = response.body.getReader()
      for (;;) {
        const { done, value } = await reader.read()
        if (done) throw new Failure(0, 'The connection ended.')
        heard()
        for (const { flags, text } of pieces.add(value)) {
          const json = JSON.parse(text)
          if (!(flags & END)) {
            await each(json)
          } else if (json.error) {
            throw new Failure(json.error.code === 'not_found' ? 404 : 400, json.error.message ?? json.error.code)
          } else {
            return
          }
        }
      }
    } finally {
      clearTimeout(timer)
      own.abort()
    }
  }
}

function envelope(message) {
  const bytes = ENCODER.encode(JSON.stringify(message))
  const whole = new Uint8Array(5 + bytes.length)
  new DataView(whole.buffer).setUint32(1, bytes.length)
  whole.set(bytes, 5)
  return whole
}

/** Envelopes out of a stream's pieces. */
class Pieces {
  left = new Uint8Array(0)

  add(bytes) {
    const all = new Uint8Array(this.left.length + bytes.length)
    all.set(this.left)
    all.set(bytes, this.left.length)
    const found = []
    let at = 0
    while (all.length - at >= 5) {
      const length = new DataView(all.buffer, at).getUint32(1)
      if (length > MOST) throw new Failure(0, 'A message is too long.')
      if (all.length - at < 5 + length) break
      found.push({ flags: all[at], text: DECODER.decode(all.subarray(at + 5, at + 5 + length)) })
      at += 5 + length
    }
    this.left = all.slice(at)
    return found
  }
}

async function refusal(response) {
  let message = `status ${response.status}`
  try {
    message = (await response.json()).message ?? message
  } catch {
    // It is no JSON; its status says enough.
  }
  return new Failure(response.status, message)
}

/** Bytes as JSON has them. */
export function toBase64(bytes) {
  let text = ''
  for (let at = 0; at < bytes.length; at += 0x8000) text += String.fromCharCode(...bytes.subarray(at, at + 0x8000))
  return btoa(text)
}

export function fromBase64(text) {
  return Uint8Array.from(atob(text), (char) => char.charCodeAt(0))
}
