//! What `kmod/uapi/basalt.h` says, for Rust: numbers, structures, and one function for each request. Knows nothing of what is
//! done with them.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use engine::XSAVE_BYTES;
use reservation::request::{self, Way, number};

/// Leaves of CPUID.
pub(crate) const MAX_CPUID: usize = 256;

/// A leaf of CPUID of which ECX matters.
pub(crate) const CPUID_INDEX: u32 = 1;

/// Why a vCPU came out.
pub(crate) mod exit {
    pub(crate) const INTERRUPTED: u32 = 0;
    pub(crate) const IO: u32 = 1;
    pub(crate) const MEMORY: u32 = 2;
    pub(crate) const MSR: u32 = 3;
    pub(crate) const HYPERCALL: u32 = 4;
    pub(crate) const SHUTDOWN: u32 = 5;
    pub(crate) const FAILED: u32 = 6;
}

/// What exits are counted by, in the order of `enum basalt_count`.
pub(crate) const COUNTS: [&str; 8] = ["port", "memory", "msr", "cpuid", "hypercall", "nmi", "other", "icr"];

/// The number behind those: what was refused.
pub(crate) const REFUSED: usize = COUNTS.len();

/// `struct basalt_create_vm`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct CreateVm {
    pub(crate) flags: u32,
    pub(crate) reserved0: u32,
    pub(crate) memory: u64,
    pub(crate) reserved: [u32; 4],
}

/// A machine whose guest's addresses nobody translates.
pub(crate) const IDENTITY: u32 = 1;

/// What the memory of such a machine is a multiple of.
pub(crate) const PIECE: u64 = 2 << 20;

/// `struct basalt_place`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Place {
    pub(crate) start: u64,
    pub(crate) size: u64,
    pub(crate) low_start: u64,
    pub(crate) low_size: u64,
    pub(crate) reserved: [u32; 8],
}

/// `struct basalt_memory`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Memory {
    pub(crate) guest: u64,
    pub(crate) size: u64,
    pub(crate) address: u64,
    pub(crate) flags: u32,
    pub(crate) reserved: [u32; 9],
}

/// `struct basalt_create_vcpu`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct CreateVcpu {
    pub(crate) cpu: u32,
    pub(crate) apic_id: u32,
    pub(crate) reserved: [u32; 6],
}

/// `struct basalt_cpuid_entry`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct CpuidLeaf {
    pub(crate) function: u32,
    pub(crate) index: u32,
    pub(crate) flags: u32,
    pub(crate) registers: [u32; 4],
    pub(crate) reserved: u32,
}

/// `struct basalt_cpuid`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Cpuid {
    pub(crate) count: u32,
    pub(crate) reserved: [u32; 7],
    pub(crate) entries: [CpuidLeaf; MAX_CPUID],
}

impl Default for Cpuid {
    fn default() -> Self {
        Self {
            count: 0,
            reserved: [0; 7],
            entries: [CpuidLeaf::default(); MAX_CPUID],
        }
    }
}

/// `struct basalt_regs`, whose order is not that of instruction encodings.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Regs {
    pub(crate) rax: u64,
    pub(crate) rbx: u64,
    pub(crate) rcx: u64,
    pub(crate) rdx: u64,
    pub(crate) rsi: u64,
    pub(crate) rdi: u64,
    pub(crate) rsp: u64,
    pub(crate) rbp: u64,
    pub(crate) r8_to_r15: [u64; 8],
    pub(crate) rip: u64,
    pub(crate) rflags: u64,
}

/// `struct basalt_segment`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) base: u64,
    pub(crate) limit: u32,
    pub(crate) selector: u16,
    pub(crate) attributes: u16,
}

