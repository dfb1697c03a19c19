//! Thirty-two threads: their registers, where each of them is, and which of them go on together. What an instruction does to
//! registers is `integer`'s, `float`'s and `convert`'s, to memory `data`'s.
//!
//! Each thread has a program counter of its own. Of those that could go on, the ones with the deepest call and the lowest
//! counter do, until they part, wait, or reach where others are; then the choice is made anew, so that threads that parted
//! meet again. Now and then those go first that waited longest: whoever spins is not alone for ever.

use super::{Cx, Fault, FaultKind, Stop, WARP};
use crate::inst::{Inst, NOWHERE, Op, Pred, Reg, Special, Src};
use crate::memory::Memory;
use crate::program::Function;

/// One register of all threads of a warp.
pub(super) type Row = [u64; WARP];

/// A caller's place, kept while it waits for its callee.
#[derive(Debug, Clone, Copy)]
struct Frame {
    pc: u32,
    base: u32,
    local: u32,
    site: u32,
}

/// Which threads an instruction is for, and where their registers are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    pub(super) active: u32,
    pub(super) base: usize,
}

/// After so many instructions those go first that waited longest.
const TURN: u32 = 4096;

/// A warp.
#[derive(Debug)]
pub(super) struct Warp {
    pub(super) rows: Vec<Row>,
    /// Predicates, a bit for each thread; numbered as registers are.
    pub(super) preds: Vec<u32>,
    pub(super) places: Places,
    /// The carry flag of each thread.
    pub(super) carry: u32,
    pub(super) locals: Vec<Vec<u8>>,
    pub(super) tid: [Row; 3],
    pub(super) number: u32,
    frames: Vec<Vec<Frame>>,
    /// Since those that waited longest went first.
    turn: u32,
    clock: u64,
}

/// Where threads are, and what they wait for.
#[derive(Debug, Clone)]
pub(super) struct Places {
    pub(super) pc: [u32; WARP],
    pub(super) base: [u32; WARP],
    pub(super) local: [u32; WARP],
    stamp: [u64; WARP],
    /// Those that have not ended.
    pub(super) live: u32,
    /// Those that wait at a barrier of the block.
    pub(super) barrier: u32,
    /// Those that reached a barrier since the block looked.
    pub(super) arrived: u32,
    /// Those that wait for threads of their warp.
    pub(super) together: u32,
}

/// Lanes of a mask.
pub(super) fn lanes(mut mask: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lane = mask.trailing_zeros();
        mask &= mask.wrapping_sub(1);
        (lane < 32).then_some(lane as usize)
    })
}

/// Each lane's number that `f` makes.
pub(super) fn row(f: impl FnMut(usize) -> u64) -> Row {
    std::array::from_fn(f)
}

impl Warp {
    pub(super) fn new(number: u32) -> Self {
        Self {
            rows: Vec::new(),
            preds: Vec::new(),
            places: Places {
                pc: [0; WARP],
                base: [0; WARP],
                local: [0; WARP],
                stamp: [0; WARP],
                live: 0,
                barrier: 0,
                arrived: 0,
                together: 0,
            },
            carry: 0,
            locals: vec![Vec::new(); WARP],
            tid: [[0; WARP]; 3],
            number,
            frames: vec![Vec::new(); WARP],
            turn: 0,
            clock: 0,
        }
    }

    /// Puts the threads of `live` at a kernel's beginning.
    pub(super) fn start(&mut self, kernel: &Function, live: u32) {
        let places = &mut self.places;
        places.pc = [kernel.entry; WARP];
        places.base = [0; WARP];
        places.local = [0; WARP];
        places.stamp = [0; WARP];
        places.live = live;
        (places.barrier, places.arrived, places.together) = (0, 0, 0);
        self.carry = 0;
        self.turn = 0;
        for frames in &mut self.frames {
            frames.clear();
        }
        self.grow(kernel.registers as usize);
        for lane in lanes(live) {
            let local = &mut self.locals[lane];
            if local.len() < kernel.local_bytes as usize {
                local.resize(kernel.local_bytes as usize, 0);
            }
        }
    }

