//! Loads, stores and atomic accesses: addresses of each thread, and which memory they are in.

use super::warp::{Row, Step, Warp, lanes, row};
use super::{Cx, Fault, FaultKind, LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, WARP};
use crate::inst::{Access, Address, Atomic, Reg, Src};
use crate::memory::Memory;
use crate::types::{Rounding, Space, Type};

use super::numbers::{BF16, F16, from_bf16, from_f16, round, sum, to_bf16, to_f16};

/// The bits above an address within a window.
const WINDOW_SHIFT: u32 = 60;

/// The space and the address in it that a generic address is.
const fn resolved(space: Space, address: u64) -> (Space, u64) {
    if !matches!(space, Space::Generic) {
        return (space, address);
    }
    let within = address & ((1 << WINDOW_SHIFT) - 1);
    match address >> WINDOW_SHIFT << WINDOW_SHIFT {
        SHARED_WINDOW => (Space::Shared, within),
        LOCAL_WINDOW => (Space::Local, within),
        PARAM_WINDOW => (Space::Param, within),
        _ => (Space::Global, address),
    }
}

/// Whether a generic address is in `space`.
pub(super) fn is_in(space: Space, address: u64) -> bool {
    resolved(Space::Generic, address).0 == space
}

fn part(bytes: &[u8], address: u64, size: usize) -> Option<&[u8]> {
    let start = usize::try_from(address).ok()?;
    bytes.get(start..start.checked_add(size)?)
}

