// Numbers and moments as people read them. Knows no element.

const MIB = 1024 * 1024

/** Bytes: `512 MiB`, `1.5 GiB`. */
export function bytes(count) {
  const mib = count / MIB
  if (count === 0) return '0'
  if (mib < 1) return `${Math.round(count / 1024)} KiB`
  if (mib < 1024) return `${mib < 10 ? trim(mib) : Math.round(mib)} MiB`
  return `${trim(mib / 1024)} GiB`
}

function trim(number) {
  return String(Math.round(number * 10) / 10)
}

/** Per cent. */
export function percent(number) {
  return `${number < 10 && number > 0 ? trim(number) : Math.round(number)} %`
}

/** Seconds as the largest two units: `4 m 05 s`, `2 h 10 m`, `3 d 4 h`. */
export function duration(seconds) {
  const all = Math.max(0, Math.floor(seconds))
  const two = (number) => String(number).padStart(2, '0')
  if (all < 60) return `${all} s`
  if (all < 3600) return `${Math.floor(all / 60)} m ${two(all % 60)} s`
  if (all < 86400) return `${Math.floor(all / 3600)} h ${two(Math.floor(all / 60) % 60)} m`
  const days = Math.floor(all / 86400)
  return days < 10 ? `${days} d ${Math.floor(all / 3600) % 24} h` : `${days} d`
}

/** Seconds since a moment. */
export function age(text, now = Date.now()) {
  return (now - Date.parse(text)) / 1000
}

/** Whether a moment is one that no sandbox lives to see: it has no limit. */
export function isNever(text) {
  return Date.parse(text) > Date.UTC(2500, 0)
}

/** Milliseconds of a span. */
export function milliseconds(us) {
  if (us === 0) return '0'
  if (us >= 1e6) return `${(us / 1e6).toFixed(2)} s`
  return us >= 1e4 ? `${(us / 1e3).toFixed(0)} ms` : `${(us / 1e3).toFixed(us < 1e3 ? 2 : 1)} ms`
}

/** The time of day of a moment, as this browser's user writes it. */
export function clock(date, withSeconds = true) {
  const options = { hour: '2-digit', minute: '2-digit', second: withSeconds ? '2-digit' : undefined }
  return date.toLocaleTimeString(undefined, options)
}

/** A moment as a date and a time of day. */
export function moment(text) {
  return new Date(text).toLocaleString(undefined, { dateStyle: 'medium', timeStyle: 'short' })
}

/** What leads the SDK to the gateway of a page at this location: at `api.DOMAIN` sandboxes are below the domain, and nowhere else. */
export function variables({ protocol, host, origin }) {
  if (protocol === 'https:' && host.startsWith('api.')) return [`export E2B_DOMAIN=${host.slice('api.'.length)}`]
  return ['E2B_API_URL', 'E2B_SANDBOX_URL', 'E2B_VOLUME_API_URL'].map((name) => `export ${name}=${origin}`)
}
