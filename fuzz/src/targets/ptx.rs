//! Modules in PTX and fat binaries, as a client of an accelerator sends them; what is read is run for a while, too. Knows no server.

use accel_ptx::{Launch, Memory, Module, Program, Regions, fatbin};

use crate::run::{Target, count, outcome};

/// Instructions that a kernel of changed text may take.
const BUDGET: u64 = 20_000;
/// No more kernels of a module are run.
const KERNELS: usize = 4;
/// Some warps, the last of which is not full.
const THREADS: u32 = 70;

/// One kernel of each kind of instruction, so that a change hits something other than whitespace.
const SMALL: &str = "\
.version 8.0
.target sm_80
.address_size 64
.global .align 8 .u64 table[2] = {generic(table), 7};
.extern .shared .align 16 .b8 more[];
.func (.param .b32 out) twice(.param .b32 x)
{
.reg .b32 %r<3>;
ld.param.u32 %r1, [x];
add.u32 %r2, %r1, %r1;
st.param.b32 [out], %r2;
ret;
}
.visible .entry k(.param .u64 p, .param .u64 q)
.maxntid 256, 1, 1
{
.reg .b64 %d<6>; .reg .b32 %r<12>; .reg .f32 %f<4>; .reg .pred %p<3>;
.shared .align 4 .b8 room[512];
.local .align 4 .b8 own[16];
ld.param.u64 %d1, [p];
mov.u32 %r1, %tid.x;
mul.wide.u32 %d2, %r1, 4;
add.s64 %d3, %d1, %d2;
ld.global.f32 %f1, [%d3];
fma.rn.f32 %f2, %f1, 0f3F800000, %f1;
mov.u64 %d4, own;
st.local.f32 [%d4+4], %f2;
setp.lt.and.u32 %p1, %r1, 33, %p2;
@%p1 bra one;
shfl.sync.bfly.b32 %r2|%p2, %r1, 16, 31, 3;
one:
vote.sync.ballot.b32 %r3, %p1, -1;
{
.param .b32 a; .param .b32 b;
st.param.b32 [a], %r1;
call.uni (b), twice, (a);
ld.param.b32 %r4, [b];
}
list: .branchtargets one, two;
@%p2 brx.idx %r4, list;
two:
bar.sync 0;
bfe.u32 %r5, %r4, 3, 5;
prmt.b32 %r6, %r5, %r1, 0x3210;
mov.b64 %d5, {%r5, %r6};
st.shared.u32 [room+4], %r6;
atom.shared.add.u32 %r7, [room+4], 1;
red.global.add.f32 [%d3], %f2;
cvt.rzi.s32.f32 %r8, %f2;
ld.global.v2.u32 {%r9, %r10}, [table];
bar.red.popc.u32 %r11, 0, %p1;
st.global.u32 [%d3], %r11;
ret;
}
";

/// Runs the kernels of what was read: their parameters are addresses of memory that is there, or not.
fn run(program: Program) -> u64 {
    let mut memory = Regions::new();
    let buffer = memory.allocate(4096);
    let place = |memory: &mut Regions, size: u64, _| {
        // A quota, as a server has one.
        let size = usize::try_from(size).ok().filter(|&size| size <= 1 << 20);
        size.map(|size| memory.allocate(size)).ok_or(accel_ptx::OutOfRange)
    };
    let Ok(module) = Module::load(program, &mut memory, place) else {
        return outcome("no room");
    };
    let mut ended = String::new();
    for kernel in module.program().kernels().iter().take(KERNELS) {
        let mut parameters = buffer.to_le_bytes().repeat(kernel.parameter_bytes.div_ceil(8) as usize);
        parameters.truncate(kernel.parameter_bytes as usize);
        let launch = Launch {
            grid: [2, 1, 1],
            block: [THREADS, 1, 1],
            dynamic_shared: 1024,
            parameters: &parameters,
            budget: BUDGET,
        };
        match module.launch(&kernel.name, &launch, &mut memory) {
            Ok(took) => {
                assert!(
                    took.instructions <= BUDGET,
                    "a budget of {BUDGET} was not kept: {took:?}"
                );
                ended.push_str("ended");
            }
            Err(error) => ended.push_str(error.cuda().0),
        }
        count(1);
    }
    assert!(memory.load(buffer, &mut [0; 4096]).is_ok(), "memory is gone");
    outcome(ended)
}

/// Text of modules.
pub(crate) fn modules() -> Target {
    Target {
        name: "ptx-modules",
        seeds: [
            SMALL,
            include_str!("../../../accel/ptx/tests/ptx/basics.ptx"),
            include_str!("../../../accel/ptx/tests/ptx/language.ptx"),
        ]
        .map(|text| text.as_bytes().to_vec())
        .to_vec(),
        parse: |bytes| match Program::parse(&String::from_utf8_lossy(bytes)) {
            Ok(program) => run(program),
            Err(refused) => outcome(refused),
        },
    }
}

/// Fat binaries, with PTX in all forms.
pub(crate) fn fat_binaries() -> Target {
    Target {
        name: "fat-binaries",
        seeds: vec![
            include_bytes!("../../../accel/ptx/tests/fatbin/none.bin").to_vec(),
            include_bytes!("../../../accel/ptx/tests/fatbin/speed.bin").to_vec(),
            include_bytes!("../../../accel/ptx/tests/fatbin/default.bin").to_vec(),
        ],
        parse: |bytes| {
            let _ = fatbin::wrapped(bytes);
            if let Ok(section) = fatbin::section(bytes) {
                assert!(section.len() <= bytes.len(), "a section is longer than its file");
            }
            match fatbin::ptx(bytes) {
                Ok(found) => {
                    let length: usize = found.iter().map(|ptx| ptx.text.len()).sum();
                    assert!(length <= accel_ptx::MAX_TEXT, "{length} bytes of text");
                    outcome(found.len())
                }
                Err(error) => outcome(error),
            }
        },
    }
}