    fn grow(&mut self, rows: usize) {
        if self.rows.len() < rows {
            self.rows.resize(rows, [0; WARP]);
            self.preds.resize(rows, 0);
        }
    }

    /// Threads that could go on.
    pub(super) const fn runnable(&self) -> u32 {
        let places = &self.places;
        places.live & !places.barrier & !places.together
    }

    /// Goes on until all threads wait or have ended, or so many instructions were carried out that others shall have a turn.
    pub(super) fn run<M: Memory + ?Sized>(&mut self, cx: &mut Cx<'_>, memory: &mut M) -> Result<(), Fault> {
        let mut left = cx.warp_turn;
        loop {
            if self.places.together != 0 {
                self.settle(cx)?;
            }
            let Some((mask, pc, limit)) = self.pick() else {
                return Ok(());
            };
            let before = cx.executed;
            let stop = self.group(cx, memory, mask, (pc, limit))?;
            self.clock += 1;
            for lane in lanes(mask) {
                self.places.stamp[lane] = self.clock;
            }
            let steps = cx.executed - before;
            self.turn = self.turn.saturating_add(u32::try_from(steps).unwrap_or(u32::MAX));
            left = left.saturating_sub(steps);
            if left == 0 && matches!(stop, Stop::Turn | Stop::Parted) {
                return Ok(());
            }
        }
    }

    /// Whose turn it is: threads, their counter, and the counter at which others wait for them.
    fn pick(&mut self) -> Option<(u32, u32, u32)> {
        let runnable = self.runnable();
        if runnable == 0 {
            return None;
        }
        let places = &self.places;
        let first = if self.turn > TURN {
            self.turn = 0;
            lanes(runnable).min_by_key(|&lane| places.stamp[lane])?
        } else {
            lanes(runnable).min_by_key(|&lane| (u32::MAX - places.base[lane], places.pc[lane]))?
        };
        let (pc, base) = (places.pc[first], places.base[first]);
        let (mut mask, mut limit) = (0, u32::MAX);
        for lane in lanes(runnable) {
            if places.base[lane] != base {
                continue;
            }
            if places.pc[lane] == pc {
                mask |= 1 << lane;
            } else if places.pc[lane] > pc {
                limit = limit.min(places.pc[lane]);
            }
        }
        if mask != runnable && limit == u32::MAX {
            // Others are elsewhere; nobody is met on the way, but they must have their turn.
            limit = u32::MAX - 1;
        }
        Some((mask, pc, limit))
    }

    fn stand(&mut self, mask: u32, pc: u32) {
        for lane in lanes(mask) {
            self.places.pc[lane] = pc;
        }
    }

    /// The threads of `mask` from `pc` on.
    fn group<M: Memory + ?Sized>(
        &mut self,
        cx: &mut Cx<'_>,
        memory: &mut M,
        mask: u32,
        (mut pc, limit): (u32, u32),
    ) -> Result<Stop, Fault> {
        let program = cx.program;
        let base = self.places.base[mask.trailing_zeros() as usize & 31] as usize;
        let weight = u64::from(mask.count_ones());
        let mut steps = if limit == u32::MAX {
            cx.warp_turn
        } else {
            u64::from(TURN)
        };
        loop {
            if pc >= limit || steps == 0 {
                self.stand(mask, pc);
                return Ok(if steps == 0 { Stop::Turn } else { Stop::Parted });
            }
            let inst: &Inst = &program.code.insts[pc as usize];
            steps -= 1;
            cx.executed += 1;
            if !cx.budget.take(weight) {
                return Err(Fault::new(cx.budget.fault(), 0, inst.line));
            }
            let active = mask & self.guarded(inst.guard, base);
            let step = Step { active, base };
            match inst.op {
                Op::Bra { target } => {
                    if active == mask {
                        pc = target;
                    } else if active == 0 {
                        pc += 1;
                    } else {
                        self.stand(active, target);
                        self.stand(mask & !active, pc + 1);
                        return Ok(Stop::Parted);
                    }
                    continue;
                }
                _ if active == 0 => {}
                Op::BraIdx { table, a } => {
                    self.stand(mask & !active, pc + 1);
                    self.branch_by_index(cx, step, (table, a), inst.line)?;
                    return Ok(Stop::Parted);
                }
                Op::Call { site } => {
                    self.stand(mask & !active, pc + 1);
                    self.call(cx, step, site, (pc, inst.line))?;
                    return Ok(Stop::Parted);
                }
                Op::Ret => {
                    self.stand(mask, pc + 1);
                    self.ret(cx, active);
                    return Ok(Stop::Parted);
                }
                Op::Exit => {
                    self.stand(mask, pc + 1);
                    self.places.live &= !active;
                    return Ok(Stop::Parted);
                }
                Op::Trap => return Err(Fault::of(FaultKind::Trap, active, inst.line)),
                Op::AssertFail => return Err(Fault::of(FaultKind::Assert, active, inst.line)),
                Op::Bar { .. } => {
                    self.stand(active, pc);
                    self.stand(mask & !active, pc + 1);
                    self.places.barrier |= active;
                    self.places.arrived |= active;
                    return Ok(Stop::Waits);
                }
                Op::Together { collective } => {
                    let collective = &program.code.collectives[collective as usize];
                    if active != mask || !self.all_here(cx, step, collective) {
                        self.stand(active, pc);
                        self.stand(mask & !active, pc + 1);
                        self.places.together |= active;
                        return Ok(Stop::Waits);
                    }
                    self.together(cx, active, |_| collective);
                }
                ref op => self.simple(cx, memory, step, (op, inst.line))?,
            }
            pc += 1;
        }
    }

