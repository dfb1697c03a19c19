// Marks in the gateway's log: which test begins and ends, for every test of the run that imports this first. A request of its own has them as
// its user agent, as the SDK's are not changed. It goes to the gateway that BASALT_MARKS_URL names, by plain HTTP, or E2B_API_URL. Knows no
// test.

import { get } from 'node:http'
import { afterEach, beforeEach } from 'node:test'

const url = process.env.BASALT_MARKS_URL || process.env.E2B_API_URL

const mark = (text) =>
  new Promise((resolve, reject) => {
    const options = { headers: { 'user-agent': `basalt-test/${text}` }, agent: false }
    get(`${url}/health`, options, (answer) => answer.resume().on('end', resolve)).on('error', reject)
  })

beforeEach((test) => mark(`begin javascript ${test.fullName}`))
afterEach(() => mark('end'))