/// `struct basalt_state`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) regs: Regs,
    pub(crate) es: Segment,
    pub(crate) cs: Segment,
    pub(crate) ss: Segment,
    pub(crate) ds: Segment,
    pub(crate) fs: Segment,
    pub(crate) gs: Segment,
    pub(crate) gdtr: Segment,
    pub(crate) ldtr: Segment,
    pub(crate) idtr: Segment,
    pub(crate) tr: Segment,
    pub(crate) cr0: u64,
    pub(crate) cr2: u64,
    pub(crate) cr3: u64,
    pub(crate) cr4: u64,
    pub(crate) dr6: u64,
    pub(crate) dr7: u64,
    pub(crate) efer: u64,
    pub(crate) pat: u64,
    pub(crate) star: u64,
    pub(crate) lstar: u64,
    pub(crate) cstar: u64,
    pub(crate) sfmask: u64,
    pub(crate) kernel_gs_base: u64,
    pub(crate) sysenter_cs: u64,
    pub(crate) sysenter_esp: u64,
    pub(crate) sysenter_eip: u64,
    pub(crate) tsc_offset: u64,
    pub(crate) interruptibility: u32,
    pub(crate) reserved0: u32,
    pub(crate) event: u64,
    pub(crate) reserved: [u32; 28],
}

/// Registers of an x2APIC.
pub(crate) const APIC_REGISTERS: usize = 64;

/// `struct basalt_context`.
#[repr(C)]
#[derive(Clone)]
pub(crate) struct Context {
    pub(crate) xsave: [u8; XSAVE_BYTES],
    pub(crate) xcr0: u64,
    pub(crate) dr: [u64; 4],
    pub(crate) tsc_aux: u64,
    pub(crate) timer_khz: u32,
    pub(crate) reserved0: u32,
    pub(crate) apic: [u32; APIC_REGISTERS],
    pub(crate) reserved: [u32; 48],
}

impl Context {
    pub(crate) fn empty() -> Box<Self> {
        Box::new(Self {
            xsave: [0; XSAVE_BYTES],
            xcr0: 0,
            dr: [0; 4],
            tsc_aux: 0,
            timer_khz: 0,
            reserved0: 0,
            apic: [0; APIC_REGISTERS],
            reserved: [0; 48],
        })
    }
}

/// The part of `struct basalt_run` that says what an exit is about, by the kind of exit.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union About {
    pub(crate) io: AboutIo,
    pub(crate) memory: AboutMemory,
    pub(crate) msr: AboutMsr,
    pub(crate) failed: AboutFailure,
    all: [u64; 24],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AboutIo {
    pub(crate) port: u16,
    pub(crate) size: u8,
    pub(crate) write: u8,
    pub(crate) value: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AboutMemory {
    pub(crate) address: u64,
    pub(crate) error: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AboutMsr {
    pub(crate) index: u32,
    pub(crate) write: u8,
    pub(crate) fault: u8,
    pub(crate) reserved: u16,
    pub(crate) value: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AboutFailure {
    pub(crate) code: u64,
    pub(crate) info1: u64,
    pub(crate) info2: u64,
}

/// Bits of [`State::interruptibility`].
pub(crate) const SHADOW: u32 = 1;
/// NMIs wait for an IRET.
pub(crate) const IN_NMI: u32 = 1 << 1;
pub(crate) const NO_NMI: u32 = 1 << 2;
/// An NMI waits.
pub(crate) const NMI_WAITS: u32 = 1 << 3;

/// `struct basalt_run`, the page that a vCPU's descriptor maps.
#[repr(C)]
pub(crate) struct Run {
    pub(crate) reason: u32,
    pub(crate) immediate_exit: u32,
    pub(crate) reserved: [u32; 14],
    pub(crate) about: About,
    pub(crate) counts: [u64; 32],
}

/// `struct basalt_interrupt`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Interrupt {
    pub(crate) vector: u32,
    pub(crate) reserved: [u32; 7],
}

impl Interrupt {
    pub(crate) fn new(vector: u8) -> Self {
        Self {
            vector: vector.into(),
            ..Self::default()
        }
    }
}

/// `struct basalt_irq`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Irq {
    pub(crate) event: i32,
    pub(crate) vector: u32,
    pub(crate) reserved: [u32; 6],
}

impl Irq {
    fn new(event: impl AsFd, vector: u8) -> Self {
        Self {
            event: event.as_fd().as_raw_fd(),
            vector: vector.into(),
            ..Self::default()
        }
    }
}

/// `struct basalt_freeze`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Freeze {
    budget_us: u32,
    reserved: [u32; 7],
}

/// `struct basalt_link`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Link {
    server: i32,
    index: u32,
    reserved: [u32; 6],
}

