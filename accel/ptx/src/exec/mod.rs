//! Launches: a loaded module, a grid of blocks one after the other, errors as CUDA has them. Threads are `warp`'s, barriers `block`'s.

mod block;
mod convert;
mod data;
mod float;
mod integer;
mod numbers;
mod simple;
mod together;
mod warp;

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{LaunchError, ThreadId};
use crate::memory::{Memory, OutOfRange};
use crate::parse::{MAX_LOCAL, MAX_SHARED, shared_aligned};
use crate::program::{Kernel, Program};

/// Threads of a warp.
const WARP: usize = 32;
/// Generic addresses of shared memory begin here. Global memory is below all windows.
pub(crate) const SHARED_WINDOW: u64 = 1 << 60;
/// Generic addresses of local memory begin here.
pub(crate) const LOCAL_WINDOW: u64 = 2 << 60;
/// Generic addresses of a kernel's parameters begin here.
pub(crate) const PARAM_WINDOW: u64 = 3 << 60;
/// A block's threads together have no more local memory, nor more registers.
const BLOCK_BYTES: usize = 256 << 20;
/// A block has no more threads.
const MAX_THREADS: u32 = 1024;
/// A warp carries out so many instructions before others have their turn.
const WARP_TURN: u64 = 65_536;
/// After so many instructions of threads it is seen whether the launch shall stop: some milliseconds.
const SLICE: u64 = 1 << 22;
/// To begin a block costs as much as so many instructions of a thread, for each warp.
const BLOCK_COST: u64 = 32;

/// What a launch is given.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// Blocks in each direction.
    pub grid: [u32; 3],
    /// Threads of a block in each direction.
    pub block: [u32; 3],
    /// Bytes of shared memory beyond what the kernel declares.
    pub dynamic_shared: u32,
    /// The parameters, as [`Kernel`] lays them out.
    pub parameters: &'a [u8],
    /// So many instructions of threads may be carried out.
    pub budget: u64,
}

/// What a launch took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Instructions, counted for each thread.
    pub instructions: u64,
    /// Instructions, counted once for all threads that carried them out together.
    pub warp_instructions: u64,
}

/// A module whose variables have addresses.
#[derive(Debug)]
pub struct Module {
    program: Program,
    addresses: Vec<u64>,
}

impl Module {
    /// Gives each variable the address that `place` finds for it, and writes what it begins with.
    ///
    /// # Errors
    ///
    /// `place` gave none, or memory that is not there.
    pub fn load<M: Memory + ?Sized>(
        program: Program,
        memory: &mut M,
        mut place: impl FnMut(&mut M, u64, u32) -> Result<u64, OutOfRange>,
    ) -> Result<Self, OutOfRange> {
        let mut addresses = Vec::with_capacity(program.variables.len());
        for variable in &program.variables {
            addresses.push(place(memory, variable.size, variable.align)?);
        }
        for (variable, &address) in program.variables.iter().zip(&addresses) {
            memory.store(address, &variable.initial)?;
            for relocation in &variable.addresses {
                let target = addresses.get(relocation.variable as usize).ok_or(OutOfRange)?;
                let target = target.wrapping_add_signed(relocation.add);
                memory.store(address + relocation.at, &target.to_le_bytes())?;
            }
        }
        Ok(Self { program, addresses })
    }

    /// What was loaded.
    #[must_use]
    pub const fn program(&self) -> &Program {
        &self.program
    }

    /// Where a variable is, and its size.
    #[must_use]
    pub fn variable(&self, name: &str) -> Option<(u64, u64)> {
        let index = self
            .program
            .variables
            .iter()
            .position(|variable| variable.name == name)?;
        Some((self.addresses[index], self.program.variables[index].size))
    }

    /// Runs a kernel to its end.
    ///
    /// # Errors
    ///
    /// What [`LaunchError`] lists. What the kernel wrote until then is written.
    pub fn launch<M: Memory + ?Sized>(
        &self,
        name: &str,
        launch: &Launch<'_>,
        memory: &mut M,
    ) -> Result<Statistics, LaunchError> {
        self.launch_until(name, launch, &AtomicBool::new(false), memory)
    }