    fn guarded(&self, guard: Pred, base: usize) -> u32 {
        if guard.reg == NOWHERE {
            return u32::MAX;
        }
        self.pred(guard, base)
    }

    /// The predicate of all threads.
    pub(super) fn pred(&self, pred: Pred, base: usize) -> u32 {
        let bits = self.preds[base + pred.reg as usize];
        if pred.not { !bits } else { bits }
    }

    pub(super) fn set_pred(&mut self, step: Step, d: Reg, bits: u32) {
        if d != NOWHERE {
            let pred = &mut self.preds[step.base + d as usize];
            *pred = (*pred & !step.active) | (bits & step.active);
        }
    }

    /// A source of all threads; `room` is for what is in no register.
    #[inline(always)]
    pub(super) fn fetch<'r>(&'r self, cx: &Cx<'_>, step: Step, source: Src, room: &'r mut Row) -> &'r Row {
        match source {
            Src::Reg(reg) => &self.rows[step.base + reg as usize],
            Src::Imm(bits) => {
                *room = [bits; WARP];
                room
            }
            other => {
                self.unusual(cx, other, room);
                room
            }
        }
    }

    #[inline(never)]
    fn unusual(&self, cx: &Cx<'_>, source: Src, room: &mut Row) {
        *room = match source {
            Src::Special(Special::Tid(axis)) => self.tid[axis as usize],
            Src::Special(special) => self.special(cx, special),
            Src::Symbol(symbol) => [cx.addresses[symbol as usize]; WARP],
            Src::Local(offset) => row(|lane| u64::from(self.places.local[lane]) + u64::from(offset)),
            Src::Shared(offset) => [u64::from(cx.module_shared + offset); WARP],
            Src::Dynamic => [u64::from(cx.dynamic_shared); WARP],
            Src::Imm(bits) => [bits; WARP],
            Src::Reg(_) => *room,
        };
    }

    fn special(&self, cx: &Cx<'_>, special: Special) -> Row {
        let below = |lane: usize| (1u64 << lane) - 1;
        let all = u64::from(u32::MAX);
        let same = |number: u32| [u64::from(number); WARP];
        match special {
            Special::Tid(axis) => self.tid[axis as usize],
            Special::Ntid(axis) => same(cx.block[axis as usize]),
            Special::Ctaid(axis) => same(cx.block_id[axis as usize]),
            Special::Nctaid(axis) => same(cx.grid[axis as usize]),
            Special::Lane => row(|lane| lane as u64),
            Special::Warp => same(self.number),
            Special::Warps => same(cx.warps),
            Special::MaskEq => row(|lane| 1 << lane),
            Special::MaskLt => row(below),
            Special::MaskLe => row(|lane| below(lane + 1)),
            Special::MaskGt => row(|lane| all & !below(lane + 1)),
            Special::MaskGe => row(|lane| all & !below(lane)),
            Special::Clock => [cx.executed; WARP],
            Special::DynamicShared => same(cx.shared_size.saturating_sub(cx.dynamic_shared)),
            Special::TotalShared => same(cx.shared_size),
            Special::Zero => same(0),
            Special::One => same(1),
            Special::WarpSize => same(32),
        }
    }

    /// A source of one thread, in the frame where it is.
    pub(super) fn of_lane(&self, cx: &Cx<'_>, lane: usize, source: Src) -> u64 {
        let step = Step {
            active: 1 << lane,
            base: self.places.base[lane] as usize,
        };
        self.fetch(cx, step, source, &mut [0; WARP])[lane]
    }

    pub(super) fn pred_of_lane(&self, lane: usize, pred: Pred) -> bool {
        self.pred(pred, self.places.base[lane] as usize) >> lane & 1 == 1
    }

    /// Writes a register of one thread, in the frame where it is.
    pub(super) fn set_lane(&mut self, lane: usize, d: Reg, value: u64) {
        if d != NOWHERE {
            self.rows[self.places.base[lane] as usize + d as usize][lane] = value;
        }
    }

    pub(super) fn set_pred_lane(&mut self, lane: usize, d: Reg, value: bool) {
        let step = Step {
            active: 1 << lane,
            base: self.places.base[lane] as usize,
        };
        self.set_pred(step, d, u32::from(value) << lane);
    }

    /// Writes a register of the threads that are active.
    #[inline(always)]
    pub(super) fn put(&mut self, step: Step, d: Reg, values: &Row) {
        if d == NOWHERE {
            return;
        }
        let target = &mut self.rows[step.base + d as usize];
        if step.active == u32::MAX {
            *target = *values;
        } else {
            for lane in 0..WARP {
                target[lane] = if step.active >> lane & 1 == 1 {
                    values[lane]
                } else {
                    target[lane]
                };
            }
        }
    }

    /// `d = f(sources)` for all threads at once: `f` is also asked for those that are not active, so it must know an answer for
    /// anything.
    #[inline(always)]
    pub(super) fn map<const N: usize>(
        &mut self,
        cx: &Cx<'_>,
        step: Step,
        d: Reg,
        sources: [Src; N],
        f: impl Fn([u64; N]) -> u64,
    ) {
        let mut values = [0; WARP];
        {
            let mut room = [[0; WARP]; N];
            let mut sources = sources.into_iter();
            let rows = room.each_mut().map(|room| {
                let source = sources.next().unwrap_or(Src::Imm(0));
                self.fetch(cx, step, source, room)
            });
            for lane in 0..WARP {
                values[lane] = f(std::array::from_fn(|operand| rows[operand][lane]));
            }
        }
        self.put(step, d, &values);
    }

    /// The same for the threads that are active only: for what takes long.
    pub(super) fn map_each<const N: usize>(
        &mut self,
        cx: &Cx<'_>,
        step: Step,
        d: Reg,
        sources: [Src; N],
        f: impl Fn([u64; N]) -> u64,
    ) {
        let rows = sources.map(|source| *self.fetch(cx, step, source, &mut [0; WARP]));
        let mut values = [0; WARP];
        for lane in lanes(step.active) {
            values[lane] = f(std::array::from_fn(|operand| rows[operand][lane]));
        }
        self.put(step, d, &values);
    }

    /// A bit for each thread.
    #[inline(always)]
    pub(super) fn test<const N: usize>(
        &self,
        cx: &Cx<'_>,
        step: Step,
        sources: [Src; N],
        f: impl Fn([u64; N]) -> bool,
    ) -> u32 {
        let mut room = [[0; WARP]; N];
        let mut sources = sources.into_iter();
        let rows = room.each_mut().map(|room| {
            let source = sources.next().unwrap_or(Src::Imm(0));
            self.fetch(cx, step, source, room)
        });
        let holds = |lane: usize| u32::from(f(std::array::from_fn(|operand| rows[operand][lane])));
        (0..WARP).fold(0, |bits, lane| bits | holds(lane) << lane)
    }

    fn branch_by_index(&mut self, cx: &Cx<'_>, step: Step, (table, a): (u32, Src), line: u32) -> Result<(), Fault> {
        let targets = &cx.program.code.tables[table as usize];
        let indices = *self.fetch(cx, step, a, &mut [0; WARP]);
        for lane in lanes(step.active) {
            let index = usize::try_from(indices[lane] & u64::from(u32::MAX));
            let Some(&target) = index.ok().and_then(|index| targets.get(index)) else {
                return Err(Fault::new(
                    FaultKind::Illegal("a branch by an index beyond its table"),
                    lane,
                    line,
                ));
            };
            self.places.pc[lane] = target;
        }
        Ok(())
    }

    fn call(&mut self, cx: &mut Cx<'_>, step: Step, site: u32, (pc, line): (u32, u32)) -> Result<(), Fault> {
        let program = cx.program;
        let call = &program.code.calls[site as usize];
        let callee = &program.functions[call.function as usize];
        let caller = &program.functions[call.caller as usize];
        let base = step.base + caller.registers as usize;
        let first = step.active.trailing_zeros() as usize & 31;
        let shape = call.arguments.len() == callee.parameters.len() && call.results.len() == callee.results.len();
        if !shape || !callee.defined {
            return Err(Fault::new(
                FaultKind::Illegal("a call with other parameters than the function has"),
                first,
                line,
            ));
        }
        if base + callee.registers as usize > cx.row_limit {
            return Err(Fault::new(FaultKind::StackOverflow, first, line));
        }
        self.grow(base + callee.registers as usize);
        // What is copied is no instruction, but takes its time.
        let copied = callee
            .parameters
            .iter()
            .chain(&callee.results)
            .map(|slot| u64::from(slot.size));
        // With nothing left the next instruction ends the launch.
        _ = cx.charge(copied.sum::<u64>() / 8 * u64::from(step.active.count_ones()));
        for lane in lanes(step.active) {
            let from = self.places.local[lane];
            let local = from + caller.local_bytes;
            let end = local as usize + callee.local_bytes as usize;
            if end > cx.local_limit {
                return Err(Fault::new(FaultKind::StackOverflow, lane, line));
            }
            let bytes = &mut self.locals[lane];
            if bytes.len() < end {
                bytes.resize(end, 0);
            }
            for (&argument, slot) in call.arguments.iter().zip(&callee.parameters) {
                copy(bytes, from + argument, local + slot.offset, slot.size);
            }
            self.frames[lane].push(Frame {
                pc: pc + 1,
                base: self.places.base[lane],
                local: from,
                site,
            });
            self.places.pc[lane] = callee.entry;
            self.places.base[lane] = u32::try_from(base).unwrap_or(u32::MAX);
            self.places.local[lane] = local;
        }
        Ok(())
    }

    /// Back to the caller; from a kernel there is no way back.
    fn ret(&mut self, cx: &Cx<'_>, active: u32) {
        for lane in lanes(active) {
            let Some(frame) = self.frames[lane].pop() else {
                self.places.live &= !(1 << lane);
                continue;
            };
            let call = &cx.program.code.calls[frame.site as usize];
            let callee = &cx.program.functions[call.function as usize];
            let local = self.places.local[lane];
            for (&result, slot) in call.results.iter().zip(&callee.results) {
                copy(
                    &mut self.locals[lane],
                    local + slot.offset,
                    frame.local + result,
                    slot.size,
                );
            }
            self.places.pc[lane] = frame.pc;
            self.places.base[lane] = frame.base;
            self.places.local[lane] = frame.local;
        }
    }
}

/// Between two frames of one thread; what would lie beyond its memory is not copied, as a parameter may be declared larger in one
/// place than in another.
fn copy(bytes: &mut [u8], from: u32, to: u32, size: u32) {
    let (from, to) = (from as usize, to as usize);
    let size = (size as usize)
        .min(bytes.len().saturating_sub(from))
        .min(bytes.len().saturating_sub(to));
    bytes.copy_within(from..from + size, to);
}
