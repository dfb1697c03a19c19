//! What threads of a warp do together: shuffles, votes, matches, reductions. All that their mask names must have come.

use super::warp::{Row, Step, Warp, lanes};
use super::{Cx, Fault, FaultKind, WARP};
use crate::inst::{Collective, Int, NOWHERE, Op, Together};
use crate::types::Type;

/// What each thread brings.
struct Brought {
    a: Row,
    b: Row,
    c: Row,
    q: u32,
}

impl Warp {
    /// Whether exactly the threads that are active are those which their masks name.
    pub(super) fn all_here(&self, cx: &Cx<'_>, step: Step, collective: &Collective) -> bool {
        let masks = self.fetch(cx, step, collective.mask, &mut [0; WARP]).to_owned();
        lanes(step.active)
            .all(|lane| masks[lane] & u64::from(self.places.live) == u64::from(step.active) && named(masks[lane], lane))
    }

    fn waits_for<'p>(&self, cx: &Cx<'p>, lane: usize) -> Option<(&'p Collective, u32)> {
        let inst = &cx.program.code.insts[self.places.pc[lane] as usize];
        match inst.op {
            Op::Together { collective } => Some((&cx.program.code.collectives[collective as usize], inst.line)),
            _ => None,
        }
    }

    /// Lets those go on whose partners have all come, wherever in the code these are.
    pub(super) fn settle(&mut self, cx: &Cx<'_>) -> Result<(), Fault> {
        let mut left = self.places.together;
        while left != 0 {
            let first = left.trailing_zeros() as usize & 31;
            let Some((collective, line)) = self.waits_for(cx, first) else {
                left &= !(1 << first);
                continue;
            };
            let mask = self.of_lane(cx, first, collective.mask);
            if !named(mask, first) {
                let what = "a warp-wide instruction by a thread that its mask does not name";
                return Err(Fault::new(FaultKind::Illegal(what), first, line));
            }
            let wanted = u32::try_from(mask & u64::from(self.places.live)).unwrap_or(0);
            let mut same = 0;
            for lane in lanes(left & wanted) {
                let Some((other, _)) = self.waits_for(cx, lane) else {
                    continue;
                };
                if other.what == collective.what && self.of_lane(cx, lane, other.mask) == mask {
                    same |= 1 << lane;
                }
            }
            left &= !same & !(1 << first);
            if same == wanted {
                let mut at: [Option<&Collective>; WARP] = [None; WARP];
                for lane in lanes(same) {
                    at[lane] = self.waits_for(cx, lane).map(|(collective, _)| collective);
                }
                self.together(cx, same, |lane| at[lane].unwrap_or(collective));
                for lane in lanes(same) {
                    self.places.pc[lane] += 1;
                }
                self.places.together &= !same;
            }
        }
        Ok(())
    }

    /// Carries it out for the threads of `set`; `of` is each one's instruction, which may have other registers.
    pub(super) fn together<'p>(&mut self, cx: &Cx<'_>, set: u32, of: impl Fn(usize) -> &'p Collective) {
        let mut brought = Brought {
            a: [0; WARP],
            b: [0; WARP],
            c: [0; WARP],
            q: 0,
        };
        for lane in lanes(set) {
            let collective = of(lane);
            brought.a[lane] = self.of_lane(cx, lane, collective.a);
            brought.b[lane] = self.of_lane(cx, lane, collective.b);
            brought.c[lane] = self.of_lane(cx, lane, collective.c);
            let held = if collective.q.reg == NOWHERE {
                brought.a[lane] != 0
            } else {
                self.pred_of_lane(lane, collective.q)
            };
            brought.q |= u32::from(held) << lane;
        }
        let what = of(set.trailing_zeros() as usize & 31).what;
        let shared = reduced(what, set, &brought);
        for lane in lanes(set) {
            let collective = of(lane);
            let (value, held) = match what {
                Together::ShflUp | Together::ShflDown | Together::ShflBfly | Together::ShflIdx => {
                    shuffled(what, set, lane, &brought)
                }
                Together::MatchAny(t) => {
                    let key = narrowed(brought.a[lane], t);
                    let same = lanes(set).filter(|&other| narrowed(brought.a[other], t) == key);
                    (same.fold(0, |mask, other| mask | 1 << other), true)
                }
                _ => shared,
            };
            self.set_lane(lane, collective.d, value);
            if collective.p != NOWHERE {
                self.set_pred_lane(lane, collective.p, held);
            }
        }
    }
}

const fn named(mask: u64, lane: usize) -> bool {
    mask >> lane & 1 == 1
}

const fn narrowed(value: u64, t: Type) -> u64 {
    if t.bytes() == 4 { value & 0xffff_ffff } else { value }
}

/// What is the same for all.
fn reduced(what: Together, set: u32, brought: &Brought) -> (u64, bool) {
    let first = set.trailing_zeros() as usize & 31;
    let values = || lanes(set).map(|lane| brought.a[lane] & 0xffff_ffff);
    let signed = |value: u64| u32::try_from(value).unwrap_or(0).cast_signed();
    let least = |int: Int| match int {
        Int::S32 => values().min_by_key(|&value| signed(value)),
        _ => values().min(),
    };
    let most = |int: Int| match int {
        Int::S32 => values().max_by_key(|&value| signed(value)),
        _ => values().max(),
    };
    let held = brought.q & set;
    match what {
        Together::VoteAll => (0, held == set),
        Together::VoteAny => (0, held != 0),
        Together::VoteUni => (0, held == set || held == 0),
        Together::Ballot => (u64::from(held), false),
        Together::MatchAll(t) => {
            let key = narrowed(brought.a[first], t);
            let all = lanes(set).all(|lane| narrowed(brought.a[lane], t) == key);
            (if all { u64::from(set) } else { 0 }, all)
        }
        Together::ReduceAdd => (values().sum(), false),
        Together::ReduceMin(int) => (least(int).unwrap_or(0), false),
        Together::ReduceMax(int) => (most(int).unwrap_or(0), false),
        Together::ReduceAnd => (values().fold(u64::MAX, |all, value| all & value), false),
        Together::ReduceOr => (values().fold(0, |all, value| all | value), false),
        Together::ReduceXor => (values().fold(0, |all, value| all ^ value), false),
        _ => (0, false),
    }
}

/// The value of the thread that this one names, and whether there is one within its segment.
fn shuffled(what: Together, set: u32, lane: usize, brought: &Brought) -> (u64, bool) {
    let lane_number = lane as u64;
    let by = brought.b[lane] & 31;
    let segment = brought.c[lane] >> 8 & 31;
    let most = (lane_number & segment) | (brought.c[lane] & 31 & !segment);
    let least = lane_number & segment;
    let (source, within) = match what {
        Together::ShflUp => {
            let source = lane_number.wrapping_sub(by);
            (source, lane_number >= by && source >= most)
        }
        Together::ShflDown => (lane_number + by, lane_number + by <= most),
        Together::ShflBfly => (lane_number ^ by, lane_number ^ by <= most),
        _ => {
            let source = least | (by & !segment);
            (source, source <= most)
        }
    };
    let source = if within {
        usize::try_from(source).unwrap_or(lane) & 31
    } else {
        lane
    };
    // Of a thread that takes no part nothing is known; PTX leaves the result open.
    let source = if set >> source & 1 == 1 { source } else { lane };
    (brought.a[source], within)
}