    /// The same, which ends soon after another thread has set `stop`.
    ///
    /// # Errors
    ///
    /// What [`LaunchError`] lists. What the kernel wrote until then is written.
    pub fn launch_until<M: Memory + ?Sized>(
        &self,
        name: &str,
        launch: &Launch<'_>,
        stop: &AtomicBool,
        memory: &mut M,
    ) -> Result<Statistics, LaunchError> {
        let kernel = self.program.kernel(name)?;
        check(kernel, launch)?;
        let threads = launch.block.iter().product::<u32>();
        let warps = threads.div_ceil(32);
        let dynamic = shared_aligned(kernel.static_shared);
        let own = self.program.functions[kernel.function as usize].shared_bytes;
        let mut cx = Cx {
            program: &self.program,
            addresses: &self.addresses,
            parameters: launch.parameters,
            grid: launch.grid,
            block: launch.block,
            block_id: [0; 3],
            warps,
            module_shared: shared_aligned(own),
            dynamic_shared: dynamic,
            shared_size: dynamic + launch.dynamic_shared,
            shared: vec![0; (dynamic + launch.dynamic_shared) as usize],
            executed: 0,
            budget: Budget::new(launch.budget, stop),
            warp_turn: if warps == 1 { u64::MAX } else { WARP_TURN },
            row_limit: BLOCK_BYTES / size_of::<warp::Row>() / warps as usize,
            local_limit: (MAX_LOCAL as usize).min(BLOCK_BYTES / threads as usize),
        };
        let mut block = block::Block::new(launch.block);
        for z in 0..launch.grid[2] {
            for y in 0..launch.grid[1] {
                for x in 0..launch.grid[0] {
                    cx.block_id = [x, y, z];
                    if !cx.charge(BLOCK_COST * u64::from(warps)) {
                        let fault = Fault::new(cx.budget.fault(), 0, 0);
                        return Err(fault.told(launch, cx.block_id, 0));
                    }
                    let run = block.run(&mut cx, kernel.function, memory);
                    run.map_err(|(warp, fault)| fault.told(launch, cx.block_id, warp))?;
                }
            }
        }
        Ok(Statistics {
            instructions: launch.budget - cx.budget.rest(),
            warp_instructions: cx.executed,
        })
    }
}

fn check(kernel: &Kernel, launch: &Launch<'_>) -> Result<(), LaunchError> {
    let refuse = |what, given: u64, allowed: u64| Err(LaunchError::Configuration { what, given, allowed });
    let threads = launch
        .block
        .iter()
        .fold(1u64, |product, &size| product.saturating_mul(u64::from(size)));
    let most = kernel.max_threads.unwrap_or(MAX_THREADS).min(MAX_THREADS);
    if threads == 0 || threads > u64::from(most) {
        return refuse("threads of a block", threads, u64::from(most));
    }
    if launch.block[2] > 64 {
        return refuse("threads of a block in z", u64::from(launch.block[2]), 64);
    }
    let most = [i32::MAX.unsigned_abs(), 65_535, 65_535];
    for (&size, most) in launch.grid.iter().zip(most) {
        if size == 0 || size > most {
            return refuse("blocks in one direction", u64::from(size), u64::from(most));
        }
    }
    let shared = u64::from(shared_aligned(kernel.static_shared)) + u64::from(launch.dynamic_shared);
    if shared > u64::from(MAX_SHARED) {
        return refuse("shared memory", shared, u64::from(MAX_SHARED));
    }
    if launch.parameters.len() != kernel.parameter_bytes as usize {
        return refuse(
            "bytes of parameters",
            launch.parameters.len() as u64,
            u64::from(kernel.parameter_bytes),
        );
    }
    let warps = threads.div_ceil(32);
    let registers = u64::from(kernel.registers) * size_of::<warp::Row>() as u64 * warps;
    if registers > BLOCK_BYTES as u64 {
        return refuse("bytes of registers", registers, BLOCK_BYTES as u64);
    }
    let local = u64::from(kernel.local_bytes) * threads;
    if local > BLOCK_BYTES as u64 {
        return refuse("bytes of local memory", local, BLOCK_BYTES as u64);
    }
    Ok(())
}

/// What all threads of a block see, and what is counted.
#[derive(Debug)]
struct Cx<'a> {
    program: &'a Program,
    addresses: &'a [u64],
    parameters: &'a [u8],
    grid: [u32; 3],
    block: [u32; 3],
    block_id: [u32; 3],
    warps: u32,
    /// Where the module's own shared variables begin, behind the kernel's.
    module_shared: u32,
    dynamic_shared: u32,
    shared_size: u32,
    shared: Vec<u8>,
    /// Instructions of warps.
    executed: u64,
    budget: Budget<'a>,
    warp_turn: u64,
    row_limit: usize,
    local_limit: usize,
}