/// What a guest says that serves others and has nothing to do.
pub(crate) const CALL_WAIT: u64 = 0x6261_7361_746c_0001;

const CREATE_VM: u32 = number::<CreateVm>(Way::Write, 0x10);
const MAP_MEMORY: u32 = number::<Memory>(Way::Write, 0x20);
const CREATE_VCPU: u32 = number::<CreateVcpu>(Way::Write, 0x21);
const SET_CPUID: u32 = number::<Cpuid>(Way::Write, 0x22);
const MAP_DEVICE: u32 = number::<Memory>(Way::Write, 0x23);
const UNMAP_DEVICE: u32 = number::<Memory>(Way::Write, 0x24);
const GET_PLACE: u32 = number::<Place>(Way::Read, 0x25);
const RUN: u32 = 0xba30;
const GET_STATE: u32 = number::<State>(Way::Read, 0x31);
const SET_STATE: u32 = number::<State>(Way::Write, 0x32);
const INTERRUPT: u32 = number::<Interrupt>(Way::Write, 0x33);
const NMI: u32 = 0xba34;
const GET_CONTEXT: u32 = number::<Context>(Way::Read, 0x35);
const SET_CONTEXT: u32 = number::<Context>(Way::Write, 0x36);
const ATTACH_IRQ: u32 = number::<Irq>(Way::Write, 0x37);
const DETACH_IRQ: u32 = number::<Irq>(Way::Write, 0x38);
const FREEZE: u32 = number::<Freeze>(Way::Write, 0x39);
const LINK: u32 = number::<Link>(Way::Write, 0x3a);

/// Makes a request of which the kernel writes and reads no more than `argument`, or nothing.
fn ioctl<T>(fd: impl AsFd, number: u32, argument: *mut T) -> io::Result<i32> {
    // SAFETY: the request's number has the size of `T`, which is what the kernel copies from and to the argument; `BASALT_RUN` and
    // `BASALT_NMI` take none.
    unsafe { request::call(fd, number, argument) }
}

fn new_descriptor(result: i32) -> OwnedFd {
    // SAFETY: the requests that are asked here answer with a descriptor that was made for us.
    unsafe { request::descriptor(result) }
}

/// Of a reservation: a machine's descriptor.
pub(crate) fn create_vm(reservation: impl AsFd) -> io::Result<OwnedFd> {
    ioctl(reservation, CREATE_VM, &mut CreateVm::default()).map(new_descriptor)
}

/// Of a reservation: the descriptor of a machine that has so many bytes of reserved memory, a multiple of `PIECE`, and sees them where they are.
pub(crate) fn create_identity_vm(reservation: impl AsFd, memory: u64) -> io::Result<OwnedFd> {
    let mut asked = CreateVm {
        flags: IDENTITY,
        memory,
        ..CreateVm::default()
    };
    ioctl(reservation, CREATE_VM, &raw mut asked).map(new_descriptor)
}

/// Of such a machine.
pub(crate) fn get_place(vm: impl AsFd) -> io::Result<Place> {
    let mut place = Place::default();
    ioctl(vm, GET_PLACE, &raw mut place)?;
    Ok(place)
}

/// Of a machine.
///
/// # Safety
/// What lies at the address stays mapped until the machine's descriptors are closed: its guest reads and writes it.
pub(crate) unsafe fn map_memory(vm: impl AsFd, mut memory: Memory) -> io::Result<()> {
    ioctl(vm, MAP_MEMORY, &raw mut memory).map(drop)
}

/// Of a machine: registers of a device become the guest's, or are not any more. The kernel takes them from the guest when they go from
/// this process.
pub(crate) fn map_device(vm: impl AsFd, mut memory: Memory, give: bool) -> io::Result<()> {
    let request = if give { MAP_DEVICE } else { UNMAP_DEVICE };
    ioctl(vm, request, &raw mut memory).map(drop)
}

/// Of a machine: a vCPU's descriptor, on the CPU that Linux counts so, with this id for its APIC.
pub(crate) fn create_vcpu(vm: impl AsFd, cpu: u32, apic_id: u32) -> io::Result<OwnedFd> {
    let mut asked = CreateVcpu {
        cpu,
        apic_id,
        ..CreateVcpu::default()
    };
    ioctl(vm, CREATE_VCPU, &raw mut asked).map(new_descriptor)
}

