//! How many instructions the interpreter carries out in a second, by kernel: those that nvcc made for the tests.
//!
//! `cargo bench -p basalt-accel-ptx` prints, for each, instructions of threads and of warps, and both in a second.

#![expect(clippy::print_stdout, reason = "a benchmark prints its figures")]

use std::time::Instant;

use accel_ptx::{Launch, Memory, Module, Program, Regions};

struct Case {
    name: &'static str,
    module: &'static str,
    grid: [u32; 3],
    block: [u32; 3],
    parameters: fn(&mut Regions) -> Vec<u8>,
}

const BASICS: &str = include_str!("../tests/ptx/basics.ptx");
const LENET: &str = include_str!("../tests/ptx/lenet.ptx");

const CASES: [Case; 4] = [
    Case {
        name: "saxpy",
        module: BASICS,
        grid: [4096, 1, 1],
        block: [256, 1, 1],
        parameters: |memory| {
            let (x, y) = (memory.allocate(4 << 20), memory.allocate(4 << 20));
            words(&[1 << 20, 0x4000_0000], &[x, y])
        },
    },
    Case {
        name: "gemm_tiled",
        module: BASICS,
        grid: [16, 16, 1],
        block: [16, 16, 1],
        parameters: |memory| {
            let [a, b, c] = [(); 3].map(|()| memory.allocate(4 << 16));
            words(&[256, 256, 256, 0], &[a, b, c])
        },
    },
    Case {
        name: "histogram",
        module: BASICS,
        grid: [32, 1, 1],
        block: [256, 1, 1],
        parameters: |memory| {
            let (x, bins) = (memory.allocate(1 << 20), memory.allocate(1024));
            words(&[1 << 20, 0], &[x, bins])
        },
    },
    Case {
        name: "convolution",
        module: LENET,
        grid: [256, 1, 1],
        block: [128, 1, 1],
        parameters: |memory| {
            let [x, w, bias, y] = [(); 4].map(|()| memory.allocate(1 << 20));
            words(&[32 * 1024, 6, 12, 16, 5, 0], &[x, w, bias, y])
        },
    },
];

fn words(numbers: &[u32], pointers: &[u64]) -> Vec<u8> {
    let numbers = numbers.iter().flat_map(|number| number.to_le_bytes());
    numbers
        .chain(pointers.iter().flat_map(|pointer| pointer.to_le_bytes()))
        .collect()
}

/// Numbers in all that the parameters point to, as zeros are quicker than others.
fn fill(memory: &mut Regions, parameters: &[u8]) {
    let mut number = 0.37f32;
    for pointer in parameters.chunks_exact(8) {
        let mut address = u64::from_le_bytes(pointer.try_into().unwrap_or_default());
        while memory.store(address, &number.to_le_bytes()).is_ok() {
            number = (number * 3.7).fract() + 0.01;
            address += 4;
        }
    }
}

fn main() {
    println!(
        "{:12} {:>14} {:>14} {:>8} {:>16} {:>16}",
        "kernel", "of threads", "of warps", "seconds", "threads'/s", "warps'/s"
    );
    for case in CASES {
        let mut memory = Regions::new();
        let program = Program::parse(case.module).expect("the module is one of the tests'");
        let module = Module::load(program, &mut memory, |memory, size, _| {
            Ok(memory.allocate(usize::try_from(size).unwrap_or(usize::MAX)))
        });
        let parameters = (case.parameters)(&mut memory);
        fill(&mut memory, &parameters);
        let launch = Launch {
            grid: case.grid,
            block: case.block,
            dynamic_shared: 0,
            parameters: &parameters,
            budget: u64::MAX,
        };
        let begun = Instant::now();
        let ran = module
            .expect("its variables have room")
            .launch(case.name, &launch, &mut memory);
        let seconds = begun.elapsed().as_secs_f64();
        let took = ran.expect("the kernel ends");
        println!(
            "{:12} {:>14} {:>14} {:>8.3} {:>16.0} {:>16.0}",
            case.name,
            took.instructions,
            took.warp_instructions,
            seconds,
            took.instructions as f64 / seconds,
            took.warp_instructions as f64 / seconds
        );
    }
}