impl Cx<'_> {
    /// Takes what is no instruction, but costs time, off the budget; false if there is not so much left.
    fn charge(&mut self, cost: u64) -> bool {
        self.budget.take(cost)
    }
}

/// Instructions of threads that are left. They are handed out in slices, between which it is seen whether the launch shall stop.
#[derive(Debug)]
struct Budget<'a> {
    slice: u64,
    behind: u64,
    stop: &'a AtomicBool,
}

impl<'a> Budget<'a> {
    fn new(all: u64, stop: &'a AtomicBool) -> Self {
        let slice = all.min(SLICE);
        Self {
            slice,
            behind: all - slice,
            stop,
        }
    }

    /// Takes so many; false if there are not so many, or the launch shall stop.
    #[inline]
    fn take(&mut self, count: u64) -> bool {
        if let Some(left) = self.slice.checked_sub(count) {
            self.slice = left;
            return true;
        }
        self.next_slice(count)
    }

    #[cold]
    fn next_slice(&mut self, count: u64) -> bool {
        let all = self.rest();
        if all < count || self.stop.load(Ordering::Relaxed) {
            // Whoever goes on all the same is stopped at the next instruction.
            (self.slice, self.behind) = (0, if all < count { 0 } else { all });
            return false;
        }
        let left = all - count;
        self.slice = left.min(SLICE);
        self.behind = left - self.slice;
        true
    }

    const fn rest(&self) -> u64 {
        self.slice + self.behind
    }

    /// Why there are none.
    fn fault(&self) -> FaultKind {
        if self.stop.load(Ordering::Relaxed) {
            FaultKind::Stopped
        } else {
            FaultKind::Timeout
        }
    }
}

/// Why threads of a warp stopped going on together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    /// They parted, or met others.
    Parted,
    /// They wait.
    Waits,
    /// Others have their turn.
    Turn,
}

/// What a thread did that ends the launch.
#[derive(Debug, Clone, Copy)]
struct Fault {
    kind: FaultKind,
    lane: usize,
    line: u32,
}

#[derive(Debug, Clone, Copy)]
enum FaultKind {
    Address {
        address: u64,
        bytes: u32,
        space: &'static str,
    },
    Misaligned {
        address: u64,
        bytes: u32,
    },
    Deadlock {
        waiting: u32,
        what: &'static str,
    },
    Timeout,
    Stopped,
    Trap,
    Assert,
    StackOverflow,
    Illegal(&'static str),
}

impl Fault {
    const fn new(kind: FaultKind, lane: usize, line: u32) -> Self {
        Self { kind, lane, line }
    }

    /// Of the first thread of a mask.
    const fn of(kind: FaultKind, mask: u32, line: u32) -> Self {
        Self::new(kind, mask.trailing_zeros() as usize & 31, line)
    }

    fn told(self, launch: &Launch<'_>, block: [u32; 3], warp: u32) -> LaunchError {
        let index = warp * 32 + u32::try_from(self.lane).unwrap_or(0);
        let [x, y, _] = launch.block;
        let thread = ThreadId {
            block,
            thread: [index % x, index / x % y, index / x / y],
        };
        let line = self.line;
        match self.kind {
            FaultKind::Address { address, bytes, space } => LaunchError::IllegalAddress {
                address,
                bytes,
                space,
                thread,
                line,
            },
            FaultKind::Misaligned { address, bytes } => LaunchError::Misaligned {
                address,
                bytes,
                thread,
                line,
            },
            FaultKind::Deadlock { waiting, what } => LaunchError::Deadlock {
                waiting,
                thread,
                line,
                what,
            },
            FaultKind::Timeout => LaunchError::Timeout { budget: launch.budget },
            FaultKind::Stopped => LaunchError::Stopped,
            FaultKind::Trap => LaunchError::Trap { thread, line },
            FaultKind::Assert => LaunchError::Assert { thread, line },
            FaultKind::StackOverflow => LaunchError::StackOverflow { thread, line },
            FaultKind::Illegal(what) => LaunchError::Illegal { what, thread, line },
        }
    }
}
