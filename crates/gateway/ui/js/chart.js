// Charts of what a sandbox uses: a line in a row of a list, and a larger one with its axes and a pointer. Drawn by the browser, without a
// library. Knows no API.

import { h, say, set, svg } from './dom.js'
import { clock } from './format.js'

/** A gap as long as this, in seconds, is shown as one. */
const GAP = { 600: 20, 3600: 20, 86400: 150 }

/** Lines of points `[x, y]`, a new one behind each gap. */
function lines(points, gap) {
  const found = []
  let last = -Infinity
  for (const point of points) {
    if (point.at - last > gap) found.push([])
    found.at(-1).push(point)
    last = point.at
  }
  return found
}

function path(points, x, y) {
  return points.map((point, index) => `${index ? 'L' : 'M'}${x(point.at).toFixed(1)} ${y(point.value).toFixed(1)}`).join('')
}

/** A line without axes, of the last ten minutes. */
export class Sparkline {
  constructor(kind) {
    this.line = svg('path', { class: 'line' })
    this.area = svg('path', { class: 'area' })
    const properties = { class: `spark ${kind}`, viewBox: '0 0 100 24', preserveAspectRatio: 'none', 'aria-hidden': 'true' }
    this.element = svg('svg', properties, this.area, this.line)
  }

  /** Of points `{at, value}`, of which `top` is the highest. */
  draw(points, top) {
    const end = points.at(-1)?.at ?? 0
    const x = (at) => 100 - (end - at) / 6
    const y = (value) => 22.5 - 21 * Math.min(1, value / top)
    const parts = lines(
      points.filter((point) => point.at > end - 600),
      GAP[600],
    )
    set(this.line, 'd', parts.map((part) => path(part, x, y)).join(''))
    set(this.area, 'd', parts.map((part) => closed(part, x, y, 24)).join(''))
  }
}

function closed(part, x, y, floor) {
  if (part.length < 2) return ''
  return `${path(part, x, y)}L${x(part.at(-1).at).toFixed(1)} ${floor}L${x(part[0].at).toFixed(1)} ${floor}Z`
}

const LEFT = 4
const RIGHT = 64
const TOP = 10
const BOTTOM = 22

/** A chart with axes. `format` writes its values, `name` says what it is of. */
export class Chart {
  constructor(name, kind, format) {
    Object.assign(this, { name, format, points: [], top: 1, seconds: 3600 })
    this.value = h('span', { class: 'value' })
    this.limit = h('span', { class: 'limit' })
    this.grid = svg('g', { class: 'grid' })
    this.area = svg('path', { class: 'area' })
    this.line = svg('path', { class: 'line' })
    this.rule = svg('line', { class: 'rule', visibility: 'hidden' })
    this.dot = svg('circle', { class: 'dot', r: 3.5, visibility: 'hidden' })
    this.nothing = svg('text', { class: 'nothing', 'text-anchor': 'middle' })
    const parts = [this.grid, this.area, this.line, this.rule, this.dot, this.nothing]
    this.drawing = svg('svg', { class: 'drawing', role: 'img', tabindex: 0 }, ...parts)
    const title = h('figcaption', {}, h('span', { class: 'name' }, name), this.value, this.limit)
    this.element = h('figure', { class: `chart ${kind}` }, title, this.drawing)
    this.drawing.addEventListener('pointermove', (event) => this.point(event.offsetX))
    this.drawing.addEventListener('pointerleave', () => this.point(null))
    this.drawing.addEventListener('keydown', (event) => this.step(event))
    this.drawing.addEventListener('blur', () => this.point(null))
    this.watch = new ResizeObserver(() => this.redraw())
    this.watch.observe(this.drawing)
  }

  /** Of points `{at, value}` in seconds, of which `top` is the highest, over so many seconds. */
  draw(points, top, seconds) {
    Object.assign(this, { points, top, seconds })
    this.redraw()
  }

  redraw() {
    const width = this.drawing.clientWidth
    const height = this.drawing.clientHeight
    if (width === 0) return
    const end = Date.now() / 1000
    this.x = (at) => LEFT + (width - LEFT - RIGHT) * (1 - (end - at) / this.seconds)
    this.y = (value) => height - BOTTOM - (height - TOP - BOTTOM) * Math.min(1, value / this.top)
    this.points = this.points.filter((point) => point.at >= end - this.seconds)
    const parts = lines(this.points, GAP[this.seconds])
    set(this.drawing, 'viewBox', `0 0 ${width} ${height}`)
    set(this.line, 'd', parts.map((part) => path(part, this.x, this.y)).join(''))
    set(this.area, 'd', parts.map((part) => closed(part, this.x, this.y, this.y(0))).join(''))
    this.axes(width, height, end)
    set(this.nothing, 'x', (width - RIGHT) / 2)
    set(this.nothing, 'y', height / 2)
    say(this.nothing, this.points.length ? '' : 'nothing was measured in this time')
    const last = this.points.at(-1)
    if (!this.isPointed) say(this.value, last ? this.format(last.value) : '–')
    say(this.limit, `of ${this.format(this.top)}`)
    set(
      this.drawing,
      'aria-label',
      `${this.name}: ${last ? this.format(last.value) : 'nothing'} of ${this.format(this.top)}. Arrow keys move along it.`,
    )
    set(this.rule, 'y1', TOP)
    set(this.rule, 'y2', height - BOTTOM)
  }

  axes(width, height, end) {
    const parts = []
    for (const part of [0, 0.5, 1]) {
      const y = this.y(part * this.top)
      parts.push(svg('line', { x1: LEFT, x2: width - RIGHT, y1: y, y2: y }))
      parts.push(svg('text', { x: width - RIGHT + 8, y: y + 4 }, this.format(part * this.top)))
    }
    const count = width > 520 ? 4 : 2
    for (let index = 0; index <= count; index += 1) {
      const at = end - this.seconds * (1 - index / count)
      const anchor = index === 0 ? 'start' : index === count ? 'end' : 'middle'
      const label = index === count ? 'now' : clock(new Date(at * 1000), false)
      parts.push(svg('text', { x: this.x(at), y: height - 5, 'text-anchor': anchor }, label))
    }
    this.grid.replaceChildren(...parts)
  }

  /** Points at what is nearest to a place, or at nothing. */
  point(x) {
    const distance = (point) => Math.abs(this.x(point.at) - x)
    const nearest =
      x === null || this.points.length === 0 ? null : this.points.reduce((a, b) => (distance(b) < distance(a) ? b : a))
    this.show(nearest)
  }

  step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key]
    if (by === undefined || this.points.length === 0) return
    event.preventDefault()
    const at = this.shown ? this.points.indexOf(this.shown) : this.points.length
    this.show(this.points[Math.min(this.points.length - 1, Math.max(0, at + by))])
  }

  show(point) {
    this.shown = point
    this.isPointed = point !== null
    for (const part of [this.rule, this.dot]) set(part, 'visibility', point ? 'visible' : 'hidden')
    const shown = point ?? this.points.at(-1)
    say(this.value, shown ? this.format(shown.value) + (point ? ` at ${clock(new Date(point.at * 1000))}` : '') : '–')
    if (!point) return
    set(this.rule, 'x1', this.x(point.at))
    set(this.rule, 'x2', this.x(point.at))
    set(this.dot, 'cx', this.x(point.at))
    set(this.dot, 'cy', this.y(point.value))
  }

  end() {
    this.watch.disconnect()
  }
}