/// Of a machine.
pub(crate) fn set_cpuid(vm: impl AsFd, cpuid: &Cpuid) -> io::Result<()> {
    ioctl(vm, SET_CPUID, &mut { *cpuid }).map(drop)
}

/// Of a vCPU; returns when it has come out.
pub(crate) fn run(vcpu: impl AsFd) -> io::Result<()> {
    ioctl::<u8>(vcpu, RUN, std::ptr::null_mut()).map(drop)
}

/// Of a vCPU that does not run.
pub(crate) fn get_state(vcpu: impl AsFd) -> io::Result<State> {
    let mut state = State::default();
    ioctl(vcpu, GET_STATE, &raw mut state)?;
    Ok(state)
}

/// Of a vCPU that does not run.
pub(crate) fn set_state(vcpu: impl AsFd, state: &State) -> io::Result<()> {
    ioctl(vcpu, SET_STATE, &mut { *state }).map(drop)
}

/// Of a vCPU that does not run.
pub(crate) fn get_context(vcpu: impl AsFd) -> io::Result<Box<Context>> {
    let mut context = Context::empty();
    ioctl(vcpu, GET_CONTEXT, &raw mut *context)?;
    Ok(context)
}

/// Of a vCPU that does not run.
pub(crate) fn set_context(vcpu: impl AsFd, context: &mut Context) -> io::Result<()> {
    ioctl(vcpu, SET_CONTEXT, &raw mut *context).map(drop)
}

/// Of a vCPU, from any thread.
pub(crate) fn interrupt(vcpu: impl AsFd, vector: u8) -> io::Result<()> {
    ioctl(vcpu, INTERRUPT, &mut Interrupt::new(vector)).map(drop)
}

/// Of a vCPU, from any thread.
pub(crate) fn nmi(vcpu: impl AsFd) -> io::Result<()> {
    ioctl::<u8>(vcpu, NMI, std::ptr::null_mut()).map(drop)
}

/// Of a vCPU, from any thread: an event's interrupts become its own. Tells whether they go there without the host.
pub(crate) fn attach_irq(vcpu: impl AsFd, event: impl AsFd, vector: u8) -> io::Result<bool> {
    Ok(ioctl(vcpu, ATTACH_IRQ, &mut Irq::new(event, vector))? > 0)
}

/// Of the vCPU that it is attached to.
pub(crate) fn detach_irq(vcpu: impl AsFd, event: impl AsFd) -> io::Result<()> {
    ioctl(vcpu, DETACH_IRQ, &mut Irq::new(event, 0)).map(drop)
}

/// Of a vCPU that has come out with [`CALL_WAIT`].
pub(crate) fn freeze(vcpu: impl AsFd, budget_us: u32) -> io::Result<OwnedFd> {
    let mut wanted = Freeze {
        budget_us,
        ..Freeze::default()
    };
    ioctl(vcpu, FREEZE, &mut wanted).map(new_descriptor)
}

/// Of a vCPU that does not run; without a server the link ends.
pub(crate) fn link(vcpu: impl AsFd, index: u32, server: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut wanted = Link {
        server: server.map_or(-1, |server| server.as_raw_fd()),
        index,
        ..Link::default()
    };
    ioctl(vcpu, LINK, &mut wanted).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_header() {
        // By gcc 12, of kmod/uapi/basalt.h.
        let sizes = [
            size_of::<CreateVm>(),
            size_of::<Memory>(),
            size_of::<CreateVcpu>(),
            size_of::<Cpuid>(),
            size_of::<State>(),
            size_of::<Run>(),
            size_of::<Interrupt>(),
            size_of::<Context>(),
            size_of::<Irq>(),
            size_of::<Place>(),
            size_of::<Freeze>(),
            size_of::<Link>(),
        ];
        assert_eq!(sizes, [32, 64, 32, 8224, 568, 512, 32, 4600, 32, 64, 32, 32]);
        assert_eq!(std::mem::offset_of!(Run, about), 64);
        assert_eq!(std::mem::offset_of!(Run, counts), 256);
    }
}
