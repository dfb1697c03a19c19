//! The warps of a block, one after the other, and the barriers that they meet at. Knows no arithmetic.

use super::warp::{Warp, lanes, row};
use super::{Cx, Fault, FaultKind};
use crate::inst::{Bar, Barrier, NOWHERE, Op};
use crate::memory::Memory;

/// Barriers of a block.
const BARRIERS: usize = 16;

/// One barrier, as far as it was reached.
#[derive(Debug, Clone, Copy, Default)]
struct Reached {
    arrived: u32,
    /// How many threads it is for; none: all that have not ended.
    count: Option<u32>,
    /// How many of them brought a true predicate.
    held: u32,
}

/// A block's threads.
#[derive(Debug)]
pub(super) struct Block {
    warps: Vec<Warp>,
    threads: u32,
    barriers: [Reached; BARRIERS],
    /// Which barrier each thread waits at, by warp and lane.
    at: Vec<[u8; 32]>,
}

impl Block {
    pub(super) fn new(size: [u32; 3]) -> Self {
        let threads = size.iter().product::<u32>();
        let mut warps: Vec<_> = (0..threads.div_ceil(32)).map(Warp::new).collect();
        for warp in &mut warps {
            let first = u64::from(warp.number) * 32;
            let [x, y, _] = size.map(u64::from);
            warp.tid = [
                row(|lane| (first + lane as u64) % x),
                row(|lane| (first + lane as u64) / x % y),
                row(|lane| (first + lane as u64) / x / y),
            ];
        }
        Self {
            at: vec![[0; 32]; warps.len()],
            warps,
            threads,
            barriers: [Reached::default(); BARRIERS],
        }
    }

    /// Runs one block from the kernel's beginning to its end; a fault with the number of its warp.
    pub(super) fn run<M: Memory + ?Sized>(
        &mut self,
        cx: &mut Cx<'_>,
        kernel: u32,
        memory: &mut M,
    ) -> Result<(), (u32, Fault)> {
        let function = &cx.program.functions[kernel as usize];
        self.barriers = [Reached::default(); BARRIERS];
        for warp in &mut self.warps {
            let here = (self.threads - warp.number * 32).min(32);
            let live = if here == 32 { u32::MAX } else { (1 << here) - 1 };
            warp.start(function, live);
        }
        loop {
            let (mut live, mut went) = (0, false);
            for index in 0..self.warps.len() {
                let warp = &mut self.warps[index];
                let before = cx.executed;
                warp.run(cx, memory).map_err(|fault| (warp.number, fault))?;
                went |= cx.executed != before;
                live += warp.places.live.count_ones();
                if warp.places.arrived != 0 {
                    self.arrive(cx, index)?;
                }
            }
            if live == 0 {
                return Ok(());
            }
            let released = self.release(cx, live);
            if !went && !released {
                return Err(self.deadlock(cx));
            }
        }
    }

    /// Counts the threads of a warp that reached a barrier.
    fn arrive(&mut self, cx: &Cx<'_>, index: usize) -> Result<(), (u32, Fault)> {
        let warp = &mut self.warps[index];
        let arrived = std::mem::take(&mut warp.places.arrived);
        for lane in lanes(arrived) {
            let Some((bar, line)) = bar_of(cx, warp, lane) else {
                continue;
            };
            let illegal = |what| (warp.number, Fault::new(FaultKind::Illegal(what), lane, line));
            let id = warp.of_lane(cx, lane, bar.id) & u64::from(u32::MAX);
            let Some(reached) = self.barriers.get_mut(usize::try_from(id).unwrap_or(usize::MAX)) else {
                return Err(illegal("a barrier whose number is above 15"));
            };
            let count = match bar.count {
                None => None,
                Some(count) => {
                    let count = u32::try_from(warp.of_lane(cx, lane, count) & u64::from(u32::MAX)).unwrap_or(u32::MAX);
                    if count == 0 || !count.is_multiple_of(32) || count > self.threads.next_multiple_of(32) {
                        return Err(illegal(
                            "a barrier for a count of threads that is no multiple of 32 within the block",
                        ));
                    }
                    Some(count)
                }
            };
            if reached.arrived != 0 && reached.count != count {
                return Err(illegal("a barrier that other threads reached with another count"));
            }
            reached.count = count;
            reached.arrived += 1;
            if bar.q.reg != NOWHERE {
                reached.held += u32::from(warp.pred_of_lane(lane, bar.q));
            }
            self.at[index][lane] = u8::try_from(id).unwrap_or(u8::MAX);
            if bar.kind == Barrier::Arrive {
                warp.places.barrier &= !(1 << lane);
                warp.places.pc[lane] += 1;
            }
        }
        Ok(())
    }

    /// Lets those go on whose barrier all reached; whether there were any.
    fn release(&mut self, cx: &Cx<'_>, live: u32) -> bool {
        let mut released = false;
        for id in 0..BARRIERS {
            let reached = self.barriers[id];
            if reached.arrived == 0 || reached.arrived < reached.count.unwrap_or(live) {
                continue;
            }
            released = true;
            self.barriers[id] = Reached::default();
            for (warp, at) in self.warps.iter_mut().zip(&self.at) {
                for lane in lanes(warp.places.barrier) {
                    if usize::from(at[lane]) != id {
                        continue;
                    }
                    if let Some((bar, _)) = bar_of(cx, warp, lane) {
                        match bar.kind {
                            Barrier::Popc => warp.set_lane(lane, bar.d, u64::from(reached.held)),
                            Barrier::And => warp.set_pred_lane(lane, bar.d, reached.held == reached.arrived),
                            Barrier::Or => warp.set_pred_lane(lane, bar.d, reached.held != 0),
                            Barrier::Sync | Barrier::Arrive => {}
                        }
                    }
                    warp.places.pc[lane] += 1;
                    warp.places.barrier &= !(1 << lane);
                }
            }
        }
        released
    }

    fn deadlock(&self, cx: &Cx<'_>) -> (u32, Fault) {
        let waiting = self.warps.iter().map(|warp| warp.places.live.count_ones()).sum();
        let mut found = (
            0,
            Fault::new(
                FaultKind::Deadlock {
                    waiting,
                    what: "nothing",
                },
                0,
                0,
            ),
        );
        for warp in &self.warps {
            let Some(lane) = lanes(warp.places.live).next() else {
                continue;
            };
            let what = if warp.places.barrier >> lane & 1 == 1 {
                "a barrier of the block"
            } else {
                "threads of its warp"
            };
            let line = cx.program.code.insts[warp.places.pc[lane] as usize].line;
            found = (
                warp.number,
                Fault::new(FaultKind::Deadlock { waiting, what }, lane, line),
            );
            break;
        }
        found
    }
}

/// The barrier that a thread is at.
fn bar_of(cx: &Cx<'_>, warp: &Warp, lane: usize) -> Option<(Bar, u32)> {
    let inst = &cx.program.code.insts[warp.places.pc[lane] as usize];
    match inst.op {
        Op::Bar { bar } => Some((cx.program.code.bars[bar as usize], inst.line)),
        _ => None,
    }
}