#[inline(always)]
fn word(bytes: &[u8], address: u64) -> Option<u32> {
    let start = usize::try_from(address).ok()?;
    let bytes = bytes.get(start..start.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

fn part_mut(bytes: &mut [u8], address: u64, size: usize) -> Option<&mut [u8]> {
    let start = usize::try_from(address).ok()?;
    bytes.get_mut(start..start.checked_add(size)?)
}

/// One access of one thread.
#[derive(Clone, Copy)]
struct One {
    space: Space,
    address: u64,
    bytes: u32,
    lane: usize,
    line: u32,
}

impl One {
    fn fault(&self, address: u64) -> Fault {
        let kind = FaultKind::Address {
            address,
            bytes: self.bytes,
            space: self.space.name(),
        };
        Fault::new(kind, self.lane, self.line)
    }
}

/// A number from its bytes, with its sign if its type has one.
#[inline(always)]
fn widened(bytes: [u8; 8], t: Type) -> u64 {
    let bits = u64::from_le_bytes(bytes);
    if t.is_signed() {
        let shift = 64 - 8 * t.bytes();
        return ((bits << shift).cast_signed() >> shift).cast_unsigned();
    }
    bits
}

impl Warp {
    fn addresses(&self, cx: &Cx<'_>, step: Step, address: Address) -> Row {
        let mut room = [0; WARP];
        let base = self.fetch(cx, step, address.base, &mut room);
        row(|lane| base[lane].wrapping_add_signed(address.offset))
    }

    fn checked(access: &Access, bytes: u32, address: u64, lane: usize, line: u32) -> Result<One, Fault> {
        let (space, within) = resolved(access.space, address);
        // Sizes are powers of two.
        if within & u64::from(bytes - 1) != 0 {
            return Err(Fault::new(FaultKind::Misaligned { address, bytes }, lane, line));
        }
        Ok(One {
            space,
            address: within,
            bytes,
            lane,
            line,
        })
    }

    #[inline(always)]
    fn read<M: Memory + ?Sized>(&self, cx: &Cx<'_>, memory: &M, one: One, into: &mut [u8]) -> Result<(), Fault> {
        let from = match one.space {
            Space::Generic | Space::Global => {
                return memory.load(one.address, into).map_err(|_| one.fault(one.address));
            }
            Space::Shared => &cx.shared,
            Space::Local => &self.locals[one.lane],
            Space::Param => cx.parameters,
        };
        let Some(from) = part(from, one.address, into.len()) else {
            return Err(one.fault(one.address));
        };
        into.copy_from_slice(from);
        Ok(())
    }

    #[inline(always)]
    fn write<M: Memory + ?Sized>(
        &mut self,
        cx: &mut Cx<'_>,
        memory: &mut M,
        one: One,
        from: &[u8],
    ) -> Result<(), Fault> {
        let into = match one.space {
            Space::Generic | Space::Global => {
                return memory.store(one.address, from).map_err(|_| one.fault(one.address));
            }
            Space::Shared => &mut cx.shared,
            Space::Local => &mut self.locals[one.lane],
            // Parameters are read only.
            Space::Param => return Err(one.fault(one.address)),
        };
        let Some(into) = part_mut(into, one.address, from.len()) else {
            return Err(one.fault(one.address));
        };
        into.copy_from_slice(from);
        Ok(())
    }

    /// A load of one value by each thread.
    pub(super) fn load_one<M: Memory + ?Sized>(
        &mut self,
        cx: &Cx<'_>,
        memory: &M,
        step: Step,
        (access, d, line): (&Access, Reg, u32),
    ) -> Result<(), Fault> {
        if access.space == Space::Param
            && let Src::Imm(base) = access.address.base
        {
            // The same for all threads.
            let one = Self::checked(
                access,
                access.t.bytes(),
                base.wrapping_add_signed(access.address.offset),
                0,
                line,
            )?;
            let mut bytes = [0; 8];
            self.read(cx, memory, one, &mut bytes[..one.bytes as usize])?;
            self.put(step, d, &[widened(bytes, access.t); WARP]);
            return Ok(());
        }
        let addresses = self.addresses(cx, step, access.address);
        let mut values = [0; WARP];
        let size = access.t.bytes();
        for lane in lanes(step.active) {
            // Most accesses of shared memory are such.
            if access.space == Space::Shared
                && size == 4
                && addresses[lane] & 3 == 0
                && let Some(word) = word(&cx.shared, addresses[lane])
            {
                values[lane] = widened(u64::from(word).to_le_bytes(), access.t);
                continue;
            }
            let one = Self::checked(access, size, addresses[lane], lane, line)?;
            let mut bytes = [0; 8];
            match size {
                4 => self.read(cx, memory, one, &mut bytes[..4])?,
                8 => self.read(cx, memory, one, &mut bytes)?,
                _ => self.read(cx, memory, one, &mut bytes[..size as usize])?,
            }
            values[lane] = widened(bytes, access.t);
        }
        self.put(step, d, &values);
        Ok(())
    }

    /// A load of several values by each thread.
    pub(super) fn load<M: Memory + ?Sized>(
        &mut self,
        cx: &Cx<'_>,
        memory: &M,
        step: Step,
        (access, targets, line): (&Access, u32, u32),
    ) -> Result<(), Fault> {
        let addresses = self.addresses(cx, step, access.address);
        let mut values = [[0; WARP]; 8];
        let size = access.t.bytes() as usize;
        let count = usize::from(access.count);
        for lane in lanes(step.active) {
            let one = Self::checked(
                access,
                access.t.bytes() * u32::from(access.count),
                addresses[lane],
                lane,
                line,
            )?;
            let mut bytes = [0; 64];
            self.read(cx, memory, one, &mut bytes[..size * count])?;
            for (values, bytes) in values.iter_mut().zip(bytes[..size * count].chunks_exact(size)) {
                let mut part = [0; 8];
                part[..size].copy_from_slice(bytes);
                values[lane] = widened(part, access.t);
            }
        }
        let targets = &cx.program.code.targets[targets as usize..][..count];
        for (&target, values) in targets.iter().zip(&values) {
            self.put(step, target, values);
        }
        Ok(())
    }

    /// A store of one or several values by each thread.
    pub(super) fn store<M: Memory + ?Sized>(
        &mut self,
        cx: &mut Cx<'_>,
        memory: &mut M,
        step: Step,
        (access, operands, line): (&Access, u32, u32),
    ) -> Result<(), Fault> {
        let addresses = self.addresses(cx, step, access.address);
        let count = usize::from(access.count);
        let size = access.t.bytes() as usize;
        let program = cx.program;
        let mut values = [[0; WARP]; 8];
        for (row, &source) in values
            .iter_mut()
            .zip(&program.code.operands[operands as usize..][..count])
        {
            *row = *self.fetch(cx, step, source, &mut [0; WARP]);
        }
        for lane in lanes(step.active) {
            let one = Self::checked(
                access,
                access.t.bytes() * u32::from(access.count),
                addresses[lane],
                lane,
                line,
            )?;
            let mut bytes = [0; 64];
            for (bytes, values) in bytes.chunks_exact_mut(size).zip(&values[..count]) {
                bytes.copy_from_slice(&values[lane].to_le_bytes()[..size]);
            }
            self.write(cx, memory, one, &bytes[..size * count])?;
        }
        Ok(())
    }

    /// An atomic access by each thread, in the order of the threads.
    pub(super) fn atomic<M: Memory + ?Sized>(
        &mut self,
        cx: &mut Cx<'_>,
        memory: &mut M,
        step: Step,
        (f, access, d, operands, line): (Atomic, &Access, Reg, u32, u32),
    ) -> Result<(), Fault> {
        let addresses = self.addresses(cx, step, access.address);
        let program = cx.program;
        let sources = &program.code.operands[operands as usize..];
        let b = *self.fetch(cx, step, sources[0], &mut [0; WARP]);
        let c = if f == Atomic::Cas {
            *self.fetch(cx, step, sources[1], &mut [0; WARP])
        } else {
            [0; WARP]
        };
        let mut values = [0; WARP];
        for lane in lanes(step.active) {
            let one = Self::checked(access, access.t.bytes(), addresses[lane], lane, line)?;
            let mut update = |old| updated(f, access.t, old, b[lane], c[lane]);
            values[lane] = match one.space {
                Space::Global | Space::Generic => memory
                    .atomic(one.address, one.bytes, &mut update)
                    .map_err(|_| one.fault(one.address))?,
                _ => {
                    let mut bytes = [0; 8];
                    let size = one.bytes as usize;
                    self.read(cx, memory, one, &mut bytes[..size])?;
                    let old = u64::from_le_bytes(bytes);
                    self.write(cx, memory, one, &update(old).to_le_bytes()[..size])?;
                    old
                }
            };
        }
        self.put(step, d, &values);
        Ok(())
    }
}

/// What an atomic access leaves in memory.
#[expect(
    clippy::cast_possible_truncation,
    reason = "a register's upper bits are not part of a narrower number"
)]
fn updated(f: Atomic, t: Type, old: u64, b: u64, c: u64) -> u64 {
    let wide = t.bytes() == 8;
    let low = |value: u64| {
        if wide {
            value
        } else {
            value & (u64::MAX >> (64 - 8 * t.bytes()))
        }
    };
    let (old, b, c) = (low(old), low(b), low(c));
    let signed = |value: u64| {
        if wide {
            value.cast_signed()
        } else {
            i64::from((value as u32).cast_signed())
        }
    };
    match f {
        Atomic::Add => match t {
            Type::F32 => u64::from((f32::from_bits(old as u32) + f32::from_bits(b as u32)).to_bits()),
            Type::F64 => (f64::from_bits(old) + f64::from_bits(b)).to_bits(),
            Type::F16 => {
                let sum = sum(from_f16(old as u16), from_f16(b as u16));
                u64::from(to_f16(round(sum, F16, Rounding::Nearest)))
            }
            Type::Bf16 => {
                let sum = sum(from_bf16(old as u16), from_bf16(b as u16));
                u64::from(to_bf16(round(sum, BF16, Rounding::Nearest)))
            }
            _ => old.wrapping_add(b),
        },
        Atomic::Min if t.is_signed() => {
            if signed(b) < signed(old) {
                b
            } else {
                old
            }
        }
        Atomic::Max if t.is_signed() => {
            if signed(b) > signed(old) {
                b
            } else {
                old
            }
        }
        Atomic::Min => old.min(b),
        Atomic::Max => old.max(b),
        Atomic::And => old & b,
        Atomic::Or => old | b,
        Atomic::Xor => old ^ b,
        Atomic::Exch => b,
        Atomic::Cas => {
            if old == b {
                c
            } else {
                old
            }
        }
        Atomic::Inc => {
            if old >= b {
                0
            } else {
                old + 1
            }
        }
        Atomic::Dec => {
            if old == 0 || old > b {
                b
            } else {
                old - 1
            }
        }
    }
}
