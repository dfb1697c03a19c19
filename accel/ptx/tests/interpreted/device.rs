//! What a program does around its kernels: memory, copies, parameters, launches.

use accel_ptx::{Launch, LaunchError, Memory, Module, Program, Regions, Statistics};

/// No kernel here needs more.
const BUDGET: u64 = 200_000_000;

/// A module with its memory.
pub(crate) struct Device {
    pub(crate) memory: Regions,
    pub(crate) module: Module,
    pub(crate) budget: u64,
}

/// A kernel's parameters, each at the next multiple of its size.
#[derive(Default, Clone)]
pub(crate) struct Args(Vec<u8>);

impl Args {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    fn push(mut self, bytes: &[u8]) -> Self {
        self.0.resize(self.0.len().next_multiple_of(bytes.len()), 0);
        self.0.extend(bytes);
        self
    }

    pub(crate) fn int(self, value: usize) -> Self {
        self.signed(i32::try_from(value).unwrap())
    }

    pub(crate) fn signed(self, value: i32) -> Self {
        self.push(&value.to_le_bytes())
    }

    pub(crate) fn float(self, value: f32) -> Self {
        self.push(&value.to_le_bytes())
    }

    pub(crate) fn pointer(self, value: u64) -> Self {
        self.push(&value.to_le_bytes())
    }

    /// Bytes as they are.
    pub(crate) fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }
}

/// A number in memory.
pub(crate) trait Number: Copy {
    const SIZE: usize;
    fn bytes(self) -> Vec<u8>;
    fn read(bytes: &[u8]) -> Self;
}

macro_rules! number {
    ($($t:ty),*) => {$(
        impl Number for $t {
            const SIZE: usize = size_of::<$t>();
            fn bytes(self) -> Vec<u8> {
                self.to_le_bytes().to_vec()
            }
            fn read(bytes: &[u8]) -> Self {
                Self::from_le_bytes(bytes.try_into().unwrap())
            }
        }
    )*};
}

number!(u8, i32, u32, i64, u64, f32, f64);

impl Device {
    pub(crate) fn new(text: &str) -> Self {
        let program = Program::parse(text).unwrap_or_else(|refused| panic!("{refused}"));
        let mut memory = Regions::new();
        let place = |memory: &mut Regions, size: u64, _| Ok(memory.allocate(usize::try_from(size).unwrap()));
        let module = Module::load(program, &mut memory, place).unwrap();
        Self {
            memory,
            module,
            budget: BUDGET,
        }
    }

    /// A copy of `values` on the device.
    pub(crate) fn upload<T: Number>(&mut self, values: &[T]) -> u64 {
        let address = self.memory.allocate(values.len() * T::SIZE);
        self.write(address, values);
        address
    }

    pub(crate) fn write<T: Number>(&mut self, address: u64, values: &[T]) {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.bytes()).collect();
        self.memory.store(address, &bytes).unwrap();
    }

    pub(crate) fn download<T: Number>(&self, address: u64, count: usize) -> Vec<T> {
        let bytes = self.memory.bytes(address, count * T::SIZE).unwrap();
        bytes.chunks_exact(T::SIZE).map(T::read).collect()
    }

    /// Runs a kernel over `blocks` blocks of `threads` threads.
    pub(crate) fn try_run(
        &mut self,
        kernel: &str,
        (blocks, threads): ([u32; 2], [u32; 2]),
        dynamic_shared: u32,
        args: &Args,
    ) -> Result<Statistics, LaunchError> {
        let launch = Launch {
            grid: [blocks[0], blocks[1], 1],
            block: [threads[0], threads[1], 1],
            dynamic_shared,
            parameters: &args.0,
            budget: self.budget,
        };
        self.module.launch(kernel, &launch, &mut self.memory)
    }

    /// Runs a kernel that has one dimension and must succeed.
    pub(crate) fn run(&mut self, kernel: &str, blocks: u32, threads: u32, args: &Args) -> Statistics {
        self.try_run(kernel, ([blocks, 1], [threads, 1]), 0, args)
            .unwrap_or_else(|error| panic!("{kernel}: {error}"))
    }
}

/// Numbers that are the same in every run.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// From -1 to 1.
    pub(crate) fn real(&mut self) -> f32 {
        let bits = u16::try_from(self.bits() >> 48).unwrap();
        f32::from(bits) / 32_768.0 - 1.0
    }

    pub(crate) fn below(&mut self, limit: i32) -> i32 {
        i32::try_from(self.bits() % u64::try_from(limit).unwrap()).unwrap()
    }

    pub(crate) fn reals(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.real()).collect()
    }
}

/// Fails where two lists of numbers differ by more than 1e-4, relative to their size where that is above one.
#[track_caller]
pub(crate) fn close(found: &[f32], wanted: &[f32]) {
    assert_eq!(found.len(), wanted.len());
    for (index, (&found, &wanted)) in found.iter().zip(wanted).enumerate() {
        let distance = (found - wanted).abs() / wanted.abs().max(1.0);
        assert!(distance <= 1e-4, "number {index} is {found}, and {wanted} was expected");
    }
}
